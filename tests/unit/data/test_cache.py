"""The node's cache: quota, recency, damage, and many threads and processes at once."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import fs

from rayapp.config.schema import CacheSection
from rayapp.data.cache import FOLDER_LOCK_NAME, ShardCache, cache_folder
from rayapp.errors import DataError, StorageError
from rayapp.storage import Location

SIZE_BYTES = 1000


def remote(root: Path) -> Location:
    return Location(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), "shards", "mock://shards")


def content(index: int) -> bytes:
    return bytes([index]) * SIZE_BYTES


def key(index: int) -> str:
    return hashlib.sha256(content(index)).hexdigest()


@pytest.fixture
def bucket(tmp_path: Path) -> Location:
    (tmp_path / "bucket" / "shards").mkdir(parents=True)
    for index in range(10):
        (tmp_path / "bucket" / "shards" / str(index)).write_bytes(content(index))
    return remote(tmp_path / "bucket")


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[[int], ShardCache]:
    return lambda num_shards: ShardCache(CacheSection(path=str(tmp_path / "cache"), quota_bytes=num_shards * SIZE_BYTES))


def cached(tmp_path: Path) -> set[int]:
    names = {path.stem for path in (tmp_path / "cache").glob("*.arrow")}
    return {index for index in range(10) if key(index) in names}


def read(cache: ShardCache, bucket: Location, index: int) -> bytes:
    with cache.lease(bucket / str(index), size_bytes=SIZE_BYTES, sha256=key(index)) as path:
        return path.read_bytes()


def touch_older(tmp_path: Path, index: int, age_s: int) -> None:
    """Set back when a shard was last used: the clock of file times may be coarse."""
    path = tmp_path / "cache" / f"{key(index)}.arrow"
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def test_a_shard_is_copied_once(bucket: Location, make_cache, tmp_path: Path) -> None:
    cache = make_cache(3)
    assert read(cache, bucket, 1) == content(1)
    (tmp_path / "bucket" / "shards" / "1").unlink()
    assert read(cache, bucket, 1) == content(1)


def test_the_least_recently_used_goes_first(bucket: Location, make_cache, tmp_path: Path) -> None:
    cache = make_cache(3)
    for index in (0, 1, 2):
        read(cache, bucket, index)
        touch_older(tmp_path, index, 100 - 10 * index)
    read(cache, bucket, 0)
    read(cache, bucket, 3)
    assert cached(tmp_path) == {0, 2, 3}


def test_a_shard_in_use_stays(bucket: Location, make_cache, tmp_path: Path) -> None:
    cache = make_cache(2)
    with cache.lease(bucket / "0", size_bytes=SIZE_BYTES, sha256=key(0)) as path:
        touch_older(tmp_path, 0, 100)
        read(cache, bucket, 1)
        read(cache, bucket, 2)
        assert cached(tmp_path) == {0, 2}
        with cache.lease(bucket / "3", size_bytes=SIZE_BYTES, sha256=key(3)), pytest.raises(DataError, match="has no room") as error:
            read(cache, bucket, 4)
        assert "raise it" in error.value.problems[0].remedy
        assert path.read_bytes() == content(0)
    assert read(cache, bucket, 4) == content(4)


def test_a_damaged_download_is_named_and_not_kept(bucket: Location, make_cache, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "shards" / "1").write_bytes(b"x" * SIZE_BYTES)
    with pytest.raises(DataError, match=r"shard mock://shards/1 is damaged"):
        read(make_cache(3), bucket, 1)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def test_a_missing_shard(bucket: Location, make_cache) -> None:
    with pytest.raises(StorageError, match="cannot be copied"), make_cache(3).lease(bucket / "none", size_bytes=SIZE_BYTES, sha256="0"):
        pass


def test_what_a_killed_download_left_is_replaced(bucket: Location, make_cache, tmp_path: Path) -> None:
    cache = make_cache(2)
    (tmp_path / "cache" / f"{key(5)}.partial").write_bytes(bytes(SIZE_BYTES))
    (tmp_path / "cache" / f"{key(1)}.partial").write_bytes(bytes(SIZE_BYTES))
    assert read(cache, bucket, 1) == content(1)
    assert read(cache, bucket, 2) == content(2)
    assert cached(tmp_path) == {1, 2}


def num_shards_under_lock(folder: Path) -> int:
    """Whole and unfinished shards; a folder that changes while it is listed tells nothing."""
    with (folder / FOLDER_LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return len({path.stem for path in folder.iterdir() if path.suffix in (".arrow", ".partial")})


def hammer(root: str, seed: int, failures: multiprocessing.Queue | list[str]) -> None:
    """Read random shards through a cache that holds 6 of 10, checking its size and every content."""
    report = failures.append if isinstance(failures, list) else failures.put
    rng = random.Random(seed)
    folder = Path(root) / "cache"
    cache = ShardCache(CacheSection(path=str(folder), quota_bytes=6 * SIZE_BYTES))
    bucket = remote(Path(root) / "bucket")
    for _ in range(100):
        index = rng.randrange(10)
        if read(cache, bucket, index) != content(index):
            report(f"shard {index} has another content")
        if num_shards_under_lock(folder) > 6:
            report("more than the quota")


def test_many_processes(bucket: Location, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=hammer, args=(str(tmp_path), seed, failures)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert failures.empty()


def test_many_threads(bucket: Location, tmp_path: Path) -> None:
    failures: list[str] = []
    threads = [threading.Thread(target=hammer, args=(str(tmp_path), seed, failures)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_readers_of_a_node_share_the_quota(make_cache) -> None:
    assert make_cache(64).fair_share(SIZE_BYTES) == 4
    assert make_cache(3).fair_share(SIZE_BYTES) == 1
    assert make_cache(10**6).fair_share(SIZE_BYTES) == 64


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder(CacheSection())
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"data\.cache\.path"):
        cache_folder(CacheSection(path=str(tmp_path / "file" / "x")))
