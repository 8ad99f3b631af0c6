"""Memory of the model's states on one rank: weights, gradients, the optimizer's states, and what communication needs.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3, with
the bytes that torch's fused AdamW and DeepSpeed 0.19 really hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayapp.config.schema import Precision
from rayapp.models.spec import ModelSpec

DataParallelStrategy = Literal["ddp", "zero-1", "zero-2", "zero-3"]

DATA_PARALLEL_STRATEGIES: tuple[DataParallelStrategy, ...] = ("ddp", "zero-1", "zero-2", "zero-3")
"""From the least sharded to the most."""

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32_BYTES = 4
ADAM_MOMENTS_BYTES = 8
"""Adam's two fp32 moments of one weight."""

ZERO3_SUB_GROUP_PARAMETERS = 1_000_000_000
"""Weights that ZeRO-3 updates at once: the default of DeepSpeed's ``sub_group_size``."""

ZERO3_LIVE_PARAMETERS = 500_000_000
"""Weights that ZeRO-3 leaves whole around the end of the forward pass: DeepSpeed's ``stage3_max_reuse_distance`` is 10^9
weights, and what lies d weights before the end is read again after 2 d."""


@dataclass(frozen=True)
class RankStates:
    """Bytes of one rank.

    Attributes:
        weights: what the forward pass reads.
        gradients: what the backward pass adds up.
        optimizer: fp32 master weights and Adam's moments.
        step: what exists during the optimizer's step alone: the gradients again, in fp32.
        host: what is kept in the host's memory instead.
    """

    weights: int
    gradients: int
    optimizer: int
    step: int
    host: int


def zero_stage(strategy: DataParallelStrategy) -> int:
    """0 for ddp, else the stage."""
    return DATA_PARALLEL_STRATEGIES.index(strategy)


def rank_states(
    num_parameters: int,
    strategy: DataParallelStrategy,
    precision: Precision,
    dp_size: int,
    *,
    offload_optimizer: bool = False,
    offload_weights: bool = False,
) -> RankStates:
    """States of one rank, between two micro-batches.

    In fp32, ddp updates the weights themselves; ZeRO updates a copy of the rank's share all the same.

    Args:
        num_parameters: weights of the model, tied ones once.
        strategy: how they are spread.
        precision: of the forward and backward pass.
        dp_size: ranks that the states are sharded over.
        offload_optimizer: the optimizer's states, and the gradients that it reads, are in the host's memory. With ZeRO.
        offload_weights: the weights are there too, but for those in use. With ZeRO-3.
    """
    stage, element = zero_stage(strategy), ELEMENT_BYTES[precision]
    share = -(-num_parameters // dp_size)
    has_master = precision != "fp32" or stage > 0
    weights = element * (share if stage == 3 else num_parameters)
    optimizer = (ADAM_MOMENTS_BYTES + (FP32_BYTES if has_master else 0)) * (share if stage else num_parameters)
    step, host = FP32_BYTES * _step_parameters(num_parameters, share, stage, precision), 0
    if offload_optimizer:
        optimizer, step, host = 0, 0, optimizer + FP32_BYTES * share
    if offload_weights:
        weights, host = 0, host + weights
    return RankStates(weights, element * (share if stage >= 2 else num_parameters), optimizer, step, host)


def _step_parameters(num_parameters: int, share: int, stage: int, precision: Precision) -> int:
    """Gradients that are copied to fp32 at once."""
    if stage == 0:
        return 0 if precision == "fp32" else num_parameters
    return min(share, ZERO3_SUB_GROUP_PARAMETERS) if stage == 3 else share


def communication_bytes(
    spec: ModelSpec, strategy: DataParallelStrategy, precision: Precision, *, bucket_bytes: int, overlap_communication: bool
) -> int:
    """Buffers of one rank that gradients and weights pass through, and with ZeRO-3 the weights that are whole for a while.

    ddp reduces gradients where they lie (``gradient_as_bucket_view``). ZeRO-1 and 2 copy them to a bucket, and to a
    second one while the first is on its way; they gather weights in place. ZeRO-3 has one bucket, half of one for weights
    that it fetches ahead, and those in use: two neighbours, layers or the embedding, at least. No bucket is larger than
    the model.
    """
    stage, element = zero_stage(strategy), ELEMENT_BYTES[precision]
    bucket = min(bucket_bytes, element * spec.num_parameters)
    if stage == 0:
        return 0
    if stage < 3:
        return bucket * (2 if overlap_communication else 1)
    neighbours = spec.num_layer_parameters + max(spec.vocab_size * spec.hidden_size, spec.num_layer_parameters)
    in_use = min(spec.num_parameters, max(neighbours, ZERO3_LIVE_PARAMETERS))
    return bucket + bucket // 2 + element * in_use
