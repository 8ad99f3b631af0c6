"""The checkpoints of a run in its storage, and which of them are complete.

A checkpoint is a folder `step-N` of fragment files (see rayapp.fragments). `manifest.json` is written last and names every
file with its size and SHA-256; a folder without it does not count.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rayapp.checkpoint.files import FileEntry, check_content, check_size
from rayapp.checkpoint.leases import leased
from rayapp.checkpoint.progress import Progress
from rayapp.errors import CheckpointError, Problem
from rayapp.storage import Location

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "step-"


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

    @property
    def world_size(self) -> int:
        """Ranks that wrote it, a file each."""
        return sum(name.endswith(".safetensors") for name in self.files)


def checkpoint_folder(folder: Location, step: int) -> Location:
    """Where the checkpoint of a step lies among a run's checkpoints."""
    return folder / f"{PREFIX}{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint in storage.

    Attributes:
        siblings: the run's checkpoints, of which it is one.
        manifest: what it consists of.
    """

    siblings: Location
    manifest: Manifest

    @property
    def folder(self) -> Location:
        return checkpoint_folder(self.siblings, self.step)

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.manifest.files.values())

    def verify(self, *, deep: bool = True) -> None:
        """Compare every file with the manifest.

        Args:
            deep: False compares sizes alone, which costs a request a file and no reading.

        Raises:
            CheckpointError: a file is missing, of another size, or of other content; it is named.
        """
        for name, entry in self.manifest.files.items():
            (check_content if deep else check_size)(self.folder / name, entry)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        """A local folder with the checkpoint's files, which are not deleted meanwhile; a remote checkpoint is downloaded and removed again.

        Raises:
            CheckpointError: the run that it belongs to has deleted it.
        """
        with leased(self.siblings, self.step):
            if not (self.folder / MANIFEST).exists():
                raise CheckpointError(Problem(f"checkpoint {self.folder}", "was deleted by the run, which has newer ones", "try again"))
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
        if not child.name.startswith(PREFIX):
            continue
        try:
            found.append(Checkpoint(folder, Manifest.model_validate_json((child / MANIFEST).read_bytes())))
        except FileNotFoundError:  # half-written, or removed just now
            continue
        except ValidationError:
            logger.warning("checkpoint %s has a manifest that cannot be read; it is left alone", child)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_intact(folder: Location, *, deep: bool = True) -> Checkpoint | None:
    """The newest checkpoint whose files are what was written; a damaged one is named and the one before is used.

    Args:
        folder: the run's checkpoints.
        deep: False compares sizes alone.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    damage: list[Problem] = []
    for checkpoint in reversed(complete_checkpoints(folder)):
        try:
            with leased(folder, checkpoint.step) if deep else contextlib.nullcontext():
                checkpoint.verify(deep=deep)
        except CheckpointError as error:
            logger.warning("%s", error)
            damage.extend(error.problems)
            continue
        return checkpoint
    if damage:
        raise CheckpointError(*damage)
    return None


def checkpoint_at(folder: Location, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest intact one.

    Args:
        folder: the run's checkpoints.
        step: None for the newest.

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
            checkpoint.verify()
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in known)
    raise CheckpointError(Problem(f"step {step}", f"has no complete checkpoint in {folder}", f"the steps are {steps or 'none'}"))
