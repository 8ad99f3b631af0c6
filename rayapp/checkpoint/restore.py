"""All ranks together open the newest intact checkpoint: each compares a share of the files, and a node downloads each file once."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from rayapp.checkpoint.checkpoints import Checkpoint, complete_checkpoints
from rayapp.checkpoint.files import check_content
from rayapp.checkpoint.leases import leased
from rayapp.errors import CheckpointError, Problem, RayappError, StorageError
from rayapp.storage import Location, open_location

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files were compared with its manifest.

    Attributes:
        checkpoint: in storage.
        files: a local folder that holds them.
    """

    checkpoint: Checkpoint
    files: Path


@contextmanager
def newest_opened(
    folder: Location, *, node: str, tell: Callable[[str], None], reading: Callable[[], None]
) -> Iterator[OpenedCheckpoint | None]:
    """The newest checkpoint whose files are what was written; None where there is none. Every rank calls it.

    Args:
        folder: the run's checkpoints.
        node: tells this rank's machine from the others'.
        tell: takes a line on each damaged checkpoint; rank 0's alone is called.
        reading: called before each file that this rank reads.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
        StorageError: the storage failed.
    """
    known: dict[int, Checkpoint] = {}

    def look() -> list[Problem]:
        known.update({checkpoint.step: checkpoint for checkpoint in complete_checkpoints(folder)})
        return []

    _gathered(look)
    steps = set.intersection(*_everyone(set(known)))  # a file tree may show a new folder to one node before another
    with _local_copy(folder, node) as (copy, index, count):
        damage: list[Problem] = []
        for step in sorted(steps, reverse=True):
            checkpoint = known[step]
            with ExitStack() as held:
                if dist.get_rank() == 0:
                    held.enter_context(leased(folder, step))
                problems = _gathered(functools.partial(_compare, checkpoint, copy, index, count, reading))
                if not problems:
                    yield OpenedCheckpoint(checkpoint, copy or checkpoint.folder.local_path)
                    dist.barrier()  # nobody reads any more
                    return
            damage += problems
            for problem in problems:
                logger.warning("%s", problem)
                if dist.get_rank() == 0:
                    tell(f"checkpoint of step {step} is damaged, the one before is used: {problem}")
        if damage:
            raise CheckpointError(*damage)
    yield None


def _compare(checkpoint: Checkpoint, copy: Path | None, index: int, count: int, reading: Callable[[], None]) -> list[Problem]:
    """Download and compare this rank's share of the files; gives what is wrong with them."""
    problems: list[Problem] = []
    for name, entry in sorted(checkpoint.manifest.files.items())[index::count]:
        file = checkpoint.folder / name
        reading()
        try:
            if copy is None:
                check_content(file, entry)
                continue
            if not file.exists():
                check_content(file, entry)
            file.download(copy / name)
            check_content(open_location(str(copy / name)), entry, named=file)
        except CheckpointError as error:
            problems += error.problems
    return problems


@contextmanager
def _local_copy(folder: Location, node: str) -> Iterator[tuple[Path | None, int, int]]:
    """Where this node's ranks put remote files together (None where the storage is a file tree), this rank's share, of how many."""
    if folder.is_local:
        yield None, dist.get_rank(), dist.get_world_size()
        return
    nodes = _everyone(node)
    neighbours = [rank for rank, other in enumerate(nodes) if other == node]
    own = tempfile.mkdtemp(prefix="rayapp-checkpoint-") if dist.get_rank() == neighbours[0] else None
    copy = _everyone(own)[neighbours[0]]
    assert copy is not None
    try:
        yield Path(copy), neighbours.index(dist.get_rank()), len(neighbours)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _gathered(action: Callable[[], list[Problem]]) -> list[Problem]:
    """What all ranks found, in the order of ranks; a failure of one is raised on all."""
    outcome: list[Problem] | RayappError
    try:
        outcome = action()
    except OSError as error:
        outcome = StorageError(
            Problem(f"rank {dist.get_rank()}", f"could not read the checkpoint: {error}", "mend the storage or the disk")
        )
    except RayappError as error:
        outcome = error
    problems: list[Problem] = []
    for other in _everyone(outcome):
        if isinstance(other, RayappError):
            raise other
        problems += other
    return problems


def _everyone(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
