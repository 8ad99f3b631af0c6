"""A process's connection to a Ray cluster, and the local Ray that stands in where there is none."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rayapp.cluster.machine import detect_memory_bytes
from rayapp.errors import PlacementError, Problem

ADDRESS_VARIABLE = "RAY_ADDRESS"
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's job manager sets it for the driver of a submitted job. Source: ray/dashboard/modules/job/job_supervisor.py"""

PROBE_TIMEOUT_S = 10.0
MIN_OBJECT_STORE_BYTES = 256 * 2**20
MAX_OBJECT_STORE_BYTES = 4 * 2**30
OBJECT_STORE_SHARE = 0.2

TOKEN_REMEDY = "put the cluster's token into ~/.ray/auth_token or RAY_AUTH_TOKEN and set RAY_AUTH_MODE=token"
SUBMIT_REMEDY = "use host:port of the head node from a node of the cluster, or `ray job submit` from elsewhere"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """A connection to a cluster.

    Attributes:
        address: the head's ``host:port``.
        dashboard_url: where the dashboard answers; None without one.
        started: True if this process started the cluster, and ends it.
    """

    address: str
    dashboard_url: str | None
    started: bool


def in_submitted_job() -> bool:
    """True in the driver of ``ray job submit``, before and after it connects."""
    config = json.loads(os.environ.get(JOB_CONFIG_VARIABLE) or "{}")
    return "job_submission_id" in config.get("metadata", {})


@contextmanager
def connected(address: str | None = None) -> Iterator[Connection]:
    """Connect to a cluster and disconnect at the end.

    Args:
        address: the head's ``host:port``; ``auto`` for a cluster that runs on this machine; ``local`` for one of its own. None:
            ``RAY_ADDRESS``, or the cluster that ``ray start`` started here, or one of its own, which ends with this block.

    A connection that the process already has is used and left open. A Ray of its own demands a token (Ray makes it in
    ``~/.ray/auth_token``), and its dashboard listens on 127.0.0.1 alone.

    Raises:
        PlacementError: the cluster does not answer, refuses the token, or runs another version.
    """
    import ray

    if ray.is_initialized():
        yield _describe(started=False)
        return
    found = _resolve(address)
    if found is not None:
        _probe(found)
    try:
        _initialise(address, start=found is None)
        yield _describe(started=found is None)
    finally:
        ray.shutdown()


def finds_cluster(address: str | None = None) -> bool:
    """True if :func:`connected` would use a cluster that runs already.

    Raises:
        PlacementError: the address is not one.
    """
    import ray

    return ray.is_initialized() or _resolve(address) is not None


def _resolve(address: str | None) -> str | None:
    """The ``host:port`` of a cluster that should be running; None where one is to be started.

    Ray's own search is asked, because its order is what ``ray start`` and job submission rely on.
    """
    from ray._private.services import canonicalize_bootstrap_address

    given = os.environ.get(ADDRESS_VARIABLE) if address in (None, "auto") else address
    if given and "://" in given:
        raise PlacementError(Problem(f"address={given}", "is not one that training can be driven through", SUBMIT_REMEDY))
    try:
        found = canonicalize_bootstrap_address(address)
    except ConnectionError as error:
        raise PlacementError(
            Problem(f"address={address}", "finds no Ray on this machine", "start one with `ray start --head`, or leave the address out")
        ) from error
    except ValueError as error:
        raise PlacementError(Problem(f"address={given}", "is not host:port", SUBMIT_REMEDY)) from error
    return None if found is None else str(found)


def _probe(address: str) -> None:
    """Fail in seconds where nothing listens. Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise PlacementError(
            Problem(
                f"address={address}",
                f"does not answer: {error}",
                "check that the cluster runs, or use --address local for a Ray of its own",
            )
        ) from error


def _initialise(address: str | None, *, start: bool) -> None:
    import ray
    from ray.exceptions import AuthenticationError

    options: dict[str, Any] = {"address": "local" if start else address, "logging_level": logging.WARNING}
    if start:
        # Without the dashboard's processes, stopped Tune trials keep their placement groups for ever.
        options |= {"include_dashboard": True, "dashboard_host": "127.0.0.1", "object_store_memory": _object_store_bytes()}
    try:
        ray.init(**options)
    except AuthenticationError as error:
        raise PlacementError(Problem("the cluster's token", f"is missing or wrong: {error.message}", TOKEN_REMEDY)) from error
    except (ConnectionError, RuntimeError) as error:
        raise _refused(address, error) from error


def _refused(address: str | None, error: Exception) -> PlacementError:
    reason = " ".join(str(error.__cause__ or error).split())
    subject = f"address={address or os.environ.get(ADDRESS_VARIABLE) or 'local'}"
    if "token" in reason.lower() or "unauthenticated" in reason.lower():
        return PlacementError(Problem(subject, f"refuses the token: {reason}", TOKEN_REMEDY))
    if "version mismatch" in reason.lower():
        return PlacementError(Problem(subject, f"runs another version: {reason}", "install the cluster's versions of Ray and Python here"))
    return PlacementError(Problem(subject, f"cannot be used: {reason}", SUBMIT_REMEDY))


def _object_store_bytes() -> int:
    """A fifth of the memory and at most 4 GiB: blocks of Ray Data pass through it, the rest belongs to the workers."""
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else MAX_OBJECT_STORE_BYTES
    wanted = min(OBJECT_STORE_SHARE * detect_memory_bytes(), 0.9 * shared, MAX_OBJECT_STORE_BYTES)
    return max(int(wanted), MIN_OBJECT_STORE_BYTES)


def _describe(*, started: bool) -> Connection:
    import ray
    from ray._private.worker import get_dashboard_url

    url = get_dashboard_url()
    return Connection(ray.get_runtime_context().gcs_address, f"http://{url}" if url else None, started)
