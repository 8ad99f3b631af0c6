"""Runs that lose workers end as if nothing had happened, and say what did."""

from __future__ import annotations

import json
import random
import re
import signal
import time

import pytest
from support.family import INTERVAL_STEPS, NUM_STEPS, Ended, Runs, assert_nothing_is_left, assert_same_end
from support.interference import records, send, training, wait_for_step, workers


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_worker_killed_at_a_random_step_changes_nothing(runs: Runs, whole: Ended, seed: int) -> None:
    choice = random.Random(seed)
    step, rank = choice.randrange(1, NUM_STEPS - 2), choice.randrange(2)
    run_id = f"killed-{seed}"
    with training(runs.head.commands, *runs.arguments(run_id)) as process:
        wait_for_step(process, runs.run_dir(run_id), step)
        victim = workers(runs.head.commands)[rank]
        send(victim, signal.SIGKILL)
        ended = runs.ended(process, run_id)
    assert_same_end(ended, whole)
    (failure,) = ended.document.failures
    assert ended.document.restarts == 1
    assert f"(pid {victim.pid}) was killed (SIGKILL" in failure.reason
    assert failure.reason.startswith(f"rank {failure.rank} on node {failure.node} ")
    assert failure.step <= step + 12, "beats come every second"
    assert "restart 1 of 3, from the newest complete checkpoint" in ended.stderr
    (event,) = [record for record in records(ended.run_dir, "event") if record["event"] == "restart"]
    assert failure.reason in event["detail"]
    before = (step - 1) // INTERVAL_STEPS * INTERVAL_STEPS  # what is being written when the worker dies may be lost
    continued = re.search(r"continuing from the checkpoint of step (\d+)", ended.stderr)
    assert (int(continued[1]) if continued else 0) >= before - (before > 0) * INTERVAL_STEPS
    assert continued is not None or step <= INTERVAL_STEPS + 1
    assert_nothing_is_left(runs.head)


def test_a_stopped_worker_is_named_and_survived(runs: Runs, whole: Ended) -> None:
    with training(runs.head.commands, *runs.arguments("stopped", "train.hang_timeout_s=12")) as process:
        wait_for_step(process, runs.run_dir("stopped"), 11)
        victim = workers(runs.head.commands)[1]
        send(victim, signal.SIGSTOP)
        ended = runs.ended(process, "stopped")
    assert_same_end(ended, whole)
    (failure,) = ended.document.failures
    assert f"(pid {victim.pid}) has not been heard of for" in failure.reason
    assert re.search(r"waiting for it: rank \d in collective all_(gather|reduce); last collective: all", failure.reason)
    assert not victim.is_running()


def test_a_hang_ends_the_run_in_time_where_no_restart_is_left(runs: Runs) -> None:
    with training(runs.head.commands, *runs.arguments("hung", "train.hang_timeout_s=12", "train.max_failures=0")) as process:
        wait_for_step(process, runs.run_dir("hung"), 11)
        send(workers(runs.head.commands)[0], signal.SIGSTOP)
        began = time.monotonic()
        ended = runs.ended(process, "hung")
        took_s = time.monotonic() - began
    assert ended.returncode == 1
    assert took_s < 12 + 20
    error = json.loads(ended.stdout)
    assert error["error"] == "WorkerError"
    assert "has not been heard of for" in error["problems"][0]
    assert "train.max_failures=0 is used up" in error["problems"][0]
    assert_nothing_is_left(runs.head)


def test_a_run_that_its_workers_refuse_to_go_on_with_ends_with_their_reason_and_no_restart(runs: Runs) -> None:
    ended = runs.train("diverged", "optim.learning_rate=1.0e+30", "train.max_skipped_steps=3")
    assert ended.returncode == 1
    error = json.loads(ended.stdout)
    assert error["error"] == "NonFiniteError"
    assert "3 steps in a row up to step" in error["problems"][0]
    assert "train.max_skipped_steps=3" in error["problems"][0]
    assert "restart 1 of" not in ended.stderr
    assert_nothing_is_left(runs.head)
