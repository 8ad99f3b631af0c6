"""What a run file leaves open, filled in for a made-up cluster, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.clusters import GIGABYTE, cluster, node

from rayapp.config.load import LoadedRunFile
from rayapp.errors import MemoryFitError
from rayapp.preflight.derive import derive, derive_all

Load = Callable[..., LoadedRunFile]

TINY = "model.config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
CPUS = cluster(node(4))
GPUS = cluster(node(64, 8, "H100", gpu_memory_bytes=80 * GIGABYTE))

LLAMA_PARAMETERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 300 * 4096 + 4096
"""transformers' default Llama, with 300 tokens."""


@pytest.mark.parametrize(
    ("overrides", "micro_batch_size", "accumulation"),
    [
        (["batch.global_batch_size=32"], 8, 2),
        (["batch.global_batch_size=12"], 2, 3),
        (["batch.global_batch_size=6"], 1, 3),
        (["batch.global_batch_size=64", "batch.micro_batch_size=4"], 4, 8),
        (["batch.global_batch_size=64", "batch.gradient_accumulation_steps=1"], 32, 1),
        (["batch.global_batch_size=64", "batch.micro_batch_size=16", "batch.gradient_accumulation_steps=2"], 16, 2),
    ],
)
def test_the_batch_is_completed(load: Load, overrides: list[str], micro_batch_size: int, accumulation: int) -> None:
    loaded = load(TINY, *overrides)
    file, notes = derive(loaded, CPUS)
    assert (file.batch.micro_batch_size, file.batch.gradient_accumulation_steps) == (micro_batch_size, accumulation)
    note = (
        f"micro_batch_size({micro_batch_size}) x gradient_accumulation_steps({accumulation}) x dp_size(2) = {file.batch.global_batch_size}"
    )
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        asked = getattr(loaded.file.batch, key) is not None
        assert notes.get(f"batch.{key}") == (None if asked else note)


@pytest.mark.parametrize(("num_steps", "interval"), [(100, 20), (12, 2), (5, 1), (3, 1)])
def test_validations_and_checkpoints_come_five_times(load: Load, num_steps: int, interval: int) -> None:
    file, notes = derive(load(TINY, f"train.num_steps={num_steps}"), CPUS)
    assert (file.train.validation_interval_steps, file.checkpoint.interval_steps) == (interval, interval)
    assert notes["train.validation_interval_steps"] == notes["checkpoint.interval_steps"] == "five times in a run"


def test_what_was_asked_for_stays_and_has_no_note(load: Load) -> None:
    asked = {
        "train.num_workers": 4, "train.device": "cpu", "train.validation_interval_steps": 7, "checkpoint.interval_steps": 9,
        "resources.cpus_per_worker": 0.5, "resources.memory_bytes": GIGABYTE * 2, "export.dtype": "fp32",
        "parallel.overlap_communication": True, "parallel.zero_stage": 1,
    }  # fmt: skip
    file, notes = derive(load(TINY, "parallel.kind=zero", *(f"{key}={str(value).lower()}" for key, value in asked.items())), CPUS)
    tree = file.model_dump()
    assert {key: tree[key.split(".")[0]][key.split(".")[1]] for key in asked} == asked
    assert not asked.keys() & notes.keys()


def test_a_cluster_of_gpus_is_used_whole(load: Load) -> None:
    file, notes = derive(load(TINY, "batch.global_batch_size=64"), GPUS)
    assert (file.train.num_workers, file.train.device, file.parallel.overlap_communication) == (8, "cuda", True)
    assert notes["train.num_workers"] == notes["train.device"] == "what the cluster has: 8 x H100"
    assert file.resources.memory_bytes == 80 * GIGABYTE
    on_cpus, _ = derive(load(TINY), CPUS)
    assert on_cpus.parallel.overlap_communication is False


def test_nothing_that_training_reads_is_left_open(load: Load) -> None:
    file, notes = derive(load(TINY), CPUS)
    left = {
        f"{section}.{key}"
        for section in ("batch", "parallel", "train", "checkpoint", "export", "resources")
        for key, value in file.model_dump()[section].items()
        if value is None
    }
    # no stage with ddp; no target, no type of GPU and no rate of failures unless asked for
    assert left == {"parallel.zero_stage", "train.target_loss", "resources.gpu_type", "checkpoint.mean_time_between_failures_s"}
    assert all(notes.values())


