"""Who trains a run: one process at a time, also where several are started with one run id at the same moment.

There are no locks, so it works on local folders, network mounts and object stores alike; all it needs is that a list shows every
file that was written before. Whoever wants the run writes a claim, waits, and lists the claims. It gives way to one that is
held and to one that is older; otherwise it marks its own as held and lists again, now giving way to older ones only. Of two,
the younger passes that second look only if the older claim was written after it, and then the older one finds a held claim at
its first. The wait is for neither to give way to the other when both start at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rayapp.errors import CheckpointError, Problem, StorageError
from rayapp.storage import Location

logger = logging.getLogger(__name__)

CLAIMS = "claims"
SETTLE_S = 0.5
RENEW_S = 10.0
DEAD_AFTER_S = 60.0
FRESH_S = 30.0
"""Taking a run must not last longer: the claim would look dead to others before it is renewed for the first time."""
START_TIME_TOLERANCE_S = 2.0
"""Of a process; it is the boot's time, which moves with the clock, plus ticks."""


class Claim(BaseModel):
    """`claims/ID.json`: a process that trains the run, or is about to."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str
    """The file's name."""
    host: str
    """The machine's name."""
    process_table: str | None
    """Boot and PID namespace in which `pid` means something; None where the system does not tell."""
    pid: int
    """The process."""
    process_started_at: float
    """When it was started: Unix time in seconds. Another process may get the same `pid`."""
    created_at: float
    """When the claim was made: Unix time in seconds."""
    renewed_at: float
    """The last sign of life: Unix time in seconds."""
    held: bool = False
    """True once the process has the run."""

    def goes_before(self, other: Claim) -> bool:
        """True for the older of two."""
        return (self.created_at, self.id) < (other.created_at, other.id)

    def is_dead(self) -> bool:
        """True if the process gave no sign of life for a minute, or ran on this machine and is gone.

        The clocks of two hosts that start one run must agree to within half a minute.
        """
        if time.time() - self.renewed_at > DEAD_AFTER_S:
            return True
        if (self.host, self.process_table) != (socket.gethostname(), _process_table()):
            return False
        started_at = _started_at(self.pid)
        return started_at is None or abs(started_at - self.process_started_at) > START_TIME_TOLERANCE_S


def _process_table() -> str | None:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {namespace.readlink()}" if boot.exists() and namespace.is_symlink() else None


def _started_at(pid: int) -> float | None:
    """When a process of this machine was started, in Unix time; None where there is none, or only its exit status is left."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def claimed(run_dir: Location) -> Iterator[Claim]:
    """Hold a run while the block runs. No other process of any host can hold it meanwhile.

    Args:
        run_dir: the run's folder, which need not exist.

    Raises:
        CheckpointError: another process has the run, or has started to claim it before.
        StorageError: the storage refused.
    """
    now = time.time()
    own = Claim(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        process_table=_process_table(),
        pid=os.getpid(),
        process_started_at=psutil.Process().create_time(),
        created_at=now,
        renewed_at=now,
    )
    try:
        held = _take(run_dir, own)
        with _renewed(run_dir, held):
            yield held
    finally:
        _remove(run_dir, own)


def _take(run_dir: Location, own: Claim) -> Claim:
    """The claim once it is held; tried again where the storage was so slow that others may have taken it for dead."""
    while True:
        began = time.monotonic()
        held = _take_unless_slow(run_dir, own)
        took_s = time.monotonic() - began
        if took_s < FRESH_S:
            return held
        logger.warning("the storage took %.0f s to tell who trains run %s; it is asked again", took_s, run_dir)


def _take_unless_slow(run_dir: Location, own: Claim) -> Claim:
    _write(run_dir, _renewed_now(own))
    time.sleep(SETTLE_S)
    _give_way(run_dir, [other for other in _others(run_dir, own) if other.held or other.goes_before(own)])
    held = _renewed_now(own.model_copy(update={"held": True}))
    _write(run_dir, held)
    others = _others(run_dir, own)
    _give_way(run_dir, [other for other in others if other.goes_before(own)])
    for other in others:
        if other.is_dead():
            _remove(run_dir, other)
    return held


def _give_way(run_dir: Location, others: list[Claim]) -> None:
    """Refuse to go on where a process of one of the claims lives.

    Raises:
        CheckpointError: with its whereabouts.
    """
    for other in others:
        if not other.is_dead():
            raise _refusal(run_dir, other)


def _refusal(run_dir: Location, other: Claim) -> CheckpointError:
    since = datetime.fromtimestamp(other.created_at, UTC)
    return CheckpointError(
        Problem(
            f"run {run_dir}",
            f"is being trained by process {other.pid} on host {other.host} since {since:%Y-%m-%d %H:%M:%S} UTC; "
            f"its last sign of life came {max(0.0, time.time() - other.renewed_at):.0f} s ago",
            "wait for it or stop it, or start another run with another --run-id",
        )
    )


def _file(run_dir: Location, claim: Claim) -> Location:
    return run_dir / CLAIMS / f"{claim.id}.json"


def _renewed_now(claim: Claim) -> Claim:
    return claim.model_copy(update={"renewed_at": time.time()})


def _write(run_dir: Location, claim: Claim) -> None:
    _file(run_dir, claim).write_text(claim.model_dump_json(indent=1))


def _others(run_dir: Location, own: Claim) -> list[Claim]:
    """Every claim on the run but one's own.

    Raises:
        CheckpointError: a claim cannot be read, and nobody knows whose it is.
    """
    found = []
    for file in (run_dir / CLAIMS).children():
        if not file.name.endswith(".json") or file == _file(run_dir, own):
            continue
        try:
            found.append(Claim.model_validate_json(file.read_bytes()))
        except FileNotFoundError:
            continue  # given up meanwhile
        except ValidationError as error:
            raise CheckpointError(
                Problem(f"claim {file}", f"cannot be read: {error.errors()[0]['msg']}", "remove it if no process trains the run")
            ) from error
    return found


def _remove(run_dir: Location, claim: Claim) -> None:
    """Remove a claim. One that stays is dead a minute later."""
    file = dataclasses.replace(_file(run_dir, claim), retry_s=RENEW_S)
    try:
        file.delete()
    except StorageError as error:
        logger.warning("claim %s was not removed: %s", file, error)


@contextlib.contextmanager
def _renewed(run_dir: Location, held: Claim) -> Iterator[None]:
    """Give signs of life while the block runs."""
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(run_dir, held, ended), name="claim-renewal", daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()  # a sign of life that comes late would bring a removed claim back


def _renew(run_dir: Location, held: Claim, ended: threading.Event) -> None:
    """Training does not end with a storage that fails for a while: that may come back, and checkpoints are tried again as well."""
    impatient = dataclasses.replace(run_dir, retry_s=RENEW_S)
    renewed_at = held.renewed_at
    while not ended.wait(RENEW_S):
        alive = _renewed_now(held)
        try:
            _write(impatient, alive)
            renewed_at = alive.renewed_at
        except StorageError as error:
            silent_s = time.time() - renewed_at
            if silent_s > DEAD_AFTER_S:
                logger.warning(
                    "the claim on run %s was not renewed for %.0f s, and another start may take it: %s", run_dir, silent_s, error
                )
