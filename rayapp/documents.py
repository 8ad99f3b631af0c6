"""The JSON documents that `--json` prints. Other programs rely on them: fields are added, never renamed or removed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """One JSON document on stdout."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PrepareDocument(Document):
    """What `rayapp prepare` did."""

    data_dir: str
    """Where the prepared data lies."""
    fingerprint: str
    """Of the corpus, the tokenizer and how rows were made."""
    reused: bool
    """True if the same data was there already."""
    vocab_size: int
    """Entries of the tokenizer."""
    num_documents: int
    """Documents that were kept, both splits."""
    num_train_rows: int
    """Rows to train on."""
    num_validation_rows: int
    """Rows held out."""
    num_train_tokens: int
    """Tokens to train on."""
    dropped: dict[str, int]
    """Rows of the corpus that were left out, counted by reason."""


class TrainFailure(Document):
    """A worker group that ended early; also a line of a run's `failures.jsonl`."""

    time: str
    """When, in ISO 8601, UTC."""
    step: int
    """The last step that was seen to be done."""
    reason: str
    """What happened, in a sentence."""
    rank: int | None
    """The rank that it happened to; null where none stands out."""
    node: str | None
    """The IP address of its node."""
    log: list[str]
    """What it wrote last."""


class TrainDocument(Document):
    """What `rayapp train` did."""

    run_dir: str
    """Where the run lies."""
    model_dir: str | None
    """The exported Hugging Face folder."""
    steps: int
    """Optimizer steps of the run, resumed ones included."""
    loss_first: float | None
    """Loss of the run's first step, in nats."""
    loss_last: float | None
    """Loss of the run's last step, in nats."""
    validation_loss: float | None
    """The last validation loss, in nats; null without held-out rows."""
    tokens_per_s: float | None
    """All ranks together, without warm-up, validation and checkpoints; null for a run too short to tell."""
    mfu: float | None
    """Model FLOP/s over the peak, 6 N + 12 L D S a token; null where the peak is unknown."""
    mfu_causal: float | None
    """The same with 6 N + 6 L D S."""
    peak_flops_source: str
    """Which peak MFU is taken over."""
    peak_memory_bytes: int
    """Of the rank that needed most; resident memory on CPUs."""
    average_memory_bytes: int
    """Mean over ranks and steps."""
    skipped_steps: int
    """Steps that were not applied: a number was not finite, or the loss a spike (`train.on_spike=skip`)."""
    restarts: int
    """Restarts of the worker group, in this process."""
    failures: list[TrainFailure] = []
    """What went wrong with workers, over all starts of the run."""
    rewinds: int = 0
    """How often the run went back to a checkpoint because of its loss."""
    target_loss_step: int | None
    """The step whose validation first reached `train.target_loss`."""
    target_loss_s: float | None
    """Seconds of training until then."""
    strategy: str
    """The engine that trained."""
    world_size: int
    """Ranks."""


class ExportDocument(Document):
    """What `rayapp export` did."""

    model_dir: str
    """The Hugging Face folder."""
    run_dir: str
    """The run that it comes from."""
    step: int
    """The checkpoint's step."""
    num_parameters: int
    """Weights written, tied ones once."""
    dtype: str
    """Their type."""


class Completion(Document):
    """One prompt and what follows it."""

    prompt: str
    """What was asked."""
    completion: str
    """What the model added."""


class GenerateDocument(Document):
    """What `rayapp generate` did."""

    model_dir: str
    """The Hugging Face folder that was used."""
    completions: list[Completion]
    """One for each prompt."""


class ConfigValue(Document):
    """One value of the resolved tree."""

    key: str
    """Dotted."""
    value: Any
    """As resolved."""
    origin: Literal["file", "override", "default", "derived"]
    """Where it comes from."""
    note: str = ""
    """The file's line, or how it was derived."""


class ConfigDocument(Document):
    """The resolved tree of a run file."""

    values: list[ConfigValue]
    """Every value, in the tree's order."""


class BenchRow(Document):
    """One strategy of a comparison."""

    strategy: Literal["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "tensor", "pipeline", "hybrid"]
    """The strategy."""
    world_size: int | None = None
    """Ranks."""
    micro_batch_size: int | None = None
    """Sequences in one pass of one rank."""
    global_batch_size: int | None = None
    """Sequences in one step."""
    samples_per_s: float | None = None
    """Sequences a second, all ranks."""
    tokens_per_s: float | None = None
    """Tokens a second, all ranks."""
    mfu: float | None = None
    """See `TrainDocument.mfu`."""
    average_memory_bytes: int | None = None
    """Mean over ranks and steps."""
    peak_memory_bytes: int | None = None
    """Of the rank that needed most."""
    communication_share: float | None = None
    """Share of a step in which communication runs."""
    steps_to_target: int | None = None
    """Steps to `train.target_loss`."""
    seconds_to_target: float | None = None
    """Seconds to `train.target_loss`."""
    why_not: str | None = None
    """Why there is no figure: it does not apply, does not fit, or failed."""


class BenchDocument(Document):
    """The comparison of strategies."""

    rows: list[BenchRow]
    """One for each strategy."""


class TuneTrial(Document):
    """One configuration of a search."""

    parameters: dict[str, Any]
    """What was tried."""
    tokens_per_s: float | None
    """Null if it did not run."""
    peak_memory_bytes: int | None
    """Of the rank that needed most."""
    outcome: Literal["measured", "pruned", "out_of_memory", "failed"]
    """How it ended."""
    reason: str = ""
    """Why, where it was not measured."""


class TuneDocument(Document):
    """The result of a search."""

    best: TuneTrial | None
    """The fastest configuration."""
    trials: list[TuneTrial]
    """All of them, in order."""
    best_run_file: str | None
    """A run file with the best configuration."""


class PlanCandidate(Document):
    """One configuration of a plan."""

    strategy: str
    """The strategy."""
    fits: bool
    """Whether it fits in the device's memory."""
    memory_bytes: dict[str, int]
    """Of one rank, by kind: weights, gradients, optimizer, activations, logits, buffers, overhead."""
    micro_batch_size: int
    """Sequences in one pass of one rank."""
    tokens_per_s: float | None = None
    """Predicted, all ranks."""
    reason: str = ""
    """What bounds it, or why it does not fit."""


class PlanDocument(Document):
    """A plan."""

    recommended: PlanCandidate | None
    """The one to take."""
    candidates: list[PlanCandidate]
    """All that were looked at."""


class DoctorCheck(Document):
    """One finding."""

    name: str
    """What was looked at."""
    ok: bool
    """Whether it is as it should be."""
    found: str
    """What was found."""
    remedy: str
    """What to do; empty if it is fine."""


class DoctorDocument(Document):
    """What `rayapp doctor` found."""

    checks: list[DoctorCheck]
    """One for each thing that was looked at."""


class ErrorDocument(Document):
    """What `--json` prints instead when a verb fails."""

    error: str
    """The exception's class."""
    problems: list[str]
    """One sentence each: the value, the rule, the remedy."""
