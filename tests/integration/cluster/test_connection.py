"""Connecting to a Ray, starting one, and a group of two torch workers on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HEAD = """
import json, sys
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, labels={"zone": "a"})
print("ADDRESS", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

OWN = """
import json
import ray
from rayapp.cluster.connect import connected
from rayapp.cluster.inventory import local_inventory, read_inventory
with connected("local") as connection, connected() as inner:
    read, local = read_inventory(), local_inventory()
    store = ray.cluster_resources()["object_store_memory"]
ended = not ray.is_initialized()
print(json.dumps([connection.started, inner.started, inner.address == connection.address, connection.dashboard_url, ended,
                  read.num_cpus == local.num_cpus, read.num_gpus == local.num_gpus, store]))
"""

JOIN = """
import json, sys
from rayapp.cluster.connect import connected
from rayapp.cluster.inventory import read_inventory
from rayapp.errors import PlacementError
try:
    with connected(sys.argv[1] if len(sys.argv) > 1 else None) as connection:
        (node,) = read_inventory().nodes
        print(json.dumps([connection.started, connection.address, node.num_cpus, node.labels["zone"]]))
except PlacementError as error:
    print(json.dumps(str(error)))
"""

SUBMIT = """
import json, sys, time
from ray.job_submission import JobSubmissionClient
from rayapp.cluster.connect import connected, in_submitted_job
job = (
    "import json; from rayapp.cluster.connect import connected, in_submitted_job; known = in_submitted_job(); block = connected(); "
    "c = block.__enter__(); print('FOUND', json.dumps([known, in_submitted_job(), c.started, c.address])); block.__exit__(None, None, None)"
)
with connected("local") as connection:
    client = JobSubmissionClient(connection.dashboard_url)
    submitted = client.submit_job(entrypoint=f'{sys.executable} -c "{job}"')
    deadline = time.monotonic() + 100
    while not client.get_job_status(submitted).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.5)
    logs = client.get_job_logs(submitted)
    found = [line for line in logs.splitlines() if line.startswith("FOUND")]
    assert found, logs
    print(json.dumps([in_submitted_job(), connection.address, json.loads(found[0].removeprefix("FOUND"))]))
"""

GROUP = """
import json, os, sys, tempfile
import psutil
from rayapp.cluster.connect import connected
from rayapp.cluster.interface import NodeInterfaceTorchConfig

def work():
    import torch, ray.train
    import torch.distributed as dist
    rank = dist.get_rank()
    total = torch.tensor([10.0 ** rank])
    dist.all_reduce(total)
    names = [None, None]
    dist.all_gather_object(names, [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]])
    return [total.item(), dist.get_backend(), names]

with connected(sys.argv[1]) as connection:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    result = TorchTrainer(work, torch_config=NodeInterfaceTorchConfig(timeout_s=60), scaling_config=ScalingConfig(num_workers=2),
                          run_config=RunConfig(storage_path=tempfile.mkdtemp())).fit()
    ip = connection.address.rpartition(":")[0]
    expected = [name for name, entries in psutil.net_if_addrs().items() if ip in [entry.address for entry in entries]]
    print(json.dumps([result.return_value, expected]))
"""


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GLOO_", "NCCL_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "RAY_TRAIN_V2_ENABLED": "1", **extra}


def run(script: str, *arguments: str, **environment: str) -> object:
    """The JSON that a script prints, which must be all that reaches its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(**environment),
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def ray_head(**environment: str) -> Iterator[str]:
    """A Ray that another process started: its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=clean_environment(**environment),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("ADDRESS"))
        yield address
        assert process.poll() is None, "the head ended with its client"
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    with ray_head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32) as address:
        yield address


def test_a_ray_of_its_own_offers_what_the_local_inventory_says_and_ends_with_the_block() -> None:
    started, inner_started, same, dashboard, ended, cpus, gpus, store = run(OWN)  # type: ignore[misc]
    assert (started, inner_started, same, ended, cpus, gpus) == (True, False, True, True, True, True)
    assert dashboard.startswith("http://127.0.0.1:")
    assert 0 < store <= 4 * 2**30


def test_a_submitted_job_knows_itself_and_joins_its_cluster() -> None:
    here, address, job = run(SUBMIT)  # type: ignore[misc]
    assert here is False
    assert job == [True, True, False, address]


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_running_cluster_is_joined_and_left_running(head: str, by_environment: bool) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    for _ in range(2):
        found = run(JOIN, RAY_ADDRESS=head, **token) if by_environment else run(JOIN, head, **token)
        assert found == [False, head, 2.0, "a"]


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 32}], ids=["no token", "another token"])
def test_a_token_that_does_not_fit_is_named(head: str, mode: dict[str, str], tmp_path: Path) -> None:
    message = run(JOIN, head, HOME=str(tmp_path), **mode)
    assert "token" in str(message)
    assert "RAY_AUTH_TOKEN" in str(message)


def test_two_workers_reduce_over_the_interface_of_rays_address(head: str) -> None:
    (total, backend, names), expected = run(GROUP, head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32)  # type: ignore[misc]
    assert (total, backend) == (11.0, "gloo")
    assert names == [[expected[0], f"={expected[0]}"]] * 2
