"""What the ranks of an engine test do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from support.runs import rank_batches, resolved

STEPS = 20


def train_on_ranks(family: str, strategies: list[str], train: dict[str, Any], micro: int, accumulation: int) -> dict[str, Any]:
    from rayapp.parallel.select import build_engine

    results = {}
    for strategy in strategies:
        run = resolved(
            family, strategy=strategy, world_size=dist.get_world_size(), micro_batch_size=micro, accumulation=accumulation, train=train
        )
        engine = build_engine(run, torch.device("cpu"))
        outputs = [
            engine.train_step(rank_batches(step, dist.get_rank(), dist.get_world_size(), micro, accumulation), run.file.optim.learning_rate)
            for step in range(STEPS)
        ]
        weights = {p.name: p.weight for p in engine.state()}
        results[strategy] = ([o.loss for o in outputs], [o.grad_norm for o in outputs], weights, all(o.applied for o in outputs))
        engine.close()
    return results
