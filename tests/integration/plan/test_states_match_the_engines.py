"""The planner's states are those that the engines hold."""

from __future__ import annotations

import pytest
from support.engine_memory import held_by_engines, num_parameters
from support.ranks import run_ranks

from rayapp.plan.states import rank_states

CASES = [("ddp", "bf16"), ("zero-1", "fp32"), ("zero-2", "bf16"), ("zero-3", "fp32"), ("zero-3", "bf16")]


def test_two_ranks_hold_what_is_planned() -> None:
    for held in run_ranks(held_by_engines, 2, CASES):
        for strategy, precision in CASES:
            states = rank_states(num_parameters(), strategy, precision, dp_size=2)  # type: ignore[arg-type]
            planned = states.weights + states.optimizer
            if strategy in {"ddp", "zero-3"}:  # their gradients have a fixed place; ZeRO-1 and 2 drop theirs between steps
                planned += states.gradients
            assert held[strategy, precision] == pytest.approx(planned, rel=0.01), (strategy, precision)
