"""Claims of one process on a run, and how it judges those of others."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import fs
from support.flaky_storage import FlakyHandler

from rayapp.checkpoint import claims
from rayapp.checkpoint.claims import Claim, claimed
from rayapp.errors import CheckpointError, StorageError
from rayapp.storage import Location, open_location


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.02)


@pytest.fixture
def run_dir(tmp_path: Path) -> Location:
    return open_location(str(tmp_path / "family" / "run"))


def files_of(run_dir: Location) -> list[Path]:
    return sorted((run_dir.local_path / "claims").iterdir())


def put(run_dir: Location, **changes: Any) -> dict[str, Any]:
    """A claim of this test's parent process as it lies in the run's folder: not held, made a second ago and alive."""
    parent = psutil.Process(os.getppid())
    namespace = os.readlink("/proc/self/ns/pid")
    claim = {
        "id": "0123",
        "host": socket.gethostname(),
        "process_table": f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {namespace}",
        "pid": parent.pid,
        "process_started_at": parent.create_time(),
        "created_at": time.time() - 1,
        "renewed_at": time.time() - 1,
        "held": False,
    } | changes
    (run_dir / "claims" / f"{claim['id']}.json").write_text(json.dumps(claim))
    return claim


def test_a_claim_lies_there_while_it_is_held(run_dir: Location) -> None:
    before = time.time()
    with claimed(run_dir) as claim:
        (file,) = files_of(run_dir)
        written = json.loads(file.read_text())
        assert (file.name, claim.held) == (f"{claim.id}.json", True)
        assert {name: written[name] for name in ("id", "held", "pid", "host")} == {
            "id": claim.id,
            "held": True,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        assert before <= written["created_at"] <= written["renewed_at"] <= time.time()
        assert written["process_started_at"] == pytest.approx(psutil.Process().create_time())
    assert files_of(run_dir) == []


def test_who_has_the_run_is_named(run_dir: Location) -> None:
    put(run_dir, held=True, host="node-7", pid=123, created_at=1_790_000_000.0, renewed_at=time.time() - 4)
    with pytest.raises(CheckpointError) as refused, claimed(run_dir):
        pytest.fail("the run is another's")
    assert str(refused.value) == (
        f"run {run_dir} is being trained by process 123 on host node-7 since 2026-09-21 14:13:20 UTC; "
        "its last sign of life came 4 s ago; wait for it or stop it, or start another run with another --run-id"
    )
    assert [file.name for file in files_of(run_dir)] == ["0123.json"]


def test_a_process_does_not_claim_a_run_twice(run_dir: Location) -> None:
    with claimed(run_dir):
        with pytest.raises(CheckpointError, match=f"by process {os.getpid()} on"), claimed(run_dir):
            pytest.fail("it is held already")
        assert len(files_of(run_dir)) == 1
    with claimed(run_dir):
        pass


GOES_FIRST: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "older": (dict, True),
    "younger": (lambda: {"created_at": time.time() + 3600}, False),
    "younger and held": (lambda: {"created_at": time.time() + 3600, "held": True}, True),
    "of another host": (lambda: {"host": "node-7", "pid": 1}, True),
    "of another boot, where the pid means nothing": (lambda: {"process_table": "other", "process_started_at": 5.0}, True),
    "silent for less than a minute": (lambda: {"renewed_at": time.time() - 45}, True),
}


@pytest.mark.parametrize("case", GOES_FIRST)
def test_a_claim_gives_way_to_older_and_to_held_ones(case: str, run_dir: Location) -> None:
    changes, goes_first = GOES_FIRST[case]
    put(run_dir, **changes())
    if goes_first:
        with pytest.raises(CheckpointError, match="is being trained by"), claimed(run_dir):
            pytest.fail("the other goes first")
    else:
        with claimed(run_dir):
            assert len(files_of(run_dir)) == 2, "the claim of a process that lives is left alone"
    assert [file.name for file in files_of(run_dir)] == ["0123.json"]


def test_of_two_made_at_the_same_moment_one_goes_first(run_dir: Location) -> None:
    first, second = (Claim.model_validate(put(run_dir, id=name, created_at=5.0)) for name in ("a", "b"))
    assert [first.goes_before(second), second.goes_before(first)] == [True, False]


def ended_process() -> dict[str, Any]:
    process = psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    changes = {"pid": process.pid, "process_started_at": process.create_time()}
    process.communicate(b"\n")
    return changes


DEAD: dict[str, Callable[[], dict[str, Any]]] = {
    "silent for more than a minute": lambda: {"host": "node-7", "renewed_at": time.time() - 61},
    "the process has ended": ended_process,
    "the pid belongs to another process by now": lambda: {"process_started_at": psutil.Process(os.getppid()).create_time() - 60},
}


@pytest.mark.parametrize("case", DEAD)
def test_the_claim_of_a_dead_process_is_removed(case: str, run_dir: Location) -> None:
    put(run_dir, held=True, **DEAD[case]())
    with claimed(run_dir) as claim:
        assert [file.name for file in files_of(run_dir)] == [f"{claim.id}.json"]


def test_a_process_of_which_only_the_exit_status_is_left_is_dead(run_dir: Location) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started_at = psutil.Process(process.pid).create_time()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    put(run_dir, held=True, pid=process.pid, process_started_at=started_at)
    with claimed(run_dir):
        assert len(files_of(run_dir)) == 1
    process.communicate()


def test_dead_claims_are_left_to_the_one_that_gets_the_run(run_dir: Location) -> None:
    put(run_dir, id="dead", host="node-7", renewed_at=time.time() - 61)
    put(run_dir, id="live", held=True)
    with pytest.raises(CheckpointError), claimed(run_dir):
        pytest.fail("the run is another's")
    assert [file.name for file in files_of(run_dir)] == ["dead.json", "live.json"]


class Rival:
    """Another process that writes its claim at a moment of the claiming: before its n-th list."""

    def __init__(self, root: Path, at_list: int, **changes: Any) -> None:
        (root / "run").mkdir()
        self.run_dir = Location(fs.PyFileSystem(FlakyHandler(root, self._before)), "run", "flaky://run")
        (root / "run" / "claims").mkdir()
        self._local, self._at_list, self._changes, self.lists = open_location(str(root / "run")), at_list, changes, 0

    def _before(self, access: str) -> None:
        self.lists += access == "list"
        if access == "list" and self.lists == self._at_list:
            put(self._local, **self._changes)


@pytest.mark.parametrize(
    ("at_list", "changes", "goes_first"),
    [
        (1, {}, True),
        (1, {"created_at": time.time() + 3600, "held": True}, True),
        (2, {}, True),  # it was slow; it finds a held claim at its first look, but may have had its look before
        (2, {"created_at": time.time() + 3600}, False),
        (2, {"created_at": time.time() + 3600, "held": True}, False),  # the younger one gives way at its own second look
    ],
)
def test_claims_that_appear_meanwhile(at_list: int, changes: dict[str, Any], goes_first: bool, tmp_path: Path) -> None:
    rival = Rival(tmp_path, at_list, **changes)
    if goes_first:
        with pytest.raises(CheckpointError), claimed(rival.run_dir):
            pytest.fail("the other goes first")
    else:
        with claimed(rival.run_dir):
            pass
    assert [path.name for path in (tmp_path / "run" / "claims").iterdir()] == ["0123.json"]
    assert rival.lists == (at_list if goes_first else 2), "it gives way at its first look where it can, before it holds the run"


def flaky_run(root: Path, before: Callable[[str], None]) -> Location:
    (root / "run" / "claims").mkdir(parents=True)
    return Location(fs.PyFileSystem(FlakyHandler(root, before)), "run", "flaky://run", retry_s=300)


def test_a_claim_that_is_given_up_while_it_is_looked_at_does_not_count(tmp_path: Path) -> None:
    other = tmp_path / "run" / "claims" / "0123.json"

    def before(access: str) -> None:
        if access == "open" and looked.is_set():
            other.unlink(missing_ok=True)
        if access == "list":
            looked.set()

    looked = threading.Event()
    run_dir = flaky_run(tmp_path, before)
    put(open_location(str(tmp_path / "run")), held=True)
    with claimed(run_dir):
        assert not other.exists()


def test_a_claim_that_cannot_be_read_is_not_ignored(run_dir: Location) -> None:
    (run_dir / "claims" / "x.json").write_text('{"id": "x"}')
    (run_dir / "claims" / ".y.json.0123.partial").write_text("is being written")
    with pytest.raises(CheckpointError, match=r"claim .*claims/x\.json cannot be read: Field required; remove it if no"), claimed(run_dir):
        pytest.fail("nobody knows who has the run")
    assert [file.name for file in files_of(run_dir)] == [".y.json.0123.partial", "x.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ValueError("x")], ids=repr)
def test_whatever_ends_the_block_frees_the_run(error: BaseException, run_dir: Location) -> None:
    with pytest.raises(type(error)), claimed(run_dir):
        raise error
    assert files_of(run_dir) == []


def test_an_interrupt_while_claiming_leaves_no_claim(run_dir: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        assert len(files_of(run_dir)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(claims.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt), claimed(run_dir):
        pytest.fail("it was interrupted")
    assert files_of(run_dir) == []


def test_a_storage_that_is_slow_to_answer_is_asked_again(run_dir: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first answer took 31 s the claim may have looked dead, and another process may have taken the run."""
    sleeps: list[float] = []
    later = time.monotonic() + 32

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            monkeypatch.setattr(claims.time, "monotonic", lambda: later)
            put(run_dir, created_at=time.time() + 3600)
        else:
            put(run_dir, created_at=time.time() + 3600, held=True)

    monkeypatch.setattr(claims.time, "sleep", sleep)
    with pytest.raises(CheckpointError), claimed(run_dir):
        pytest.fail("the other took it")
    assert len(sleeps) == 2


