"""Moving a training state between strategies and world sizes, as the ranks of a test do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayapp.engine import TrainEngine, TrainingState
from rayapp.fragments import PARTS, FragmentedState
from support.runs import rank_batches, resolved
from support.snapshots import save_engine

ROWS = 12  # a step's rows, whatever the world size
MICRO = 2
RATE = 3e-3
SECOND, THIRD, END = 3, 6, 8
"""Steps at which a state moves, and the last one."""

Losses = list[float]


def engine_of(strategy: str, precision: str = "fp32", seed: int = 7) -> TrainEngine:
    from rayapp.parallel.select import build_engine

    run = resolved(
        "llama",
        strategy=strategy,
        world_size=dist.get_world_size(),
        accumulation=accumulation(),
        train={"precision": precision, "seed": seed},
    )
    return build_engine(run, torch.device("cpu"))


def accumulation() -> int:
    return ROWS // (MICRO * dist.get_world_size())


def train(engine: TrainEngine, start: int, end: int) -> Losses:
    return [
        engine.train_step(rank_batches(s, dist.get_rank(), dist.get_world_size(), MICRO, accumulation()), RATE).loss
        for s in range(start, end)
    ]


def validation_loss(engine: TrainEngine) -> float:
    return engine.eval_step(rank_batches(99, dist.get_rank(), dist.get_world_size(), MICRO, accumulation())).loss


def save(engine: TrainEngine, folder: Path) -> None:
    save_engine(engine, folder)
    dist.barrier()


def differences(one: TrainingState, other: TrainingState) -> list[str]:
    """The parameters that are not equal, bit for bit, and what else differs."""
    found = [] if one.step == other.step else [f"step {one.step} and {other.step}"]
    found += [] if one.names() == other.names() else ["names"]
    for mine, theirs in zip(one, other, strict=True):
        found += [f"{part} of {mine.name}" for part in PARTS if not torch.equal(getattr(mine, part), getattr(theirs, part))]
    return found


def without_a_stop(root: str) -> Losses:
    """The losses of ZeRO-3 from the first step to the last; its state is saved at the second stage."""
    engine = engine_of("zero-3")
    losses = train(engine, 0, SECOND)
    save(engine, Path(root) / "zero-3")
    losses += train(engine, SECOND, END)
    engine.close()
    return losses


def moved_on(root: str, strategies: list[str]) -> dict[str, Losses]:
    """Take ZeRO-3's state into other strategies at this world size, train on, and save what became of it."""
    losses = {}
    for strategy in strategies:
        engine = engine_of(strategy, seed=1)  # other fresh weights than those that are loaded
        engine.load(Path(root) / "zero-3")
        losses[strategy] = train(engine, SECOND, THIRD)
        save(engine, Path(root) / f"{strategy}-{dist.get_world_size()}")
        engine.close()
    return losses


def moved_back(root: str, names: list[str]) -> dict[str, Losses]:
    """Take the states that :func:`moved_on` saved back into ZeRO-3 and train to the end."""
    losses = {}
    for name in names:
        engine = engine_of("zero-3", seed=2)
        engine.load(Path(root) / name)
        losses[name] = train(engine, THIRD, END)
        engine.close()
    return losses


def live_states(root: str, precision: str, strategies: list[str]) -> dict[str, Any]:
    """What a running engine gives compared with what it saves, and what another engine makes of it."""
    results = {}
    for giver, taker in zip(strategies, strategies[1:] + strategies[:1], strict=True):
        first, second = engine_of(giver, precision), engine_of(taker, precision, seed=1)
        before = differences(first.state(), second.state())
        train(first, 0, 2)
        save(first, Path(root) / f"{precision}-{giver}")
        on_disk = FragmentedState(Path(root) / f"{precision}-{giver}")
        results[f"{giver} to {taker}"] = {
            "different_before": len(before),
            "saved": differences(first.state(), on_disk),
            "taken": (second.load_state(first.state()), differences(first.state(), second.state()))[1],
            "own": (first.load_state(first.state()), differences(first.state(), on_disk))[1],
            "validation": (validation_loss(first), validation_loss(second)),
        }
        first.close()
        second.close()
    return results


def two_ranks(root: str, strategies: list[str]) -> tuple[Losses, dict[str, Losses], dict[str, Any], str]:
    """All that two ranks do before another world size comes in."""
    live = {
        f"{key} in {precision}": found for precision in ("fp32", "bf16") for key, found in live_states(root, precision, strategies).items()
    }
    return without_a_stop(root), moved_on(root, strategies), live, loaded_into_another_model(root)


def loaded_into_another_model(root: str) -> str:
    """What an engine says to the state of a model with other shapes."""
    from rayapp.errors import CheckpointError
    from rayapp.parallel.select import build_engine

    wider = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
    run = resolved("llama", strategy="zero-2", model={"config": wider})
    engine = build_engine(run, torch.device("cpu"))
    try:
        engine.load(Path(root) / "zero-3")
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"
