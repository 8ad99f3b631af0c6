"""A save in which one rank cannot write."""

from __future__ import annotations

import errno

import torch.distributed as dist

from rayapp.checkpoint.checkpoints import complete_checkpoints
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.store import CheckpointStore
from rayapp.errors import StorageError
from rayapp.storage import open_location
from support.snapshots import FileSnapshot, saved


def save_with_a_failing_rank(folder: str, failing_rank: int) -> tuple[str, list[int], list[str]]:
    """What this rank was told, the steps that are complete afterwards, and the files of the first."""
    location = open_location(folder)
    store = CheckpointStore(location, keep_last=1, keep_best=0, check_owner=lambda: None)

    name = f"rank-{dist.get_rank()}"
    good = FileSnapshot({name: b"x" * 100})
    full = FileSnapshot({name: OSError(errno.ENOSPC, "No space left on device")})
    first = saved(store, Progress(step=1, data_fingerprint="f"), good)
    told = ""
    try:
        saved(store, Progress(step=2, data_fingerprint="f"), full if dist.get_rank() == failing_rank else good)
    except StorageError as error:
        told = str(error)
    first.verify()
    return told, [checkpoint.step for checkpoint in complete_checkpoints(location)], sorted(first.manifest.files)
