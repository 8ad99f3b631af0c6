"""The learning rate of each step. Pure."""

from __future__ import annotations

import math

from rayapp.config.schema import OptimSection


def learning_rate(optim: OptimSection, step: int, num_steps: int) -> float:
    """The rate of a step, counted from 0.

    It rises linearly over the warm-up, reaches ``learning_rate`` at its end, and falls to ``min_learning_rate_ratio`` of it at
    the last step.

    Args:
        optim: the schedule.
        step: 0 to ``num_steps`` - 1.
        num_steps: of the whole run.
    """
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.learning_rate
    falling_steps = num_steps - 1 - optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / falling_steps) if falling_steps > 0 else 1.0
    height = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    low = optim.min_learning_rate_ratio
    return optim.learning_rate * (low + (1.0 - low) * height)
