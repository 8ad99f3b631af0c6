"""Files in a folder or in any `pyarrow.fs` location, behind one class. A storage that fails for a while is tried again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar
from urllib.parse import parse_qsl, quote

from pyarrow import ArrowCapacityError, ArrowException, fs
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from rayapp.errors import Problem, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

COPY_CHUNK_BYTES = 8 * 2**20
DEFAULT_RETRY_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0

PERMANENT_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
PERMANENT_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError, ValueError)
"""For what is raised without an error number; ``ValueError`` covers ``ArrowInvalid``."""
PERMANENT_MESSAGE = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID"
    r"|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT|OPT_IN_REQUIRED|\w*SIGNATURE\w*"
    r"|UNKNOWN \(HTTP status (301|400|401|403|404|405|507)\)) "
    r"|^Bucket '.*' not found"
    r"|^Unable to load lib(jvm|hdfs)"
)
"""What pyarrow says where it gives no error number. S3: the SDK's names, and the status of what the SDK has no name for."""
NUMBER_IN_MESSAGE = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust pass an error number on."""

CHECK_STORAGE = "check the path, the permissions and the free space"
MEND_STORAGE = "mend the storage, or raise storage.retry_s"
KNOWN_SCHEMES = "use a path, or s3://, gs:// or hdfs:// with a bucket or host"

S3_CONNECT_TIMEOUT_S = 5
S3_SILENCE_TIMEOUT_S = 10
"""One call makes three attempts, so that it takes half a minute at most. With what a URI gives it would be 100 s."""
S3_LOST_OPTIONS = ("smart_defaults", "tls_ca_dir_path", "tls_verify_certificates")
"""pyarrow takes them from a URI and forgets them when it sends the filesystem to another process."""
GCS_RETRY_LIMIT = "retry_limit_seconds"
GCS_RETRY_S = 5
"""The SDK's own limit is 15 minutes."""
PATH_SIGNS = "/!$&'()*+,;=:@"
"""What may stand in a URI's path as it is, besides letters, digits and ``-._~``. Source: RFC 3986, section 3.3."""
SECRET_OPTION = re.compile(r"key|secret|token|password|^sig$", re.IGNORECASE)


