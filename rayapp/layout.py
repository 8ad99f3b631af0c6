"""Degrees of parallelism and batch arithmetic. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.errors import InputError, Problem

LARGEST_DERIVED_MICRO_BATCH = 8


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run are arranged: world_size = dp_size x pp_size x tp_size.

    Tensor ranks are next to each other (inside a node), data ranks are the farthest apart.
    """

    dp_size: int
    pp_size: int = 1
    tp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_size * self.pp_size * self.tp_size

    def dp_rank(self, rank: int) -> int:
        """The data-parallel rank of a global rank."""
        return rank // (self.pp_size * self.tp_size)


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x dp_size, in sequences."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_size: int


def derive_layout(world_size: int, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Layout:
    """Arrange ``world_size`` ranks.

    Raises:
        InputError: the world size is not a multiple of the two degrees' product.
    """
    group = tensor_parallel_size * pipeline_parallel_size
    if world_size % group:
        low = world_size // group * group
        options = f"{low} or {low + group}" if low else str(group)
        raise InputError(
            Problem(
                f"world_size={world_size}",
                f"is not a multiple of tensor_parallel_size({tensor_parallel_size}) x "
                f"pipeline_parallel_size({pipeline_parallel_size})={group}",
                f"use train.num_workers={options}",
            )
        )
    return Layout(world_size // group, pipeline_parallel_size, tensor_parallel_size)


def derive_batch(
    global_batch_size: int, dp_size: int, micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None
) -> BatchPlan:
    """Fill in what the run file left open.

    Args:
        global_batch_size: sequences in one optimizer step.
        dp_size: data-parallel ranks.
        micro_batch_size: sequences in one pass of one rank, or None.
        gradient_accumulation_steps: passes of one rank in one step, or None.

    Raises:
        InputError: the factors do not multiply to the global batch.
    """
    known, names = dp_size, f"dp_size({dp_size})"
    if gradient_accumulation_steps is not None:
        known, names = known * gradient_accumulation_steps, f"gradient_accumulation_steps({gradient_accumulation_steps}) x {names}"
    if micro_batch_size is not None:
        known, names = known * micro_batch_size, f"micro_batch_size({micro_batch_size}) x {names}"
    if global_batch_size % known:
        raise InputError(_not_a_multiple(global_batch_size, known, names))
    rest = global_batch_size // known
    if micro_batch_size is not None and gradient_accumulation_steps is not None:
        if rest != 1:
            raise InputError(
                Problem(
                    f"batch.global_batch_size={global_batch_size}",
                    f"is not {names}={known}",
                    f"use {known}, or leave batch.gradient_accumulation_steps out",
                )
            )
        return BatchPlan(global_batch_size, micro_batch_size, gradient_accumulation_steps, dp_size)
    if micro_batch_size is not None:
        return BatchPlan(global_batch_size, micro_batch_size, rest, dp_size)
    if gradient_accumulation_steps is not None:
        return BatchPlan(global_batch_size, rest, gradient_accumulation_steps, dp_size)
    micro = next(size for size in (8, 4, 2, 1) if rest % size == 0 and size <= LARGEST_DERIVED_MICRO_BATCH)
    return BatchPlan(global_batch_size, micro, rest // micro, dp_size)


def _not_a_multiple(global_batch_size: int, factor: int, names: str) -> Problem:
    below = global_batch_size // factor * factor
    options = f"{below} or {below + factor}" if below else str(factor)
    product = f"{names}={factor}" if " x " in names else names
    return Problem(f"batch.global_batch_size={global_batch_size}", f"is not a multiple of {product}", f"use {options}")
