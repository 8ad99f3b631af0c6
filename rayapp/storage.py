"""Files in a folder or in any `pyarrow.fs` location, behind one class."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pyarrow import ArrowInvalid, fs

from rayapp.errors import Problem, StorageError

COPY_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Location:
    """A place in a filesystem.

    Attributes:
        filesystem: where it is.
        path: the path inside that filesystem, without a trailing slash.
        uri: how people name it: an absolute local path, or a URI with its scheme.
    """

    filesystem: fs.FileSystem
    path: str
    uri: str

    def __truediv__(self, name: str) -> Location:
        return Location(self.filesystem, f"{self.path}/{name}", f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def is_local(self) -> bool:
        """True where the files lie in this machine's own file tree (which may be a network mount)."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def local_path(self) -> Path:
        """The path in this machine's file tree; only where ``is_local``."""
        assert self.is_local, f"{self.uri} is not a local path"
        return Path(self.path)

    def exists(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound)

    def is_dir(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.Directory)

    def size_bytes(self) -> int:
        return int(self.filesystem.get_file_info(self.path).size)

    def children(self) -> list[Location]:
        """What lies directly inside, sorted by name; nothing where it does not exist."""
        selector = fs.FileSelector(self.path, recursive=False, allow_not_found=True)
        names = sorted(PurePosixPath(info.path).name for info in self.filesystem.get_file_info(selector))
        return [self / name for name in names]

    def files(self) -> Iterator[Location]:
        """Every file below, sorted by path."""
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        for info in sorted(self.filesystem.get_file_info(selector), key=lambda info: info.path):
            if info.type == fs.FileType.File:
                relative = PurePosixPath(info.path).relative_to(PurePosixPath(self.path))
                yield self / str(relative)

    def make_dirs(self) -> None:
        try:
            self.filesystem.create_dir(self.path, recursive=True)
        except OSError as error:
            raise self._refused("cannot be created", error) from error

    def read_bytes(self) -> bytes:
        with self.filesystem.open_input_file(self.path) as stream:
            return bytes(stream.read())

    def read_text(self) -> str:
        return self.read_bytes().decode("utf-8")

    def write_bytes(self, content: bytes) -> None:
        """Write the whole file or nothing: readers see the old content or the new one.

        Raises:
            StorageError: the storage refused.
        """
        try:
            if self.is_local:
                self._write_local(content)
            else:  # an object store shows an object only when its upload is complete
                with self.filesystem.open_output_stream(self.path) as stream:
                    stream.write(content)
        except OSError as error:
            raise self._refused("cannot be written", error) from error

    def write_text(self, content: str) -> None:
        self.write_bytes(content.encode("utf-8"))

    def _write_local(self, content: bytes) -> None:
        target = self.local_path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with partial.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def upload(self, source: Path) -> None:
        """Copy a local file here.

        Raises:
            StorageError: the storage refused.
        """
        try:
            if self.is_local:
                self.local_path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, self.local_path)
            else:
                with source.open("rb") as stream, self.filesystem.open_output_stream(self.path) as out:
                    while chunk := stream.read(COPY_CHUNK_BYTES):
                        out.write(chunk)
        except OSError as error:
            raise self._refused("cannot be written", error) from error

    def download(self, target: Path) -> None:
        """Copy this file to a local path; the target appears only when it is complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with self.filesystem.open_input_stream(self.path) as stream, partial.open("wb") as out:
                while chunk := stream.read(COPY_CHUNK_BYTES):
                    out.write(chunk)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def delete(self) -> None:
        """Remove a file, or a folder with all that it holds; nothing happens where there is none."""
        kind = self.filesystem.get_file_info(self.path).type
        if kind == fs.FileType.Directory:
            self.filesystem.delete_dir(self.path)
        elif kind != fs.FileType.NotFound:
            self.filesystem.delete_file(self.path)

    def sha256(self) -> str:
        """The file's SHA-256, read in pieces."""
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(self.path) as stream:
            while chunk := stream.read(COPY_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def _refused(self, rule: str, error: OSError) -> StorageError:
        return StorageError(Problem(f"storage {self.uri}", f"{rule}: {error}", "check the path, the permissions and the free space"))


def open_location(path: str) -> Location:
    """A local path (made absolute) or a URI such as ``s3://bucket/runs``.

    Raises:
        StorageError: the scheme is unknown or the URI is malformed.
    """
    if "://" not in path:
        absolute = str(Path(path).expanduser().absolute())
        return Location(fs.LocalFileSystem(), absolute, absolute)
    try:
        filesystem, inner = fs.FileSystem.from_uri(path)
    except (ArrowInvalid, OSError) as error:
        raise StorageError(
            Problem(f"location {path!r}", f"cannot be opened: {error}", "use a path, or s3://, gs:// or hdfs:// with a bucket or host")
        ) from error
    inner = inner.rstrip("/")
    return Location(filesystem, inner, inner if isinstance(filesystem, fs.LocalFileSystem) else path.rstrip("/"))
