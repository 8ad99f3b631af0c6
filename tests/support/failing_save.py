"""A save in which one rank cannot write."""

from __future__ import annotations

import errno
from pathlib import Path

import torch.distributed as dist

from rayapp.checkpoint.store import CheckpointStore, Progress, complete_checkpoints
from rayapp.errors import StorageError
from rayapp.storage import open_location


def save_with_a_failing_rank(folder: str, failing_rank: int) -> tuple[str, list[int], list[str]]:
    """What this rank was told, the steps that are complete afterwards, and the files of the first."""
    location = open_location(folder)
    store = CheckpointStore(location, keep_last=1, keep_best=0)

    def write(target: Path) -> None:
        (target / f"rank-{dist.get_rank()}").write_bytes(b"x" * 100)

    def fail(target: Path) -> None:
        write(target)
        if dist.get_rank() == failing_rank:
            raise OSError(errno.ENOSPC, "No space left on device")

    first = store.save(Progress(step=1, data_fingerprint="f"), write)
    told = ""
    try:
        store.save(Progress(step=2, data_fingerprint="f"), fail)
    except StorageError as error:
        told = str(error)
    first.verify()
    return told, [checkpoint.step for checkpoint in complete_checkpoints(location)], sorted(first.manifest.files)
