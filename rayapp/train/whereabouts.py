"""Where a thread of this process is: in which collective, or at which line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

RECORDER_ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Turns torch's flight recorder on: how many collectives it remembers."""

DISTRIBUTED = "torch/distributed/"
WRAPPERS = ("wrapper",)
"""torch's decorators around its collectives."""


def collectives_entered() -> tuple[int, str] | None:
    """How many collectives this process has entered, in all groups, and the last of them; None where torch does not record them."""
    dump = _recorder()
    recorded = {} if dump is None else json.loads(dump())
    groups, entries = recorded.get("pg_status"), recorded.get("entries")
    if not groups or not entries:
        return None
    last = max(entries, key=lambda entry: entry["record_id"])
    name = last["profiling_name"].partition(":")[2] or last["profiling_name"]
    return sum(int(group["last_enqueued_collective"]) for group in groups.values()), name


def _recorder() -> Callable[[], bytes] | None:
    """torch's flight recorder, under the name that this release has for it."""
    module = torch._C._distributed_c10d
    return getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)


def place_of(thread_id: int) -> str:
    """What a thread of this process is inside: `collective all_reduce`, or `loader.py:88 in next_row`."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    innermost = None
    while frame is not None:
        code = frame.f_code
        if DISTRIBUTED in code.co_filename and code.co_name not in WRAPPERS and not code.co_name.startswith("_"):
            return f"collective {code.co_name}"
        innermost = innermost or f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return innermost or "nothing"
