"""Fill in what a run file leaves open, for a given cluster."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rayapp.cluster.inventory import ClusterInventory
from rayapp.config.load import LoadedRunFile
from rayapp.config.resolved import StrategyName
from rayapp.config.schema import RunFile
from rayapp.data.shards import PreparedData
from rayapp.data.tokenizer import load_tokenizer, tokenizer_sha256, vocab_size_of
from rayapp.errors import DataError, Problem
from rayapp.layout import BatchPlan, Layout, derive_batch, derive_layout
from rayapp.models.build import check_against_data, check_model_folder, model_config, model_spec
from rayapp.models.spec import ModelSpec
from rayapp.plan.fit import check_fit, choose_strategy, memory_question
from rayapp.plan.states import DataParallelStrategy
from rayapp.preflight.placement import Placement, choose_device, place
from rayapp.preflight.settings import check_settings

VALIDATIONS_PER_RUN = 5
CHECKPOINTS_PER_RUN = 5
CHECKPOINT_INTERVAL_S = 1800.0
DEFAULT_ZERO_STAGE = 2
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Derived:
    """A run file with nothing left open, and what was found on the way.

    Attributes:
        file: the run file, complete.
        notes: how each derived value came about, by dotted key.
        placement: the workers.
        layout: their degrees.
        batch: their batch.
        model: the model's complete configuration.
        spec: its size.
        strategy: the engine.
        strategy_reason: why.
    """

    file: RunFile
    notes: dict[str, str]
    placement: Placement
    layout: Layout
    batch: BatchPlan
    model: dict[str, Any]
    spec: ModelSpec
    strategy: StrategyName
    strategy_reason: str


def derive(loaded: LoadedRunFile, inventory: ClusterInventory) -> tuple[RunFile, dict[str, str]]:
    """The complete run file, and a note for each value that was derived, by dotted key.

    Raises:
        InputError: something cannot work.
    """
    derived = derive_all(loaded, inventory)
    return derived.file, derived.notes


def derive_all(loaded: LoadedRunFile, inventory: ClusterInventory, prepared: PreparedData | None = None) -> Derived:
    """Check a run file against a cluster and fill it in.

    Args:
        loaded: the run file.
        inventory: the cluster.
        prepared: its tokenizer counts; None: the tokenizer that the run file names, or what its training is to reach.

    Raises:
        InputError: something cannot work.
    """
    file = loaded.file
    check_settings(loaded, choose_device(file, inventory))
    placement = place(file, inventory)
    layout = derive_layout(placement.num_workers, file.parallel.tensor_parallel_size or 1, file.parallel.pipeline_parallel_size or 1)
    batch = derive_batch(file.batch.global_batch_size, layout.dp_size, file.batch.micro_batch_size, file.batch.gradient_accumulation_steps)
    if file.model.path is not None:
        check_model_folder(file.model.path, needs_weights=not file.model.random_weights)  # its tokenizer is read from there next
    vocabulary, special_tokens = tokenizer_facts(file, prepared)
    model = model_config(file.model, vocabulary, special_tokens)
    check_against_data(model, vocabulary, file.data.sequence_length)
    spec = model_spec(model)
    strategy, reason = _strategy(file, spec, layout, batch, placement)
    question = memory_question(
        file, spec=spec, strategy=strategy, layout=layout, micro_batch_size=batch.micro_batch_size, device=placement.device
    )
    check_fit(question, placement.memory_bytes)
    complete, notes = _filled(file, placement, batch, strategy, reason)
    return Derived(complete, notes, placement, layout, batch, model, spec, cast("StrategyName", strategy), reason)


def _strategy(file: RunFile, spec: ModelSpec, layout: Layout, batch: BatchPlan, placement: Placement) -> tuple[DataParallelStrategy, str]:
    if file.parallel.kind == "ddp":
        return "ddp", "the run file asks for it"
    if file.parallel.kind == "zero":
        return cast("DataParallelStrategy", f"zero-{file.parallel.zero_stage or DEFAULT_ZERO_STAGE}"), "the run file asks for it"
    question = memory_question(
        file, spec=spec, strategy="ddp", layout=layout, micro_batch_size=batch.micro_batch_size, device=placement.device
    )
    return choose_strategy(question, placement.memory_bytes)


def _filled(file: RunFile, placement: Placement, batch: BatchPlan, strategy: str, reason: str) -> tuple[RunFile, dict[str, str]]:
    stage = int(strategy[-1]) if strategy.startswith("zero-") else None
    steps = file.train.num_steps
    where = f"{placement.num_workers} x {placement.device_name}"
    values: dict[str, tuple[Any, str]] = {
        "train.num_workers": (placement.num_workers, f"what the cluster has: {where}"),
        "train.device": (placement.device, f"what the cluster has: {where}"),
        "train.validation_interval_steps": (max(1, steps // VALIDATIONS_PER_RUN), "five times in a run"),
        **_checkpoint_intervals(file),
        "batch.micro_batch_size": (batch.micro_batch_size, _batch_note(batch)),
        "batch.gradient_accumulation_steps": (batch.gradient_accumulation_steps, _batch_note(batch)),
        "parallel.zero_stage": (stage, reason if file.parallel.kind == "auto" else "the stage that kind: zero means"),
        "parallel.tensor_parallel_size": (1, "not asked for"),
        "parallel.pipeline_parallel_size": (1, "not asked for"),
        "parallel.overlap_communication": (placement.device == "cuda", "on GPUs"),
        "resources.cpus_per_worker": (placement.worker.num_cpus, "one a worker"),
        "resources.memory_bytes": (placement.memory_bytes, "asked of the hardware"),
        "export.dtype": (file.train.precision, "as trained"),
    }
    notes = {key: note for key, (value, note) in values.items() if value is not None and _get(file, key) is None}
    tree = file.model_dump(mode="json")
    for key in notes:
        section, field = key.split(".")
        tree[section][field] = values[key][0]
    for section in (tree["model"], tree["data"]["tokenizer"]):
        if section["path"] is not None and Path(section["path"]).expanduser().is_dir():
            section["path"] = str(Path(section["path"]).expanduser().absolute())  # workers start in other folders
    if file.parallel.kind == "auto":
        tree["parallel"]["kind"] = "ddp" if strategy == "ddp" else "zero"
        notes["parallel.kind"] = reason
    return RunFile.model_validate(tree), notes


def _checkpoint_intervals(file: RunFile) -> dict[str, tuple[Any, str]]:
    """Where nothing is said: often enough for the run's length, and for a run that takes weeks."""
    section = file.checkpoint
    if any(given is not None for given in (section.interval_steps, section.interval_s, section.mean_time_between_failures_s)):
        return {}
    return {
        "checkpoint.interval_steps": (max(1, file.train.num_steps // CHECKPOINTS_PER_RUN), "five times in a run"),
        "checkpoint.interval_s": (CHECKPOINT_INTERVAL_S, "no more than half an hour is lost"),
    }


def _get(file: RunFile, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(file, section), field)


def _batch_note(batch: BatchPlan) -> str:
    return (
        f"micro_batch_size({batch.micro_batch_size}) x gradient_accumulation_steps({batch.gradient_accumulation_steps}) "
        f"x dp_size({batch.dp_size}) = {batch.global_batch_size}"
    )


def tokenizer_facts(file: RunFile, prepared: PreparedData | None) -> tuple[int, dict[str, int | None]]:
    """The vocabulary's size and the special tokens of the tokenizer that the run file names.

    Raises:
        DataError: there is none, or it does not go with the model's weights.
    """
    tokenizer = file.data.tokenizer
    if tokenizer.train is not None:
        size = tokenizer.train.vocab_size if prepared is None else prepared.vocab_size
        return size, dict.fromkeys(SPECIAL_TOKENS, 0 if prepared is None else prepared.manifest.eos_token_id)
    path = tokenizer.path or file.model.path
    if path is None:
        raise DataError(
            Problem("data.tokenizer", "names no tokenizer", "set data.tokenizer.path, or data.tokenizer.train.vocab_size to train one")
        )
    uses_weights = file.model.path is not None and not file.model.random_weights
    if uses_weights and tokenizer.path is not None and file.model.path is not None:
        _check_same_tokenizer(tokenizer.path, file.model.path, file.model.revision)
    vocabulary, ids = _facts(path, file.model.revision if tokenizer.path is None else None)
    return vocabulary, dict(ids)


@functools.lru_cache(maxsize=4)
def _facts(path: str, revision: str | None) -> tuple[int, tuple[tuple[str, int | None], ...]]:
    loaded = load_tokenizer(path, revision)
    return vocab_size_of(loaded), tuple((name, getattr(loaded, name)) for name in SPECIAL_TOKENS)


def _check_same_tokenizer(path: str, model_path: str, revision: str | None) -> None:
    if tokenizer_sha256(load_tokenizer(path)) != tokenizer_sha256(load_tokenizer(model_path, revision)):
        raise DataError(
            Problem(
                f"data.tokenizer.path={path!r}",
                f"is another tokenizer than that of the weights in {model_path}",
                "leave data.tokenizer out, or set model.random_weights=true",
            )
        )
