"""The share of a step in which ranks talk to each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")
Interval = tuple[int, int]
"""Begin and end, in nanoseconds of the profiler's clock."""

STEP_MARK = "rayapp.measured_step"
SILENT_KINETO_LEVEL = "99"


class CommunicationMeasurement(NamedTuple, Generic[T]):
    """What was measured on one call.

    Attributes:
        result: what the call returned.
        share: seconds in which communication ran over ``seconds``, 0 to 1; None where the process uses a GPU of which the profiler saw
            nothing, as when the driver refuses it the GPU's counters.
        seconds: the call's wall time under the profiler.
    """

    result: T
    share: float | None
    seconds: float


def measure_communication(step: Callable[[], T]) -> CommunicationMeasurement[T]:
    """Run one step under torch's profiler and measure how long communication ran in it, as this rank sees it.

    What counts:

    - on GPUs, the kernels that NCCL runs (``nccl...Kernel...``);
    - on CPUs, the collectives and point-to-point transfers of gloo (``gloo:all_reduce``, ...), from being issued to being finished.

    Overlapping intervals count once, so the share is that of the wall time during which at least one of them ran. A rank that enters a
    collective early waits inside it, and that counts; so does communication that computation hides. It is therefore not the time
    that would be saved without communication, but the most that could be. What ran before or after the call does not count. It makes no
    difference who issued the collectives: torch's DDP and FSDP, DeepSpeed, or plain calls. Not seen are transfers that use neither,
    such as DeepSpeed's shared-memory operator for CPUs.

    Profiling slows the step by some microseconds for each operator, and reading the events takes a fraction of a second more; the first
    call in a process that uses a GPU takes some seconds, until CUPTI is up. Leave such a step out of the throughput. Nothing is
    written, apart from what ``step`` itself writes. Every rank may call this, or only one.

    Raises:
        Exception: whatever ``step`` raises.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT_KINETO_LEVEL)  # it reports every start and stop on stderr otherwise
    on_gpu = torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # acc_events: there is one cycle only, and without it torch 2.11 warns of what happens between cycles
    profiler = profile(activities=activities, acc_events=True)
    with _unheard():
        profiler.start()
    try:
        with record_function(STEP_MARK):
            result = step()
            if on_gpu:
                torch.cuda.synchronize()
    finally:
        profiler.stop()
    trace = _read_trace(profiler)
    begin_ns, end_ns = trace.step
    share = covered(trace.communication, begin_ns, end_ns) / (end_ns - begin_ns)
    return CommunicationMeasurement(result, None if on_gpu and not trace.num_gpu_events else share, (end_ns - begin_ns) / 1e9)


@contextmanager
def _unheard() -> Iterator[None]:
    """Drop what the profiler writes on stderr as it starts: outside the main thread it reports an error that is none."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def covered(intervals: Iterable[Interval], begin: int, end: int) -> int:
    """The length of the union of intervals, as far as it lies between ``begin`` and ``end``."""
    total, reached = 0, begin
    for start, stop in sorted(intervals):
        new_length = min(stop, end) - max(start, reached)
        if new_length > 0:
            total += new_length
            reached = min(stop, end)
    return total


def is_communication(name: str, on_gpu: bool) -> bool:
    """Whether an event of the profiler is communication that runs, rather than code that asks for it."""
    return name.startswith("nccl") and "Kernel" in name if on_gpu else name.startswith("gloo:")


class _Trace(NamedTuple):
    step: Interval
    communication: list[Interval]
    num_gpu_events: int


def _read_trace(profiler: profile) -> _Trace:
    """What the profiler saw.

    Reads the raw events: ``profiler.events()`` builds a tree of Python objects, which takes seconds for a large model's step.
    """
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None, "the profiler has stopped, so it has results"
    step: Interval | None = None
    communication, num_gpu_events = [], 0
    for event in results.events():
        name, on_gpu = event.name(), event.device_type().name == "CUDA"
        num_gpu_events += on_gpu
        if is_communication(name, on_gpu):
            communication.append((event.start_ns(), event.end_ns()))
        elif name == STEP_MARK and not on_gpu:
            step = event.start_ns(), event.end_ns()
    assert step is not None, f"the profiler lost its own mark {STEP_MARK}"
    return _Trace(step, communication, num_gpu_events)
