"""How much memory this rank uses."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Literal

import psutil


@dataclass(frozen=True)
class MemorySample:
    """One reading.

    Attributes:
        used_bytes: in use now. On GPUs what tensors occupy, on CPUs the process's resident set.
        peak_bytes: the most that was in use since the process started.
        reserved_bytes: what torch's allocator holds of the GPU, free blocks included; None on CPUs.
    """

    used_bytes: int
    peak_bytes: int
    reserved_bytes: int | None


class MemoryMeter:
    """Reads this process's memory, and keeps the average over the readings.

    On CPUs the peak is ``getrusage``'s ``ru_maxrss``. Linux carries it through ``exec``, so a process that was forked from a larger one
    starts from that one's size.

    Args:
        device_kind: whose memory counts: the current CUDA device's, or the host's.
    """

    def __init__(self, device_kind: Literal["cuda", "cpu"]) -> None:
        self._device_kind = device_kind
        self._process = psutil.Process()
        self._num_samples = 0
        self._sum_bytes = 0

    def sample(self) -> MemorySample:
        """Read the memory now. Once a step, at the same place in it."""
        sample = self._read_cuda() if self._device_kind == "cuda" else self._read_host()
        self._num_samples += 1
        self._sum_bytes += sample.used_bytes
        return sample

    @property
    def average_bytes(self) -> int | None:
        """Mean of ``used_bytes`` over the samples; None before the first."""
        return self._sum_bytes // self._num_samples if self._num_samples else None

    def _read_cuda(self) -> MemorySample:
        import torch

        return MemorySample(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())

    def _read_host(self) -> MemorySample:
        used_bytes = int(self._process.memory_info().rss)
        return MemorySample(used_bytes, max(used_bytes, _max_resident_bytes()), None)


def _max_resident_bytes() -> int:
    """``ru_maxrss`` in bytes. Source: getrusage(2): kilobytes on Linux, bytes on macOS."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
