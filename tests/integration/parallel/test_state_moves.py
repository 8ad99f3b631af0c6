"""A training state goes from any strategy and world size to any other, and training goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from support.ranks import run_ranks
from support.state_moves import END, SECOND, THIRD, Losses, moved_back, moved_on, two_ranks

STRATEGIES = ["ddp", "zero-1", "zero-2", "zero-3"]
WORLD_SIZES = [1, 2, 3]


@dataclass(frozen=True)
class Moves:
    """What ranks found.

    Attributes:
        straight: losses of ZeRO-3 at two ranks, without a stop.
        away: by strategy and world size, the losses after ZeRO-3's state was moved there.
        back: the same, after the state was moved back to ZeRO-3 at two ranks.
        live: what running engines gave, saved and took.
        refusal: what was said to the state of another model.
    """

    straight: Losses
    away: dict[str, Losses]
    back: dict[str, Losses]
    live: dict[str, Any]
    refusal: str


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> Moves:
    root = str(tmp_path_factory.mktemp("states"))
    ranks = run_ranks(two_ranks, 2, root, STRATEGIES)
    assert ranks[0] == ranks[1]
    straight, *_, live, refusal = ranks[0]
    away = {1: run_ranks(moved_on, 1, root, STRATEGIES)[0], 2: ranks[0][1], 3: run_ranks(moved_on, 3, root, STRATEGIES)[0]}
    by_name = {f"{strategy}-{size}": losses for size, of_size in away.items() for strategy, losses in of_size.items()}
    return Moves(straight, by_name, run_ranks(moved_back, 2, root, list(by_name))[0], live, refusal)


def test_training_learns(moves: Moves) -> None:
    assert len(moves.straight) == END
    assert moves.straight[-1] < moves.straight[0] - 0.1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_state_of_zero_3_goes_anywhere_and_back(moves: Moves, strategy: str, world_size: int) -> None:
    name = f"{strategy}-{world_size}"
    assert moves.away[name] == pytest.approx(moves.straight[SECOND:THIRD], abs=1e-5)
    assert moves.back[name] == pytest.approx(moves.straight[THIRD:END], abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("giver", "taker"), list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True)))
def test_what_a_running_engine_gives(moves: Moves, giver: str, taker: str, precision: str) -> None:
    found = moves.live[f"{giver} to {taker} in {precision}"]
    assert found["different_before"] > 10
    assert found["saved"] == [], "what is saved is what the engine gives"
    assert found["taken"] == [], "another strategy takes all of it"
    assert found["own"] == [], "its own state changes nothing"
    mine, theirs = found["validation"]
    assert theirs == pytest.approx(mine, abs=1e-5)


def test_the_state_of_another_model_is_refused(moves: Moves) -> None:
    assert "model.embed_tokens.weight has shape [96, 32]" in moves.refusal
    assert "[96, 64] in the model" in moves.refusal
