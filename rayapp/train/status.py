"""What the ranks tell each other after every step, in one small collective."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Status:
    """One rank after a step, or all of them.

    Attributes:
        memory_bytes: in use; of all ranks: the mean.
        peak_memory_bytes: the most since the process started; of all ranks: the largest.
        save_is_due: a checkpoint is due; rank 0's counts, for clocks differ.
        save_is_running: the last checkpoint is still being written; of all ranks: by any.
        save_has_failed: the last checkpoint could not be written; of all ranks: by any.
        stop_requested: the run should be saved and ended; of all ranks: of any.
    """

    memory_bytes: int
    peak_memory_bytes: int
    save_is_due: bool
    save_is_running: bool
    save_has_failed: bool
    stop_requested: bool


def exchange(own: Status, device: torch.device) -> Status:
    """The status of all ranks; every rank calls it and gets the same."""
    row = torch.tensor([int(value) for value in astuple(own)], dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    memory, peak, due, running, failed, stop = torch.stack(rows).cpu().unbind(dim=1)
    return Status(
        memory_bytes=int(memory.sum()) // len(rows),
        peak_memory_bytes=int(peak.max()),
        save_is_due=bool(due[0]),
        save_is_running=bool(running.any()),
        save_has_failed=bool(failed.any()),
        stop_requested=bool(stop.any()),
    )
