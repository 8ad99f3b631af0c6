"""The mixture against counting its draws one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.data.mixture import Mixture

weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)


@given(weights, st.integers(1, 400))
def test_index_counts_earlier_draws_of_the_source(values: list[float], num_positions: int) -> None:
    mixture = Mixture(values)
    seen: Counter[int] = Counter()
    for position in range(num_positions):
        draw = mixture.draw(position)
        assert draw.index == seen[draw.source]
        seen[draw.source] += 1


@given(weights)
def test_counts_stay_near_the_exact_share(values: list[float]) -> None:
    mixture = Mixture(values)
    seen: Counter[int] = Counter()
    for position in range(600):
        seen[mixture.draw(position).source] += 1
        for source, value in enumerate(values):
            assert abs(seen[source] - (position + 1) * value / sum(values)) < 2


def test_shares_are_exact_over_a_period() -> None:
    seen = Counter(Mixture([3.0, 1.0, 1.0]).draw(position).source for position in range(5000))
    assert seen == {0: 3000, 1: 1000, 2: 1000}


def test_a_tiny_weight_is_drawn_in_its_turn() -> None:
    mixture = Mixture([1.0, 1e-5])
    drawn = [position for position in range(300_000) if mixture.draw(position).source == 1]
    assert len(drawn) in (2, 3)


def test_a_far_position_needs_no_walk_and_no_float() -> None:
    mixture = Mixture([2.0, 1.0])
    far = 3 * 10**30
    drawn = [mixture.draw(far + i) for i in range(3)]
    assert sorted(draw.source for draw in drawn) == [0, 0, 1]
    assert {draw.index for draw in drawn if draw.source == 1} == {10**30}
    assert {draw.index for draw in drawn if draw.source == 0} == {2 * 10**30, 2 * 10**30 + 1}


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_refuses_what_is_no_mixture(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive weights"):
        Mixture(values)
