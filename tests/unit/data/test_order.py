"""The order of rows: a bijection, other in every epoch, the same at any world size."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.data.order import RowOrder, SourceRows, permuted, positions_of_step
from rayapp.layout import BatchPlan


def permutation(size: int, seed: int = 0, stream: int = 0, epoch: int = 0) -> list[int]:
    return [permuted(i, size, seed=seed, stream=stream, epoch=epoch) for i in range(size)]


@given(st.integers(1, 700), st.integers(0, 2**63), st.integers(0, 5))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(size, seed, epoch=epoch)) == list(range(size))


@pytest.mark.parametrize("size", [*range(1, 20), 255, 256, 257, 1023, 1024, 1025, 4097])
def test_permutation_is_a_bijection_around_powers_of_two(size: int) -> None:
    assert sorted(permutation(size)) == list(range(size))


def test_permutations_differ_by_seed_stream_and_epoch() -> None:
    orders = {tuple(permutation(1000, *key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (10, 0, 0)]}
    assert len(orders) == 6
    assert tuple(range(1000)) not in orders


def test_permutation_of_a_huge_range_is_immediate() -> None:
    size = 10**15
    images = {permuted(i, size, seed=1, stream=0, epoch=0) for i in range(1000)}
    assert len(images) == 1000
    assert all(0 <= image < size for image in images)


def test_permutation_looks_random() -> None:
    """Chi-square over the images' place for 4,000 permutations of 6: 30 degrees of freedom beyond chance at 80."""
    counts = [[0] * 6 for _ in range(6)]
    for seed in range(4000):
        for i, image in enumerate(permutation(6, seed)):
            counts[i][image] += 1
    expected = 4000 / 6
    chi_square = sum((count - expected) ** 2 / expected for row in counts for count in row)
    assert chi_square < 80


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_positions_of_all_ranks_are_the_global_batch(micro: int, accumulation: int, step: int) -> None:
    for dp_size in (1, 2, 4):
        size = micro * accumulation * dp_size
        plan = BatchPlan(size, micro, accumulation, dp_size)
        ranks = [positions_of_step(step, plan, rank) for rank in range(dp_size)]
        in_order = [position for a in range(accumulation) for rank in ranks for position in rank[a]]
        assert in_order == list(range(step * size, (step + 1) * size))


def test_every_world_size_reads_the_same_rows_in_a_step() -> None:
    order = RowOrder([SourceRows(53, 2.0), SourceRows(17, 1.0)], seed=3, shuffle=True)
    for step in range(20):
        seen = set()
        for micro, accumulation, dp_size in [(16, 1, 1), (4, 4, 1), (4, 2, 2), (2, 2, 4), (4, 1, 4), (1, 16, 1)]:
            plan = BatchPlan(16, micro, accumulation, dp_size)
            rows = chain.from_iterable(chain.from_iterable(order.rows_of_step(step, plan, rank)) for rank in range(dp_size))
            seen.add(tuple(sorted(rows)))
        assert len(seen) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_reads_every_row_once(shuffle: bool) -> None:
    order = RowOrder([SourceRows(53, 1.0)], seed=3, shuffle=shuffle)
    epochs = [[order.row_at(position) for position in range(53 * e, 53 * (e + 1))] for e in range(4)]
    assert all(sorted(epoch) == list(range(53)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (4 if shuffle else 1)
    assert (epochs[0] == list(range(53))) is not shuffle


def test_sources_go_through_their_own_epochs() -> None:
    order = RowOrder([SourceRows(30, 3.0), SourceRows(5, 1.0)], seed=0, shuffle=True)
    rows = [order.row_at(position) for position in range(40)]
    assert sorted(row for row in rows if row < 30) == list(range(30))
    assert sorted(row for row in rows if row >= 30) == sorted([*range(30, 35), *range(30, 35)])


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a row"):
        RowOrder([SourceRows(3, 1.0), SourceRows(0, 1.0)], seed=0, shuffle=True)
