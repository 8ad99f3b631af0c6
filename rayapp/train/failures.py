"""Why a worker group ended early, in a sentence. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from rayapp.documents import TrainFailure
from rayapp.train.group import GroupFailure

DEATH_CLASSES = (
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
    "ActorDiedError",
    "ActorUnavailableError",
    "OutOfMemoryError",
)
"""What Ray raises for a worker whose process or node is gone."""

DEATHS = (
    (r"running low on memory|OutOfMemoryError|Ray's memory monitor", "was killed because its node ran out of memory"),
    (r"node.{0,80}(has died|was terminated|is dead|died)|[Nn]ode has died|NODE_DIED", "was lost with its node"),
    (r"ActorUnavailableError", "cannot be reached any more: its process or its node is gone"),
    (r"preempt", "was lost: its node was taken back"),
    (r"connection error code 2|SIGKILL|process (has )?died", "was killed (SIGKILL, or by the kernel for want of memory) or crashed"),
)
"""Marks in Ray's texts, and what they mean; the first that is found counts."""

COLLATERAL = re.compile(
    r"Connection (closed|reset)|connection was closed|NCCL|gloo|ProcessGroup|DistBackendError|Timed out waiting", re.IGNORECASE
)
"""What ranks say that lost a peer."""

MOST_TEXT = 400


def blamed(failure: GroupFailure) -> tuple[int | None, str]:
    """The rank that the others failed with, and what became of it.

    A rank that was ended because it hung comes first, then one whose process is gone, then one that said something else than that
    it lost a peer, then whichever said something first.
    """
    if failure.verdicts:
        rank = min(failure.verdicts)
        return rank, failure.verdicts[rank]
    deaths = {rank: text for rank, (name, text) in failure.exceptions.items() if name in DEATH_CLASSES and rank not in failure.reports}
    if deaths:
        rank = min(deaths, key=lambda rank: (_kind_of_death(deaths[rank]), rank))
        return rank, f"{_who(failure, rank)} {_death(deaths[rank])}"
    said = dict(failure.reports) | {rank: text for rank, (_, text) in failure.exceptions.items() if rank not in failure.reports}
    own = {rank: text for rank, text in said.items() if not COLLATERAL.search(text)}
    for rank, text in (own or said).items():
        return rank, f"{_who(failure, rank)} failed: {_short(text)}"
    return None, _short(failure.detail) or "the worker group failed without a word"


def failure_document(failure: GroupFailure, log: Mapping[int, list[str]]) -> TrainFailure:
    """The failure for the record.

    Args:
        failure: of a group.
        log: last lines of ranks' stderr.
    """
    rank, reason = blamed(failure)
    worker = None if rank is None else failure.workers.get(rank)
    return TrainFailure(
        time=datetime.fromtimestamp(failure.time, UTC).isoformat(timespec="seconds"),
        step=failure.step,
        reason=reason,
        rank=rank,
        node=None if worker is None else worker.address,
        log=[] if rank is None else log.get(rank, []),
    )


def _who(failure: GroupFailure, rank: int) -> str:
    worker = failure.workers.get(rank)
    return f"rank {rank}" if worker is None else str(worker)


def _kind_of_death(text: str) -> int:
    """Which of the known deaths it is: the first are the causes of those that follow. NCCL ends survivors, too."""
    return next((kind for kind, (mark, _) in enumerate(DEATHS) if re.search(mark, text, re.DOTALL)), len(DEATHS))


def _death(text: str) -> str:
    kind = _kind_of_death(text)
    return DEATHS[kind][1] if kind < len(DEATHS) else f"is gone: {_short(text)}"


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= MOST_TEXT else f"{joined[:MOST_TEXT]} ..."
