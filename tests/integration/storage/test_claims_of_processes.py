"""Several processes start one run at the same moment, and one of them gets it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.claiming import Claimants, claimants, delays

from rayapp.checkpoint.claims import claimed
from rayapp.errors import CheckpointError
from rayapp.storage import open_location

NUM_PROCESSES = 6
ROUNDS = 6


@pytest.fixture(scope="module")
def group(server_port: int) -> Iterator[Claimants]:
    assert server_port, "its credentials are in the environment that the processes get"
    with claimants(NUM_PROCESSES) as started:
        yield started


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where runs lie."""
    return str(tmp_path) if request.param == "local" else str(request.getfixturevalue("root_uri"))


def test_one_of_many_gets_the_run(group: Claimants, uri: str) -> None:
    for number in range(ROUNDS):
        run_dir = open_location(uri) / f"run-{number}"
        answers = group.claim(run_dir.uri, delays(NUM_PROCESSES, number))
        (winner,) = [pid for pid, refusal in answers.items() if refusal is None]
        refusals = {refusal for refusal in answers.values() if refusal is not None}
        assert all(re.match(rf"run {re.escape(str(run_dir))} is being trained by process \d+ on host ", refusal) for refusal in refusals)
        with pytest.raises(CheckpointError, match=f"is being trained by process {winner} on"), claimed(run_dir):
            pytest.fail("one of the processes has it")
        group.free()
        deadline = time.monotonic() + 30
        while (run_dir / "claims").children() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (run_dir / "claims").children() == []


def test_the_run_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    run_dir = open_location(str(tmp_path / "run"))
    with claimants(2) as pair:
        answers = pair.claim(run_dir.uri, [0.0, 0.0])
        (winner,) = [pid for pid, refusal in answers.items() if refusal is None]
        os.kill(winner, signal.SIGKILL)
        started = time.monotonic()
        with claimed(run_dir) as claim:
            assert time.monotonic() - started < 3
            assert [file.name for file in (run_dir / "claims").children()] == [f"{claim.id}.json"]
