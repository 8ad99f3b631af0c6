"""Where the time of training goes, by the host's clock.

An engine returns floats, so whatever ran on the device is over when a step's part ends: the host's clock is enough.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Part = Literal["data", "compute", "validation", "checkpoint"]

MOST_WARMUP_STEPS = 3
SMOOTHED_STEPS = 20


def warmup_steps(num_steps: int) -> int:
    """Steps of a process that its throughput leaves out: the first tenth, rounded up, at most 3.

    They carry what happens once: allocations, compiled kernels, connections between ranks, the first shards.
    """
    return min(MOST_WARMUP_STEPS, math.ceil(num_steps / 10))


@dataclass(frozen=True)
class StepTiming:
    """Where the time of one step went.

    Attributes:
        data_s: waiting for data.
        compute_s: the engine's step.
        other_s: everything outside of the named parts, such as writing figures.
        validation_s: validation after the step.
        checkpoint_s: how long a checkpoint held training up.
        num_tokens: tokens that all ranks fed to the model.
    """

    data_s: float
    compute_s: float
    other_s: float
    validation_s: float
    checkpoint_s: float
    num_tokens: int

    @property
    def step_s(self) -> float:
        """Seconds of the step without validation and checkpoint."""
        return self.data_s + self.compute_s + self.other_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def data_wait_share(self) -> float:
        return self.data_s / self.step_s

    @property
    def checkpoint_share(self) -> float:
        """The checkpoint's share of ``step_s`` plus itself."""
        return self.checkpoint_s / (self.step_s + self.checkpoint_s)


class StepClock:
    """Times the steps of one process: from the end of one to the end of the next, so that no second goes uncounted.

    ::

        clock = StepClock(num_steps, tokens_per_step)
        clock.start()
        for step in ...:
            with clock.part("data"): ...
            with clock.part("compute"): ...
            with clock.part("checkpoint"): ...
            timing = clock.end_step()

    Args:
        num_steps: steps that this process is to make.
        tokens_per_step: tokens that all ranks together feed to the model in one step.
        trained_s: seconds of training in earlier processes of the run.
        now: a clock in seconds that never goes back.
    """

    def __init__(self, num_steps: int, tokens_per_step: int, trained_s: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._now = now
        self._part: Part | Literal["other"] = "other"
        self._seconds = _no_seconds()
        self._mark_s = math.nan
        self._trained_s = trained_s
        self._held_up_s = 0.0
        self._steps_done = 0
        self._steady_steps = 0
        self._steady_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=SMOOTHED_STEPS)

    def start(self) -> None:
        """The first step begins now."""
        self._mark_s = self._now()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What runs inside is this part of the step. A part inside another one is taken out of the outer one."""
        outer = self._part
        self._charge()
        self._part = name
        try:
            yield
        finally:
            self._charge()
            self._part = outer

    def end_step(self, profiled: bool = False) -> StepTiming:
        """The step is over and the next one begins.

        Args:
            profiled: the step ran under a profiler, which slows it: it is left out of the throughput and of the time left.
        """
        self._charge()
        spent, self._seconds = self._seconds, _no_seconds()
        timing = StepTiming(
            data_s=spent["data"],
            compute_s=spent["compute"],
            other_s=spent["other"],
            validation_s=spent["validation"],
            checkpoint_s=spent["checkpoint"],
            num_tokens=self._tokens_per_step,
        )
        self._trained_s += timing.step_s
        self._held_up_s += timing.validation_s + timing.checkpoint_s
        self._steps_done += 1
        if not profiled:
            self._count(timing)
        return timing

    def _count(self, timing: StepTiming) -> None:
        warm = warmup_steps(self._num_steps)
        if self._steps_done > warm:
            if not self._steady_steps:
                self._recent_s.clear()
            self._steady_steps += 1
            self._steady_s += timing.step_s
        self._recent_s.append(timing.step_s)

    @property
    def tokens_per_s(self) -> float | None:
        """All ranks, over the steady steps: without warm-up and profiled steps, validation and checkpoints. None before the first."""
        return self._tokens_per_step * self._steady_steps / self._steady_s if self._steady_steps else None

    @property
    def smoothed_tokens_per_s(self) -> float | None:
        """All ranks, over the last 20 steps that were not profiled. Warm-up steps count only until there are others."""
        return self._tokens_per_step * len(self._recent_s) / sum(self._recent_s) if self._recent_s else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step's end, if the steps stay as fast and validations and checkpoints as frequent as they were."""
        if not self._recent_s:
            return None
        step_s = sum(self._recent_s) / len(self._recent_s)
        held_up_s = self._held_up_s / self._steps_done
        return (self._num_steps - self._steps_done) * (step_s + held_up_s)

    @property
    def trained_s(self) -> float:
        """Seconds of training up to now, earlier processes of the run included; without validation and checkpoints."""
        self._charge()
        return self._trained_s + self._seconds["data"] + self._seconds["compute"] + self._seconds["other"]

    def _charge(self) -> None:
        now_s = self._now()
        self._seconds[self._part] += now_s - self._mark_s
        self._mark_s = now_s


def _no_seconds() -> dict[Part | Literal["other"], float]:
    return {"data": 0.0, "compute": 0.0, "validation": 0.0, "checkpoint": 0.0, "other": 0.0}
