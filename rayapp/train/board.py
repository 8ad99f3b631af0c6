"""Carries news between workers and their driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from rayapp.errors import RayappError
from rayapp.train.group import Beat, GroupFailure, RankView, WorkerInfo

MOST_CALLS = 100_000
"""Calls at once: every worker keeps one open that waits for the request to stop."""


@dataclass(frozen=True)
class News:
    """What happened since the driver looked last.

    Attributes:
        lines: of progress.
        views: of the ranks that are up, by rank.
        world_size: of their group; 0 while none is up.
        starts: how often a whole group has come up.
        failures: groups that ended early since the last look.
        refusal: why a rank refused the run.
        controller: Ray Train's; None before it is up.
        start_error: why the last try to start a group failed; None where it did not.
    """

    lines: list[str]
    views: dict[int, RankView]
    world_size: int
    starts: int
    failures: list[GroupFailure]
    refusal: RayappError | None
    controller: Any = None
    start_error: str | None = None

    @property
    def is_running(self) -> bool:
        """True while all ranks of a group are up."""
        return self.world_size > 0 and len(self.views) == self.world_size


@dataclass
class _Rank:
    """What the board keeps of one rank, by its own clock."""

    worker: WorkerInfo
    beat: Beat = field(default_factory=lambda: Beat("starting", 0, 0))
    heard_s: float = field(default_factory=time.monotonic)
    changed_s: float = field(default_factory=time.monotonic)
    has_left: bool = False


@ray.remote(num_cpus=0, max_concurrency=MOST_CALLS)
class Board:
    """Keeps what workers tell until the driver takes it.

    Workers of a group that has failed may still tell something: the token of their group, which no other start has, gives them away.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._controller: Any = None
        self._group: str | None = None
        self._closed: set[str] = set()
        self._ranks: dict[int, _Rank] = {}
        self._starts = 0
        self._start_error: str | None = None
        self._reports: dict[int, str] = {}
        self._verdicts: dict[int, str] = {}
        self._failures: list[GroupFailure] = []
        self._last_failure: GroupFailure | None = None
        self._refusal: RayappError | None = None
        self._stop = asyncio.Event()
        self._has_ended = False

    async def lead(self, controller: Any) -> None:
        """Ray Train's controller is up."""
        self._controller = controller

    async def join(self, worker: WorkerInfo) -> GroupFailure | None:
        """A worker is up. Gives the failure of the group before."""
        if worker.group in self._closed:
            return self._last_failure
        if worker.group != self._group:
            self._open(worker.group)
        self._ranks[worker.rank] = _Rank(worker)
        if len(self._ranks) == worker.world_size:
            self._starts += 1
            self._start_error = None
        return self._last_failure

    def _open(self, group: str | None) -> None:
        if self._group is not None:
            self._closed.add(self._group)
        self._group, self._ranks, self._reports, self._verdicts = group, {}, {}, {}

    async def beat(self, group: str, rank: int, beat: Beat) -> None:
        """A rank is alive."""
        known = self._ranks.get(rank)
        if known is None or group != self._group:
            return
        known.heard_s = time.monotonic()
        if known.beat.num_marks != beat.num_marks:
            known.changed_s = known.heard_s
        known.beat = beat

    async def leave(self, group: str, rank: int) -> None:
        """A rank has done its work; the others may still be at theirs, and it is no longer watched."""
        known = self._ranks.get(rank)
        if known is not None and group == self._group:
            known.has_left = True

    async def tell(self, line: str) -> None:
        """A line of progress. A line replaces an untaken one that begins with the same word, so that a slow reader misses no news."""
        if self._lines and self._lines[-1].partition(" ")[0] == line.partition(" ")[0] == "step":
            self._lines[-1] = line
        else:
            self._lines.append(line)

    async def refuse(self, error: RayappError) -> None:
        """A rank cannot go on, and starting again would not help. Its peers may be waiting for it, so the driver ends the run."""
        self._refusal = self._refusal or error

    async def report(self, group: str, rank: int, text: str) -> None:
        """A rank ends because of an exception."""
        if group == self._group:
            self._reports.setdefault(rank, text)

    async def judge(self, group: str, verdicts: Mapping[int, str]) -> None:
        """Ranks of a group are about to be ended, for these reasons."""
        if group == self._group:
            self._verdicts |= verdicts

    async def fail(self, exceptions: Mapping[int, tuple[str, str]], detail: str, is_preemption: bool) -> None:
        """The group has failed; Ray says so, once."""
        failure = GroupFailure(
            time=time.time(),
            step=max((known.beat.step for known in self._ranks.values()), default=0),
            workers={rank: known.worker for rank, known in self._ranks.items()},
            exceptions=exceptions,
            detail=detail,
            is_preemption=is_preemption,
            reports=self._reports,
            verdicts=self._verdicts,
        )
        self._failures.append(failure)
        self._last_failure = failure
        self._open(None)

    async def fail_to_start(self, text: str) -> None:
        """A group could not be started; Ray tries again."""
        self._start_error = text
        self._open(None)

    async def end(self) -> None:
        """The driver has given the run up."""
        self._has_ended = True

    async def has_ended(self) -> bool:
        """True once the driver has given the run up."""
        return self._has_ended

    async def stop(self) -> None:
        """Ask all workers to save and to end."""
        self._stop.set()

    async def wait_for_stop(self) -> None:
        """Returns when the workers are to end."""
        await self._stop.wait()

    async def take(self) -> News:
        """What happened since the last call."""
        now = time.monotonic()
        lines, self._lines = self._lines, []
        failures, self._failures = self._failures, []
        views = {
            rank: RankView(known.worker, known.beat, now - known.heard_s, now - known.changed_s, known.has_left)
            for rank, known in self._ranks.items()
        }
        world_size = next((known.worker.world_size for known in self._ranks.values()), 0)
        return News(lines, views, world_size, self._starts, failures, self._refusal, self._controller, self._start_error)
