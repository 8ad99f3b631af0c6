"""Saves the checkpoints of one run beside its training: written by all ranks, complete only with their manifest.

What training waits for is the copy of the state to the host's memory. A thread of each rank writes it; the threads agree over
a process group of their own, so that they never meet the collectives of training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rayapp.checkpoint.checkpoints import MANIFEST, Checkpoint, Manifest, checkpoint_folder
from rayapp.checkpoint.files import FileEntry, write_file
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.retention import remove_half_written, remove_old
from rayapp.engine import Snapshot
from rayapp.errors import Problem, RayappError, StorageError
from rayapp.storage import Location

logger = logging.getLogger(__name__)

WAIT_S = 1.0
UPLOAD_TIMEOUT = timedelta(days=2)
"""How far apart the ranks' uploads may end. A rank that dies is noticed at once, by its closed connection."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that became complete.

    Attributes:
        checkpoint: where it is.
        seconds: from the beginning of the writing until it was complete.
    """

    checkpoint: Checkpoint
    seconds: float


class CheckpointStore:
    """Saves checkpoints of a run. Every rank holds one, and every rank begins the same saves in the same order.

    Args:
        folder: the run's checkpoints. Its ``retry_s`` says how long a storage that fails is tried again.
        keep_last: newest checkpoints that are kept.
        keep_best: checkpoints with the lowest validation loss that are kept besides.
        check_owner: called by rank 0 before it changes anything, and before a checkpoint becomes complete; it raises where the run belongs
            to another start.
    """

    def __init__(self, folder: Location, *, keep_last: int, keep_best: int, check_owner: Callable[[], None]) -> None:
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._check_owner = check_owner
        self.pieces_written = 0
        """By this rank, in all saves: it grows while a save makes progress."""
        self._group = dist.new_group(backend="gloo", timeout=UPLOAD_TIMEOUT)
        self._saving: _Saving | None = None

    @property
    def is_busy(self) -> bool:
        """True while this rank writes, or waits for others that do."""
        return self._saving is not None and self._saving.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if the last save failed; ``collect`` raises why."""
        return self._saving is not None and not self._saving.is_alive() and self._saving.failure is not None

    def begin(self, progress: Progress, snapshot: Snapshot) -> None:
        """Begin to save; no rank may be busy.

        Args:
            progress: how far the run is.
            snapshot: this rank's part. It must not change before the save has ended.
        """
        assert self._saving is None, "the last save was not collected"
        self._saving = _Saving(lambda: self._save(progress, snapshot))
        self._saving.start()

    def collect(self) -> Saved | None:
        """The save that has ended since the last call; None if none has.

        Raises:
            StorageError: on every rank, if any rank could not write; what was complete before still is.
        """
        if self._saving is None or self._saving.is_alive():
            return None
        ended, self._saving = self._saving, None
        return ended.result()

    def finish(self, waiting: Callable[[], None]) -> Saved | None:
        """Wait until nothing is being saved.

        Args:
            waiting: called about once a second as long as this rank's writing makes progress.

        Raises:
            StorageError: as ``collect`` does.
        """
        while self._saving is not None and self._saving.is_alive():
            before = self.pieces_written
            self._saving.join(WAIT_S)
            if self.pieces_written != before:
                waiting()
        return self.collect()

    def _save(self, progress: Progress, snapshot: Snapshot) -> Saved:
        """What the thread of a rank does."""
        started = time.monotonic()
        target = checkpoint_folder(self.folder, progress.step)
        self._on_first(lambda: self._make_room(target))
        files: dict[str, FileEntry] = {}

        def write() -> None:
            for name, pieces in snapshot.files().items():
                files[name] = write_file(target / name, lambda pieces=pieces: self._counted(pieces()))  # type: ignore[misc]

        try:
            self._together(write)
        except StorageError:
            if dist.get_rank() == 0:
                remove_half_written(self.folder)  # a full disk is not to stay full of it
            raise
        manifest = Manifest(progress=progress, files=self._merged(files), written_at=time.time())
        self._on_first(lambda: self._complete(target, manifest))
        return Saved(Checkpoint(self.folder, manifest), time.monotonic() - started)

    def _counted(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            self.pieces_written += 1

    def _make_room(self, target: Location) -> None:
        """Remove what unfinished saves have left, and an older checkpoint of this step."""
        self._check_owner()
        remove_half_written(self.folder)
        (target / MANIFEST).delete()
        target.delete()
        target.make_dirs()

    def _complete(self, target: Location, manifest: Manifest) -> None:
        self._check_owner()
        (target / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        remove_old(self.folder, newest_step=manifest.progress.step, keep_last=self._keep_last, keep_best=self._keep_best)

    def _on_first(self, action: Callable[[], None]) -> None:
        self._together(action if dist.get_rank() == 0 else _nothing)

    def _together(self, action: Callable[[], None]) -> None:
        """Do what this rank has to do; if it fails on any rank, raise on all of them."""
        failure: RayappError | None = None
        try:
            action()
        except OSError as error:
            failure = StorageError(Problem(f"storage {self.folder}", f"failed: {error}", "free space or mend the storage"))
        except RayappError as error:
            failure = error
        failures: list[RayappError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure, group=self._group)
        told = {rank: error for rank, error in enumerate(failures) if error is not None}
        if not told:
            return
        rank, first = next(iter(told.items()))
        if isinstance(first, StorageError):
            why = "; ".join(f"{problem.subject} {problem.rule}" for problem in first.problems)
            rule = f"could not be written by rank {rank}: {why}"
            raise StorageError(Problem(f"checkpoint in {self.folder}", rule, "free space or mend the storage, then go on with --resume"))
        raise first

    def _merged(self, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        everyone: list[dict[str, FileEntry]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, files, group=self._group)
        return {name: entry for own in everyone for name, entry in own.items()}


def _nothing() -> None:
    """What the other ranks do while the first one acts."""


class _Saving(threading.Thread):
    """One save. The process may end before it does."""

    def __init__(self, save: Callable[[], Saved]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._save = save
        self._saved: Saved | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._saved = self._save()
        except Exception as error:  # noqa: BLE001 (raised again by result())
            self.failure = error

    def result(self) -> Saved | None:
        if self.failure is not None:
            raise self.failure
        return self._saved
