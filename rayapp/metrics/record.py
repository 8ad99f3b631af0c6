"""The lines of `metrics.jsonl`: one JSON object a line, told apart by ``kind``.

Losses are in nats. A figure that was not finite (JSON has no NaN) is written as null and named in ``non_finite``, so that it is not
taken for one that was never measured. Fields are added, never renamed or removed: other programs read these lines.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator


class Record(BaseModel):
    """One line. Figures that are not finite become null on the way in."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    time: float
    """When it was written, in seconds since 1970."""
    non_finite: tuple[str, ...] = ()
    """Fields whose figure was NaN or infinite, and which are null for that reason."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_not_finite(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        broken = tuple(name for name, value in data.items() if isinstance(value, float) and not math.isfinite(value))
        return {**data, **dict.fromkeys(broken), "non_finite": broken} if broken else data


class StepRecord(Record):
    """One optimizer step, all ranks together."""

    kind: Literal["step"] = "step"
    """Which record this is."""
    step: int
    """Optimizer steps of the run so far, this one and skipped ones included: the first is 1."""
    loss: float | None
    """Mean cross-entropy of the step's valid tokens, in nats."""
    grad_norm: float | None
    """2-norm of the gradient over all parameters, before clipping."""
    learning_rate: float
    """The rate of this step."""
    tokens_per_s: float
    """Tokens fed to the model over ``step_s``, all ranks."""
    samples_per_s: float
    """Sequences over ``step_s``, all ranks."""
    step_s: float
    """Seconds from the end of the step before to the end of this one, without validation and checkpoint."""
    data_wait_share: float
    """Share of ``step_s`` that was spent waiting for data."""
    communication_share: float | None = None
    """Share of the step in which communication ran on rank 0; null on steps that were not profiled."""
    checkpoint_share: float
    """Seconds that a checkpoint held training up, over ``step_s`` plus those seconds."""
    mfu: float | None
    """Model FLOP/s over the peak, with 6 N + 12 L D S a token; null where the peak is unknown."""
    mfu_causal: float | None
    """The same with 6 N + 6 L D S."""
    memory_bytes: int
    """Memory in use at the end of the step, averaged over ranks: allocated on GPUs, resident on CPUs."""
    peak_memory_bytes: int
    """The most that any rank has needed since it started."""
    num_valid_tokens: int
    """Tokens that the loss counted."""
    applied: bool
    """False if the optimizer left the step out: the loss or the gradient was not finite, or the loss a spike (`train.on_spike`)."""
    skipped_steps: int
    """Steps of the run that were not applied so far."""


class ValidationRecord(Record):
    """One pass over the held-out rows."""

    kind: Literal["validation"] = "validation"
    """Which record this is."""
    step: int
    """Optimizer steps that the weights had seen."""
    loss: float | None
    """Mean cross-entropy of the valid tokens, in nats."""
    perplexity: float | None
    """e to the loss."""
    seconds: float
    """How long the validation took."""
    num_valid_tokens: int
    """Tokens that the loss counted."""
    elapsed_s: float
    """Seconds of training until then, earlier processes of the run included; without validation and checkpoints."""


class CheckpointRecord(Record):
    """One checkpoint that was written."""

    kind: Literal["checkpoint"] = "checkpoint"
    """Which record this is."""
    step: int
    """The step that it holds."""
    seconds: float
    """How long it held training up."""
    write_seconds: float | None = None
    """How long it took until it was complete, mostly beside training."""
    bytes: int
    """Size of all its files."""


class EventRecord(Record):
    """Something that happened: a restart, a skipped step, a loss scale that fell."""

    kind: Literal["event"] = "event"
    """Which record this is."""
    step: int | None
    """The step in which it happened; null outside of steps."""
    event: str
    """What it was, in one word or a few: `restart`, `skipped_step`."""
    detail: str
    """The particulars, for people."""


MetricsRecord = Annotated[StepRecord | ValidationRecord | CheckpointRecord | EventRecord, Field(discriminator="kind")]
"""Any line of `metrics.jsonl`."""

_ADAPTER: TypeAdapter[MetricsRecord] = TypeAdapter(MetricsRecord)


def parse_record(line: str | bytes) -> MetricsRecord:
    """The record that one line holds.

    Raises:
        pydantic.ValidationError: the line is not a whole record.
    """
    return _ADAPTER.validate_json(line)


def perplexity(loss: float) -> float:
    """e to a loss in nats; infinite where a double cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
