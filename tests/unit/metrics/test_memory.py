from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rayapp.metrics.memory import MemoryMeter

MIB = 2**20


def status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="compares with Linux's /proc")


@needs_proc
def test_resident_memory_is_what_the_kernel_says():
    sample = MemoryMeter("cpu").sample()
    assert abs(sample.used_bytes - status_bytes("VmRSS")) < 32 * MIB
    assert sample.reserved_bytes is None
    assert sample.peak_bytes >= sample.used_bytes


def test_the_peak_stays_and_the_current_falls():
    """In a process of its own, whose peak no other test has raised."""
    code = """
import mmap
from rayapp.metrics.memory import MemoryMeter
meter = MemoryMeter("cpu")
before = meter.sample()
size = before.peak_bytes - before.used_bytes + 256 * 2**20
block = mmap.mmap(-1, size)
for offset in range(0, size, mmap.PAGESIZE):
    block[offset] = 1
full = meter.sample()
block.close()
after = meter.sample()
assert full.used_bytes - before.used_bytes >= size - 2**20, (before, full)
assert full.used_bytes - after.used_bytes >= size - 2**20, (full, after)
assert after.peak_bytes >= full.used_bytes - 2**20, (full, after)
assert meter.average_bytes == (before.used_bytes + full.used_bytes + after.used_bytes) // 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_there_is_no_average_before_the_first_sample():
    assert MemoryMeter("cpu").average_bytes is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory_follows_the_tensors():
    meter = MemoryMeter("cuda")
    before = meter.sample()
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    full = meter.sample()
    del block
    after = meter.sample()
    assert full.used_bytes - before.used_bytes == 256 * MIB
    assert after.used_bytes == before.used_bytes
    assert after.peak_bytes >= full.used_bytes
    assert after.reserved_bytes is not None
    assert after.reserved_bytes >= 256 * MIB
