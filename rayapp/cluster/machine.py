"""This machine's CPUs, memory and GPUs, as a Ray started here would count them. Needs neither Ray nor torch."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayapp.errors import PlacementError, Problem

CGROUP_ROOT = Path("/sys/fs/cgroup")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_SMI_TIMEOUT_S = 30
NVIDIA_SMI_QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
MODEL_TOKEN = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        accelerator_type: Ray's name of it, such as ``H100``.
        memory_bytes: its memory.
    """

    accelerator_type: str
    memory_bytes: int


def detect_num_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """The machine's CPUs, or what the container may use of them, rounded down.

    Source: ``ray._private.utils.get_num_cpus``, which looks at no affinity mask.
    """
    machine = os.cpu_count() or 1
    if os.environ.get("RAY_USE_MULTIPROCESSING_CPU_COUNT"):
        return machine
    quota = _cgroup_cpu_quota(cgroup_root)
    return machine if quota is None else max(1, min(machine, int(quota)))


def _cgroup_cpu_quota(root: Path) -> float | None:
    """CPUs that the control group grants; None without a limit."""
    version_2, version_1 = root / "cpu.max", root / "cpu"
    if version_2.exists():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    if (version_1 / "cpu.cfs_quota_us").exists():
        quota_us = float((version_1 / "cpu.cfs_quota_us").read_text())
        return None if quota_us < 0 else quota_us / float((version_1 / "cpu.cfs_period_us").read_text())
    return None


def detect_memory_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """The machine's memory, or the container's limit where that is lower."""
    machine = int(psutil.virtual_memory().total)
    for limit in (cgroup_root / "memory.max", cgroup_root / "memory" / "memory.limit_in_bytes"):
        if limit.exists():
            text = limit.read_text().strip()
            return machine if text == "max" else min(machine, int(text))
    return machine


def detect_free_memory_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Memory that new allocations can have: the machine's, or what the container's limit leaves where that is less."""
    free = int(psutil.virtual_memory().available)
    current, statistics = cgroup_root / "memory.current", cgroup_root / "memory.stat"
    if not (current.exists() and statistics.exists()):
        return free
    figures = dict(line.split() for line in statistics.read_text().splitlines())
    in_use = int(current.read_text()) - int(figures.get("inactive_file", 0))  # cached files make room when it is needed
    return min(free, detect_memory_bytes(cgroup_root) - in_use)


def detect_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible; none on a machine without their driver.

    Raises:
        PlacementError: there is a driver, but it does not answer.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        if NVIDIA_DRIVER.exists():
            raise PlacementError(Problem("nvidia-smi", "is not on the PATH, though an NVIDIA driver is loaded", "add its folder to PATH"))
        return []
    try:
        listed = subprocess.run([command, *NVIDIA_SMI_QUERY], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlacementError(Problem("nvidia-smi", f"did not answer in {NVIDIA_SMI_TIMEOUT_S} s", "look after the GPU driver")) from error
    if listed.returncode != 0:
        if not NVIDIA_DRIVER.exists():  # an image built for GPUs, on a machine without one
            return []
        raise PlacementError(Problem("nvidia-smi", f"failed: {listed.stdout.strip()}", "look after the GPU driver"))
    return visible(parse_gpus(listed.stdout), os.environ)


def parse_gpus(listed: str) -> list[Gpu]:
    """What nvidia-smi prints: a line of name and MiB for each GPU."""
    rows = csv.reader(listed.splitlines(), skipinitialspace=True)
    return [Gpu(accelerator_type_of(name), int(memory_mib) * 2**20) for name, memory_mib in rows]


def visible(gpus: list[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """The first as many as ``CUDA_VISIBLE_DEVICES`` names. Ray counts them so, and takes one type for a node."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return gpus
    if devices in ("", "NoDevFiles", "-1"):
        return []
    return gpus[: len(devices.split(","))]


def accelerator_type_of(name: str) -> str:
    """Ray's name of a GPU: ``NVIDIA A100-SXM4-80GB`` is ``A100``, ``NVIDIA GeForce RTX 5090`` is ``GeForce-RTX-5090``.

    Source: ``ray._private.accelerators.nvidia_gpu.NvidiaGPUAcceleratorManager``
    """
    match = MODEL_TOKEN.match(name)
    if match and len(match.group(1)) > 1:
        return match.group(1).replace(" ", "-")
    return re.sub(r"^NVIDIA\s+", "", name).strip().replace(" ", "-")
