"""What the ranks of the pretrained tests do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rayapp.config.schema import ModelSection
from support.runs import global_batch, rank_batches, resolved


def start_from_folder(folder: str, strategies: list[str]) -> dict[str, Any]:
    """The first loss and the starting weights of engines that take a model folder."""
    from rayapp.models.build import model_config
    from rayapp.parallel.select import build_engine

    results = {}
    for strategy in strategies:
        section = {"kind": "pretrained", "path": folder, "config": {}}
        run = resolved("llama", strategy=strategy)
        file = run.file.model_copy(update={"model": ModelSection.model_validate(section)})
        run = run.model_copy(update={"file": file, "transformers_config": model_config(file.model, 96, {})})
        engine = build_engine(run, torch.device("cpu"))
        weights = {p.name: p.weight for p in engine.state()}
        output = engine.train_step(rank_batches(0, dist.get_rank(), dist.get_world_size(), 2, 2), 1e-3)
        results[strategy] = (output.loss, weights)
        engine.close()
    return results


def plain_loss(network: Any, rows: int = 8) -> float:
    """The loss of the first global batch, by transformers alone."""
    inputs, labels = global_batch(0, rows)
    with torch.no_grad():
        logits = network(input_ids=inputs, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))
