"""Runs rayapp as a user does: in a process of its own, in an environment of which nothing is left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef" * 4
TRACE_VARIABLE = "RAYAPP_TEST_TRACE"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CommandLine:
    """Runs commands from the repository's root.

    Attributes:
        environment: of every command; it holds a trace that whatever the commands start inherits.
    """

    environment: dict[str, str]

    @classmethod
    def in_folder(cls, home: Path) -> CommandLine:
        """A command line without a Ray. ``home`` takes what Ray keeps; its path must be short, for sockets lie in it."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GLOO_", "NCCL_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        own = {"HOME": str(home), "PATH": path, "RAY_TMPDIR": str(home), "HF_HUB_OFFLINE": "1", TRACE_VARIABLE: uuid.uuid4().hex}
        return cls({**kept, **own})

    def rayapp(self, *arguments: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "rayapp", *arguments, timeout_s=timeout_s)

    def run(self, *command: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=self.environment, timeout=timeout_s, check=False)

    def document(self, *arguments: str) -> dict[str, Any]:
        """The JSON document of a verb that succeeds; it must be all that is on stdout."""
        done = self.rayapp(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def processes(self) -> list[psutil.Process]:
        """Everything that the commands have started, directly or not, and that still runs."""
        return [process for process in psutil.process_iter() if self._traced(process)]

    def _traced(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(TRACE_VARIABLE) == self.environment[TRACE_VARIABLE])
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            return False


@dataclass(frozen=True)
class Head:
    """A cluster of one node that asks for a token.

    Attributes:
        address: of Ray, for drivers.
        dashboard_url: for submitted jobs.
        commands: runs commands on this cluster, with its token.
    """

    address: str
    dashboard_url: str
    commands: CommandLine


@contextmanager
def ray_head(home: Path, *, num_cpus: int) -> Iterator[Head]:
    """A head that ``ray start --head`` starts, on free ports; it and all that it started ends with the block."""
    commands = CommandLine.in_folder(home)
    token_file = home / "token"
    token_file.write_text(TOKEN)
    commands.environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_file))
    ports = free_ports(6)
    address, dashboard = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--temp-dir={home}",
            "--node-ip-address=127.0.0.1", f"--port={ports[0]}", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}",
            f"--dashboard-agent-listen-port={ports[2]}", f"--dashboard-agent-grpc-port={ports[3]}",
            f"--metrics-export-port={ports[4]}", f"--ray-client-server-port={ports[5]}", f"--object-store-memory={2**28}",
            "--disable-usage-stats",
        ],
        env=commands.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(process, address, dashboard)
        commands.environment["RAY_ADDRESS"] = address
        yield Head(address, f"http://{dashboard}", commands)
        assert process.poll() is None, "the head ended before its time"
    finally:
        process.terminate()
        _wait_for_end(process)
        for left in commands.processes():
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


@contextmanager
def joined_node(head: Head, *, num_cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """A node of its own on this machine, joined to the head; it ends with the block, unless the test has ended it."""
    ports = free_ports(3)
    known = _num_nodes(head)
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "ray"), "start", f"--address={head.address}", "--block", f"--num-cpus={num_cpus}",
            "--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={ports[0]}", f"--dashboard-agent-grpc-port={ports[1]}",
            f"--metrics-export-port={ports[2]}", f"--object-store-memory={2**27}", "--disable-usage-stats",
        ],
        env=head.commands.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while _num_nodes(head) <= known:
            assert process.poll() is None, f"ray start ended with {process.returncode}"
            assert time.monotonic() < deadline, "the node did not join"
        yield process
    finally:
        process.terminate()
        _wait_for_end(process)


def _num_nodes(head: Head) -> int:
    script = "import ray, logging; ray.init(logging_level=logging.ERROR); print(sum(node['Alive'] for node in ray.nodes()))"
    return int(head.commands.run("python", "-c", script).stdout.splitlines()[-1])


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Ray ends its parts one after the other, some of them slowly; what is still there then is not waited for."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_TIMEOUT_S)


def _wait_for(process: subprocess.Popen[bytes], *addresses: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    for address in addresses:
        host, _, port = address.partition(":")
        while not _answers(host, int(port)):
            assert process.poll() is None, f"ray start ended with {process.returncode}"
            assert time.monotonic() < deadline, f"nothing listens on {address}"
            time.sleep(0.2)


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nothing listens, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
