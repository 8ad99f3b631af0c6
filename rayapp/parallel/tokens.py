"""Counting what the loss is divided by, bounding it, and evaluating: the same for every data-parallel strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rayapp.engine import IGNORED_LABEL, Batch, EvalOutput


def count_valid_tokens(micro_batches: list[Batch], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Valid labels of all micro-batches and ranks, a float64 scalar on ``device``; every rank calls it."""
    count = torch.zeros((), dtype=torch.float64, device=device)
    for batch in micro_batches:
        count += (batch.labels != IGNORED_LABEL).sum()
    dist.all_reduce(count, group=group)
    return count


def loss_guard(loss: Tensor, max_loss: float | None) -> Tensor:
    """What the last backward pass is multiplied with: 1, or NaN where the loss is too high.

    A NaN in the gradient makes every engine skip the step, on all ranks, without the host waiting for the loss.

    Args:
        loss: the step's loss over all ranks, a scalar.
        max_loss: the highest that is applied; None: no limit.
    """
    one = torch.ones((), dtype=torch.float32, device=loss.device)
    return one if max_loss is None else torch.where(loss > max_loss, torch.nan, one)


@torch.no_grad()
def evaluate(
    forward: Callable[..., Tensor], micro_batches: list[Batch], device: torch.device, group: dist.ProcessGroup | None = None
) -> EvalOutput:
    """The summed loss of a list of micro-batches over all ranks; the module must be in evaluation mode."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in micro_batches:
        sums[0] += forward(batch.input_ids, batch.labels, batch.position_ids)
        sums[1] += (batch.labels != IGNORED_LABEL).sum()
    dist.all_reduce(sums, group=group)
    return EvalOutput(float(sums[0]), int(sums[1]))
