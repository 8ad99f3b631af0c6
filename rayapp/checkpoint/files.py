"""One file of a checkpoint: written in pieces and hashed on the way, and compared with what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from pydantic import BaseModel, ConfigDict

from rayapp.errors import CheckpointError, Problem
from rayapp.storage import Location


class FileEntry(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size_bytes: int
    sha256: str


def write_file(target: Location, pieces: Callable[[], Iterator[memoryview]]) -> FileEntry:
    """Write a file and tell what it is; it appears when it is complete, and in a file tree it is on the disk then.

    Args:
        target: where.
        pieces: gives the bytes from the beginning, every time it is called.

    Raises:
        StorageError: the storage refused, or failed for too long.
    """
    entry = FileEntry(size_bytes=0, sha256="")

    def hashed() -> Iterator[memoryview]:
        nonlocal entry
        digest, size = hashlib.sha256(), 0
        for piece in pieces():
            digest.update(piece)
            size += len(piece)
            yield piece
        entry = FileEntry(size_bytes=size, sha256=digest.hexdigest())

    target.write_pieces(hashed)
    return entry


def check_size(file: Location, entry: FileEntry) -> None:
    """Compare a file's size with what was written.

    Raises:
        CheckpointError: the file is missing or has another size.
    """
    if not file.exists():
        raise _damaged(file, "is missing")
    if file.size_bytes() != entry.size_bytes:
        raise _damaged(file, f"has {file.size_bytes()} bytes where the manifest says {entry.size_bytes}")


def check_content(file: Location, entry: FileEntry, named: Location | None = None) -> None:
    """Compare a file with what was written.

    Args:
        file: read whole.
        entry: of the manifest.
        named: what errors call it; None: itself.

    Raises:
        CheckpointError: the file is missing, has another size or other content.
    """
    check_size(file, entry)
    if file.sha256() != entry.sha256:
        raise _damaged(named or file, "has other content than was written (SHA-256 differs)")


def _damaged(file: Location, rule: str) -> CheckpointError:
    return CheckpointError(Problem(f"checkpoint file {file}", rule, "use an older checkpoint, or restore the file"))
