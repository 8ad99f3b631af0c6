"""AdamW as every strategy uses it: which parameters decay, and its state before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayapp.config.schema import OptimSection

LOSS_SCALE_WINDOW = 1000
"""Finite steps after which fp16's loss scale is doubled, in every strategy."""


def decay_groups(parameters: list[nn.Parameter], decays: list[bool], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups, those that decay first; an empty one is left out.

    Args:
        parameters: what is trained.
        decays: for each of them whether it decays, see :func:`is_decayed`.
        weight_decay: of the first group.
    """
    chosen = [
        {"params": [p for p, d in zip(parameters, decays, strict=True) if d], "weight_decay": weight_decay},
        {"params": [p for p, d in zip(parameters, decays, strict=True) if not d], "weight_decay": 0.0},
    ]
    return [group for group in chosen if group["params"]]


def is_decayed(num_dims: int) -> bool:
    """Matrices decay; biases, norms and other vectors do not."""
    return num_dims >= 2


def adamw(groups: list[dict[str, Any]], optim: OptimSection) -> torch.optim.AdamW:
    """torch's fused AdamW, which needs no compiler on the node."""
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=True)


def set_step(optimizer: torch.optim.Optimizer, parameter: Tensor, step: int) -> None:
    """Set what fused AdamW counts for a parameter; moments of zero are made where it has none yet."""
    state = optimizer.state[parameter]
    if not state:
        state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Adam's own count of steps; 0 before the first."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
