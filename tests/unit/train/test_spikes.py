"""Loss spikes are told from noise and from falling losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.train.spikes import FEWEST_STEPS, WINDOW_STEPS, is_spike, spike_limit, with_loss


def test_nothing_is_a_spike_before_there_is_something_to_compare_with() -> None:
    assert spike_limit([3.0] * (FEWEST_STEPS - 1), 6.0) is None
    assert not is_spike(1000.0, None)


def test_the_limit_of_normal_losses_is_as_many_deviations_above_them_as_asked_for() -> None:
    losses = [*np.random.default_rng(0).normal(4.0, 0.1, 20_000), *[4.0] * 10]
    assert spike_limit(losses, 5.0) == pytest.approx(4.0 + 5.0 * 0.1, rel=0.01)


def test_a_trend_does_not_hide_a_spike() -> None:
    noise = np.random.default_rng(2).normal(0.0, 0.02, 40)
    falling = [6.0 - 0.05 * step + noise[step] for step in range(40)]
    limit = spike_limit(falling, 6.0)
    assert is_spike(falling[-1] + 0.6, limit)
    assert not is_spike(falling[-1] + 0.1, limit)


def test_a_spike_in_the_window_does_not_hide_the_next_one() -> None:
    losses = [*np.random.default_rng(1).normal(3.0, 0.05, 40), 30.0, 40.0, 50.0]
    limit = spike_limit(losses, 6.0)
    assert limit is not None
    assert limit < 3.6
    assert is_spike(4.0, limit)
    assert not is_spike(3.1, limit)


def test_a_falling_loss_is_no_spike() -> None:
    losses: tuple[float, ...] = ()
    for step in range(300):
        loss = 2.0 + 8.0 * math.exp(-step / 40)
        assert not is_spike(loss, spike_limit(losses, 6.0))
        losses = with_loss(losses, loss)


def test_equal_losses_do_not_make_a_spike_of_the_next_small_change() -> None:
    limit = spike_limit([2.0] * 20, 6.0)
    assert not is_spike(2.1, limit)
    assert is_spike(2.2, limit)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_no_spike_but_something_else(loss: float) -> None:
    assert not is_spike(loss, 1.0)


@given(st.lists(st.floats(0, 20), max_size=120))
def test_the_window_holds_the_last_losses(losses: list[float]) -> None:
    window: tuple[float, ...] = ()
    for loss in losses:
        window = with_loss(window, loss)
    assert list(window) == losses[-WINDOW_STEPS:]
