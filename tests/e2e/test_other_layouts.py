"""A run that is continued on another number of workers, or under another strategy, learns what it would have learnt."""

from __future__ import annotations

import shutil

import pytest
from support.family import NUM_STEPS, Ended, Runs
from support.interference import records

STOPPED_AT = 16
ROWS = ("batch.global_batch_size=24", "optim.learning_rate=3.0e-3", "resources.cpus_per_worker=0.5")
ZERO_3 = ("parallel.zero_stage=3", "checkpoint.keep_last=50")
OTHERS = {
    "one-rank": ("parallel.zero_stage=3", "train.num_workers=1"),
    "three-ranks-zero-1": ("parallel.zero_stage=1", "train.num_workers=3"),
    "ddp": ("parallel={kind: ddp}",),
}
"""What takes the run over from two ranks of ZeRO-3; what is left out of the accumulation follows from the ranks."""


@pytest.fixture(scope="module")
def sharded(runs: Runs) -> Ended:
    """The run without a stop, under ZeRO-3 on two ranks."""
    ended = runs.train("sharded", *ROWS, *ZERO_3)
    assert (ended.document.strategy, ended.document.world_size) == ("zero-3", 2)
    return ended


@pytest.mark.parametrize("other", ["one-rank", "three-ranks-zero-1", pytest.param("ddp", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_run_without_a_stop(runs: Runs, sharded: Ended, other: str) -> None:
    folder = runs.run_dir(other)
    shutil.copytree(sharded.run_dir, folder)
    for checkpoint in folder.glob("checkpoints/step-*"):
        if int(checkpoint.name.removeprefix("step-")) > STOPPED_AT:
            shutil.rmtree(checkpoint)
    resumed = runs.train(other, *ROWS, *OTHERS[other], resume=True)
    assert f"continuing from the checkpoint of step {STOPPED_AT}" in resumed.stderr
    assert resumed.document.strategy == {"one-rank": "zero-3", "three-ranks-zero-1": "zero-1", "ddp": "ddp"}[other]
    assert resumed.document.world_size == {"one-rank": 1, "three-ranks-zero-1": 3, "ddp": 2}[other]
    assert list(resumed.losses) == list(range(1, NUM_STEPS + 1))
    assert list(resumed.losses.values()) == pytest.approx(list(sharded.losses.values()), abs=1e-5)
    assert resumed.document.validation_loss == pytest.approx(sharded.document.validation_loss, abs=1e-5)
    tokens = [[record["num_valid_tokens"] for record in records(run.run_dir)] for run in (resumed, sharded)]
    assert tokens[0] == tokens[1]
