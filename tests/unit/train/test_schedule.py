"""Learning rates by hand."""

from __future__ import annotations

import math

import pytest

from rayapp.config.schema import OptimSection
from rayapp.train.schedule import learning_rate


def rates(num_steps: int, **settings: object) -> list[float]:
    optim = OptimSection.model_validate({"learning_rate": 1.0, "min_learning_rate_ratio": 0.2, **settings})
    return [learning_rate(optim, step, num_steps) for step in range(num_steps)]


def test_warmup_rises_linearly_and_meets_the_highest_rate() -> None:
    assert rates(8, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_falls_to_the_lowest_at_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(5, schedule="cosine") == pytest.approx(
        [1.0, 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 0.6, 0.2 + 0.4 * (1 - math.cos(math.pi / 4)), 0.2]
    )


def test_constant_stays() -> None:
    assert rates(4, schedule="constant", warmup_steps=1) == [1.0, 1.0, 1.0, 1.0]


def test_one_step_and_all_warmup() -> None:
    assert rates(1) == pytest.approx([0.2])
    assert rates(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
