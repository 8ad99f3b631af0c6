"""Every strategy at two ranks learns what one plain process learns."""

from __future__ import annotations

import copy

import pytest
import torch
from support.engine_work import STEPS, train_on_ranks
from support.ranks import run_ranks
from support.reference import plain_network, train_plainly
from support.runs import FAMILIES, resolved

STRATEGIES = ["ddp", "zero-1", "zero-2", "zero-3"]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fp32_matches_plain_torch(family: str) -> None:
    run = resolved(family)
    losses, norms, weights = train_plainly(
        plain_network(family), num_steps=STEPS, rows=8, micro_rows=8, learning_rate=run.file.optim.learning_rate, optim=run.file.optim
    )
    assert losses[-1] < losses[0]
    for results in run_ranks(train_on_ranks, 2, family, STRATEGIES, {}, 2, 2):
        for strategy in STRATEGIES:
            their_losses, their_norms, their_weights, applied = results[strategy]
            assert applied
            assert their_losses == pytest.approx(losses, abs=1e-5), strategy
            assert their_norms == pytest.approx(norms, rel=1e-4), strategy
            assert set(their_weights) == set(weights)
            for name, weight in weights.items():
                torch.testing.assert_close(
                    their_weights[name], weight, rtol=0, atol=2e-4, msg=lambda m, n=name, s=strategy: f"{s} {n}: {m}"
                )


def test_bf16_matches_torch_with_fp32_master_weights() -> None:
    run = resolved("llama")
    plain = plain_network("llama")
    arguments = {"num_steps": STEPS, "rows": 8, "micro_rows": 2, "learning_rate": run.file.optim.learning_rate, "optim": run.file.optim}
    losses, _, _ = train_plainly(copy.deepcopy(plain), precision="bf16", **arguments)
    exact, _, _ = train_plainly(plain, precision="fp32", **arguments)
    results = run_ranks(train_on_ranks, 2, "llama", STRATEGIES, {"precision": "bf16"}, 2, 2)[0]
    noise = max(abs(a - b) for a, b in zip(losses, exact, strict=True))
    assert noise > 0
    for strategy in STRATEGIES:
        worst = max(abs(a - b) for a, b in zip(results[strategy][0], losses, strict=True))
        assert worst <= max(2 * noise, 5e-3), (strategy, worst, noise)
    assert results["zero-1"][0] == pytest.approx(results["zero-2"][0], abs=2e-3)
    assert results["zero-2"][0] == pytest.approx(results["zero-3"][0], abs=2e-3)


def test_accumulation_changes_nothing() -> None:
    eight = run_ranks(train_on_ranks, 1, "llama", ["ddp", "zero-2"], {}, 1, 8)[0]
    two = run_ranks(train_on_ranks, 1, "llama", ["ddp", "zero-2"], {}, 4, 2)[0]
    for strategy in ("ddp", "zero-2"):
        assert eight[strategy][0] == pytest.approx(two[strategy][0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "micro", "accumulation"), [(1, 4, 2), (4, 1, 2), (4, 2, 1)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_fp32_matches_plain_torch_at_other_world_sizes(family: str, world_size: int, micro: int, accumulation: int) -> None:
    run = resolved(family)
    losses, _, _ = train_plainly(
        plain_network(family), num_steps=STEPS, rows=8, micro_rows=8, learning_rate=run.file.optim.learning_rate, optim=run.file.optim
    )
    results = run_ranks(train_on_ranks, world_size, family, STRATEGIES, {}, micro, accumulation)[0]
    for strategy in STRATEGIES:
        assert results[strategy][0] == pytest.approx(losses, abs=1e-5), strategy
