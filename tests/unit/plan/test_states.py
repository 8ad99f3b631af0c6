from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.models.spec import ModelSpec, spec_from_config
from rayapp.plan.states import DATA_PARALLEL_STRATEGIES, RankStates, communication_bytes, rank_states

N = 8_000_000


def small_llama() -> ModelSpec:
    spec = spec_from_config(
        {
            "model_type": "llama",
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
    )
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("strategy", "precision", "bytes_of_one_weight"),
    [
        # weights, gradients, optimizer, step; over four ranks
        ("ddp", "fp32", (4, 4, 8, 0)),
        ("ddp", "bf16", (2, 2, 12, 4)),
        ("zero-1", "fp32", (4, 4, 12 / 4, 4 / 4)),
        ("zero-1", "bf16", (2, 2, 12 / 4, 4 / 4)),
        ("zero-2", "fp16", (2, 2 / 4, 12 / 4, 4 / 4)),
        ("zero-3", "fp32", (4 / 4, 4 / 4, 12 / 4, 4 / 4)),
        ("zero-3", "bf16", (2 / 4, 2 / 4, 12 / 4, 4 / 4)),
    ],
)
def test_bytes_of_one_weight(strategy: str, precision: str, bytes_of_one_weight: tuple[float, ...]) -> None:
    states = rank_states(N, strategy, precision, dp_size=4)  # type: ignore[arg-type]
    assert states == RankStates(*(int(size * N) for size in bytes_of_one_weight), host=0)


def test_seven_and_a_half_billion_on_64_ranks_as_in_the_paper() -> None:
    """Figure 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.9 GB for 7.5 B weights in mixed precision on 64 GPUs."""
    sizes = []
    for strategy in DATA_PARALLEL_STRATEGIES:
        states = rank_states(7_500_000_000, strategy, "fp16", dp_size=64)
        sizes.append((states.weights + states.gradients + states.optimizer) / 1e9)
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)


def test_offloaded_states_are_in_the_hosts_memory() -> None:
    states = rank_states(N, "zero-3", "bf16", dp_size=4, offload_optimizer=True, offload_weights=True)
    assert states == RankStates(weights=0, gradients=N // 2, optimizer=0, step=0, host=(12 + 4 + 2) * N // 4)


def test_zero_3_updates_a_sub_group_at_once() -> None:
    assert rank_states(6_000_000_000, "zero-3", "bf16", dp_size=2).step == 4 * 1_000_000_000


@given(
    num_parameters=st.integers(1, 10**12),
    dp_size=st.integers(1, 4096),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_more_sharding_never_takes_more(num_parameters: int, dp_size: int, precision: str) -> None:
    of_stages = [rank_states(num_parameters, strategy, precision, dp_size) for strategy in DATA_PARALLEL_STRATEGIES[1:]]  # type: ignore[arg-type]
    totals = [states.weights + states.gradients + states.optimizer for states in of_stages]
    assert totals == sorted(totals, reverse=True)
    for strategy in DATA_PARALLEL_STRATEGIES:
        one = rank_states(num_parameters, strategy, precision, dp_size)  # type: ignore[arg-type]
        two = rank_states(num_parameters, strategy, precision, 2 * dp_size)  # type: ignore[arg-type]
        assert all(getattr(two, kind) <= getattr(one, kind) for kind in ("weights", "gradients", "optimizer", "step"))


def test_buckets() -> None:
    spec = small_llama()

    def buffers(strategy: str, bucket_bytes: int, overlap: bool = True) -> int:
        return communication_bytes(spec, strategy, "bf16", bucket_bytes=bucket_bytes, overlap_communication=overlap)  # type: ignore[arg-type]

    assert buffers("ddp", 1000) == 0
    assert buffers("zero-1", 1000) == buffers("zero-2", 1000) == 2000
    assert buffers("zero-2", 1000, overlap=False) == 1000
    assert buffers("zero-2", 10**12) == 2 * 2 * spec.num_parameters
    assert buffers("zero-3", 1000) == 1500 + 2 * spec.num_parameters
