"""Runs that are asked to end leave a checkpoint of their last step, and go on from it as if they had never ended."""

from __future__ import annotations

import json
import signal
import time
import uuid

import pytest
from support.command_line import ROOT, Head
from support.family import NUM_STEPS, Ended, Runs, assert_nothing_is_left, assert_same_end
from support.interference import records, training, wait_for_step


def newest_step(ended: Ended) -> int:
    """Of the complete checkpoints, by their manifests."""
    manifests = (ended.run_dir / "checkpoints").glob("step-*/manifest.json")
    return max(json.loads(manifest.read_text())["progress"]["step"] for manifest in manifests)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_a_signal_saves_the_last_step(runs: Runs, whole: Ended, number: signal.Signals, status: int) -> None:
    run_id = f"signal-{number.name.lower()}"
    with training(runs.head.commands, *runs.arguments(run_id)) as process:
        wait_for_step(process, runs.run_dir(run_id), 11)
        process.send_signal(number)
        ended = runs.ended(process, run_id)
    assert ended.returncode == status, ended.stderr
    last = records(ended.run_dir)[-1]["step"]
    assert newest_step(ended) == last < NUM_STEPS
    (sentence,) = json.loads(ended.stdout)["problems"]
    assert f"ended after step {last} and has its newest checkpoint at step {last}" in sentence
    assert f"--resume {run_id}" in sentence
    assert_nothing_is_left(runs.head)
    resumed = runs.train(run_id, resume=True)
    assert f"continuing from the checkpoint of step {last}" in resumed.stderr
    assert_same_end(resumed, whole)


@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_keeps_what_was_complete(runs: Runs, whole: Ended) -> None:
    with training(runs.head.commands, *runs.arguments("impatient")) as process:
        wait_for_step(process, runs.run_dir("impatient"), 11)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # some senders signal twice
        time.sleep(1.1)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        ended = runs.ended(process, "impatient", timeout_s=60)
    assert ended.returncode == 130
    assert_nothing_is_left(runs.head)
    assert_same_end(runs.train("impatient", resume=True), whole)


def test_a_stopped_job_goes_on_where_it_was(runs: Runs, whole: Ended, head: Head) -> None:
    """`ray job stop` gives three seconds."""
    job = f"test-{uuid.uuid4().hex[:8]}"
    command = ["ray", "job", "submit", "--address", head.dashboard_url, "--working-dir", str(ROOT), "--submission-id", job, "--no-wait"]
    done = head.commands.run(*command, "--", "python", "-m", "rayapp", "train", *runs.arguments("job"))
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 240
    while not any(record["step"] >= 11 for record in records(runs.run_dir("job"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = head.commands.run("ray", "job", "stop", "--address", head.dashboard_url, job)
    assert done.returncode == 0, done.stderr
    stopped = Ended(0, "", "", runs.run_dir("job"))
    assert newest_step(stopped) == records(stopped.run_dir)[-1]["step"] < NUM_STEPS
    assert_nothing_is_left(head)
    resumed = runs.train("job", resume=True)
    assert_same_end(resumed, whole)
    assert [record["num_valid_tokens"] for record in records(resumed.run_dir)] == [
        record["num_valid_tokens"] for record in records(whole.run_dir)
    ]
