"""Harm to a training run from the outside, at a step of choice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from support.command_line import ROOT, CommandLine

POLL_S = 0.01
TIMEOUT_S = 240.0


@contextmanager
def training(commands: CommandLine, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`rayapp train` in the background; it is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rayapp", "train", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=commands.environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def records(run_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The whole lines of a kind in a run's metrics."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until the run has made a step."""
    deadline = time.monotonic() + TIMEOUT_S
    while not any(record["step"] >= step for record in records(run_dir)):
        if process.poll() is not None:
            raise AssertionError(f"it ended before step {step}: {process.communicate()[1][-3000:]}")
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(POLL_S)


def workers(commands: CommandLine) -> list[psutil.Process]:
    """The training processes, by age."""
    found = [process for process in commands.processes() if _is_worker(process)]
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("RayTrainWorker" in part for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    os.kill(process.pid, number)
