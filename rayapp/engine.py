"""The seam between the training loop and every strategy.

Shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank.

    Attributes:
        input_ids: [B, S] int64.
        labels: [B, S] int64, already shifted: ``labels[b, s]`` is the token that follows ``input_ids[b, s]``, or
            ``IGNORED_LABEL`` where the loss does not count.
        position_ids: [B, S] int64, starting from 0 at every document's first token; None where documents that share a
            row see each other.
        row_ids: the stable ids of the rows, for tests and for reports on data; length B.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    row_ids: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. From pinned memory the copy does not wait."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(move(self.input_ids), move(self.labels), None if self.position_ids is None else move(self.position_ids), self.row_ids)


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step gave.

    Attributes:
        loss: mean cross-entropy in nats over the valid tokens of all ranks and micro-batches.
        grad_norm: 2-norm of the gradient over all parameters, before clipping.
        applied: False if the step was skipped because a number was not finite, or the loss too high.
        num_valid_tokens: tokens that the loss counted, over all ranks.
    """

    loss: float
    grad_norm: float
    applied: bool
    num_valid_tokens: int


@dataclass(frozen=True)
class EvalOutput:
    """Sum of the cross-entropy in nats, and the number of valid tokens, over all ranks."""

    loss_sum: float
    num_valid_tokens: int

    @property
    def loss(self) -> float:
        return self.loss_sum / self.num_valid_tokens if self.num_valid_tokens else float("nan")


@dataclass(frozen=True)
class ParameterState:
    """One parameter of the logical state, whole, in fp32, on the CPU.

    Attributes:
        name: its Hugging Face name.
        weight: the master weight.
        exp_avg: Adam's first moment.
        exp_avg_sq: Adam's second moment.
    """

    name: str
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class TrainingState(Protocol):
    """The one logical state that every strategy can give and take, whatever the world size."""

    @property
    def step(self) -> int:
        """Optimizer steps that were applied (Adam's own count)."""

    @property
    def loss_scale(self) -> float | None:
        """The dynamic loss scale of fp16; None for other precisions."""

    def names(self) -> list[str]:
        """The parameters' names, tied ones once."""

    def parameter(self, name: str) -> ParameterState:
        """One parameter. With an engine behind it, every rank must call this for the same names in the same order."""

    def __iter__(self) -> Iterator[ParameterState]:
        """All parameters, one at a time."""


class Snapshot(Protocol):
    """One rank's part of the logical state, ready to be written."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""

    def files(self) -> dict[str, Callable[[], Iterator[memoryview]]]:
        """The rank's files by name: each gives its bytes from the beginning whenever it is called."""


class TrainEngine(Protocol):
    """A strategy. It takes the whole accumulation list, so that all kinds of parallelism share one signature."""

    def train_step(self, micro_batches: list[Batch], learning_rate: float, max_loss: float | None = None) -> StepOutput:
        """One optimizer step. The loss of every valid token weighs the same, whichever micro-batch or rank it is in.

        Args:
            micro_batches: of this rank.
            learning_rate: of this step.
            max_loss: a step whose loss is higher is not applied; None: any finite one is.
        """

    def eval_step(self, micro_batches: list[Batch]) -> EvalOutput:
        """The loss without gradients and without dropout."""

    def snapshot(self, *, copied: bool) -> Snapshot:
        """This rank's part of the state as it is now. Every rank calls it.

        Args:
            copied: into memory of the host that the engine keeps for this: it stays as it is while training goes on, until the
                next snapshot. False: nothing is copied, and it must be written before the next step.
        """

    def load(self, folder: Path) -> None:
        """Read what snapshots wrote. Every rank calls it, with a folder that holds every rank's files."""

    def state(self) -> TrainingState:
        """The logical state, whole parameter by whole parameter."""

    def load_state(self, state: TrainingState) -> None:
        """Take a logical state from any strategy and world size."""

    def close(self) -> None:
        """Free what the engine holds. It cannot be used afterwards."""
