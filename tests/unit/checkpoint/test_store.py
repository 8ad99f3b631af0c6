"""Checkpoints of one rank: complete or not there, the newest and the best kept, damage named."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from pyarrow import fs
from support.damage import flip, truncate
from support.snapshots import FileSnapshot, saved

from rayapp.checkpoint import retention
from rayapp.checkpoint.checkpoints import MANIFEST, checkpoint_at, complete_checkpoints, newest_intact
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.store import CheckpointStore
from rayapp.errors import CheckpointError, Problem, StorageError
from rayapp.storage import Location, open_location


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return open_location(str(tmp_path / "checkpoints"))


def progress(step: int, validation_loss: float | None = None) -> Progress:
    return Progress(step=step, data_fingerprint="f", validation_loss=validation_loss, validation_step=step)


def writer(content: bytes | Exception = b"weights") -> FileSnapshot:
    return FileSnapshot({"rank-0": content, "state.json": b"{}"})


def store_of(folder: Location, keep_last: int = 2, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(folder, keep_last=keep_last, keep_best=keep_best, check_owner=lambda: None)


def save(folder: Location, *steps: int, keep_last: int = 10) -> None:
    for step in steps:
        saved(store_of(folder, keep_last), progress(step), writer(f"weights of {step}".encode()))


def steps_on_disk(folder: Location) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.local_path.glob("step-*"))]


def file_of(folder: Location, step: int, name: str = "rank-0") -> Path:
    return folder.local_path / f"step-{step:08d}" / name


def test_the_manifest_tells_what_was_written(folder: Location) -> None:
    checkpoint = saved(store_of(folder), progress(3, validation_loss=1.5), writer(b"some weights"))
    listed = json.loads(file_of(folder, 3, MANIFEST).read_text())
    assert listed["files"] == {
        "rank-0": {"size_bytes": 12, "sha256": hashlib.sha256(b"some weights").hexdigest()},
        "state.json": {"size_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
    }
    assert listed["progress"]["validation_loss"] == 1.5
    assert checkpoint.size_bytes == 14
    assert sorted(path.name for path in file_of(folder, 3).parent.iterdir()) == [MANIFEST, "rank-0", "state.json"]
    assert newest_intact(folder) == checkpoint


def test_the_newest_and_the_best_are_kept(folder: Location) -> None:
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 1.2, 5: 2.0, 6: 2.5, 7: 2.6}
    store = store_of(folder, keep_last=2, keep_best=2)
    kept = []
    for step, loss in losses.items():
        saved(store, progress(step, loss), writer())
        kept.append(steps_on_disk(folder))
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 5, 6], [2, 4, 6, 7]]


def test_a_later_save_of_a_step_replaces_the_one_before(folder: Location) -> None:
    saved(store_of(folder), progress(4), writer(b"old"))
    file_of(folder, 4, "rank-7").write_bytes(b"of a larger world")
    checkpoint = saved(store_of(folder), progress(4), writer(b"new"))
    assert file_of(folder, 4).read_bytes() == b"new"
    assert not file_of(folder, 4, "rank-7").exists()
    checkpoint.verify()


def test_a_half_written_folder_does_not_count_and_is_cleared(folder: Location) -> None:
    save(folder, 1)
    half = file_of(folder, 2).parent
    (half / "rayapp-save-x").mkdir(parents=True)
    (half / "rank-0").write_bytes(b"half")
    (half / "rank-1").write_bytes(b"half")
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [1]
    assert newest_intact(folder) == checkpoint_at(folder, 1)
    with pytest.raises(CheckpointError, match=r"step 2 has no complete checkpoint in .*; the steps are 1$"):
        checkpoint_at(folder, 2)
    save(folder, 2)
    assert sorted(path.name for path in half.iterdir()) == [MANIFEST, "rank-0", "state.json"]


def test_what_unfinished_saves_left_of_other_steps_is_cleared_by_the_next_save(folder: Location) -> None:
    save(folder, 1)
    half = file_of(folder, 2).parent
    half.mkdir()
    (half / ".rank-0.partial").write_bytes(b"half")
    save(folder, 3)
    assert not half.exists()
    assert steps_on_disk(folder) == [1, 3]


DAMAGE = {
    "has other content than was written": flip,
    r"has 11 bytes where the manifest says 12": truncate,
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("told", list(DAMAGE))
def test_damage_is_named_and_the_checkpoint_before_is_used(folder: Location, told: str, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, 1, 2)
    damaged = file_of(folder, 2)
    DAMAGE[told](damaged)
    with pytest.raises(CheckpointError, match=told) as refused:
        checkpoint_at(folder, 2)
    assert str(damaged) in str(refused.value)
    newest = newest_intact(folder)
    assert newest is not None
    assert newest.step == 1
    assert str(damaged) in caplog.text


def test_when_all_are_damaged_all_are_named(folder: Location) -> None:
    save(folder, 1, 2)
    for step in (1, 2):
        flip(file_of(folder, step))
    with pytest.raises(CheckpointError) as refused:
        newest_intact(folder)
    assert [problem.subject for problem in refused.value.problems] == [f"checkpoint file {file_of(folder, step)}" for step in (2, 1)]


def test_a_manifest_that_cannot_be_read_is_left_alone(folder: Location, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, 1, 2)
    file_of(folder, 2, MANIFEST).write_text('{"format": 99}')
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [1]
    assert "step-00000002" in caplog.text
    assert file_of(folder, 2).exists()


def test_an_empty_run_has_no_checkpoint(folder: Location) -> None:
    assert newest_intact(folder) is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        checkpoint_at(folder, None)


def test_a_write_that_fails_loses_nothing_that_was_complete(folder: Location) -> None:
    save(folder, 1, 2, keep_last=1)

    with pytest.raises(StorageError, match=r"could not be written by rank 0: .*No space left on device.*; free space"):
        saved(store_of(folder, keep_last=1), progress(3), writer(OSError(errno.ENOSPC, "No space left on device")))
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [2]
    checkpoint_at(folder, 2).verify()
    save(folder, 3, keep_last=1)
    assert steps_on_disk(folder) == [3]


def test_storage_that_is_no_file_tree(tmp_path: Path) -> None:
    remote = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    folder = Location(remote, "run/checkpoints", "mock://bucket/run/checkpoints")
    store = store_of(folder, keep_last=1)
    saved(store, progress(1), writer())
    checkpoint = saved(store, progress(2), writer(b"far away"))
    assert [found.step for found in complete_checkpoints(folder)] == [2]
    checkpoint.verify()
    with checkpoint.opened() as local:
        assert sorted(path.name for path in local.iterdir()) == ["rank-0", "state.json"]
        assert (local / "rank-0").read_bytes() == b"far away"
    assert not local.exists()
    flip(tmp_path / "run/checkpoints/step-00000002/rank-0")
    with pytest.raises(CheckpointError, match="mock://bucket/run/checkpoints/step-00000002/rank-0 has other content"):
        checkpoint.verify()


def test_a_run_that_went_back_keeps_what_it_saves_then(folder: Location) -> None:
    save(folder, 1, 2, 3, 4, 5)
    save(folder, 3, keep_last=2)
    assert steps_on_disk(folder) == [2, 3]


def test_only_a_checkpoint_that_was_validated_itself_is_among_the_best(folder: Location) -> None:
    store = store_of(folder, keep_last=1, keep_best=1)
    validated = progress(10, 1.0)
    saved(store, validated, writer())
    saved(store, validated.model_copy(update={"step": 15}), writer())
    saved(store, progress(20, 3.0), writer())
    assert steps_on_disk(folder) == [10, 20]


class Slow:
    """A snapshot whose file takes until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    @property
    def size_bytes(self) -> int:
        return 7

    def files(self) -> dict[str, Callable[[], Iterator[memoryview]]]:
        return {"rank-0": self._pieces, "state.json": lambda: iter([memoryview(b"{}")])}

    def _pieces(self) -> Iterator[memoryview]:
        yield memoryview(b"wei")
        assert self.let_go.wait(30)
        yield memoryview(b"ghts")