def test_zero_means_stage_2(load: Load) -> None:
    file, notes = derive(load(TINY, "parallel.kind=zero"), CPUS)
    assert (file.parallel.kind, file.parallel.zero_stage) == ("zero", 2)
    assert "parallel.zero_stage" in notes
    assert "parallel.kind" not in notes


# bytes of a weight in bf16 on four workers: ddp 2 + 2 + 12 and 4 in the step; ZeRO-1 shares 12 and 4; ZeRO-2 the gradients, ZeRO-3 all
@pytest.mark.parametrize(
    ("memory_bytes_of_a_weight", "kind", "stage"),
    [(21.5, "ddp", None), (19.5, "zero", 1), (8.7, "zero", 1), (7.4, "zero", 2), (6.2, "zero", 3)],
)
def test_auto_takes_the_least_sharded_strategy_that_fits(load: Load, memory_bytes_of_a_weight: float, kind: str, stage: int | None) -> None:
    memory_bytes = int(memory_bytes_of_a_weight * LLAMA_PARAMETERS)
    loaded = load("train.num_workers=4", "batch={global_batch_size: 4, micro_batch_size: 1}", f"resources.memory_bytes={memory_bytes}")
    derived = derive_all(loaded, CPUS)
    assert derived.spec.num_parameters == LLAMA_PARAMETERS
    assert (derived.file.parallel.kind, derived.file.parallel.zero_stage) == (kind, stage)
    strategy = "ddp" if stage is None else f"zero-{stage}"
    assert derived.strategy == strategy
    assert derived.strategy_reason.startswith(f"{strategy} needs ")
    assert f" of {memory_bytes / 1e9:.1f} GB a worker" in derived.strategy_reason
    weaker = {None: "", 1: "where ddp needs", 2: "where zero-1 needs", 3: "where zero-2 needs"}[stage]
    assert weaker in derived.strategy_reason
    assert derived.notes["parallel.kind"] == derived.strategy_reason


def test_auto_with_one_worker_shards_nothing(load: Load) -> None:
    derived = derive_all(load(TINY, "train.num_workers=1"), CPUS)
    assert derived.strategy == "ddp"
    assert derived.strategy_reason.startswith("with one worker there is nothing to shard")


def test_auto_says_when_the_memory_is_not_known(load: Load) -> None:
    derived = derive_all(load(TINY, "batch.global_batch_size=32"), cluster(node(16, 4, "GPU-of-tomorrow")))
    assert derived.strategy == "ddp"
    assert "how much memory a worker has is not known" in derived.strategy_reason
    assert derived.file.resources.memory_bytes is None


def test_what_cannot_fit_is_refused_with_what_would(load: Load) -> None:
    loaded = load("train.num_workers=4", "batch={global_batch_size: 4, micro_batch_size: 1}", "resources.memory_bytes=20000000000")
    with pytest.raises(MemoryFitError, match=r"zero-3 with train.num_workers=4 .* of 20\.0 GB; use train\.num_workers=8"):
        derive(loaded, CPUS)


def test_the_model_takes_the_tokenizers_vocabulary(load: Load) -> None:
    derived = derive_all(load(TINY), CPUS)
    assert (derived.model["vocab_size"], derived.model["eos_token_id"]) == (300, 0)
    larger = derive_all(load(TINY, "model.config.vocab_size=320"), CPUS)
    assert larger.model["vocab_size"] == 320


@pytest.mark.parametrize(
    ("overrides", "steps", "seconds"),
    [
        ((), 2, 1800.0),
        (("checkpoint.interval_steps=7",), 7, None),
        (("checkpoint.interval_s=60.0",), None, 60.0),
        (("checkpoint.mean_time_between_failures_s=86400.0",), None, None),
    ],
)
def test_an_interval_that_is_asked_for_is_the_only_one(
    load: Load, overrides: tuple[str, ...], steps: int | None, seconds: float | None
) -> None:
    file, _ = derive(load(TINY, "train.num_steps=12", *overrides), CPUS)
    assert (file.checkpoint.interval_steps, file.checkpoint.interval_s) == (steps, seconds)
