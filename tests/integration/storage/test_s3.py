"""Locations on S3, as another S3 client sees them, also where the server or the way to it fails for a while."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.s3 import Fault, Proxy

from rayapp import storage
from rayapp.errors import StorageError
from rayapp.storage import Location, open_location

MANY_PARTS_BYTES = 25 * 2**20


def objects(client: Any, bucket: str) -> dict[str, bytes]:
    """Every object of a bucket; those that stand for folders are left out."""
    listed = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return {
        entry["Key"]: client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        for entry in listed
        if not entry["Key"].endswith("/")
    }


def failing(faults: Callable[[int], Fault | None], method: str) -> Callable[[str], Fault | None]:
    """A fault by the number of the request among those of one method, from 1."""
    numbers = count(1)
    return lambda requested: faults(next(numbers)) if requested == method else None


def seconds_of(action: Callable[[], object], match: str) -> float:
    """How long an action took to fail with a StorageError."""
    started = time.monotonic()
    with pytest.raises(StorageError, match=match):
        action()
    return time.monotonic() - started


def test_every_operation(client: Any, bucket: str, root_uri: str, tmp_path: Path) -> None:
    root, content = open_location(root_uri), os.urandom(MANY_PARTS_BYTES)
    assert [root.exists(), root.children(), list(root.files())] == [False, [], []]
    (root / "new" / "folder").make_dirs()
    assert (root / "new" / "folder").is_dir()
    (root / "a b%").write_text("grüße")
    (root / "a b%").write_text("grüße an alle")
    (tmp_path / "source").write_bytes(content)
    (root / "sub" / "big").upload(tmp_path / "source")
    assert objects(client, bucket) == {"runs/a b%": "grüße an alle".encode(), "runs/sub/big": content}

    client.put_object(Bucket=bucket, Key="runs/theirs", Body=b"theirs")
    assert (root / "theirs").read_bytes() == b"theirs"
    assert [(root / "theirs").exists(), (root / "theirs").is_dir(), (root / "theirs").size_bytes()] == [True, False, 6]
    assert (root / "sub" / "big").sha256() == hashlib.sha256(content).hexdigest()
    (root / "sub" / "big").download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert [child.name for child in root.children()] == ["a b%", "new", "sub", "theirs"]
    assert [(file.name, open_location(file.uri) == file) for file in root.files()] == [("a b%", True), ("big", True), ("theirs", True)]
    assert pickle.loads(pickle.dumps(root / "theirs")).read_bytes() == b"theirs"

    (root / "theirs").delete()
    (root / "theirs").delete()
    (root / "sub").delete()
    assert set(objects(client, bucket)) == {"runs/a b%"}
    root.delete()
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_what_does_not_exist_is_not_found_at_once(root_uri: str, tmp_path: Path) -> None:
    missing = open_location(root_uri) / "missing"
    started = time.monotonic()
    for read in (missing.read_bytes, missing.sha256, lambda: missing.download(tmp_path / "x")):
        with pytest.raises(FileNotFoundError):
            read()
    assert time.monotonic() - started < 2


def test_a_source_that_cannot_be_read_to_its_end_leaves_no_object(client: Any, bucket: str, root_uri: str) -> None:
    target = open_location(root_uri, retry_s=0.1) / "x"
    seconds_of(lambda: target.upload(Path("/proc/self/mem")), r"x\?.* cannot be written: \[Errno 5\]")  # it opens, but cannot be read
    assert objects(client, bucket) == {}


# outages


def use_everything(root: Location, content: bytes, folder: Path) -> None:
    """Write, read, list and remove; what is left is `kept` with the content."""
    (folder / "source").write_bytes(content)
    (root / "kept").upload(folder / "source")
    (root / "small").write_text("small")
    assert (root / "small").read_text() == "small"
    assert (root / "kept").sha256() == hashlib.sha256(content).hexdigest()
    (root / "kept").download(folder / "copy")
    assert (folder / "copy").read_bytes() == content
    assert [file.name for file in root.files()] == [child.name for child in root.children()] == ["kept", "small"]
    (root / "small").delete()
    assert not (root / "small").exists()


@pytest.mark.parametrize("operation", ["write", "upload", "read", "download", "list", "delete"])
def test_a_server_that_is_away_for_a_while(
    operation: str, client: Any, bucket: str, proxy: Proxy, proxied_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, content = open_location(proxied_uri), os.urandom(2**20)
    client.put_object(Bucket=bucket, Key="runs/there", Body=content)
    (tmp_path / "source").write_bytes(content)
    actions: dict[str, Callable[[], Any]] = {
        "write": lambda: (root / "new").write_bytes(content),
        "upload": lambda: (root / "new").upload(tmp_path / "source"),
        "read": (root / "there").read_bytes,
        "download": lambda: (root / "there").download(tmp_path / "copy"),
        "list": root.children,
        "delete": (root / "there").delete,
    }
    proxy.refuse()
    threading.Timer(4, proxy.listen).start()
    started = time.monotonic()
    result = actions[operation]()
    assert 4 < time.monotonic() - started < 15
    assert "Could not connect" in caplog.text
    assert "it is tried again in" in caplog.text
    there = {} if operation == "delete" else {"runs/there": content}
    assert objects(client, bucket) == there | ({"runs/new": content} if operation in ("write", "upload") else {})
    match operation:
        case "read":
            assert result == content
        case "download":
            assert (tmp_path / "copy").read_bytes() == content
        case "list":
            assert result == [root / "there"]


FAULTS: dict[str, Callable[[str], Fault | None]] = {
    "every third PUT is answered with 503": failing(lambda number: "503" if number % 3 == 0 else None, "PUT"),
    "503 until the SDK gives up": failing(lambda number: "503" if number % 12 in (2, 3, 4, 5, 6, 7, 8) else None, "PUT"),
    "connections that are closed": failing(lambda number: "drop" if number % 12 in (1, 2, 3, 4, 5, 6, 7) else None, "PUT"),
    "answers that are cut off": failing(lambda number: "cut" if number % 9 in (1, 2, 3, 4) else None, "GET"),
    "503 for looking": failing(lambda number: "503" if number % 7 in (1, 2, 3) else None, "HEAD"),
    "closed before listing": failing(lambda number: "drop" if number in (7, 8, 9, 12, 13, 14) else None, "GET"),
    "503 to the end of an upload": failing(lambda number: "503" if number % 5 in (1, 2, 3) else None, "POST"),
    "503 to removing": failing(lambda number: "503" if number in (1, 2, 3) else None, "DELETE"),
}
LEFT_TO_THE_SDK = ["every third PUT is answered with 503"]
"""It makes three attempts; all other faults last longer."""


@pytest.mark.parametrize("fault", FAULTS)
def test_content_outlives_a_server_that_fails_now_and_then(
    fault: str,
    client: Any,
    bucket: str,
    proxy: Proxy,
    proxied_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(storage, "LONGEST_WAIT_S", 1.0)
    content, proxy.fault = os.urandom(MANY_PARTS_BYTES), FAULTS[fault]
    use_everything(open_location(proxied_uri), content, tmp_path)
    assert objects(client, bucket) == {"runs/kept": content}
    assert proxy.faults >= 2
    assert ("it is tried again" in caplog.text) == (fault not in LEFT_TO_THE_SDK)


def test_a_server_that_is_away_for_too_long(proxy: Proxy, proxied_uri: str) -> None:
    root = open_location(proxied_uri, retry_s=3)
    proxy.refuse()
    for action in ((root / "x").read_bytes, lambda: (root / "x").write_text("x"), root.exists):
        sentence = r"^storage s3://.*runs.* cannot be .*: .*Could not connect.* \(tried \d+ times in \d+ s\); mend the storage, or raise"
        assert 3 <= seconds_of(action, sentence) < 15  # the first try and the last, each with the SDK's own, besides the time between


def test_a_server_that_never_answers(proxy: Proxy, proxied_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "S3_SILENCE_TIMEOUT_S", 1)
    root = open_location(proxied_uri, retry_s=1)
    proxy.fault = lambda _: "hang"
    for location in (root, pickle.loads(pickle.dumps(root))):
        proxy.requests.clear()
        assert 6 <= seconds_of(location.exists, r"cannot be looked up: .*Timeout was reached") < 18
        assert len(proxy.requests) == 6, "two tries of three requests each"


# refusals


def test_a_bucket_that_does_not_exist(server_port: int) -> None:
    root = open_location(f"s3://no-such-bucket-anywhere/runs?endpoint_override=127.0.0.1:{server_port}&scheme=http")
    refusal = r"^storage s3://no-such-bucket-anywhere/runs.* cannot be {}: .*{}.*; check the path, the permissions and the free space$"
    assert seconds_of(lambda: (root / "x").write_text("x"), refusal.format("written", "NO_SUCH_BUCKET")) < 2
    assert seconds_of(root.make_dirs, refusal.format("created", "Bucket 'no-such-bucket-anywhere' not found")) < 2
    with pytest.raises(FileNotFoundError):
        (root / "x").read_bytes()
    assert [root.exists(), root.children()] == [False, []]


def test_credentials_that_are_refused(proxy: Proxy, proxied_uri: str, tmp_path: Path) -> None:
    root = open_location(proxied_uri)
    (tmp_path / "source").write_bytes(b"x")
    proxy.fault = lambda _: "403"
    actions: dict[Callable[[], object], str] = {
        lambda: (root / "x").write_text("x"): "written: .*INVALID_ACCESS_KEY_ID",
        lambda: (root / "x").upload(tmp_path / "source"): "written: .*INVALID_ACCESS_KEY_ID",
        root.children: "listed: .*INVALID_ACCESS_KEY_ID",
        (root / "x").read_bytes: "read: .*ACCESS_DENIED",
        (root / "x").sha256: "read: .*ACCESS_DENIED",
        lambda: (root / "x").download(tmp_path / "copy"): "copied to .*: .*ACCESS_DENIED",
        root.exists: "looked up: .*ACCESS_DENIED",
        root.make_dirs: "created: .*ACCESS_DENIED",
        (root / "x").delete: "removed: .*ACCESS_DENIED",
    }
    for action, told in actions.items():
        assert seconds_of(action, rf"^storage s3://.* cannot be {told}.*; check the path, the permissions and the free space$") < 2
    assert len(proxy.requests) <= len(actions), "no refusal is tried again"
