"""The names under which charts show the figures of records, the same in every tracker."""

from __future__ import annotations

from rayapp.metrics.record import CheckpointRecord, EventRecord, MetricsRecord, StepRecord, ValidationRecord

STEP_TAGS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/num_valid_tokens": "num_valid_tokens",
    "train/skipped_steps": "skipped_steps",
    "throughput/tokens_per_s": "tokens_per_s",
    "throughput/samples_per_s": "samples_per_s",
    "throughput/step_s": "step_s",
    "throughput/mfu": "mfu",
    "throughput/mfu_causal": "mfu_causal",
    "share/data_wait": "data_wait_share",
    "share/communication": "communication_share",
    "share/checkpoint": "checkpoint_share",
    "memory/memory_bytes": "memory_bytes",
    "memory/peak_memory_bytes": "peak_memory_bytes",
}
VALIDATION_TAGS = {"validation/loss": "loss", "validation/perplexity": "perplexity", "validation/seconds": "seconds"}
CHECKPOINT_TAGS = {"checkpoint/seconds": "seconds", "checkpoint/bytes": "bytes"}
"""Tags, and the fields of records that they show."""


def figures(record: MetricsRecord) -> dict[str, float]:
    """A record's figures by tag. Those that are null are left out; an event has none."""
    match record:
        case StepRecord():
            tags = STEP_TAGS
        case ValidationRecord():
            tags = VALIDATION_TAGS
        case CheckpointRecord():
            tags = CHECKPOINT_TAGS
        case EventRecord():
            return {}
    values = {tag: getattr(record, field) for tag, field in tags.items()}
    return {tag: float(value) for tag, value in values.items() if value is not None}


def event_tag(event: EventRecord) -> str:
    """The tag of an event's text."""
    return f"event/{event.event}"
