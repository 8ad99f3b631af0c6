"""What a start resolves a run file to: nothing is left open, and every worker reads the same."""

from __future__ import annotations

from typing import Any, Literal

from rayapp.config.schema import RunFile, Section
from rayapp.layout import Layout

StrategyName = Literal["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "tensor", "pipeline", "hybrid"]


class ResolvedLayout(Section):
    """The degrees of parallelism and the batch, all of them."""

    world_size: int
    """Ranks."""
    dp_size: int
    """Data-parallel ranks."""
    pp_size: int
    """Pipeline stages."""
    tp_size: int
    """Ranks that share a layer."""
    micro_batch_size: int
    """Sequences in one pass of one rank."""
    gradient_accumulation_steps: int
    """Passes of one rank in one step."""

    @property
    def layout(self) -> Layout:
        return Layout(self.dp_size, self.pp_size, self.tp_size)


class ResolvedDevice(Section):
    """What one worker computes on."""

    kind: Literal["cuda", "cpu"]
    """The torch device type."""
    name: str
    """The accelerator's name as the hardware reports it; `cpu` on CPUs."""
    memory_bytes: int | None
    """Memory of one worker's device; None where it is not known."""
    peak_flops: float | None
    """Dense FLOP/s at the run's precision; None where it is not known."""
    peak_flops_source: str
    """Where the peak comes from, or why there is none."""


class ResolvedData(Section):
    """The prepared data of the run."""

    folder: str
    """Where the shards lie."""
    fingerprint: str
    """Of the corpus, the tokenizer and how rows were made."""
    vocab_size: int
    """Entries of the tokenizer, special tokens included."""
    num_train_rows: int
    """Rows to train on."""
    num_validation_rows: int
    """Rows held out."""


class ResolvedRun(Section):
    """One start of a run, written beside it as `run.json`."""

    run_id: str
    """The start's name in its family."""
    created_at: float
    """When the run was first started: Unix time in seconds."""
    run_dir: str
    """Where the run lies: an absolute path or a URI."""
    file: RunFile
    """The run file, with every derived field filled in."""
    strategy: StrategyName
    """Which engine trains."""
    strategy_reason: str
    """Why this strategy."""
    layout: ResolvedLayout
    """Degrees and batch."""
    device: ResolvedDevice
    """What a worker computes on."""
    data: ResolvedData
    """The prepared data."""
    transformers_config: dict[str, Any]
    """The model's complete configuration, as transformers writes it."""
    num_parameters: int
    """Weights of the model, tied ones once."""
    flops_per_token: float
    """Of one training step: 6 N + 12 L D S."""
    flops_per_token_causal: float
    """The same with causal attention counted once: 6 N + 6 L D S."""
    storage_marker: str
    """What the driver wrote to the storage; every worker reads it back before step 0."""
    resume_step: int | None = None
    """The checkpoint that the run continues from."""
