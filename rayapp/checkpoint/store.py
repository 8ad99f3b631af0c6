"""Checkpoints of one run: written by all ranks, complete only with their manifest, the newest and the best kept.

A checkpoint is a folder `step-N` of fragment files (see rayapp.fragments). `manifest.json` is written last and names every
file with its size and SHA-256; a folder without it does not count, and the next save of that step clears it away.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError

from rayapp.errors import CheckpointError, Problem, StorageError
from rayapp.storage import Location, open_location

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "step-"


class Progress(BaseModel):
    """How far a run is; part of every manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    step: int
    """Steps of the run, skipped ones included: the position in the data."""
    data_fingerprint: str
    """Of the data that the run reads."""
    loss_first: float | None = None
    """Loss of the first step."""
    loss_last: float | None = None
    """Loss of this step."""
    validation_loss: float | None = None
    """The last validation loss."""
    validation_step: int | None = None
    """The step that it was measured at."""
    skipped_steps: int = 0
    """Steps that were not applied."""
    skipped_in_a_row: int = 0
    """The last of them, without an applied one between."""
    training_s: float = 0.0
    """Seconds of training until here, over all starts."""
    target_loss_step: int | None = None
    """The step whose validation first reached the target."""
    target_loss_s: float | None = None
    """Seconds of training until then."""

    @property
    def own_validation_loss(self) -> float | None:
        """The validation loss of this step's own weights; None where they were not validated."""
        return self.validation_loss if self.validation_step == self.step else None


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """`manifest.json`: what a complete checkpoint consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Of this file."""
    progress: Progress
    """How far the run was."""
    files: dict[str, FileEntry]
    """Every file by its name."""
    written_at: float
    """Unix time in seconds."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint in storage."""

    folder: Location
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.manifest.files.values())

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: a file is missing, of another size, or of other content; it is named.
        """
        for name, entry in self.manifest.files.items():
            file = self.folder / name
            if not file.exists():
                raise self._damaged(file, "is missing")
            if file.size_bytes() != entry.size_bytes:
                raise self._damaged(file, f"has {file.size_bytes()} bytes where the manifest says {entry.size_bytes}")
            if file.sha256() != entry.sha256:
                raise self._damaged(file, "has other content than was written (SHA-256 differs)")

    def _damaged(self, file: Location, rule: str) -> CheckpointError:
        return CheckpointError(Problem(f"checkpoint file {file}", rule, "use an older checkpoint, or restore the file"))

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        """A local folder with the checkpoint's files; a remote checkpoint is downloaded and removed again."""
        if self.folder.is_local:
            yield self.folder.local_path
            return
        with tempfile.TemporaryDirectory(prefix="rayapp-checkpoint-") as copy:
            for name in self.manifest.files:
                (self.folder / name).download(Path(copy) / name)
            yield Path(copy)


def complete_checkpoints(folder: Location) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first."""
    found = []
    for child in folder.children():
        manifest = child / MANIFEST
        if not child.name.startswith(PREFIX) or not manifest.exists():
            continue
        try:
            found.append(Checkpoint(child, Manifest.model_validate_json(manifest.read_bytes())))
        except ValidationError:
            logger.warning("checkpoint %s has a manifest that cannot be read; it is left alone", child)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_intact(folder: Location) -> Checkpoint | None:
    """The newest checkpoint whose files are what was written; a damaged one is named and the one before is used.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    damage: list[Problem] = []
    for checkpoint in reversed(complete_checkpoints(folder)):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            logger.warning("%s", error)
            damage.extend(error.problems)
            continue
        return checkpoint
    if damage:
        raise CheckpointError(*damage)
    return None


def checkpoint_at(folder: Location, step: int | None, *, verify: bool = True) -> Checkpoint:
    """The checkpoint of a step, or the newest intact one.

    Args:
        folder: the run's checkpoints.
        step: None for the newest.
        verify: False where another rank has compared the files with the manifest already.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if step is None:
        newest = newest_intact(folder)
        if newest is None:
            raise CheckpointError(Problem(f"run {folder}", "has no complete checkpoint", "train it first"))
        return newest
    known = complete_checkpoints(folder)
    for checkpoint in known:
        if checkpoint.step == step:
            if verify:
                checkpoint.verify()
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in known)
    raise CheckpointError(Problem(f"step {step}", f"has no complete checkpoint in {folder}", f"the steps are {steps or 'none'}"))


class CheckpointStore:
    """Saves checkpoints of a run. Every rank holds one, and every rank calls every method."""

    def __init__(self, folder: Location, *, keep_last: int, keep_best: int) -> None:
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best

    def save(self, progress: Progress, write: Callable[[Path], None]) -> Checkpoint:
        """Let every rank write its files, then make the checkpoint complete and remove those that are no longer kept.

        Args:
            progress: how far the run is.
            write: writes this rank's files into a local folder.

        Raises:
            StorageError: on every rank, if any rank could not write; what was complete before still is.
        """
        target = self.folder / f"{PREFIX}{progress.step:08d}"
        self._run_on_first(lambda: self._clear(target))
        files, failure = self._write_own_files(target, write)
        self._raise_together(failure)
        merged = self._gather_files(files)
        manifest = Manifest(progress=progress, files=merged, written_at=time.time())
        self._run_on_first(lambda: (target / MANIFEST).write_text(manifest.model_dump_json(indent=1)))
        self._run_on_first(lambda: self._remove_old(progress.step))
        return Checkpoint(target, manifest)

    def _clear(self, target: Location) -> None:
        (target / MANIFEST).delete()
        target.delete()
        target.make_dirs()

    def _write_own_files(self, target: Location, write: Callable[[Path], None]) -> tuple[dict[str, FileEntry], str | None]:
        """This rank's files with their hashes, or why they could not be written."""
        staging = Path(tempfile.mkdtemp(prefix="rayapp-save-", dir=target.path if target.is_local else None))
        try:
            write(staging)
            files = {}
            for path in sorted(staging.iterdir()):
                location = open_location(str(path))
                files[path.name] = FileEntry(size_bytes=path.stat().st_size, sha256=location.sha256())
                if target.is_local:
                    path.rename(target.local_path / path.name)
                else:
                    (target / path.name).upload(path)
            return files, None
        except (OSError, StorageError) as error:
            return {}, f"rank {dist.get_rank()}: {error}"
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _gather_files(self, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        everyone: list[dict[str, FileEntry]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, files)
        return {name: entry for own in everyone for name, entry in own.items()}

    def _run_on_first(self, action: Callable[[], None]) -> None:
        failure = None
        if dist.get_rank() == 0:
            try:
                action()
            except (OSError, StorageError) as error:
                failure = str(error)
        self._raise_together(failure)

    def _raise_together(self, failure: str | None) -> None:
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        told = [text for text in failures if text]
        if told:
            raise StorageError(
                Problem(f"checkpoint in {self.folder}", f"could not be written: {told[0]}", "free space or mend the storage")
            )

    def _remove_old(self, newest_step: int) -> None:
        """Keep the newest and the best. What lies after the step just saved was left behind when the run went back."""
        everything = complete_checkpoints(self.folder)
        checkpoints = [checkpoint for checkpoint in everything if checkpoint.step <= newest_step]
        kept = {checkpoint.step for checkpoint in checkpoints[-self._keep_last :]}
        losses = {checkpoint.step: checkpoint.manifest.progress.own_validation_loss for checkpoint in checkpoints}
        scored = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept |= {step for _, step in scored[: self._keep_best]}
        for checkpoint in everything:
            if checkpoint.step not in kept:
                (checkpoint.folder / MANIFEST).delete()
                checkpoint.folder.delete()
