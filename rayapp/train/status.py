"""What the ranks tell each other after every step, in one small collective."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankStatus:
    """One rank after a step.

    Attributes:
        memory_bytes: in use.
        peak_memory_bytes: the most since its process started.
        save_is_due: a checkpoint is due; rank 0's counts, for clocks differ.
        save_is_running: the last checkpoint is still being written.
        save_has_failed: the last checkpoint could not be written.
        stop_requested: the run should be saved and ended.
    """

    memory_bytes: int
    peak_memory_bytes: int
    save_is_due: bool
    save_is_running: bool
    save_has_failed: bool
    stop_requested: bool


@dataclass(frozen=True)
class GroupStatus:
    """All ranks after a step; every rank has the same.

    Attributes:
        memory_bytes: in use, mean over ranks.
        peak_memory_bytes: of the rank that needed most.
        save_is_due: rank 0's clock and interval say so.
        save_is_running: on any rank.
        save_has_failed: on any rank.
        stop_requested: of any rank.
    """

    memory_bytes: int
    peak_memory_bytes: int
    save_is_due: bool
    save_is_running: bool
    save_has_failed: bool
    stop_requested: bool


def exchange(own: RankStatus, device: torch.device) -> GroupStatus:
    """Gather the status of all ranks. Every rank calls it."""
    row = torch.tensor([int(value) for value in astuple(own)], dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    memory, peak, due, running, failed, stop = torch.stack(rows).cpu().unbind(dim=1)
    return GroupStatus(
        memory_bytes=int(memory.sum()) // len(rows),
        peak_memory_bytes=int(peak.max()),
        save_is_due=bool(due[0]),
        save_is_running=bool(running.any()),
        save_has_failed=bool(failed.any()),
        stop_requested=bool(stop.any()),
    )
