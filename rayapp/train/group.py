"""What is known of a worker group while it runs, and of one that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerInfo:
    """One worker process.

    Attributes:
        group: the token of its group, one for every start.
        rank: its world rank.
        world_size: of its group.
        node_id: Ray's id of its node.
        address: the node's IP address.
        pid: of the process, on that node.
        log_path: the file on that node that takes its stderr; None where it is not a file.
        actor: Ray's handle of it.
    """

    group: str
    rank: int
    world_size: int
    node_id: str
    address: str
    pid: int
    log_path: str | None
    actor: Any = None

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.address} (pid {self.pid})"


@dataclass(frozen=True)
class Beat:
    """A sign of life of one rank.

    Attributes:
        doing: what it marked last.
        step: steps that the run had behind it then.
        num_marks: marks so far; as long as it grows the rank makes progress.
        inside: where the rank is, once it has not made progress for a while: a collective, or a place in the code.
        collective: how many collectives it has entered, where that is recorded and it made no progress.
    """

    doing: str
    step: int
    num_marks: int
    inside: str | None = None
    collective: int | None = None


@dataclass(frozen=True)
class RankView:
    """One rank as its driver sees it.

    Attributes:
        worker: its process.
        beat: its last sign of life.
        silent_s: seconds since then.
        unchanged_s: seconds since it was last seen to make progress.
        has_left: it has done its work.
    """

    worker: WorkerInfo
    beat: Beat
    silent_s: float
    unchanged_s: float
    has_left: bool = False


@dataclass(frozen=True)
class GroupFailure:
    """A worker group that ended early.

    Attributes:
        time: Unix time in seconds.
        step: the last step that any rank was seen to have behind it.
        workers: its processes by rank, those that had come up.
        exceptions: what Ray says of ranks, the class and the text.
        detail: what Ray says of the group where it says nothing of ranks.
        is_preemption: its node was taken back, which uses no restart up.
        reports: what ranks said themselves before they ended, in the order of time.
        verdicts: of ranks that were ended because they hung.
    """

    time: float
    step: int
    workers: Mapping[int, WorkerInfo]
    exceptions: Mapping[int, tuple[str, str]]
    detail: str = ""
    is_preemption: bool = False
    reports: Mapping[int, str] = field(default_factory=dict)
    verdicts: Mapping[int, str] = field(default_factory=dict)
