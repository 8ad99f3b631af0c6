"""A cluster that loses nodes: the run goes on where there is room, and says what it lacks where there is none."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support.command_line import Head, joined_node, ray_head
from support.family import Ended, Runs, assert_nothing_is_left
from support.interference import training, wait_for_step, workers

from rayapp.documents import PrepareDocument

NUM_NODES = 3
START_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def head_alone() -> Iterator[Head]:
    """A head without CPUs."""
    with tempfile.TemporaryDirectory(prefix="rayapp-nodes-") as folder, ray_head(Path(folder), num_cpus=0) as head:
        yield head


@pytest.fixture(scope="module")
def nodes(head_alone: Head) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Nodes of one CPU each: two for the workers, and one to spare."""
    with ExitStack() as stack:
        yield [stack.enter_context(joined_node(head_alone, num_cpus=1)) for _ in range(NUM_NODES)]


def lose_node_of(worker: psutil.Process) -> None:
    """Its raylet dies at once, and what it has started with it."""
    raylet = next(parent for parent in worker.parents() if "raylet" in parent.name())
    raylet.send_signal(signal.SIGKILL)


def test_a_run_goes_on_where_there_is_room_and_says_what_it_lacks_where_there_is_none(
    head_alone: Head, nodes: list[subprocess.Popen[bytes]], runs: Runs, whole: Ended
) -> None:
    assert PrepareDocument.model_validate(head_alone.commands.document("prepare", str(runs.run_file))).reused
    here = Runs(head_alone, runs.run_file, runs.storage)
    with training(head_alone.commands, *here.arguments("nodes", f"train.start_timeout_s={START_TIMEOUT_S}")) as process:
        wait_for_step(process, here.run_dir("nodes"), 10)
        first, *_ = workers(head_alone.commands)
        lose_node_of(first)
        while first.is_running() or len(workers(head_alone.commands)) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        wait_for_step(process, here.run_dir("nodes"), 20)
        lose_node_of(workers(head_alone.commands)[0])
        ended = here.ended(process, "nodes")
    assert ended.returncode == 2, ended.stderr
    (problem,) = json.loads(ended.stdout)["problems"]
    assert f"train.start_timeout_s={START_TIMEOUT_S} passed before all 2 workers of 1 CPU each were up" in problem
    assert "2 node(s) with 1 CPUs and 0 GPUs" in problem
    assert "--resume nodes train.num_workers=N" in problem
    failures = [json.loads(line) for line in (ended.run_dir / "failures.jsonl").read_text().splitlines()]
    assert len(failures) == 2
    assert all(re.search("was lost with its node|its process or its node is gone|was killed", failure["reason"]) for failure in failures)
    assert_nothing_is_left(head_alone)

    resumed = here.train("nodes", "train.num_workers=1", resume=True)
    assert resumed.document.world_size == 1
    assert "which 2 ranks wrote" in resumed.stderr
    assert list(resumed.losses.values()) == pytest.approx(list(whole.losses.values()), abs=1e-3)  # other sums, at a learning rate of 1e-2
