"""Which checkpoints of a run are kept."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from rayapp.checkpoint.checkpoints import MANIFEST, PREFIX, Checkpoint, checkpoint_folder, complete_checkpoints
from rayapp.checkpoint.leases import leased_steps
from rayapp.errors import StorageError
from rayapp.storage import Location

logger = logging.getLogger(__name__)


def steps_to_keep(checkpoints: Sequence[Checkpoint], *, newest_step: int, keep_last: int, keep_best: int) -> set[int]:
    """The newest and the best. What lies after the step just saved was left behind when the run went back.

    Args:
        checkpoints: complete ones, oldest first.
        newest_step: the step just saved.
        keep_last: newest ones to keep.
        keep_best: ones with the lowest validation loss of their own to keep besides.
    """
    reached = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest_step]
    losses = {checkpoint.step: checkpoint.manifest.progress.own_validation_loss for checkpoint in reached}
    scored = sorted((loss, step) for step, loss in losses.items() if loss is not None)
    return {checkpoint.step for checkpoint in reached[-keep_last:]} | {step for _, step in scored[:keep_best]}


def remove_old(folder: Location, *, newest_step: int, keep_last: int, keep_best: int) -> None:
    """Remove what is no longer kept, unless somebody reads it. What cannot be removed now is tried again after the next save."""
    checkpoints = complete_checkpoints(folder)
    kept = steps_to_keep(checkpoints, newest_step=newest_step, keep_last=keep_last, keep_best=keep_best) | leased_steps(folder)
    for checkpoint in checkpoints:
        if checkpoint.step not in kept:
            _try(checkpoint.folder, functools.partial(_remove, folder, checkpoint))


def remove_half_written(folder: Location) -> None:
    """Remove folders of saves that never ended. Nobody else saves this run, and nothing of its own is being written."""
    half = [child for child in folder.children() if child.name.startswith(PREFIX) and not (child / MANIFEST).exists()]
    in_use = {checkpoint_folder(folder, step).name for step in leased_steps(folder)}  # one that was about to be removed
    for child in half:
        if child.name not in in_use:
            _try(child, child.delete)


def _try(what: Location, remove: Callable[[], None]) -> None:
    try:
        remove()
    except StorageError as error:
        logger.warning("checkpoint %s is not kept and cannot be removed now: %s", what, error)


def _remove(folder: Location, checkpoint: Checkpoint) -> None:
    """The manifest goes first, so that nobody begins to read; who began before that is seen by the lease, and keeps it."""
    manifest = checkpoint.folder / MANIFEST
    manifest.delete()
    if checkpoint.step in leased_steps(folder):
        manifest.write_text(checkpoint.manifest.model_dump_json(indent=1))
        return
    checkpoint.folder.delete()