def test_whoever_saves_goes_on_while_it_is_written(folder: Location) -> None:
    store, slow = store_of(folder), Slow()
    store.begin(progress(1), slow)
    assert store.is_busy
    assert store.collect() is None
    assert complete_checkpoints(folder) == [], "it is complete only when all of it is written"
    slow.let_go.set()
    ended = store.finish(lambda: None)
    assert ended is not None
    assert (ended.checkpoint.step, store.is_busy, store.collect()) == (1, False, None)
    assert file_of(folder, 1).read_bytes() == b"weights"


def test_a_failure_is_told_when_the_save_is_collected(folder: Location) -> None:
    store = store_of(folder)
    store.begin(progress(1), writer(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(StorageError, match="Read-only file system"):
        store.finish(lambda: None)
    assert not (folder / "step-00000001").exists(), "what could not be completed does not fill the disk"
    saved(store, progress(2), writer())
    assert steps_on_disk(folder) == [2]


def test_who_no_longer_owns_the_run_changes_nothing(folder: Location) -> None:
    def taken_over() -> None:
        raise CheckpointError(Problem("run r", "was taken over", "watch the later one"))

    before = saved(store_of(folder), progress(4), writer(b"of the new owner"))
    late = CheckpointStore(folder, keep_last=1, keep_best=0, check_owner=taken_over)
    for step in (4, 5):
        with pytest.raises(CheckpointError, match="was taken over"):
            saved(late, progress(step), writer(b"of the old one"))
    assert complete_checkpoints(folder) == [before]
    before.verify()


def test_what_somebody_reads_is_not_deleted(folder: Location) -> None:
    save(folder, 1)
    (first,) = complete_checkpoints(folder)
    with first.opened() as files:
        save(folder, 2, 3, keep_last=1)
        assert steps_on_disk(folder) == [1, 3]
        assert (files / "rank-0").read_bytes() == b"weights of 1"
    save(folder, 4, keep_last=1)
    assert steps_on_disk(folder) == [4]


def test_a_reader_that_comes_while_it_is_deleted_keeps_it(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease appears after retention has looked for one, and before the files go."""
    save(folder, 1)
    looks = iter([set(), set(), {1}])
    monkeypatch.setattr(retention, "leased_steps", lambda _: next(looks))
    save(folder, 2, keep_last=1)
    assert steps_on_disk(folder) == [1, 2]
    checkpoint_at(folder, 1).verify()


def test_a_lease_of_a_reader_that_died_expires(folder: Location) -> None:
    save(folder, 1)
    leases = folder / "leases"
    (leases / "00000001-dead.json").write_text(json.dumps({"renewed_at": time.time() - 301}))
    (leases / "00000001-other.json").write_text("{")
    save(folder, 2, keep_last=1)
    assert steps_on_disk(folder) == [2]


def test_what_was_deleted_meanwhile_is_not_opened(folder: Location) -> None:
    save(folder, 1)
    (first,) = complete_checkpoints(folder)
    save(folder, 2, keep_last=1)
    with pytest.raises(CheckpointError, match="was deleted by the run"), first.opened():
        pass
