"""The order of data: a pure function of (seed, step), in constant memory, the same at any world size. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from rayapp.data.mixture import Mixture
from rayapp.layout import BatchPlan

NUM_ROUNDS = 6
WORD_MASK = 2**64 - 1


@lru_cache(maxsize=1024)
def _round_keys(seed: int, stream: int, epoch: int) -> tuple[int, ...]:
    message = f"{seed}/{stream}/{epoch}".encode()
    return struct.unpack(f"<{NUM_ROUNDS}Q", hashlib.blake2b(message, digest_size=8 * NUM_ROUNDS).digest())


def _mix(word: int) -> int:
    """Spread every bit of a 64-bit word over the others.

    Source: the output function of SplitMix64, Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195
    """
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD_MASK
    return word ^ (word >> 31)


def permuted(index: int, size: int, *, seed: int, stream: int, epoch: int) -> int:
    """Where a random permutation of ``range(size)`` sends ``index``, without holding the permutation.

    A Feistel network permutes the smallest square power of two that holds ``size``; an image outside the range is sent
    through it again (cycle walking), fewer than four times on average.

    Args:
        index: in ``range(size)``.
        size: elements.
        seed: of the run.
        stream: tells permutations of one seed and epoch apart: the source's index.
        epoch: counts from 0.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", https://doi.org/10.1007/3-540-45760-7_9
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    keys = _round_keys(seed, stream, epoch)
    image = index
    while True:
        left, right = image >> half_bits, image & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & half_mask)
        image = left << half_bits | right
        if image < size:
            return image


def positions_of_step(step: int, plan: BatchPlan, dp_rank: int) -> list[range]:
    """The positions of one rank's micro-batches in step ``step``: one range for each accumulation index.

    The global batch of step n is the positions n*G to (n+1)*G - 1; of them, micro-batch ``b`` of accumulation ``a`` on rank
    ``r`` takes ``(a * dp_size + r) * micro_batch_size + b``. So every world size reads the same positions in a step.
    """
    first = step * plan.global_batch_size + dp_rank * plan.micro_batch_size
    stride = plan.dp_size * plan.micro_batch_size
    starts = (first + accumulation * stride for accumulation in range(plan.gradient_accumulation_steps))
    return [range(start, start + plan.micro_batch_size) for start in starts]


@dataclass(frozen=True)
class SourceRows:
    """One source of a mixture.

    Attributes:
        num_rows: rows that an epoch of it has.
        weight: its share, relative to the others'.
    """

    num_rows: int
    weight: float


class RowOrder:
    """Which row every position reads. Each source of the mixture goes through its own epochs.

    Args:
        sources: the mixture; each has at least one row.
        seed: of the run.
        shuffle: another order in every epoch; else rows come as they were packed.
    """

    def __init__(self, sources: Sequence[SourceRows], *, seed: int, shuffle: bool) -> None:
        if min(source.num_rows for source in sources) < 1:
            raise ValueError("every source of an order needs a row")
        self._num_rows = [source.num_rows for source in sources]
        self._first_rows = [0, *accumulate(self._num_rows)]
        self._mixture = Mixture([source.weight for source in sources])
        self._seed = seed
        self._shuffle = shuffle

    def row_at(self, position: int) -> int:
        """The row id (the source's first row id plus the row) that ``position`` reads."""
        draw = self._mixture.draw(position)
        num_rows = self._num_rows[draw.source]
        epoch, row = divmod(draw.index, num_rows)
        if self._shuffle:
            row = permuted(row, num_rows, seed=self._seed, stream=draw.source, epoch=epoch)
        return self._first_rows[draw.source] + row

    def rows_of_step(self, step: int, plan: BatchPlan, dp_rank: int) -> list[list[int]]:
        """The row ids of one rank's micro-batches in step ``step``: one list for each accumulation index."""
        return [[self.row_at(position) for position in micro_batch] for micro_batch in positions_of_step(step, plan, dp_rank)]
