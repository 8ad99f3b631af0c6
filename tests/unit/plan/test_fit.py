from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config.schema import RunFile
from rayapp.errors import MemoryFitError
from rayapp.layout import Layout
from rayapp.models.spec import ModelSpec, spec_from_config
from rayapp.plan.activations import Pass
from rayapp.plan.fit import MemoryQuestion, check_fit, choose_strategy, estimate, memory_question
from rayapp.plan.states import DATA_PARALLEL_STRATEGIES

KINDS = ["weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead"]
GIB = 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


def llama_8b() -> ModelSpec:
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    spec = spec_from_config({**LLAMA, **sizes, "num_attention_heads": 32, "num_key_value_heads": 8})
    assert spec is not None
    return spec


def llama_1b() -> ModelSpec:
    sizes = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    spec = spec_from_config({**LLAMA, **sizes, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True})
    assert spec is not None
    return spec


def question(spec: ModelSpec, strategy: str = "ddp", dp_size: int = 8, micro_batch_size: int = 1, **changes: Any) -> MemoryQuestion:
    work = Pass(micro_batch_size, 2048, "bf16", "cuda")
    return MemoryQuestion(spec, strategy, dp_size, work, **changes)  # type: ignore[arg-type]


def test_kinds_are_those_of_the_plan_document() -> None:
    assert list(estimate(question(llama_1b())).by_kind) == KINDS


@pytest.mark.parametrize(
    ("spec", "micro_batch_size", "checkpointing", "measured_bytes"),
    [(llama_1b(), 8, False, 53.84e9), (llama_1b(), 16, False, 82.80e9), (llama_1b(), 16, True, 29.87e9), (llama_1b(), 32, False, None)],
)
def test_what_an_h200_took(spec: ModelSpec, micro_batch_size: int, checkpointing: bool, measured_bytes: float | None) -> None:
    """Memory of the device in use after steps of the same model in plain torch with bf16 weights and fp32 masters."""
    total = estimate(question(spec, "ddp", 1, micro_batch_size, activation_checkpointing=checkpointing)).total_bytes
    if measured_bytes is None:
        assert total > 130e9
    else:
        assert total == pytest.approx(measured_bytes, rel=0.03)


def test_the_optimizers_step_can_be_the_peak() -> None:
    """With few tokens the fp32 gradients are more than activations and logits ever were."""
    spec = llama_8b()
    tiny = replace(question(spec), work=Pass(1, 16, "bf16", "cuda"))
    kinds = estimate(tiny).by_kind
    assert kinds["activations"] + kinds["logits"] + kinds["buffers"] == 4 * spec.num_parameters
    assert estimate(question(spec, micro_batch_size=32)).by_kind["buffers"] == 0


def test_offloading_moves_bytes_to_the_host() -> None:
    here, there = (estimate(question(llama_8b(), "zero-2", offload_optimizer=flag)) for flag in (False, True))
    assert here.host_bytes == 0
    assert there.by_kind["optimizer"] == 0
    assert there.host_bytes == pytest.approx((12 + 4) * llama_8b().num_parameters / 8, rel=1e-6)


def test_on_cpus_there_is_no_other_memory_to_offload_to() -> None:
    on_cpu = replace(question(llama_1b(), "zero-3"), work=Pass(1, 256, "fp32", "cpu"))
    assert estimate(replace(on_cpu, offload_optimizer=True, offload_weights=True)) == estimate(on_cpu)


def test_the_least_sharded_strategy_that_fits_is_chosen() -> None:
    asked = question(llama_8b(), activation_checkpointing=True)
    totals = [estimate(replace(asked, strategy=strategy)).total_bytes for strategy in DATA_PARALLEL_STRATEGIES]
    assert totals == sorted(totals, reverse=True)
    for index, strategy in enumerate(DATA_PARALLEL_STRATEGIES):
        assert choose_strategy(asked, totals[index])[0] == strategy
        if index:
            assert choose_strategy(asked, totals[index - 1] - 1)[0] == strategy


def test_the_reason_has_the_numbers() -> None:
    strategy, reason = choose_strategy(question(llama_8b(), activation_checkpointing=True), int(79.1 * GIB))
    assert strategy == "zero-1"
    assert reason.startswith("zero-1 needs 5")
    assert " GB of 84.9 GB a worker, where ddp needs 1" in reason


def test_one_worker_has_nothing_to_shard() -> None:
    strategy, reason = choose_strategy(question(llama_8b(), dp_size=1), 10 * GIB)
    assert strategy == "ddp"
    assert "one worker" in reason


def test_unknown_memory_refuses_nothing() -> None:
    huge = question(llama_8b(), micro_batch_size=4096)
    assert choose_strategy(huge, None)[0] == "ddp"
    assert check_fit(huge, None) == estimate(huge)


