"""Batch arithmetic: what is derived multiplies out, and what cannot is refused with numbers that can."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.errors import InputError
from rayapp.layout import Layout, derive_batch, derive_layout

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES)
def test_whatever_is_left_open_the_product_is_the_global_batch(micro: int, accumulation: int, dp_size: int) -> None:
    total = micro * accumulation * dp_size
    for given_micro in (micro, None):
        for given_accumulation in (accumulation, None):
            plan = derive_batch(total, dp_size, given_micro, given_accumulation)
            assert plan.micro_batch_size * plan.gradient_accumulation_steps * plan.dp_size == total == plan.global_batch_size
            assert given_micro in (None, plan.micro_batch_size)
            assert given_accumulation in (None, plan.gradient_accumulation_steps)


@pytest.mark.parametrize(("total", "dp_size", "micro"), [(64, 2, 8), (12, 1, 4), (6, 1, 2), (7, 1, 1), (16, 4, 4), (48, 2, 8)])
def test_the_micro_batch_is_the_largest_power_of_two_up_to_eight(total: int, dp_size: int, micro: int) -> None:
    assert derive_batch(total, dp_size).micro_batch_size == micro


@given(st.integers(1, 2000), SIZES, st.one_of(st.none(), SIZES), st.one_of(st.none(), SIZES))
def test_every_remedy_works(total: int, dp_size: int, micro: int | None, accumulation: int | None) -> None:
    try:
        derive_batch(total, dp_size, micro, accumulation)
    except InputError as error:
        (problem,) = error.problems
        assert problem.subject == f"batch.global_batch_size={total}"
        sizes = [int(size) for size in re.findall(r"\d+", problem.remedy)]
        assert sizes
        for size in sizes:
            if size != total and micro is not None and accumulation is not None:
                assert size % (micro * accumulation * dp_size) == 0
            else:
                derive_batch(size, dp_size, micro, accumulation)


def test_the_refusal_of_a_batch_names_its_factors() -> None:
    with pytest.raises(InputError) as refused:
        derive_batch(512, 8, micro_batch_size=6)
    assert str(refused.value) == ("batch.global_batch_size=512 is not a multiple of micro_batch_size(6) x dp_size(8)=48; use 480 or 528")
    with pytest.raises(InputError, match=r"is not a multiple of dp_size\(8\); use 8$"):
        derive_batch(5, 8)


@given(SIZES, SIZES, SIZES)
def test_ranks_of_one_data_rank_are_next_to_each_other(dp_size: int, pp_size: int, tp_size: int) -> None:
    layout = derive_layout(dp_size * pp_size * tp_size, tp_size, pp_size)
    assert layout == Layout(dp_size, pp_size, tp_size)
    of_rank = [layout.dp_rank(rank) for rank in range(layout.world_size)]
    assert of_rank == sorted(of_rank)
    assert [of_rank.count(rank) for rank in range(dp_size)] == [pp_size * tp_size] * dp_size


@pytest.mark.parametrize(("world_size", "remedy"), [(10, r"use train\.num_workers=8 or 12"), (3, r"use train\.num_workers=4$")])
def test_a_world_that_does_not_divide_is_refused(world_size: int, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        derive_layout(world_size, tensor_parallel_size=2, pipeline_parallel_size=2)
