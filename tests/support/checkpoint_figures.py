"""What checkpoints cost runs, from their records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayapp.metrics.record import CheckpointRecord, MetricsRecord, StepRecord


@dataclass(frozen=True)
class RunFigures:
    """Of the steps of one run that were measured. "Checkpoints" are those after these steps.

    Attributes:
        wall_s: how long the steps and the checkpoints took.
        step_s: the median of the steps without what checkpoints held up.
        beside_s: seconds of each step during which, or during a part of which, a checkpoint was written; without what it held up.
        apart_s: the same of the other steps.
        first_held_up_s: how long the run's first checkpoint held training up, which is before these steps and finds no memory for
            its copy yet; None for a run whose only checkpoint is the last one.
        held_up_s: how long each checkpoint held training up.
        write_s: how long it took to write each of them.
        num_waited: checkpoints whose writing training waited for.
        checkpoint_bytes: size of one.
    """

    wall_s: float
    step_s: float
    beside_s: list[float]
    apart_s: list[float]
    first_held_up_s: float | None
    held_up_s: list[float]
    write_s: list[float]
    num_waited: int
    checkpoint_bytes: int

    @property
    def beside_ratio(self) -> float | None:
        """The median step beside a write over that of the others; None without either of them."""
        return statistics.median(self.beside_s) / statistics.median(self.apart_s) if self.beside_s and self.apart_s else None

    @property
    def lost_s(self) -> float | None:
        """What one checkpoint costs by this run's medians alone: what it holds up, and how much longer than the others the steps
        beside its writing take. None without a checkpoint, or if every step was beside one."""
        if not self.held_up_s or not self.apart_s:
            return None
        surplus_s = statistics.median(self.beside_s) - statistics.median(self.apart_s) if self.beside_s else 0.0
        return statistics.median(self.held_up_s) + surplus_s * len(self.beside_s) / len(self.held_up_s)

    @property
    def own_ratio(self) -> float | None:
        """Time over time without checkpoints, by the same medians; None likewise."""
        if self.lost_s is None:
            return None
        num_steps = len(self.beside_s) + len(self.apart_s)
        return 1 + self.lost_s * len(self.held_up_s) / (num_steps * statistics.median(self.apart_s))


def run_figures(records: Sequence[MetricsRecord], *, first: int, last: int) -> RunFigures:
    """The figures of a run over the steps after ``first`` up to ``last``.

    Args:
        records: of the run, in the order in which they were written; its last step comes after ``last``.
        first: the last step that is not measured, at least 1.
        last: the last step that is measured. A later checkpoint does not count: training waits for a run's last one in any case.
    """
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    checkpoints = [record for record in records if isinstance(record, CheckpointRecord)]
    before_the_end = [checkpoint for checkpoint in checkpoints if checkpoint.step <= last]
    counted = [checkpoint for checkpoint in before_the_end if checkpoint.step > first]
    writes = [_written_beside(checkpoint, steps) for checkpoint in before_the_end if not _was_waited_for(checkpoint, steps)]
    beside_s: list[float] = []
    apart_s: list[float] = []
    for step in range(first + 1, last + 1):
        began = steps[step - 1].time
        ended = began + steps[step].step_s
        is_beside = any(began < write_end and write_start < ended for write_start, write_end in writes)
        (beside_s if is_beside else apart_s).append(steps[step].step_s)
    return RunFigures(
        wall_s=steps[last].time - steps[first].time,
        step_s=statistics.median(beside_s + apart_s),
        beside_s=beside_s,
        apart_s=apart_s,
        first_held_up_s=before_the_end[0].seconds if before_the_end else None,
        held_up_s=[checkpoint.seconds for checkpoint in counted],
        write_s=[_write_s(checkpoint) for checkpoint in counted],
        num_waited=sum(_was_waited_for(checkpoint, steps) for checkpoint in counted),
        checkpoint_bytes=checkpoints[-1].bytes,
    )


def _was_waited_for(checkpoint: CheckpointRecord, steps: dict[int, StepRecord]) -> bool:
    """Then it is recorded before its step is, and else when a later step finds it complete."""
    return checkpoint.time <= steps[checkpoint.step].time


def _written_beside(checkpoint: CheckpointRecord, steps: dict[int, StepRecord]) -> tuple[float, float]:
    """From when to when: its step ends with the copy."""
    start = steps[checkpoint.step].time
    return start, start + _write_s(checkpoint)


def _write_s(checkpoint: CheckpointRecord) -> float:
    assert checkpoint.write_seconds is not None, "every store measures it; the field is open for older records"
    return checkpoint.write_seconds


@dataclass(frozen=True)
class Comparison:
    """Runs of one kind, one a round, and what they are beside those without checkpoints. A median of nothing is None.

    Attributes:
        num_checkpoints: of all runs.
        first_held_up_s: median of the runs' first checkpoints.
        held_up_s: median of the others.
        write_s: how long they took to write: median.
        beside_ratio: median of the runs'.
        lost_s: median of the runs'.
        own_ratios: the runs' own, where there is one.
        time_ratios: of each round, time over that without checkpoints.
    """

    num_checkpoints: int
    first_held_up_s: float | None
    held_up_s: float | None
    write_s: float | None
    beside_ratio: float | None
    lost_s: float | None
    own_ratios: list[float]
    time_ratios: list[float]


def compared(runs: Sequence[RunFigures], without: Sequence[RunFigures]) -> Comparison:
    """Compare runs with those without checkpoints of the same rounds, in the same order."""
    return Comparison(
        num_checkpoints=sum(len(run.held_up_s) for run in runs),
        first_held_up_s=median_of(run.first_held_up_s for run in runs),
        held_up_s=median_of(s for run in runs for s in run.held_up_s),
        write_s=median_of(s for run in runs for s in run.write_s),
        beside_ratio=median_of(run.beside_ratio for run in runs),
        lost_s=median_of(run.lost_s for run in runs),
        own_ratios=[run.own_ratio for run in runs if run.own_ratio is not None],
        time_ratios=[run.wall_s / other.wall_s for run, other in zip(runs, without, strict=True)],
    )


def median_of(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