def test_what_certainly_cannot_fit_is_refused_with_the_nearest_that_fits() -> None:
    asked = question(llama_8b(), "ddp", 8, 4)
    with pytest.raises(MemoryFitError) as caught:
        check_fit(asked, int(79.1 * GIB))
    message = str(caught.value)
    assert message.startswith("ddp with train.num_workers=8 batch.micro_batch_size=4 needs ")
    assert all(f"{kind} " in message for kind in KINDS)
    assert "of 84.9 GB" in message
    assert "parallel.kind=zero parallel.zero_stage=" in message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("asked", "memory_gib", "remedy"),
    [
        (question(llama_1b(), "ddp", 1, 64), 79.1, "use batch.micro_batch_size=16, or train.activation_checkpointing=true"),
        (question(llama_8b(), "ddp", 8, 1), 79.1, "use parallel.kind=zero parallel.zero_stage=1"),
        (question(llama_8b(), "zero-2", 2, 1), 60, "use parallel.offload_optimizer=cpu, or train.num_workers=8"),
        (question(llama_8b(), "ddp", 1, 1), 0.5, "no smaller batch, sharding, offloading or number of workers is enough"),
    ],
)
def test_remedies(asked: MemoryQuestion, memory_gib: float, remedy: str) -> None:
    with pytest.raises(MemoryFitError) as caught:
        check_fit(asked, int(memory_gib * GIB))
    assert caught.value.problems[0].remedy.startswith(remedy)


@pytest.mark.parametrize("memory_gib", [14.5, 22, 39.4, 79.1])
@pytest.mark.parametrize("strategy", DATA_PARALLEL_STRATEGIES)
def test_a_refused_run_needs_more_than_there_is_in_the_estimate_too(strategy: str, memory_gib: float) -> None:
    asked = question(llama_8b(), strategy, 8, 2)
    answer = estimate(asked)
    assert answer.minimum_bytes < answer.total_bytes
    if answer.minimum_bytes > memory_gib * GIB:
        with pytest.raises(MemoryFitError):
            check_fit(asked, int(memory_gib * GIB))
    else:
        assert check_fit(asked, int(memory_gib * GIB)) == answer


questions = st.builds(
    MemoryQuestion,
    spec=st.sampled_from([llama_1b(), llama_8b()]),
    strategy=st.sampled_from(DATA_PARALLEL_STRATEGIES),
    dp_size=st.integers(1, 1024),
    work=st.builds(
        Pass,
        micro_batch_size=st.integers(1, 64),
        sequence_length=st.integers(1, 32_768),
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        device=st.sampled_from(["cuda", "cpu"]),
    ),
    activation_checkpointing=st.booleans(),
    loss_chunk_tokens=st.integers(1, 8192),
    bucket_bytes=st.integers(1, 10**9),
    overlap_communication=st.booleans(),
)


@given(asked=questions)
def test_more_of_anything_takes_more(asked: MemoryQuestion) -> None:
    total = estimate(asked).total_bytes
    work = asked.work
    assert min(estimate(asked).by_kind.values()) >= 0
    assert estimate(asked).minimum_bytes <= total
    assert estimate(replace(asked, work=replace(work, micro_batch_size=2 * work.micro_batch_size))).total_bytes >= total
    assert estimate(replace(asked, work=replace(work, sequence_length=2 * work.sequence_length))).total_bytes >= total
    assert estimate(replace(asked, dp_size=2 * asked.dp_size)).total_bytes <= total
    assert estimate(replace(asked, activation_checkpointing=True)).total_bytes <= total


def test_thousands_of_estimates_a_second() -> None:
    asked = question(llama_8b())
    start = time.process_time()
    for dp_size in range(1, 1001):
        estimate(replace(asked, dp_size=dp_size))
    assert time.process_time() - start < 1


def test_a_run_file_asks_its_question() -> None:
    file = RunFile.model_validate(
        {
            "name": "x",
            "data": {"sequence_length": 512},
            "train": {"precision": "fp32", "activation_checkpointing": True, "loss_chunk_tokens": 77},
            "parallel": {"kind": "zero", "zero_stage": 2, "bucket_bytes": 1000, "offload_optimizer": "cpu"},
        }
    )
    asked = memory_question(file, spec=llama_1b(), strategy="zero-2", layout=Layout(4), micro_batch_size=3, device="cpu")
    assert asked.work == Pass(3, 512, "fp32", "cpu", "sdpa")
    assert (asked.dp_size, asked.activation_checkpointing, asked.loss_chunk_tokens, asked.bucket_bytes) == (4, True, 77, 1000)
    assert asked.offload_optimizer
    assert not asked.offload_weights
    assert not asked.overlap_communication