@dataclass(frozen=True)
class Location:
    """A place in a filesystem.

    An operation that fails is tried again for ``retry_s`` seconds, unless the storage refuses it for good; then, and after
    that time, it raises a :class:`StorageError`. Every operation can be repeated: a file is written whole or not at all.

    Attributes:
        filesystem: where it is.
        path: the path inside that filesystem, without a trailing slash.
        uri: how people name it: an absolute local path, or a URI with its scheme. :func:`open_location` makes the same place of it.
        retry_s: seconds.
    """

    filesystem: fs.FileSystem
    path: str
    uri: str
    retry_s: float = DEFAULT_RETRY_S

    def __truediv__(self, name: str) -> Location:
        if "://" in self.uri:
            place, mark, options = self.uri.partition("?")
            uri = f"{place}/{quote(name, safe=PATH_SIGNS)}{mark}{options}"
        else:
            uri = f"{self.uri}/{name}"
        return Location(self.filesystem, f"{self.path}/{name}", uri, self.retry_s)

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
        return bool(self._info().type != fs.FileType.NotFound)

    def is_dir(self) -> bool:
        return bool(self._info().type == fs.FileType.Directory)

    def size_bytes(self) -> int:
        return int(self._info().size)

    def _info(self) -> fs.FileInfo:
        return self._try("cannot be looked up", lambda: self.filesystem.get_file_info(self.path))

    def children(self) -> list[Location]:
        """What lies directly inside, sorted by name; nothing where it does not exist."""
        return [self / name for name in sorted(PurePosixPath(info.path).name for info in self._list(recursive=False))]

    def files(self) -> Iterator[Location]:
        """Every file below, sorted by path."""
        for info in sorted(self._list(recursive=True), key=lambda info: info.path):
            if info.type == fs.FileType.File:
                relative = PurePosixPath(info.path).relative_to(PurePosixPath(self.path))
                yield self / str(relative)

    def _list(self, *, recursive: bool) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        return self._try("cannot be listed", lambda: self.filesystem.get_file_info(selector))

    def make_dirs(self) -> None:
        self._try("cannot be created", lambda: self.filesystem.create_dir(self.path, recursive=True))

    def read_bytes(self) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: the storage refused, or failed for too long.
        """

        def read() -> bytes:
            with self.filesystem.open_input_file(self.path) as stream:
                return bytes(stream.read())

        return self._try_reading("cannot be read", read)

    def read_text(self) -> str:
        return self.read_bytes().decode("utf-8")

    def write_bytes(self, content: bytes) -> None:
        """Write the whole file or nothing: readers see the old content or the new one.

        Raises:
            StorageError: the storage refused, or failed for too long.
        """
        self.write_pieces(lambda: iter([content]))

    def write_pieces(self, pieces: Callable[[], Iterator[bytes | memoryview]]) -> None:
        """Write a file that is not held whole: readers see the old content or the new one.

        Args:
            pieces: gives the bytes from the beginning, every time it is called.

        Raises:
            StorageError: the storage refused, or failed for too long.
        """

        def write() -> None:
            if self.is_local:
                with _appearing(self.local_path) as partial:
                    with partial.open("wb") as stream:
                        stream.writelines(pieces())
                    _bring_to_disk(partial)
            else:
                self._write_object(pieces())

        self._try("cannot be written", write)

    def write_text(self, content: str) -> None:
        self.write_bytes(content.encode("utf-8"))

    def upload(self, source: Path) -> None:
        """Copy a local file here, whole or not at all.

        Raises:
            StorageError: the storage refused, or failed for too long.
        """

        def copy() -> None:
            if self.is_local:
                with _appearing(self.local_path) as partial:
                    shutil.copyfile(source, partial)
                    _bring_to_disk(partial)
            else:
                with source.open("rb") as stream:
                    self._write_object(iter(lambda: stream.read(COPY_CHUNK_BYTES), b""))

        self._try("cannot be written", copy)

    def _write_object(self, chunks: Iterator[bytes | memoryview]) -> None:
        """Write where a file appears when its stream is closed, as objects do."""
        stream = self.filesystem.open_output_stream(self.path)
        try:
            for chunk in chunks:
                stream.write(chunk)
        except BaseException:
            # pyarrow can only close a stream, which completes the object with the chunks so far. Where it was the storage that
            # failed, closing fails too, and nothing has appeared.
            stream.close()
            self.filesystem.delete_file(self.path)
            raise
        stream.close()

    def download(self, target: Path) -> None:
        """Copy this file to a local path; the target appears only when it is complete.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the storage refused, or failed for too long, or the local disk did.
        """

        def copy() -> None:
            with self.filesystem.open_input_stream(self.path) as stream, _appearing(target) as partial, partial.open("wb") as out:
                while chunk := stream.read(COPY_CHUNK_BYTES):
                    out.write(chunk)

        self._try_reading(f"cannot be copied to {target}", copy)

    def delete(self) -> None:
        """Remove a file, or a folder with all that it holds; nothing happens where there is none.

        Raises:
            StorageError: the storage refused, or failed for too long.
        """

        def remove() -> None:
            kind = self.filesystem.get_file_info(self.path).type
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if kind == fs.FileType.Directory:
                    self.filesystem.delete_dir(self.path)
                elif kind != fs.FileType.NotFound:
                    self.filesystem.delete_file(self.path)

        self._try("cannot be removed", remove)

    def sha256(self) -> str:
        """The file's SHA-256, read in pieces.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the storage refused, or failed for too long.
        """

        def read() -> str:
            digest = hashlib.sha256()
            with self.filesystem.open_input_stream(self.path) as stream:
                while chunk := stream.read(COPY_CHUNK_BYTES):
                    digest.update(chunk)
            return digest.hexdigest()

        return self._try_reading("cannot be read", read)

    def _try(self, rule: str, action: Callable[[], T]) -> T:
        return retrying(action, what=f"storage {self}", rule=rule, retry_s=self.retry_s)

    def _try_reading(self, rule: str, action: Callable[[], T]) -> T:
        try:
            return self._try(rule, action)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` when the block ends without an error; nothing is left of it otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _bring_to_disk(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def retrying(action: Callable[[], T], *, what: str, retry_s: float, rule: str = "failed", remedy: str = CHECK_STORAGE) -> T:
    """Do what touches a storage; where that fails for a while, do it again.

    Args:
        action: can be repeated after it failed at any point.
        what: what it does and to what, as errors and the log name it: ``writing runs/a/checkpoint``.
        retry_s: seconds from the first failure to the last try. Between two, half a second pass at first and 15 s at most, at random.
        rule: how errors say that it failed.
        remedy: what they advise where trying again is of no use.

    Returns:
        What the action returns.

    Raises:
        StorageError: the storage refused for good, or failed for too long. A StorageError of the action is tried again where its
            ``__cause__`` may pass; one that may not is raised as it is. So is every exception that does not come from a storage.
    """
    backoff = wait_random_exponential(multiplier=FIRST_WAIT_S, min=FIRST_WAIT_S, max=LONGEST_WAIT_S)

    first_failure_s: list[float] = []  # an upload may take longer than that, and fail at its end

    def left_s() -> float:
        if not first_failure_s:
            first_failure_s.append(time.monotonic())
        return first_failure_s[0] + retry_s - time.monotonic()

    def wait(state: RetryCallState) -> float:
        return max(0.0, min(backoff(state), left_s()))  # the last try comes at the end of the time

    def tell(state: RetryCallState) -> None:
        assert state.outcome is not None
        logger.warning("%s %s: %s; it is tried again in %.1f s", what, rule, _reason(state.outcome.exception()), state.upcoming_sleep)

    tries = Retrying(retry=retry_if_exception(_may_pass), wait=wait, stop=lambda state: left_s() <= 0, before_sleep=tell, reraise=True)
    started = time.monotonic()
    try:
        return tries(action)
    except (OSError, ArrowException, StorageError) as error:
        may_pass = _may_pass(error)
        if isinstance(error, StorageError) and not may_pass:
            raise
        number, seconds = tries.statistics["attempt_number"], time.monotonic() - started
        effort = f" (tried {number} times in {seconds:.0f} s)" if number > 1 else ""
        raise StorageError(Problem(what, f"{rule}: {_reason(error)}{effort}", MEND_STORAGE if may_pass else remedy)) from _origin(error)


def _may_pass(error: BaseException) -> bool:
    """True for a failure of a storage that another try may not meet."""
    if not isinstance(error, OSError | ArrowException | StorageError):
        return False
    origin = _origin(error)
    number = getattr(origin, "errno", None)
    if number is None and (named := NUMBER_IN_MESSAGE.search(str(origin))):
        number = int(named[1])
    if number is not None:
        return number not in PERMANENT_ERRNOS
    if isinstance(origin, PERMANENT_ERRORS) or PERMANENT_MESSAGE.search(str(origin)):
        return False
    return isinstance(origin, OSError | ArrowCapacityError) or type(origin) is ArrowException


def _origin(error: BaseException | None) -> BaseException | None:
    """What the storage raised, where that became a StorageError."""
    while isinstance(error, StorageError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException | None) -> str:
    return str(_origin(error))


def open_location(path: str, retry_s: float = DEFAULT_RETRY_S) -> Location:
    """A local path (made absolute) or a URI such as ``s3://bucket/runs``, with options behind a question mark.

    Args:
        path: of a file or folder, which need not exist.
        retry_s: seconds for which its operations, and looking up the region of an S3 bucket here, are tried again.

    Raises:
        StorageError: the scheme is unknown, the URI is malformed or holds a secret, or the bucket's region cannot be looked up.
    """
    if "://" not in path:
        return _local_location(path, retry_s)
    _check_uri(path)
    filesystem, inner = retrying(
        lambda: _open_filesystem(path), what=f"location {path!r}", rule="cannot be opened", remedy=KNOWN_SCHEMES, retry_s=retry_s
    )
    if isinstance(filesystem, fs.LocalFileSystem):
        return _local_location(inner, retry_s)
    place, mark, options = path.partition("?")
    return Location(filesystem, inner.rstrip("/"), f"{place.rstrip('/')}{mark}{options}", retry_s)


def _local_location(path: str, retry_s: float) -> Location:
    absolute = str(Path(path).expanduser().absolute())
    return Location(fs.LocalFileSystem(), absolute, absolute, retry_s)


def _open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    place, _, options = uri.partition("?")
    if place.startswith(("gs://", "gcs://")) and GCS_RETRY_LIMIT not in options:
        uri = f"{place}?" + "&".join(filter(None, [options, f"{GCS_RETRY_LIMIT}={GCS_RETRY_S}"]))
    filesystem, inner = fs.FileSystem.from_uri(uri)
    return (_impatient(filesystem) if filesystem.type_name == "s3" else filesystem), inner


def _impatient(filesystem: fs.S3FileSystem) -> fs.S3FileSystem:
    """The same S3 with limits on how long one call may take, and with pyarrow's usual three attempts; a URI can give neither."""
    _, (options,) = filesystem.__reduce__()  # how pyarrow sends the options to another process
    limits = {"connect_timeout": S3_CONNECT_TIMEOUT_S, "request_timeout": S3_SILENCE_TIMEOUT_S}
    return fs.S3FileSystem(**(options | limits))


def _check_uri(uri: str) -> None:
    """Refuse what would be kept or shown although it is secret, and what would get lost.

    Raises:
        StorageError: with the reason. It does not repeat the secret.
    """
    place, _, query = uri.partition("?")
    scheme, _, rest = place.partition("://")
    user = rest.partition("/")[0].rpartition("@")[0]
    options = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    shown = f"location '{scheme}://{rest.removeprefix(f'{user}@')}'"
    if ":" in user or (user and scheme == "s3") or any(SECRET_OPTION.search(name) for name in options):
        rule = "holds a key, and locations are kept beside the run and shown"
        raise StorageError(Problem(shown, rule, "give it by the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3)"))
    if "#" in uri:
        raise StorageError(Problem(shown, "has a '#', and what follows one is no part of a path", "write it as %23"))
    if scheme == "s3" and (lost := [name for name in options if name in S3_LOST_OPTIONS]):
        rule = f"has the option {lost[0]}, which does not reach other processes"
        raise StorageError(Problem(shown, rule, "leave it out; tls_ca_file_path names a certificate to trust"))
