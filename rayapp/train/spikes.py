"""Tells a loss spike from the losses before it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

WINDOW_STEPS = 50
LEVEL_STEPS = 10
FEWEST_STEPS = 10
"""Fewer losses say nothing about what is usual."""

DEVIATION_PER_MAD = 1.4826
"""Standard deviation over the median absolute deviation of normally distributed numbers. Source: P. J. Rousseeuw, C. Croux,
Alternatives to the median absolute deviation, JASA 88(424), 1993."""

LEAST_DEVIATION = 0.01
"""Of the level: losses that hardly differ make no spike of the next small change."""


def spike_limit(recent_losses: Sequence[float], threshold: float) -> float | None:
    """The loss above which a step is a spike; None while too few steps were made.

    The level is the median of the last few losses. The deviation is taken from the differences of successive losses, which have
    sqrt(2) times that of the losses and hold no trend: a loss that falls is not taken for one that scatters. Medians are used,
    since a spike inside the window would hide the next one from mean and standard deviation.

    Args:
        recent_losses: of applied steps, in nats.
        threshold: standard deviations above the level.
    """
    if len(recent_losses) < FEWEST_STEPS:
        return None
    level = median(recent_losses[-LEVEL_STEPS:])
    changes = [later - earlier for earlier, later in pairwise(recent_losses)]
    usual = median(changes)
    deviation = DEVIATION_PER_MAD * median(abs(change - usual) for change in changes) / math.sqrt(2.0)
    return level + threshold * max(deviation, LEAST_DEVIATION * level)


def is_spike(loss: float, limit: float | None) -> bool:
    """True if a finite loss is above the limit."""
    return limit is not None and math.isfinite(loss) and loss > limit


def with_loss(recent_losses: Sequence[float], loss: float) -> tuple[float, ...]:
    """The window after another applied step."""
    return (*recent_losses, loss)[-WINDOW_STEPS:]
