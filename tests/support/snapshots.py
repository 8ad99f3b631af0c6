"""Snapshots without an engine, and snapshots in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayapp.checkpoint.checkpoints import Checkpoint
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.store import CheckpointStore
from rayapp.engine import Snapshot, TrainEngine


@dataclass(frozen=True)
class FileSnapshot:
    """Gives the contents it was made from; a content that is an exception is raised half-way through its file."""

    contents: Mapping[str, bytes | Exception]

    @property
    def size_bytes(self) -> int:
        return sum(len(content) for content in self.contents.values() if isinstance(content, bytes))

    def files(self) -> dict[str, Callable[[], Iterator[memoryview]]]:
        return {name: lambda content=content: _pieces(content) for name, content in self.contents.items()}  # type: ignore[misc]


def _pieces(content: bytes | Exception) -> Iterator[memoryview]:
    if isinstance(content, Exception):
        yield memoryview(b"a part")
        raise content
    yield memoryview(content[:3])
    yield memoryview(content[3:])


def write_files(snapshot: Snapshot, folder: Path) -> None:
    """Write a snapshot's files into a local folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pieces in snapshot.files().items():
        with (folder / name).open("wb") as stream:
            stream.writelines(pieces())


def save_engine(engine: TrainEngine, folder: Path) -> None:
    """Write this rank's part of a running engine."""
    write_files(engine.snapshot(copied=True), folder)


def saved(store: CheckpointStore, progress: Progress, snapshot: Snapshot) -> Checkpoint:
    """Save and wait until the checkpoint is complete."""
    store.begin(progress, snapshot)
    ended = store.finish(lambda: None)
    assert ended is not None
    return ended.checkpoint
