"""`state.json`, and what the files beside it are called."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Part = Literal["weight", "exp_avg", "exp_avg_sq"]
PARTS: tuple[Part, ...] = ("weight", "exp_avg", "exp_avg_sq")
STATE_FILE = "state.json"
BUFFER = "buffer"


class StateIndex(BaseModel):
    """`state.json`: what the fragments make up."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Of this file and of the fragments."""
    world_size: int
    """Ranks that wrote."""
    step: int
    """Optimizer steps that were applied: Adam's own count."""
    loss_scale: float | None = None
    """fp16's dynamic loss scale."""
    loss_scale_good_steps: int = 0
    """Steps since the loss scale last changed."""
    shapes: dict[str, list[int]]
    """Every parameter once, by its Hugging Face name."""


def rank_file(rank: int, world_size: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
