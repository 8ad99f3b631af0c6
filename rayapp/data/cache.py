"""The copy of remote shards on a node's disk: a quota, the least recently used go first, and many processes share it.

Every shard is kept under its SHA-256. Whoever reads one holds a shared lock on its lock file, whoever downloads or removes it
an exclusive one; the operating system frees a lock when its process ends, however it ends. Room is taken under the lock of
the whole folder, by giving the unfinished file its full size before it is filled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rayapp.config.schema import CacheSection
from rayapp.errors import DataError, Problem, StorageError
from rayapp.storage import COPY_CHUNK_BYTES, Location, retrying

SHARD_ENDING = ".arrow"
PARTIAL_ENDING = ".partial"
LOCK_ENDING = ".lock"
FOLDER_LOCK_NAME = "folder.lock"
SHARERS_OF_A_NODE = 16
MAX_HELD_SHARDS = 64


def cache_folder(section: CacheSection) -> Path:
    """Where the node's cache lies, made if it is not there.

    Raises:
        StorageError: it cannot be made, or the folder in the temporary folder is another user's.
    """
    folder = Path(section.path or Path(tempfile.gettempdir()) / f"rayapp-cache-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            Problem(f"data.cache.path={folder}", f"cannot be created: {error}", "give a folder on the node's disk")
        ) from error
    if section.path is None and folder.stat().st_uid != os.getuid():
        raise StorageError(Problem(f"folder {folder}", "belongs to another user", "set data.cache.path"))
    return folder


class ShardCache:
    """A node's cache of shards.

    Args:
        section: the folder and its quota.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, section: CacheSection) -> None:
        self._folder = cache_folder(section)
        self._quota_bytes = section.quota_bytes

    def fair_share(self, shard_bytes: int) -> int:
        """How many shards of a size one reader may hold, so that a node's readers together stay within the quota."""
        return min(MAX_HELD_SHARDS, max(1, self._quota_bytes // (SHARERS_OF_A_NODE * shard_bytes)))

    @contextmanager
    def lease(self, source: Location, *, size_bytes: int, sha256: str) -> Iterator[Path]:
        """The local copy of a shard, which stays until the context ends.

        Raises:
            DataError: what was downloaded is not the shard, or the quota has no room for it.
            StorageError: it cannot be downloaded.
        """
        with ExitStack() as held:
            lock = held.enter_context(self._locked(sha256 + LOCK_ENDING, fcntl.LOCK_SH))
            target = self._folder / (sha256 + SHARD_ENDING)
            while not target.exists():
                # flock turns a shared lock into an exclusive one by letting go first, so look again afterwards
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    self._fetch(source, target, size_bytes, sha256)
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(target)
            yield target

    @contextmanager
    def _locked(self, name: str, operation: int) -> Iterator[int]:
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, operation)
            yield descriptor
        finally:
            os.close(descriptor)

    def _fetch(self, source: Location, target: Path, size_bytes: int, sha256: str) -> None:
        partial = target.with_suffix(PARTIAL_ENDING)
        try:
            self._reserve(partial, size_bytes)
            rule = f"cannot be copied to {self._folder}"
            if retrying(lambda: _copy(source, partial), what=f"shard {source.uri}", rule=rule, retry_s=source.retry_s) != sha256:
                raise DataError(
                    Problem(
                        f"shard {source.uri}",
                        "is damaged: its content has another SHA-256 than the manifest says",
                        "prepare the data again",
                    )
                )
            with self._locked(FOLDER_LOCK_NAME, fcntl.LOCK_EX):  # who lists the folder meanwhile might see neither name
                partial.replace(target)
        except OSError as error:
            raise StorageError(
                Problem(f"shard {source.uri}", f"cannot be copied to {self._folder}: {error}", "check the storage and the node's disk")
            ) from error
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, partial: Path, size_bytes: int) -> None:
        with self._locked(FOLDER_LOCK_NAME, fcntl.LOCK_EX):
            used_bytes = self._make_room(size_bytes)
            if used_bytes + size_bytes > self._quota_bytes:
                raise DataError(
                    Problem(
                        f"data.cache.quota_bytes={self._quota_bytes}",
                        f"has no room for a shard of {size_bytes} bytes beside {used_bytes} bytes in use",
                        "raise it, or lower data.rows_per_shard",
                    )
                )
            with partial.open("wb") as stream:
                stream.truncate(size_bytes)

    def _make_room(self, size_bytes: int) -> int:
        """Remove shards that nobody reads, the least recently used first, until ``size_bytes`` fit or none is left.

        Returns:
            The bytes that are taken afterwards.
        """
        kept = [path for path in self._folder.iterdir() if path.suffix in (SHARD_ENDING, PARTIAL_ENDING)]
        files = sorted(((info.st_mtime_ns, info.st_size, path) for path in kept if (info := _stat(path))), reverse=True)
        used_bytes = sum(size for _, size, _ in files)
        while files and used_bytes + size_bytes > self._quota_bytes:
            _, oldest_bytes, oldest = files.pop()
            if self._remove_unless_used(oldest):
                used_bytes -= oldest_bytes
        return used_bytes

    def _remove_unless_used(self, path: Path) -> bool:
        try:
            with self._locked(path.stem + LOCK_ENDING, fcntl.LOCK_EX | fcntl.LOCK_NB):
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True


def _stat(path: Path) -> os.stat_result | None:
    """None where the file is gone: a download that ended renames it at any time."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _copy(source: Location, target: Path) -> str:
    """Copy a file into a local one that has its size already; the SHA-256 of what was read."""
    digest = hashlib.sha256()
    with source.filesystem.open_input_stream(source.path) as stream, target.open("r+b") as out:
        while chunk := stream.read(COPY_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
