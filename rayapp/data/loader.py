"""The batches of one data-parallel rank, made ahead of the step that uses them.

Shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from itertools import count
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from rayapp.config.schema import CacheSection
from rayapp.data.order import RowOrder, SourceRows, positions_of_step
from rayapp.data.prefetch import prefetched
from rayapp.data.shards import PreparedData, Row, ShardReader
from rayapp.engine import IGNORED_LABEL, Batch
from rayapp.layout import BatchPlan

PREFETCHED_STEPS = 4
PADDING_ROW_ID = -1

log = logging.getLogger(__name__)


class Loader:
    """Reads prepared data in an order that is a pure function of the seed and the step.

    Every rank of one data-parallel rank (its tensor and pipeline ranks) reads the same.

    Args:
        prepared: the data.
        seed: of the run.
        shuffle: another order of the rows in every epoch.
        reset_attention: batches tell where documents begin, and the loss leaves a document's first token out.
        global_batch_size: sequences of a step, over all ranks.
        micro_batch_size: B.
        gradient_accumulation_steps: micro-batches of one rank in a step.
        dp_rank: which data-parallel rank this is.
        dp_size: how many there are.
        pin_memory: batches lie in page-locked memory, from which a GPU copies without waiting.
        cache: of this node, for shards that are not in its file tree.

    Raises:
        ValueError: global_batch_size is not micro_batch_size x gradient_accumulation_steps x dp_size.
    """

    def __init__(
        self,
        prepared: PreparedData,
        *,
        seed: int,
        shuffle: bool,
        reset_attention: bool,
        global_batch_size: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        pin_memory: bool,
        cache: CacheSection,
    ) -> None:
        if global_batch_size != micro_batch_size * gradient_accumulation_steps * dp_size:
            raise ValueError(f"{global_batch_size=} is not {micro_batch_size=} x {gradient_accumulation_steps=} x {dp_size=}")
        sources = [SourceRows(source.num_train_rows, source.weight) for source in prepared.manifest.sources]
        self._order = RowOrder(sources, seed=seed, shuffle=shuffle)
        self._plan = BatchPlan(global_batch_size, micro_batch_size, gradient_accumulation_steps, dp_size)
        self._dp_rank = dp_rank
        self._num_train_rows = prepared.num_train_rows
        self._num_validation_rows = prepared.num_validation_rows
        self._collate = Collator(prepared.manifest.sequence_length, prepared.manifest.eos_token_id, reset_attention=reset_attention)
        self._pin_memory = pin_memory
        self._reader = ShardReader(prepared, cache)
        if dp_rank == 0:
            _tell_if_cache_is_small(prepared, cache)

    def train_batches(self, start_step: int) -> Generator[list[Batch], None, None]:
        """Endless: this rank's accumulation list of ``start_step``, of the step after it, and so on."""
        return self._ahead(lambda: self._train_steps(start_step))

    def validation_batches(self, max_rows: int) -> Generator[list[Batch], None, None]:
        """Held-out rows in their order, evenly spread over all of them where there are more than ``max_rows``.

        Every rank gets the same number of micro-batches, in lists of ``gradient_accumulation_steps`` (the last list may be
        shorter). Rows that fill up the last micro-batches have the id -1 and no valid label. Nothing comes where no
        document is held out.
        """
        return self._ahead(lambda: self._validation_steps(max_rows))

    def close(self) -> None:
        """Let go of the shards. Close the iterators first."""
        self._reader.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _train_steps(self, start_step: int) -> Iterator[list[Batch]]:
        for step in count(start_step):
            yield [self._batch(row_ids) for row_ids in self._order.rows_of_step(step, self._plan, self._dp_rank)]

    def _validation_steps(self, max_rows: int) -> Iterator[list[Batch]]:
        num_rows = min(max_rows, self._num_validation_rows)
        rows_of_all_ranks = self._plan.micro_batch_size * self._plan.dp_size
        num_micro_batches = -(-num_rows // rows_of_all_ranks)
        for first in range(0, num_micro_batches, self._plan.gradient_accumulation_steps):
            step = first // self._plan.gradient_accumulation_steps
            micro_batches = positions_of_step(step, self._plan, self._dp_rank)[: num_micro_batches - first]
            yield [self._batch([self._validation_row_id(position, num_rows) for position in positions]) for positions in micro_batches]

    def _validation_row_id(self, position: int, num_rows: int) -> int:
        if position >= num_rows:
            return PADDING_ROW_ID
        return self._num_train_rows + position * self._num_validation_rows // num_rows

    def _batch(self, row_ids: list[int]) -> Batch:
        return self._collate([None if row_id == PADDING_ROW_ID else self._reader[row_id] for row_id in row_ids], tuple(row_ids))

    def _ahead(self, make_steps: Callable[[], Iterator[list[Batch]]]) -> Generator[list[Batch], None, None]:
        if not self._pin_memory:
            return prefetched(make_steps, PREFETCHED_STEPS)
        device = torch.cuda.current_device()
        return prefetched(lambda: _pinned(make_steps(), device), PREFETCHED_STEPS)


def _pinned(steps: Iterator[list[Batch]], device: int) -> Iterator[list[Batch]]:
    torch.cuda.set_device(device)  # pinning takes the thread's device, and a new thread's is 0: that would cost memory there
    for micro_batches in steps:
        yield [_pin(batch) for batch in micro_batches]


def _pin(batch: Batch) -> Batch:
    positions = None if batch.position_ids is None else batch.position_ids.pin_memory()
    return Batch(batch.input_ids.pin_memory(), batch.labels.pin_memory(), positions, batch.row_ids)


def _tell_if_cache_is_small(prepared: PreparedData, cache: CacheSection) -> None:
    size_bytes = sum(shard.size_bytes for shard in prepared.manifest.shards)
    if not prepared.folder.is_local and size_bytes > cache.quota_bytes:
        log.warning(
            "the shards (%d bytes) do not fit in data.cache.quota_bytes=%d: they will be copied again and again",
            size_bytes,
            cache.quota_bytes,
        )


class Collator:
    """Makes a batch of rows.

    Args:
        sequence_length: S.
        padding_token_id: fills rows that are not there.
        reset_attention: see ``Loader``.
    """

    def __init__(self, sequence_length: int, padding_token_id: int, *, reset_attention: bool) -> None:
        self._sequence_length = sequence_length
        self._reset_attention = reset_attention
        self._padding = Row(
            np.full(sequence_length + 1, padding_token_id, dtype=np.int32),
            np.zeros(sequence_length + 1, dtype=np.bool_),
            np.zeros(0, dtype=np.int32),
        )

    def __call__(self, rows: list[Row | None], row_ids: tuple[int, ...]) -> Batch:
        """The batch of B rows; None stands for a row of padding without a valid label."""
        filled = [self._padding if row is None else row for row in rows]
        tokens = np.stack([row.tokens for row in filled]).astype(np.int64)
        counts = np.stack([row.loss_mask for row in filled])
        positions = None
        if self._reset_attention:
            starts = self._starts(filled)
            counts &= ~starts
            positions = torch.from_numpy(_positions(starts[:, :-1]))
        labels = np.where(counts[:, 1:], tokens[:, 1:], IGNORED_LABEL)
        return Batch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(labels), positions, row_ids)

    def _starts(self, rows: list[Row]) -> npt.NDArray[np.bool_]:
        """[B, S+1]; True where a document begins."""
        starts = np.zeros((len(rows), self._sequence_length + 1), dtype=np.bool_)
        for i, row in enumerate(rows):
            starts[i, row.document_starts] = True
        return starts


def _positions(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[B, S] positions that count from 0 at every start, and at the row's beginning."""
    index = np.arange(starts.shape[1], dtype=np.int64)
    newest_start = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return index - newest_start
