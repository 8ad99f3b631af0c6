"""When checkpoints are due: by steps, by time, and by how often a run fails."""

from __future__ import annotations

import numpy as np
import pytest

from rayapp.checkpoint.interval import SaveInterval, best_interval_s
from rayapp.config.schema import CheckpointSection


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_steps_are_counted_from_the_run_s_beginning_wherever_it_continues() -> None:
    interval = SaveInterval(CheckpointSection(interval_steps=10), step=17)
    due = []
    for step in range(18, 45):
        if interval.is_due(step):
            due.append(step)
            interval.begun(step, cost_s=0.1)
    assert due == [20, 30, 40]


def test_what_is_due_stays_due_until_it_is_begun() -> None:
    interval = SaveInterval(CheckpointSection(interval_steps=10), step=0)
    assert [interval.is_due(step) for step in (9, 10, 11, 12)] == [False, True, True, True]
    interval.begun(12, cost_s=0.1)
    assert [interval.is_due(step) for step in (13, 19, 20)] == [False, False, True]


def test_seconds_and_steps_whichever_comes_first() -> None:
    clock = Clock()
    interval = SaveInterval(CheckpointSection(interval_steps=100, interval_s=60.0), step=0, now=clock)
    clock.now_s += 59
    assert not interval.is_due(5)
    clock.now_s += 1
    assert interval.is_due(6)
    interval.begun(6, cost_s=0.1)
    assert not interval.is_due(7)
    assert interval.is_due(100)


def test_the_interval_follows_from_the_failure_rate_and_the_measured_cost() -> None:
    clock = Clock()
    interval = SaveInterval(CheckpointSection(mean_time_between_failures_s=20_000.0), step=0, now=clock)
    interval.begun(1, cost_s=1.0)
    assert interval.interval_s == pytest.approx(200.0)
    clock.now_s += 199
    assert not interval.is_due(2)
    clock.now_s += 1
    assert interval.is_due(3)
    interval.begun(3, cost_s=4.0)
    assert interval.interval_s == pytest.approx(400.0)


@pytest.mark.parametrize(("cost_s", "between_failures_s"), [(1.0, 3600.0), (20.0, 86_400.0)])
def test_no_other_interval_loses_less_time_in_a_simulation_of_failures(cost_s: float, between_failures_s: float) -> None:
    """Failures strike at random; what is lost is the time for checkpoints and the work since the last one."""
    random = np.random.default_rng(0)
    failures = random.exponential(between_failures_s, 200_000)

    def lost_share(interval_s: float) -> float:
        period = interval_s + cost_s
        saved = np.floor(failures / period) * interval_s
        return float(1 - saved.sum() / failures.sum())

    best = best_interval_s(cost_s, between_failures_s)
    losses = {factor: lost_share(factor * best) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)}
    assert losses[1.0] < losses[0.5]
    assert losses[1.0] < losses[2.0]
    assert losses[1.0] <= min(losses.values()) * 1.02
