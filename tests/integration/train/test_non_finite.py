"""Numbers that stop being finite: no strategy applies them, each is recorded, and the run ends when they do not end."""

from __future__ import annotations

from pathlib import Path

from support.non_finite_work import HUGE_RATE, blow_up, run_until_given_up
from support.prepared import prepare_small, run_on
from support.ranks import run_ranks


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    for results in run_ranks(blow_up, 2, ["ddp", "zero-1", "zero-2", "zero-3"], ["fp32", "bf16"]):
        assert len(results) == 8
        for key, result in results.items():
            assert result == {"first_applied": True, "finite": False, "applied": False, "unchanged": True, "steps_counted": 0}, key


def test_a_run_of_them_ends_the_run(tmp_path: Path) -> None:
    prepared = prepare_small(tmp_path / "data")
    run = run_on(
        prepared,
        tmp_path / "run",
        "llama",
        strategy="zero-2",
        train={"num_steps": 20, "max_skipped_steps": 4, "validation_interval_steps": 20},
        checkpoint={"interval_steps": 20},
        optim={"learning_rate": HUGE_RATE, "weight_decay": 0.0},
    )
    for name, sentence, steps, num_events in run_ranks(run_until_given_up, 2, run.model_dump_json(), str(tmp_path / "run")):
        skipped = [step for step, applied, _ in steps if not applied]
        assert name == "NonFiniteError"
        assert len(skipped) == num_events == 4
        assert skipped == list(range(skipped[0], skipped[0] + 4))
        assert steps[-1] == (skipped[-1], False, 4)
        assert f"4 steps in a row up to step {skipped[-1]}" in sentence
        assert "train.max_skipped_steps=4" in sentence
