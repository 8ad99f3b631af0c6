"""Two gloo ranks: the share of communication against steps whose communication is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.communication_steps import COMPUTE_S, ddp_step, deepspeed_step, plain_steps
from support.ranks import run_ranks

from rayapp.metrics.communication import measure_communication


def test_the_share_is_that_of_the_time_in_collectives():
    """Bounds that a busy machine cannot break: it adds time, it takes none away."""
    first, second = run_ranks(plain_steps, 2)
    for rank in (first, second):
        share, seconds = rank["compute"]
        assert share == 0.0
        assert seconds >= COMPUTE_S
        share, _ = rank["communicate"]
        assert share > 0.5
    share, seconds = first["late"]  # waits in the collective for the other rank, then computes
    assert share * seconds > 0.8 * COMPUTE_S
    assert (1 - share) * seconds >= COMPUTE_S
    share, seconds = second["late"]  # computes, finds the other rank waiting, computes
    assert (1 - share) * seconds >= 2 * COMPUTE_S


def test_collectives_of_ddp_s_reducer_count():
    for reduced, kept in run_ranks(ddp_step, 2):
        assert 0.05 < reduced <= 1.0
        assert kept == 0.0


def test_collectives_of_deepspeed_count():
    for share in run_ranks(deepspeed_step, 2):
        assert 0.05 < share <= 1.0


def test_one_process_without_a_group_communicates_nothing():
    measurement = measure_communication(lambda: torch.ones(4).sum().item())
    assert measurement.result == 4.0
    assert measurement.share == 0.0


def test_what_the_step_raises_comes_out_and_the_next_measurement_works():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_communication(broken)
    assert measure_communication(lambda: 1).result == 1


def test_nothing_is_printed():
    """In a process of its own: the profiler's C++ part writes to the file descriptors."""
    code = "from rayapp.metrics.communication import measure_communication as m; [m(lambda: 1) for _ in range(2)]"
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[3], capture_output=True, timeout=120, check=True
    )
    assert done.stdout == b""
    assert done.stderr == b""
