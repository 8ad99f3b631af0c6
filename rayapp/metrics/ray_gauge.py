"""Figures on Ray's Prometheus port. Only this file of the folder needs Ray."""

from __future__ import annotations

import math

from ray.util.metrics import Gauge

from rayapp.metrics.record import CheckpointRecord, MetricsRecord, StepRecord, ValidationRecord

TAG_KEYS = ("run", "family")

STEP_GAUGES = {
    "step": "Optimizer steps of the run.",
    "loss": "Training loss of the last step, in nats.",
    "grad_norm": "2-norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the last step.",
    "tokens_per_s": "Tokens a second in the last step, all ranks.",
    "samples_per_s": "Sequences a second in the last step, all ranks.",
    "step_s": "Seconds of the last step.",
    "data_wait_share": "Share of the last step spent waiting for data.",
    "communication_share": "Share of the last profiled step in which communication ran.",
    "checkpoint_share": "Share of the last step in which a checkpoint held training up.",
    "mfu": "Model FLOP/s utilisation, 6 N + 12 L D S a token.",
    "mfu_causal": "Model FLOP/s utilisation, 6 N + 6 L D S a token.",
    "memory_bytes": "Memory in use, averaged over ranks.",
    "peak_memory_bytes": "The most memory that any rank has needed.",
    "skipped_steps": "Steps that were not applied.",
}
VALIDATION_GAUGES = {"loss": "Loss of the last validation, in nats.", "perplexity": "Perplexity of the last validation."}
CHECKPOINT_GAUGES = {"step": "Step of the newest checkpoint.", "seconds": "How long the newest checkpoint held training up."}
"""Fields of records and what their gauges are described as."""


class RayGaugeSink:
    """Sets Ray gauges, tagged with ``run`` and ``family``.

    They are called ``rayapp_<field>``, ``rayapp_validation_<field>`` and ``rayapp_checkpoint_<field>``. Ray puts its own prefix before
    that, so Prometheus sees ``ray_rayapp_loss``. A gauge shows the last figure that there was, and nothing from one that was not finite
    until the next that is: set to NaN, Ray leaves it out. Ray sends gauges from a thread of its own and drops what it cannot send,
    so nothing here waits or fails.

    Args:
        run_id: the run's name in its family.
        family: the run file's name.
    """

    def __init__(self, run_id: str, family: str) -> None:
        tags = {"run": run_id, "family": family}
        self._step = _gauges("rayapp_", STEP_GAUGES, tags)
        self._validation = _gauges("rayapp_validation_", VALIDATION_GAUGES, tags)
        self._checkpoint = _gauges("rayapp_checkpoint_", CHECKPOINT_GAUGES, tags)

    def write(self, record: MetricsRecord) -> None:
        """Set the gauges of the record's kind; events have none."""
        match record:
            case StepRecord():
                _set(self._step, record)
            case ValidationRecord():
                _set(self._validation, record)
            case CheckpointRecord():
                _set(self._checkpoint, record)

    def flush(self) -> None:
        """Ray sends gauges by itself, every few seconds."""

    def close(self) -> None:
        """Ray forgets the gauges when the process ends."""


def _gauges(prefix: str, descriptions: dict[str, str], tags: dict[str, str]) -> dict[str, Gauge]:
    return {field: Gauge(prefix + field, text, TAG_KEYS).set_default_tags(tags) for field, text in descriptions.items()}


def _set(gauges: dict[str, Gauge], record: MetricsRecord) -> None:
    for field, gauge in gauges.items():
        value = math.nan if field in record.non_finite else getattr(record, field)
        if value is not None:
            gauge.set(value)
