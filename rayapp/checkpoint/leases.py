"""Marks checkpoints that somebody reads, so that a run which goes on meanwhile does not delete them."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rayapp.errors import StorageError
from rayapp.storage import Location

logger = logging.getLogger(__name__)

LEASES = "leases"
RENEW_S = 60.0
EXPIRE_S = 300.0
"""A lease that was not renewed for so long is left over from a reader that died. Clocks may differ by less than that."""


@contextmanager
def leased(folder: Location, step: int) -> Iterator[None]:
    """Keep the checkpoint of a step from being deleted inside the block.

    Where the storage cannot be written the block runs without: a reader need not be allowed to write.

    Args:
        folder: the run's checkpoints.
        step: of the checkpoint.
    """
    lease = folder / LEASES / f"{step:08d}-{secrets.token_hex(8)}.json"
    try:
        (folder / LEASES).make_dirs()
        _renew(lease)
    except StorageError as error:
        logger.info("the checkpoint of step %d is read without a lease: %s", step, error)
        yield
        return
    done = threading.Event()
    renewing = threading.Thread(target=_keep, args=(lease, done), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        _give_up(lease)


def leased_steps(folder: Location) -> set[int]:
    """The steps whose checkpoints somebody reads now."""
    steps = set()
    for lease in (folder / LEASES).children():
        step, _, _ = lease.name.partition("-")
        if step.isdigit() and _is_alive(lease):
            steps.add(int(step))
    return steps


def _is_alive(lease: Location) -> bool:
    try:
        renewed_at = float(json.loads(lease.read_bytes())["renewed_at"])
    except (FileNotFoundError, ValueError, KeyError):  # given up meanwhile, or of another version
        return False
    if time.time() - renewed_at < EXPIRE_S:
        return True
    _give_up(lease)
    return False


def _renew(lease: Location) -> None:
    lease.write_text(json.dumps({"renewed_at": time.time()}))


def _keep(lease: Location, done: threading.Event) -> None:
    while not done.wait(RENEW_S):
        try:
            _renew(lease)
        except StorageError as error:
            logger.warning("the lease %s cannot be renewed: %s", lease, error)


def _give_up(lease: Location) -> None:
    try:
        lease.delete()
    except StorageError as error:
        logger.warning("the lease %s cannot be removed and expires by itself: %s", lease, error)
