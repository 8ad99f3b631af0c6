"""Locations in a file tree and in other filesystems behave alike, and outlive a storage that fails for a while."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from safetensors import SafetensorError
from safetensors.torch import save_file
from support.flaky_storage import FlakyHandler

from rayapp import storage
from rayapp.errors import Problem, StorageError
from rayapp.storage import COPY_CHUNK_BYTES, DEFAULT_RETRY_S, Location, open_location, retrying

S3_OPTIONS = "?endpoint_override=127.0.0.1:9&scheme=http"


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An existing folder; the remote one is no file tree for all that a Location knows."""
    if request.param == "local":
        return open_location(str(tmp_path))
    return Location(fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem()), tmp_path.name, "mock://bucket")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between two tries of milliseconds."""
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(storage, "LONGEST_WAIT_S", 0.01)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder: Location) -> list[str]:
    return [child.name for child in folder.children()]


def flaky(root: Path, before: Callable[[str], None], retry_s: float = 30.0) -> Location:
    (root / "bucket").mkdir()
    return Location(fs.PyFileSystem(FlakyHandler(root, before)), "bucket", "flaky://bucket", retry_s)


class Failing:
    """An action that raises what it is given, one after the other, and then returns ``done``."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.tries = list(errors), 0

    def __call__(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class Lasting(Failing):
    """An action that always raises the same."""

    def __call__(self) -> str:
        self.tries += 1
        raise self.errors[0]


def test_what_is_written_is_read(place: Location) -> None:
    file = place / "a.txt"
    assert not file.exists()
    file.write_text("grüße")
    assert file.exists()
    assert not file.is_dir()
    assert (file.read_text(), file.read_bytes(), file.size_bytes()) == ("grüße", "grüße".encode(), 7)
    file.write_bytes(b"shorter")
    assert file.read_bytes() == b"shorter"
    assert names(place) == ["a.txt"], "no partial file is left"
    assert (file.name, str(file).endswith("/a.txt")) == ("a.txt", True)


def test_large_files_are_copied_piece_by_piece(place: Location, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = os.urandom(COPY_CHUNK_BYTES + 17)
    source = tmp_path_factory.mktemp("source") / "big"
    source.write_bytes(content)
    file = place / "big"
    file.upload(source)
    assert file.sha256() == hashlib.sha256(content).hexdigest()
    target = source.parent / "deep" / "back"
    file.download(target)
    assert target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == ["back"]


def test_listing(place: Location) -> None:
    folder = place / "f"
    (folder / "sub").make_dirs()
    for name in ("b", "a", "sub/c"):
        (folder / name).write_text(name)
    assert names(folder) == ["a", "b", "sub"]
    assert [(str(file).removeprefix(f"{folder}/"), file.read_text()) for file in folder.files()] == [(n, n) for n in ("a", "b", "sub/c")]
    assert folder.is_dir()
    assert names(place / "nowhere") == list((place / "nowhere").files()) == []


def test_deleting(place: Location) -> None:
    folder = place / "f"
    (folder / "sub").make_dirs()
    (folder / "sub" / "c").write_text("c")
    (folder / "a").write_text("a")
    (folder / "a").delete()
    assert names(folder) == ["sub"]
    folder.delete()
    folder.delete()
    assert not folder.exists()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    target = open_location(str(tmp_path / "taken"))
    (target / "inside").write_text("kept")
    with pytest.raises(StorageError, match=f"storage {target} cannot be written: .*; check the path"):
        target.write_text("a file in place of a folder that is not empty")
    assert (target / "inside").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_below_a_file_is_refused(place: Location) -> None:
    (place / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be created"):
        (place / "file" / "below").make_dirs()
    with pytest.raises(StorageError, match="cannot be written"):
        (place / "file" / "below").write_text("x")


def test_what_does_not_exist_is_not_found_at_once(place: Location, tmp_path: Path) -> None:
    missing = place / "missing"
    for read in (missing.read_bytes, missing.read_text, missing.sha256, lambda: missing.download(tmp_path / "copy" / "x")):
        started = time.monotonic()
        with pytest.raises(FileNotFoundError):
            read()
        assert time.monotonic() - started < storage.FIRST_WAIT_S
    assert not (tmp_path / "copy" / "x").exists()


def test_a_source_that_cannot_be_read_to_its_end_leaves_no_file(place: Location, quick: None) -> None:
    source = Path("/proc/self/mem")  # can be opened, and reading it is an input/output error
    target = Location(place.filesystem, f"{place.path}/x", f"{place.uri}/x", retry_s=0.1)
    with pytest.raises(StorageError, match=r"x cannot be written: .*Errno 5"):
        target.upload(source)
    assert names(place) == []


# a storage that fails for a while

TRANSIENT = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    TimeoutError("timed out"),
    OSError("connection reset"),
    # what pyarrow 26 raised for servers that refused connections, closed them, or answered 503, 429 and 500
    OSError(
        "When initiating multiple part upload for key 'runs/x' in bucket 'bucket': AWS Error NETWORK_CONNECTION during "
        "CreateMultipartUpload operation: curlCode: 7, Could not connect to server; Details: Failed to connect to 127.0.0.1:5008"
    ),
    OSError(
        "When reading information for key 'runs/NO_SUCH_KEY' in bucket 'b': AWS Error UNKNOWN (HTTP status 503) during HeadObject "
        "operation: No response body."
    ),
    OSError(
        "When initiating multiple part upload for key 'x' in bucket 'b': AWS Error SLOW_DOWN during CreateMultipartUpload operation: x"
    ),
    OSError("AWS Error UNKNOWN (HTTP status 429) during HeadObject operation: No response body."),
    OSError("AWS Error REQUEST_TIMEOUT during PutObject operation: x"),
    OSError("google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of told backendError error_info={})"),
    pa.ArrowCapacityError("google::cloud::Status(RESOURCE_EXHAUSTED: quota)"),
    pa.ArrowException("Unknown error: google::cloud::Status(UNKNOWN: x)"),
]
PERMANENT = [
    *(
        OSError(number, os.strerror(number))
        for number in (
            *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
            *(errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
        )
    ),
    PermissionError("no number"),
    # what pyarrow 26 raised for servers that answered 403, 404, 400, 301 and 507 with the error codes of S3
    OSError(
        "When initiating multiple part upload for key 'runs/x' in bucket 'bucket': AWS Error NO_SUCH_BUCKET during CreateMultipartUpload "
        "operation: The specified bucket does not exist (Request ID: T0Wq)"
    ),
    OSError("Bucket 'bucket' not found. To create buckets, enable the allow_bucket_creation option."),
    OSError(
        "When getting information for key 'runs/x' in bucket 'bucket': AWS Error ACCESS_DENIED during HeadObject operation: "
        "No response body."
    ),
    OSError("When listing objects under key 'runs/' in bucket 'b': AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation: told"),
    OSError("When listing objects under key 'runs/' in bucket 'b': AWS Error SIGNATURE_DOES_NOT_MATCH during ListObjectsV2 operation: x"),
    OSError(
        "When initiating multiple part upload for key 'x' in bucket 'b': AWS Error UNKNOWN (HTTP status 403) during CreateMultipartUpload "
        "operation: Unable to parse ExceptionName: ExpiredToken Message: told ExpiredToken"
    ),
    OSError("AWS Error UNKNOWN (HTTP status 301) during HeadBucket operation: No response body."),
    OSError("AWS Error UNKNOWN (HTTP status 507) during CreateMultipartUpload operation: Unable to parse ExceptionName: XMinioStorageFull"),
    OSError("Unable to load libjvm\ndlopen(/usr/lib/jvm/default-java/libjvm.so) failed"),
    pa.ArrowInvalid("google::cloud::Status(INVALID_ARGUMENT: Permanent error, with a last message of told invalid error_info={})"),
    pa.ArrowNotImplementedError("moving directories"),
]


def label(error: BaseException) -> str:
    return re.sub(r"\W+", " ", f"{type(error).__name__} {error}")[:80].strip()


@pytest.mark.parametrize("error", TRANSIENT, ids=label)
def test_a_failure_that_may_pass_is_tried_again(error: Exception, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    action = Failing(error, error)
    with caplog.at_level(logging.WARNING):
        assert retrying(action, what="writing runs/a", retry_s=30) == "done"
    assert action.tries == 3
    assert len(caplog.messages) == 2
    assert all(re.fullmatch(rf"writing runs/a failed: {re.escape(str(error))}; it is tried again in 0\.0 s", m) for m in caplog.messages)


@pytest.mark.parametrize("error", PERMANENT, ids=label)
def test_a_refusal_for_good_is_not_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    action = Lasting(error)
    with pytest.raises(StorageError) as refused:
        retrying(action, what="writing runs/a", retry_s=30)
    assert str(refused.value) == f"writing runs/a failed: {error}; check the path, the permissions and the free space"
    assert refused.value.__cause__ is error
    assert (action.tries, caplog.messages) == (1, [])


def test_what_fails_for_too_long_is_given_up(quick: None) -> None:
    action = Lasting(OSError(errno.EIO, "Input/output error"))
    started = time.monotonic()
    with pytest.raises(StorageError) as refused:
        retrying(action, what="storage runs/a", rule="cannot be written", retry_s=1.2)
    assert 1.2 <= time.monotonic() - started < 2
    assert str(refused.value) == (
        f"storage runs/a cannot be written: [Errno 5] Input/output error (tried {action.tries} times in 1 s); "
        "mend the storage, or raise storage.retry_s"
    )
    assert action.tries > 50


def test_a_refusal_for_good_after_failures_ends_the_tries(quick: None) -> None:
    action = Failing(OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StorageError, match=r"failed: \[Errno 28\] No space left on device \(tried 2 times in 0 s\); check the path"):
        retrying(action, what="writing runs/a", retry_s=30)


def test_waits_grow_at_random_from_half_a_second_to_15_and_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    for _ in range(50):
        now = 0.0
        with pytest.raises(StorageError, match="in 300 s"):
            retrying(Lasting(OSError("x")), what="x", retry_s=300)
        *before, last = waits
        assert sum(waits) == pytest.approx(300)
        assert last <= 15
        for index, wait in enumerate(before):
            assert 0.5 <= wait <= min(15, 0.5 * 2**index)
        assert max(before) > 7.5
        assert len(set(before[5:])) == len(before[5:]), "no two waits are alike, so that many workers do not come at once"
        waits.clear()


def wrapped(cause: BaseException | None) -> StorageError:
    error = StorageError(Problem("file x", "cannot be written", "free space"))
    error.__cause__ = cause
    return error


def test_a_storage_error_is_judged_by_its_cause(quick: None) -> None:
    broken = SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")
    action = Failing(wrapped(broken), wrapped(wrapped(OSError("connection reset"))))
    assert retrying(action, what="saving", retry_s=30) == "done"
    assert action.tries == 3
    for cause in (None, ValueError("x"), SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")):
        action = Lasting(wrapped(cause))
        with pytest.raises(StorageError) as refused:
            retrying(action, what="saving", retry_s=30)
        assert refused.value is action.errors[0]
        assert action.tries == 1
    with pytest.raises(
        StorageError, match=r"saving failed: Error while serializing: .*\(os error 5\) \(tried \d+ times in 0 s\); mend"
    ) as lost:
        retrying(Lasting(wrapped(broken)), what="saving", retry_s=0.1)
    assert lost.value.__cause__ is broken


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("os error 5"), KeyboardInterrupt()], ids=label)
def test_what_does_not_come_from_a_storage_is_raised_as_it_is(error: BaseException) -> None:
    action = Lasting(error)
    with pytest.raises(type(error)) as raised:
        retrying(action, what="x", retry_s=30)
    assert raised.value is error
    assert action.tries == 1


@pytest.mark.parametrize("failing", ["write", "any"])
def test_every_operation_outlives_failures(
    failing: str, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third write fails, or one of six accesses of all kinds."""
    writes, chance, failed = count(1), random.Random(0), set[str]()

    def fail(access: str) -> None:
        if (failing == "any" and chance.random() < 1 / 6) or (access == failing and next(writes) % 3 == 0):
            failed.add(access)
            raise OSError(errno.EIO, f"Input/output error at {access}")

    root = flaky(tmp_path, fail)
    monkeypatch.setattr(storage, "COPY_CHUNK_BYTES", 1000)
    content = os.urandom(1700)
    (tmp_path / "source").write_bytes(content)
    for number in range(50):
        folder = root / f"folder-{number}"
        folder.make_dirs()
        (folder / "a").write_bytes(b"old and longer")
        (folder / "a").write_bytes(b"new")
        assert (folder / "a").read_bytes() == b"new"
        assert [(folder / "a").exists(), folder.is_dir(), (folder / "a").size_bytes()] == [True, True, 3]
        (folder / "b").upload(tmp_path / "source")
        assert (folder / "b").sha256() == hashlib.sha256(content).hexdigest()
        (folder / "b").download(tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content
        assert names(folder) == [file.name for file in folder.files()] == ["a", "b"]
        (folder / "a").delete()
        assert names(folder) == ["b"]
        folder.delete()
        assert names(root) == []
    assert failed == ({"look up", "list", "create", "remove", "open", "read", "write"} if failing == "any" else {"write"})
    assert len(caplog.messages) > 30


def test_what_another_removes_first_is_removed(tmp_path: Path) -> None:
    def another(access: str) -> None:
        if access == "remove":
            (tmp_path / "bucket" / "x").unlink()

    root = flaky(tmp_path, another)
    (root / "x").write_text("x")
    (root / "x").delete()
    assert names(root) == []


def test_a_full_disk_is_refused_at_once(full_disk: Path, tmp_path: Path) -> None:
    root, content = open_location(str(full_disk), retry_s=60), b"x" * 2**21
    (root / "kept").write_bytes(b"kept")
    (tmp_path / "source").write_bytes(content)
    source = open_location(str(tmp_path / "source"))
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"disk/kept cannot be written: \[Errno 28\] No space left on device; check the path"):
        (root / "kept").write_bytes(content)
    with pytest.raises(StorageError, match=r"disk/new cannot be written: .*No space left"):
        (root / "new").upload(tmp_path / "source")
    with pytest.raises(StorageError, match=r"source cannot be copied to .*disk/copy: .*No space left"):
        source.download(full_disk / "copy")
    assert time.monotonic() - started < 5
    assert {path.name: path.read_bytes() for path in full_disk.iterdir()} == {"kept": b"kept"}


def test_a_full_disk_ends_the_tries_of_other_writers_too(full_disk: Path) -> None:
    def save() -> None:
        try:
            save_file({"x": torch.zeros(2**20)}, full_disk / "x.safetensors")
        except SafetensorError as error:
            raise StorageError(Problem("file x", f"cannot be written: {error}")) from error

    started = time.monotonic()
    with pytest.raises(StorageError, match=r"^file x cannot be written: .*os error 28"):
        retrying(save, what="saving", retry_s=60)
    assert time.monotonic() - started < 5


def test_the_time_for_tries_is_passed_on(place: Location) -> None:
    patient = Location(place.filesystem, place.path, place.uri, retry_s=7.5)
    (patient / "a").make_dirs()
    (patient / "a" / "b").write_text("x")
    assert [found.retry_s for found in (patient / "a" / "b", *patient.children(), *patient.files())] == [7.5] * 3
    assert pickle.loads(pickle.dumps(patient)) == patient
    assert (open_location("x").retry_s, open_location("x", retry_s=3).retry_s) == (DEFAULT_RETRY_S, 3)
    assert open_location(f"s3://bucket/x{S3_OPTIONS}", retry_s=3).retry_s == 3


# names


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs", "~/runs", str(tmp_path / "runs")):
        location = open_location(path)
        assert (location.uri, location.is_local) == (str(tmp_path / "runs"), True)


def test_uris(tmp_path: Path) -> None:
    local = open_location(f"file://{tmp_path}/")
    assert local.is_local
    assert local.uri == str(tmp_path)
    bucket = open_location("s3://bucket/runs/?region=us-east-1")
    assert not bucket.is_local
    assert bucket.path == "bucket/runs"


@pytest.mark.parametrize("path", ["nope://bucket/x", "://x"])
def test_a_scheme_that_is_unknown_is_refused(path: str) -> None:
    with pytest.raises(StorageError, match=r"location '.*' cannot be opened: .*; use a path, or s3://"):
        open_location(path)


FILE_NAME = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name not in (".", "..")
)


@settings(deadline=None)
@given(st.lists(FILE_NAME, min_size=1, max_size=3))
@pytest.mark.parametrize(
    "root",
    ["/data/runs", f"s3://bucket/runs{S3_OPTIONS}", f"s3://bucket/{S3_OPTIONS}", "s3://b/a%20b/c?region=eu", "gs://anonymous@bucket"],
)
def test_a_uri_leads_to_the_same_place_again(root: str, parts: list[str]) -> None:
    location = open_location(root)
    assert open_location(location.uri) == location
    for part in parts:
        location = location / part
    again = open_location(str(location))
    assert again == location
    assert (again.path, again.uri) == (location.path, location.uri)
    assert location.path.endswith("/" + "/".join(parts))


def test_options_stay_behind_the_path() -> None:
    file = open_location(f"s3://bucket/runs/{S3_OPTIONS}") / "a" / "what is 100%?"
    assert file.path == "bucket/runs/a/what is 100%?"
    assert str(file) == f"s3://bucket/runs/a/what%20is%20100%25%3F{S3_OPTIONS}"
    assert (open_location("s3://bucket/runs?region=eu") / "a=1").uri == "s3://bucket/runs/a=1?region=eu"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://KEY:hush@bucket/runs?region=eu",
        "s3://hush@bucket/runs",
        "s3://bucket/runs?region=eu&access_key=KEY&secret_key=hush",
        "s3://bucket/runs?session_token=hush",
        "abfs://account:hush@container/runs",
        "abfs://container/runs?sig=hush",
        "abfs://container/runs?account_key=hush",
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(StorageError, match=r"location '\w+://\w+/runs' holds a key, .*; give it by the environment") as refused:
        open_location(uri)
    assert "hush" not in str(refused.value)


def test_what_would_get_lost_is_refused() -> None:
    with pytest.raises(StorageError, match=r"location 's3://bucket/a#b' has a '#', .*; write it as %23"):
        open_location("s3://bucket/a#b")
    with pytest.raises(StorageError, match=r"location 's3://bucket/a' has the option tls_verify_certificates, .*; leave it out"):
        open_location("s3://bucket/a?region=eu&tls_verify_certificates=false")
    with pytest.raises(StorageError, match=r"cannot be opened: Unexpected query parameter in S3 URI: 'reigon'; use a path"):
        open_location("s3://bucket/a?reigon=eu")
