"""Batches against a plain reimplementation that knows rows by their ids."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from rayapp.config.schema import CacheSection
from rayapp.data.loader import Loader
from rayapp.engine import IGNORED_LABEL, Batch
from rayapp.errors import DataError

S = 8


def make_loader(prepared, dp_rank: int = 0, dp_size: int = 1, micro: int = 4, accumulation: int = 2, **changes) -> Loader:
    settings = {"seed": 5, "shuffle": True, "reset_attention": False, "pin_memory": False, "cache": CacheSection(), **changes}
    return Loader(
        prepared,
        global_batch_size=micro * accumulation * dp_size,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dp_rank=dp_rank,
        dp_size=dp_size,
        **settings,
    )


def train(prepared, num_steps: int, start_step: int = 0, **settings) -> list[list[Batch]]:
    with make_loader(prepared, **settings) as loader:
        batches = loader.train_batches(start_step)
        steps = list(islice(batches, num_steps))
        batches.close()
    return steps


def naive(data, row_id: int, reset_attention: bool) -> tuple[list[int], list[int], list[int]]:
    """Inputs, labels and positions of one row, token by token."""
    if row_id == -1:
        return [0] * S, [IGNORED_LABEL] * S, list(range(S))
    tokens, mask, starts = data.tokens[row_id], data.loss_mask[row_id], data.document_starts[row_id]
    labels, positions, position = [], [], 0
    for i in range(S):
        if i in starts:
            position = 0
        positions.append(position)
        position += 1
        counts = mask[i + 1] and not (reset_attention and i + 1 in starts)
        labels.append(int(tokens[i + 1]) if counts else IGNORED_LABEL)
    return tokens[:S].tolist(), labels, positions


def check(data, batch: Batch, reset_attention: bool) -> None:
    for b, row_id in enumerate(batch.row_ids):
        inputs, labels, positions = naive(data, row_id, reset_attention)
        assert batch.input_ids[b].tolist() == inputs
        assert batch.labels[b].tolist() == labels
        if reset_attention:
            assert batch.position_ids[b].tolist() == positions
    assert (batch.position_ids is None) is not reset_attention
    assert batch.input_ids.dtype == batch.labels.dtype


@pytest.mark.parametrize("reset_attention", [True, False])
def test_batches_hold_the_rows_that_they_name(make_data: Callable, reset_attention: bool) -> None:
    data = make_data()
    for step in train(data.prepared, 8, reset_attention=reset_attention):
        assert [len(batch.row_ids) for batch in step] == [4, 4]
        for batch in step:
            assert batch.input_ids.shape == batch.labels.shape == (4, S)
            check(data, batch, reset_attention)


def rows_of(step: list[Batch]) -> list[int]:
    return [row_id for batch in step for row_id in batch.row_ids]


def test_any_world_size_reads_the_same_rows_in_a_step(make_data: Callable) -> None:
    prepared = make_data(train=(37, 5), validation=(11, 0), weights=(1.0, 2.0)).prepared
    steps_by_layout = []
    for dp_size, micro, accumulation in [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1)]:
        ranks = [train(prepared, 6, dp_rank=r, dp_size=dp_size, micro=micro, accumulation=accumulation) for r in range(dp_size)]
        steps_by_layout.append([sorted(row for step in steps for row in rows_of(step)) for steps in zip(*ranks, strict=True)])
    assert all(steps == steps_by_layout[0] for steps in steps_by_layout)
    assert len({tuple(step) for step in steps_by_layout[0]}) == 6


def test_resuming_at_a_step_equals_going_on(make_data: Callable) -> None:
    prepared = make_data().prepared
    whole = train(prepared, 10)
    resumed = train(prepared, 4, start_step=6)
    for a, b in zip(whole[6:], resumed, strict=True):
        assert rows_of(a) == rows_of(b)
        assert all(x.input_ids.equal(y.input_ids) and x.labels.equal(y.labels) for x, y in zip(a, b, strict=True))


def test_every_epoch_reads_every_row_once_in_another_order(make_data: Callable) -> None:
    prepared = make_data(train=(40,)).prepared
    rows = [row for step in train(prepared, 15) for row in rows_of(step)]
    epochs = [rows[start : start + 40] for start in (0, 40, 80)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [row for step in train(prepared, 5, shuffle=False) for row in rows_of(step)] == list(range(40))
    assert [row for step in train(prepared, 5, seed=6) for row in rows_of(step)] != epochs[0]


def validation(prepared, max_rows: int = 1000, **settings) -> list[list[Batch]]:
    with make_loader(prepared, **settings) as loader:
        return list(loader.validation_batches(max_rows))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize(("micro", "accumulation"), [(1, 1), (2, 3), (4, 2)])
def test_validation_reads_all_held_out_rows_with_equal_ranks(make_data: Callable, dp_size: int, micro: int, accumulation: int) -> None:
    data = make_data()
    ranks = [validation(data.prepared, dp_rank=r, dp_size=dp_size, micro=micro, accumulation=accumulation) for r in range(dp_size)]
    assert len({tuple(len(step) for step in rank) for rank in ranks}) == 1
    assert all(0 < len(step) <= accumulation for step in ranks[0])
    micro_batches = [[batch for step in rank for batch in step] for rank in ranks]
    in_order = [row for batches in zip(*micro_batches, strict=True) for batch in batches for row in batch.row_ids]
    held_out = list(range(37, 48))
    assert in_order[:11] == held_out
    assert set(in_order[11:]) <= {-1}
    assert len(in_order) - 11 < micro * dp_size
    for batches in micro_batches:
        for batch in batches:
            check(data, batch, reset_attention=False)


def test_fewer_validation_rows_are_spread_over_all(make_data: Callable) -> None:
    prepared = make_data(validation=(100,)).prepared
    rows = [row for step in validation(prepared, max_rows=8) for row in rows_of(step)]
    assert rows == [37 + i * 100 // 8 for i in range(8)]


def test_without_held_out_rows_validation_is_empty(make_data: Callable) -> None:
    assert validation(make_data(validation=(0,)).prepared) == []


def test_validation_while_training_goes_on(make_data: Callable) -> None:
    prepared = make_data().prepared
    expected = [rows_of(step) for step in train(prepared, 12)]
    with make_loader(prepared) as loader:
        batches = loader.train_batches(0)
        got = []
        for i in range(12):
            got.append(rows_of(next(batches)))
            if i % 4 == 0:
                assert len(list(loader.validation_batches(5))) == 1
        batches.close()
    assert got == expected


def test_a_shard_that_went_away_fails_in_the_consumer(make_data: Callable) -> None:
    prepared = make_data().prepared
    for shard in prepared.manifest.shards:
        (prepared.folder / shard.name).delete()
    with make_loader(prepared) as loader, pytest.raises(DataError, match="cannot be read"):
        next(loader.train_batches(0))


def test_a_batch_that_does_not_divide_is_refused(make_data: Callable) -> None:
    with pytest.raises(ValueError, match="global_batch_size=7"):
        Loader(
            make_data().prepared,
            seed=0,
            shuffle=True,
            reset_attention=False,
            global_batch_size=7,
            micro_batch_size=2,
            gradient_accumulation_steps=2,
            dp_rank=0,
            dp_size=2,
            pin_memory=False,
            cache=CacheSection(),
        )


def test_batches_may_be_changed(make_data: Callable) -> None:
    """They are copies: an engine that pads a vocabulary or masks in place does not touch the mapped file."""
    data = make_data()
    batch = train(data.prepared, 1)[0][0]
    batch.input_ids.zero_()
    batch.labels.zero_()
    assert np.array_equal(train(data.prepared, 1)[0][0].input_ids[0].numpy(), data.tokens[train(data.prepared, 1)[0][0].row_ids[0]][:S])
