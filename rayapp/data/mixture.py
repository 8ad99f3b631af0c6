"""A weighted mixture of sources as a pure function of the position.

The sources are the leaves of a binary tree. Of the first ``p`` positions that reach a node, ``round(p * share)`` go left and
the others right, so a position's way down needs nothing but ``p``: no state, no block to hold, and no weight too small to be
drawn. It is the two-colour Bresenham line, nested. The arithmetic is exact (integers of any size), and at any position a
source's count is less than 2 away from its exact share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Draw:
    """What a position of the mixture reads.

    Attributes:
        source: the source's index.
        index: how many earlier positions read the same source.
    """

    source: int
    index: int


@dataclass(frozen=True)
class _Leaf:
    source: int


@dataclass(frozen=True)
class _Split:
    """A node that sends ``left_weight / weight`` of its positions to the left."""

    left: _Split | _Leaf
    right: _Split | _Leaf
    left_weight: int
    weight: int

    def num_left(self, count: int) -> int:
        """How many of the first ``count`` positions go left: the exact share, rounded."""
        return (2 * count * self.left_weight + self.weight) // (2 * self.weight)


class Mixture:
    """A mixture of sources.

    Args:
        weights: positive; a source's share is its weight over their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        if not exact or min(exact) <= 0:
            raise ValueError(f"a mixture needs positive weights, not {list(weights)}")
        self._root = _tree(exact)

    def draw(self, position: int) -> Draw:
        """What ``position`` (from 0) reads. O(log sources) for weights of one size, O(sources) at worst."""
        node, index = self._root, position
        while isinstance(node, _Split):
            before = node.num_left(index)
            goes_left = node.num_left(index + 1) > before
            node, index = (node.left, before) if goes_left else (node.right, index - before)
        return Draw(node.source, index)


def _tree(weights: list[Fraction]) -> _Split | _Leaf:
    """Huffman's tree: heavy sources near the root, where the rounding is smallest."""
    scale = 1
    for weight in weights:
        scale = max(scale, weight.denominator)  # a float's denominator is a power of two: the largest is common to all
    heap: list[tuple[int, int, _Split | _Leaf]] = [(int(weight * scale), source, _Leaf(source)) for source, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        light, first, right = heapq.heappop(heap)
        heavy, second, left = heapq.heappop(heap)
        heapq.heappush(heap, (light + heavy, min(first, second), _Split(left, right, heavy, light + heavy)))
    return heap[0][2]
