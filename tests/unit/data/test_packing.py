"""Packing against the plain concatenation of the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.data.packing import Packer, Rows

PAD = 999
documents = st.lists(st.integers(1, 40), max_size=30)


def pack(lengths: list[int], sequence_length: int, rows_per_block: int) -> tuple[list[list[int]], list[Rows]]:
    """Documents of consecutive numbers with every third token masked, and the blocks they were packed to."""
    packer = Packer(sequence_length, PAD, rows_per_block)
    stream, blocks, first = [], [], 0
    for length in lengths:
        document = list(range(first, first + length))
        first += length
        stream.append(document)
        tokens = np.asarray(document, dtype=np.int32)
        blocks.extend(packer.add(tokens, tokens % 3 != 0))
    last = packer.finish()
    return stream, blocks + ([last] if last is not None else [])


@given(documents, st.integers(1, 16), st.integers(1, 5))
def test_rows_hold_the_documents_concatenation(lengths: list[int], sequence_length: int, rows_per_block: int) -> None:
    documents, blocks = pack(lengths, sequence_length, rows_per_block)
    stream = [token for document in documents for token in document]
    rows = [row.tolist() for block in blocks for row in block.tokens]
    masks = [mask.tolist() for block in blocks for mask in block.loss_mask]
    if len(stream) < 2:
        assert rows == []
        return
    unpacked = [token for row in rows for token in row[:-1]] + rows[-1][-1:]
    assert unpacked[: len(stream)] == stream
    assert set(unpacked[len(stream) :]) <= {PAD}
    assert len(unpacked) - len(stream) < sequence_length

    predicted = [token for row, mask in zip(rows, masks, strict=True) for token, counts in zip(row[1:], mask[1:], strict=True) if counts]
    assert predicted == [token for token in stream[1:] if token % 3 != 0]


@given(documents, st.integers(1, 16), st.integers(1, 5))
def test_document_starts(lengths: list[int], sequence_length: int, rows_per_block: int) -> None:
    documents, blocks = pack(lengths, sequence_length, rows_per_block)
    first_tokens = {document[0] for document in documents}
    for block in blocks:
        for tokens, starts in zip(block.tokens, block.document_starts, strict=True):
            assert starts.tolist() == [i for i, token in enumerate(tokens) if int(token) in first_tokens]


def test_block_size_does_not_change_the_rows() -> None:
    one = pack([13, 1, 50, 7, 7, 90], 6, 1)[1]
    many = pack([13, 1, 50, 7, 7, 90], 6, 1000)[1]
    assert len(many) == 1
    assert np.array_equal(np.concatenate([block.tokens for block in one]), many[0].tokens)
    assert [starts.tolist() for block in one for starts in block.document_starts] == [s.tolist() for s in many[0].document_starts]


@pytest.mark.parametrize("num_tokens", [8, 9, 10, 16, 17])
def test_a_stream_that_just_fits_needs_no_padding_row(num_tokens: int) -> None:
    _, blocks = pack([num_tokens], 8, 100)
    assert sum(len(block) for block in blocks) == {8: 1, 9: 1, 10: 2, 16: 2, 17: 2}[num_tokens]


def test_rows_are_held_no_longer_than_a_block() -> None:
    packer = Packer(10, PAD, 4)
    for _ in range(100):
        list(packer.add(np.arange(25, dtype=np.int32), np.ones(25, dtype=bool)))
        assert packer._num_pending <= 4 * 10
