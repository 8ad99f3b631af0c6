"""When a checkpoint is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rayapp.config.schema import CheckpointSection

ASSUMED_COST_S = 5.0
"""What a checkpoint is taken to cost until the first one was measured."""


def best_interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds between two checkpoints that lose the least time: sqrt(2 C M).

    With an interval T a run loses C/T of its time to checkpoints and, on average, T/2 of work to each failure, one every M
    seconds: C/T + T/(2M) is least there. Source: J. W. Young, A first order approximation to the optimum checkpoint
    interval, Communications of the ACM 17(9), 1974.

    Args:
        cost_s: seconds that a checkpoint holds training up.
        mean_time_between_failures_s: of the whole run.
    """
    return math.sqrt(2.0 * cost_s * mean_time_between_failures_s)


class SaveInterval:
    """Says when a checkpoint is due: after so many steps, so many seconds, or both, whichever comes first.

    Once due it stays so until one is begun, for the storage may still be busy with the one before.

    Args:
        section: the intervals.
        step: that the run continues from.
        now: a clock in seconds that never goes back.
    """

    def __init__(self, section: CheckpointSection, step: int, now: Callable[[], float] = time.monotonic) -> None:
        self._section, self._now = section, now
        self._last_s = now()
        self._cost_s = ASSUMED_COST_S
        self._next_step = self._following(step)

    @property
    def interval_s(self) -> float | None:
        """Seconds between two checkpoints; None where steps alone count."""
        if self._section.mean_time_between_failures_s is not None:
            return best_interval_s(self._cost_s, self._section.mean_time_between_failures_s)
        return self._section.interval_s

    def is_due(self, step: int) -> bool:
        """True if the run should be saved after this step."""
        by_time = self.interval_s is not None and self._now() - self._last_s >= self.interval_s
        return by_time or (self._next_step is not None and step >= self._next_step)

    def begun(self, step: int, cost_s: float) -> None:
        """A checkpoint of this step has held training up for ``cost_s`` seconds and is on its way."""
        self._last_s = self._now()
        self._cost_s = max(cost_s, 1e-3)
        self._next_step = self._following(step)

    def _following(self, step: int) -> int | None:
        """Steps are counted from the run's beginning, so that a resumed run saves where an uninterrupted one does."""
        steps = self._section.interval_steps
        return None if steps is None else (step // steps + 1) * steps
