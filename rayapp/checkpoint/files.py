"""One file of a checkpoint: written in pieces, hashed on the way, tried again as a whole when the storage fails for a while."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator

from pydantic import BaseModel, ConfigDict

from rayapp.errors import CheckpointError, Problem
from rayapp.storage import Location, retrying


class FileEntry(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size_bytes: int
    sha256: str


def write_file(target: Location, pieces: Callable[[], Iterator[memoryview]]) -> FileEntry:
    """Write a file; it appears when it is complete, and in a file tree it is on the disk then.

    Args:
        target: where. Its ``retry_s`` says how long a storage that fails is tried again.
        pieces: gives the bytes from the beginning, every time it is called.

    Raises:
        StorageError: the storage refused, or failed for too long.
    """
    write = _write_local if target.is_local else _write_remote
    return retrying(lambda: write(target, pieces()), what=f"writing {target}", retry_s=target.retry_s)


def _write_local(target: Location, pieces: Iterator[memoryview]) -> FileEntry:
    path = target.local_path
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    digest, size = hashlib.sha256(), 0
    try:
        with partial.open("wb", buffering=0) as stream:
            for piece in pieces:
                digest.update(piece)
                rest = piece
                while rest:  # a raw write may take less than it is given
                    rest = rest[stream.write(rest) :]
                size += len(piece)
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return FileEntry(size_bytes=size, sha256=digest.hexdigest())


def _write_remote(target: Location, pieces: Iterator[memoryview]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with target.filesystem.open_output_stream(target.path) as stream:  # an object appears when its upload is complete
        for piece in pieces:
            digest.update(piece)
            stream.write(piece)
            size += len(piece)
    return FileEntry(size_bytes=size, sha256=digest.hexdigest())


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