def test_signs_of_life(run_dir: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    with claimed(run_dir) as claim:
        time.sleep(0.4)
        (file,) = (file for file in files_of(run_dir) if file.suffix == ".json")  # beside one that is being written
        alive = Claim.model_validate_json(file.read_text())
    assert alive.renewed_at > claim.renewed_at + 0.2
    assert alive.model_copy(update={"renewed_at": claim.renewed_at}) == claim
    assert files_of(run_dir) == []


def test_no_late_sign_of_life_brings_the_claim_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = threading.Event()

    def before(access: str) -> None:
        if access == "open" and threading.current_thread().name == "claim-renewal":
            writes.set()
            time.sleep(0.3)

    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    with claimed(flaky_run(tmp_path, before)):
        assert writes.wait(30)
    assert list((tmp_path / "run" / "claims").iterdir()) == []
    time.sleep(0.4)
    assert list((tmp_path / "run" / "claims").iterdir()) == []


def test_a_storage_that_fails_does_not_end_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = False

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == claims.__name__]

    def before(access: str) -> None:
        if broken:
            raise OSError(5, "Input/output error")

    run_dir = flaky_run(tmp_path, before)
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    monkeypatch.setattr(claims, "DEAD_AFTER_S", 1.6)
    with caplog.at_level(logging.WARNING), claimed(run_dir):
        broken = True
        time.sleep(0.3)
        assert told() == [], "a short failure is not worth a word"
        deadline = time.monotonic() + 30
        while not told() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert told()[0].startswith("the claim on run flaky://run was not renewed for 2 s, and another start may take it: ")
        caplog.clear()
        ended = time.monotonic()
    assert [m for m in caplog.messages if "was not removed" in m], "and it ends as it would have"
    assert time.monotonic() - ended < 10, "although the storage may be tried for 300 s"


def test_a_storage_that_takes_no_claim_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"), claimed(open_location(str(tmp_path / "run"))):
        pytest.fail("there is no claim")
