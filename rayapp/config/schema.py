"""The tree of a run file. Defaults live here and nowhere else; ``None`` means "derive it"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def _only_int(value: object) -> object:
    """A literal takes whatever equals it; ``true`` and ``2.0`` are no stages."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
Flag = Annotated[bool, Field(strict=True)]
ZeroStage = Annotated[Literal[1, 2, 3], BeforeValidator(_only_int)]

StrategyKind = Literal["auto", "ddp", "zero", "fsdp", "tensor", "pipeline", "hybrid"]
Precision = Literal["fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A frozen part of the tree that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StorageSection(Section):
    """Where runs, prepared data and exports are kept."""

    path: str = "runs"
    """A folder, or any `pyarrow.fs` location: `s3://bucket/x`, `gs://bucket/x`, `hdfs://host/x`. Every node must reach it.
    A relative path is taken from where the command is started, and refused inside a submitted job."""

    retry_s: PositiveFloat = 300.0
    """Seconds for which a storage that fails is tried again."""


class ModelSection(Section):
    """Which causal language model is trained."""

    kind: str = "simple_transformer"
    """`pretrained` (with `path`), `simple_transformer` (built in), or a model type of transformers: `llama`, `gpt2`, `qwen2`, ..."""

    path: str | None = None
    """With `kind: pretrained`: a local folder or a hub name, whose weights, configuration and tokenizer are used."""

    revision: str | None = None
    """The hub's branch, tag or commit."""

    random_weights: Flag = False
    """With `kind: pretrained`: take the configuration (and `config`'s overrides), start from fresh weights."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the model type's configuration, under the names that transformers uses."""

    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The attention implementation."""

    @model_validator(mode="after")
    def _path_goes_with_pretrained(self) -> ModelSection:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("kind: pretrained needs path; give a local folder or a hub name")
        if self.kind != "pretrained" and self.path:
            raise ValueError(f"path goes with kind: pretrained, not with kind: {self.kind}; drop one of the two")
        if self.kind != "pretrained" and self.random_weights:
            raise ValueError(f"random_weights goes with kind: pretrained; kind: {self.kind} always starts from fresh weights")
        if self.revision is not None and not self.path:
            raise ValueError(f"revision={self.revision} goes with path; drop one of the two")
        return self


class TokenizerTraining(Section):
    """A byte-level BPE tokenizer, trained on the corpus."""

    vocab_size: Annotated[int, Field(ge=300, le=1_000_000, strict=True)]
    """Entries of the vocabulary, the special token and the 256 bytes included."""

    max_bytes: PositiveInt = 200_000_000
    """Bytes of the corpus that the training reads at most."""


class TokenizerSection(Section):
    """The tokenizer. Leave both out with a pretrained model to use the model's own."""

    path: str | None = None
    """A local folder or a hub name."""

    train: TokenizerTraining | None = None
    """Train one on the corpus instead."""

    @model_validator(mode="after")
    def _one_of(self) -> TokenizerSection:
        if self.path is not None and self.train is not None:
            raise ValueError("path and train exclude each other; drop one of the two")
        return self


class SourceSection(Section):
    """One source of a mixture."""

    path: str
    """`python-stdlib`, a file, a folder, or a pattern such as `s3://bucket/books/*.parquet`."""

    weight: PositiveFloat = 1.0
    """Its share of the training rows, relative to the other sources' weights."""

    format: Literal["text", "jsonl", "parquet"] | None = None
    """How the files are read. None: from the name's ending (`.jsonl`, `.jsonl.gz`, `.parquet`; else text, one document a file)."""

    text_column: str = "text"
    """The column of a JSONL or Parquet file that holds the text."""


class CacheSection(Section):
    """The copy of remote shards on a node's disk."""

    path: str | None = None
    """A folder on the node. None: a folder of rayapp's in the node's temporary folder."""

    quota_bytes: PositiveInt = 100_000_000_000
    """Bytes it may take on one node. The shards that were not read for the longest time go first."""


class DataSection(Section):
    """The corpus, and how it becomes rows of tokens."""

    source: str | list[SourceSection] = "python-stdlib"
    """One path, or a list of weighted sources."""

    sequence_length: PositiveInt = 1024
    """Tokens that a row feeds to the model."""

    tokenizer: TokenizerSection = TokenizerSection()
    """Which tokenizer turns text into tokens."""

    validation_fraction: Fraction = 0.02
    """The share of documents that is held out. A document is held out by a hash of its text, so duplicates stay on one side."""

    reset_attention: Flag = False
    """Documents that share a row do not see each other: positions and attention start anew at each border."""

    shuffle: Flag = True
    """Another order of the rows in every epoch. False: the order in which they were packed."""

    max_document_bytes: PositiveInt = 64_000_000
    """A longer document is left out, and counted."""

    rows_per_shard: PositiveInt = 8192
    """Rows in one shard file."""

    cache: CacheSection = CacheSection()
    """The copy of remote shards on each node."""


class BatchSection(Section):
    """micro_batch_size x gradient_accumulation_steps x dp_size = global_batch_size, in sequences."""

    global_batch_size: PositiveInt = 32
    """Sequences in one optimizer step, over all ranks."""

    micro_batch_size: PositiveInt | None = None
    """Sequences in one forward pass of one rank. None: the largest power of two that divides evenly, up to 8."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Forward and backward passes of one rank in one optimizer step. None: derived from the other two."""


class ParallelSection(Section):
    """How a model and its states are spread over the workers."""

    kind: StrategyKind = "auto"
    """`auto` takes the least sharded strategy that fits and says why."""

    zero_stage: ZeroStage | None = None
    """With `kind: zero`: 1 shards the optimizer's states, 2 the gradients too, 3 the weights too. None: 2."""

    tensor_parallel_size: PositiveInt | None = None
    """Ranks that share every layer. None: 1."""

    pipeline_parallel_size: PositiveInt | None = None
    """Ranks that hold consecutive layers. None: 1."""

    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where ZeRO keeps the optimizer's states and fp32 weights."""

    offload_weights: Literal["none", "cpu"] = "none"
    """Where ZeRO-3 keeps the weights between their uses."""

    bucket_bytes: PositiveInt = 500_000_000
    """Size of the buffers in which gradients are reduced and weights gathered."""

    overlap_communication: Flag | None = None
    """Reduce gradients while the backward pass runs. None: on GPUs."""


class OptimSection(Section):
    """AdamW and its learning rate."""

    learning_rate: PositiveFloat = 3.0e-4
    """The highest rate, reached at the end of the warm-up."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and of the second moment."""

    eps: PositiveFloat = 1.0e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices. Biases, norms and other vectors are not decayed."""

    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient is scaled down to this 2-norm over all parameters. None: never."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls from the end of the warm-up to the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises linearly from zero."""

    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.1
    """The rate at the last step, as a share of the highest. Unused by `constant`."""


class TrainSection(Section):
    """How long, how precise, on how many workers."""

    num_steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""

    num_workers: PositiveInt | None = None
    """Worker processes. None: one for each GPU of the cluster; without GPUs, 2 on CPUs (1 where there is one CPU)."""

    device: Literal["cuda", "cpu"] | None = None
    """None: cuda where the cluster has GPUs."""

    precision: Precision = "bf16"
    """The type of the forward and backward pass. The optimizer always works on fp32 weights. fp16 needs GPUs."""

    seed: NonNegativeInt = 0
    """Of fresh weights, of the order of data and of dropout."""

    activation_checkpointing: Flag = False
    """Keep only each layer's input and compute the rest again in the backward pass."""

    validation_interval_steps: PositiveInt | None = None
    """Steps between two validations. None: five times in a run. One always comes at the end."""

    validation_rows: PositiveInt = 256
    """Held-out rows that one validation reads at most."""

    target_loss: PositiveFloat | None = None
    """The validation loss whose first reaching is timed."""

    max_skipped_steps: PositiveInt = 10
    """Steps in a row whose loss or gradient is not finite, after which the run ends."""

    on_spike: Literal["warn", "skip", "rewind"] = "warn"
    """What follows a loss spike. `warn`: an event in the record. `skip`: the step is not applied. `rewind`: back to the checkpoint
    before, and the rows since then are left out. A step that is not finite is never applied; `max_skipped_steps` of them in a
    row, spikes included, end the run, or with `rewind` lead back."""

    spike_threshold: PositiveFloat = 6.0
    """A loss is a spike if it is this many standard deviations above the level of the steps before."""

    max_rewinds: PositiveInt = 5
    """Times that a run goes back because of its loss before it is given up."""

    max_failures: NonNegativeInt = 3
    """Restarts of the worker group from the newest checkpoint before the run is given up."""

    start_timeout_s: PositiveFloat = 600.0
    """Seconds to wait until all workers are placed, at the start and after a failure."""

    hang_timeout_s: Annotated[float, Field(ge=10, allow_inf_nan=False, strict=True)] = 900.0
    """Seconds without progress of any rank after which the one that holds the others up is ended and the group started again. More than
    the longest step, validation, start of the model, and outage of the storage (`storage.retry_s`)."""

    loss_chunk_tokens: PositiveInt = 1024
    """Positions whose logits are held at once while the loss is computed."""


class CheckpointSection(Section):
    """When the run is saved, and what is kept."""

    interval_steps: PositiveInt | None = None
    """Steps between two checkpoints. None, without another interval: five times in a run. One always comes at the end."""

    interval_s: PositiveFloat | None = None
    """Seconds between two checkpoints; beside `interval_steps` whichever comes first. None, without another interval: 1800."""

    mean_time_between_failures_s: PositiveFloat | None = None
    """How often the run is expected to fail, all of its nodes together. The interval follows from it and from what a checkpoint was
    measured to cost: sqrt(2 x cost x this). In place of the other two."""

    asynchronous: Flag = True
    """Training waits for a copy to host memory alone, and goes on while that is written. It needs as much memory of the host as the
    states of its ranks take; where that is not free, and with False, training waits until everything is written."""

    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""

    keep_best: NonNegativeInt = 1
    """Checkpoints with the lowest validation loss that are kept besides, of those whose step was validated as well."""

    @model_validator(mode="after")
    def _one_kind_of_interval(self) -> CheckpointSection:
        if self.mean_time_between_failures_s is not None and (self.interval_steps is not None or self.interval_s is not None):
            raise ValueError("mean_time_between_failures_s sets the interval; drop interval_steps and interval_s, or drop it")
        return self


class ExportSection(Section):
    """The Hugging Face folder at the end."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """None: as trained."""

    max_shard_bytes: PositiveInt = 4_000_000_000
    """Size of one safetensors file at most."""


class ResourcesSection(Section):
    """What each worker asks Ray for."""

    gpu_type: str | None = None
    """Ray's name of an accelerator type, such as `H100` or `A100-80G`. None: any."""

    cpus_per_worker: PositiveFloat | None = None
    """None: 1."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that a worker's node must carry."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the workers. They are stored with the run as they are: no place for secrets."""

    memory_bytes: PositiveInt | None = None
    """Memory of one worker's device that the fit is checked against. None: asked of the hardware."""


class MlflowSection(Section):
    """MLflow. A user name, password or token comes from the workers' environment (`MLFLOW_TRACKING_USERNAME`,
    `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`): the run file and `resources.env` are stored as they are."""

    tracking_uri: str | None = None
    """A server (`http://host:5000`, `databricks`), a database (`sqlite:////absolute/path.db`), or a folder (an absolute path).
    None: the workers' `MLFLOW_TRACKING_URI`; where that is not set, the database `mlflow.db` in the run's folder."""

    experiment: Annotated[str, Field(min_length=1)] | None = None
    """The experiment that the run is part of. None: the family, `name`."""


class WandbSection(Section):
    """Weights & Biases. The key comes from the workers' environment (`WANDB_API_KEY`) or a login on their nodes, never from the run
    file: it and `resources.env` are stored as they are."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]+$", max_length=128)] | None = None
    """The project that the run is part of. None: the family, `name`."""

    entity: str | None = None
    """The user or team that owns the project. None: the login's default, or `WANDB_ENTITY`."""

    mode: Literal["online", "offline"] | None = None
    """`online` needs a key; where the server cannot be reached the run goes on offline, and says so. `offline` keeps the figures under
    `wandb/` in the run's folder, until `wandb sync` uploads them. None: the workers' `WANDB_MODE`, or else `online`."""


class MetricsSection(Section):
    """Where figures go. `metrics.jsonl` in the run's folder is always written."""

    tensorboard: Flag = True
    """Write TensorBoard event files."""

    ray: Flag = True
    """Export `rayapp_*` gauges on Ray's Prometheus port."""

    mlflow: MlflowSection | None = None
    """Log to MLflow; `mlflow: {}` takes the defaults. None: do not. Needs `pip install 'rayapp[mlflow]'`."""

    wandb: WandbSection | None = None
    """Log to Weights & Biases; `wandb: {}` takes the defaults. None: do not. Needs `pip install 'rayapp[wandb]'`."""

    communication_interval_steps: PositiveInt = 50
    """Every so many steps one step is profiled for its share of communication. It is left out of the throughput."""

    peak_flops: PositiveFloat | None = None
    """FLOP/s of one device at the run's precision, for MFU. None: the catalogue's; where it knows none, MFU is null."""


class TuneSpace(Section):
    """The values that a search may take. What is left out stays as the run file has it."""

    micro_batch_size: list[PositiveInt] | None = None
    """Micro-batches to try; the accumulation follows, so that the global batch stays."""

    zero_stage: list[ZeroStage] | None = None
    """ZeRO stages to try."""

    activation_checkpointing: list[Flag] | None = None
    """With and without activation checkpointing."""


class TuneSection(Section):
    """The search for the fastest configuration."""

    space: TuneSpace = TuneSpace()
    """What is searched."""

    max_trials: PositiveInt = 32
    """Configurations that are measured at most."""

    max_seconds: PositiveFloat = 3600.0
    """Seconds that the search may take."""


class BenchSection(Section):
    """The comparison of strategies."""

    strategies: list[str] = ["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "tensor", "pipeline", "hybrid"]
    """Rows of the table."""

    num_steps: PositiveInt = 20
    """Timed steps a row."""


class PlanSection(Section):
    """What is asked of the planner."""

    total_tokens: PositiveInt | None = None
    """Tokens to train on, for days and cost. None: the run file's steps."""


class ServeSection(Section):
    """The OpenAI-compatible endpoint."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto`: vLLM where it is installed and has a GPU."""

    tensor_parallel_size: PositiveInt | Literal["auto"] = 1
    """GPUs of one replica. `auto`: the fewest that hold the model with room for the cache."""

    num_replicas: PositiveInt | None = None
    """None: as many as the GPUs carry; 1 on CPUs."""

    host: str = "127.0.0.1"
    """The interface that the endpoint listens on."""

    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 8000
    """The port. 0: any free one."""


class GenerateSection(Section):
    """Text generation from the newest export."""

    max_new_tokens: PositiveInt = 64
    """Tokens to add to a prompt at most."""

    temperature: NonNegativeFloat = 0.0
    """0: always the likeliest token."""

    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    seed: NonNegativeInt = 0
    """Of the sampling."""


class RunFile(Section):
    """A whole run file. A verb ignores the sections that are not its own."""

    name: Name
    """A family of runs: each start makes `name/<run id>` in the storage."""

    storage: StorageSection = StorageSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    parallel: ParallelSection = ParallelSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()
    resources: ResourcesSection = ResourcesSection()
    metrics: MetricsSection = MetricsSection()
    tune: TuneSection = TuneSection()
    bench: BenchSection = BenchSection()
    plan: PlanSection = PlanSection()
    serve: ServeSection = ServeSection()
    generate: GenerateSection = GenerateSection()
