"""What the ranks of the non-finite tests do."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from rayapp.errors import NonFiniteError
from rayapp.metrics.jsonl import read_records
from rayapp.storage import open_location
from rayapp.train.lifeline import LocalLifeline
from rayapp.train.worker import Refusal, run_worker
from support.runs import rank_batches, resolved

HUGE_RATE = 1e30


def blow_up(strategies: list[str], precisions: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Engines whose weights explode in the second step: what the third step does to what they hold."""
    from rayapp.parallel.select import build_engine

    results = {}
    for strategy in strategies:
        for precision in precisions:
            run = resolved("llama", strategy=strategy, train={"precision": precision}, optim={"weight_decay": 0.0})
            engine = build_engine(run, torch.device("cpu"))
            rank, world_size = dist.get_rank(), dist.get_world_size()
            good = engine.train_step(rank_batches(0, rank, world_size, 2, 2), 1e-3)
            engine.train_step(rank_batches(1, rank, world_size, 2, 2), HUGE_RATE)
            before = {p.name: p.weight.clone() for p in engine.state()}
            steps_before = engine.state().step
            bad = engine.train_step(rank_batches(2, rank, world_size, 2, 2), 1e-3)
            unchanged = all(torch.equal(p.weight, before[p.name]) for p in engine.state())
            results[strategy, precision] = {
                "first_applied": good.applied,
                "finite": math.isfinite(bad.loss) and math.isfinite(bad.grad_norm),
                "applied": bad.applied,
                "unchanged": unchanged,
                "steps_counted": engine.state().step - steps_before,
            }
            engine.close()
    return results


def run_until_given_up(run_json: str, run_dir: str) -> tuple[str, str, list[tuple[int, bool, int]], int]:
    """A whole run whose learning rate is absurd: the refusal, its steps, and how many events were recorded."""
    outcome = run_worker(
        run_json, device=torch.device("cpu"), lifeline=LocalLifeline(lambda _: None), optional_sinks=lambda _run, _step: []
    )
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.error, NonFiniteError)
    records = read_records(open_location(run_dir) / "metrics.jsonl")
    steps = [(r.step, r.applied, r.skipped_steps) for r in records if r.kind == "step"]
    return type(outcome.error).__name__, str(outcome.error), steps, sum(r.kind == "event" for r in records)
