"""Documents become fixed rows: one stream of tokens, cut in rows that overlap by one token.

Row ``i`` holds the stream's tokens ``[i * S, i * S + S]``, so each token but the stream's first is predicted exactly once.

Shapes: S sequence length, R rows, T tokens of a document. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one stream.

    Attributes:
        tokens: [R, S+1] int32.
        loss_mask: [R, S+1]; True where the token counts as a target of the loss.
        document_starts: for each row, the positions in 0..S where a document begins, ascending. A document that begins on
            the token that two rows share is in both.
    """

    tokens: Tokens
    loss_mask: Mask
    document_starts: list[Tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.tokens[part], self.loss_mask[part], self.document_starts[part])


class Packer:
    """Packs a stream of documents, holding at most one block of rows and one document.

    Args:
        sequence_length: S.
        pad_token_id: fills the end of the stream's last row, where the loss mask is False.
        rows_per_block: rows that ``add`` gives at a time.
    """

    def __init__(self, sequence_length: int, pad_token_id: int, rows_per_block: int) -> None:
        self._sequence_length = sequence_length
        self._pad_token_id = pad_token_id
        self._rows_per_block = rows_per_block
        self._tokens: list[Tokens] = []
        self._masks: list[Mask] = []
        self._starts: list[int] = []
        self._num_pending = 0

    def add(self, tokens: Tokens, loss_mask: Mask) -> Iterator[Rows]:
        """Append one document ([T] tokens and their mask) and give the blocks that are full.

        The iterator must be used up before the next document.
        """
        self._starts.append(self._num_pending)
        self._tokens.append(tokens)
        self._masks.append(loss_mask)
        self._num_pending += len(tokens)
        while self._num_pending > self._rows_per_block * self._sequence_length:
            yield self._cut(self._rows_per_block)

    def finish(self) -> Rows | None:
        """What is left, its last row padded. None if no token is left to predict."""
        num_targets = self._num_pending - 1
        if num_targets < 1:
            return None
        num_rows = -(-num_targets // self._sequence_length)
        num_padding = num_rows * self._sequence_length - num_targets
        self._tokens.append(np.full(num_padding, self._pad_token_id, dtype=np.int32))
        self._masks.append(np.zeros(num_padding, dtype=np.bool_))
        self._num_pending += num_padding
        return self._cut(num_rows)

    def _cut(self, num_rows: int) -> Rows:
        """Take ``num_rows`` rows from the front; the last one's last token stays as the next row's first."""
        tokens, mask = _joined(self._tokens), _joined(self._masks)
        end = num_rows * self._sequence_length
        rows = Rows(self._windows(tokens, num_rows), self._windows(mask, num_rows), self._starts_by_row(num_rows))
        self._tokens, self._masks = [tokens[end:]], [mask[end:]]
        self._starts = [start - end for start in self._starts if start >= end]
        self._num_pending -= end
        return rows

    def _windows(self, stream: npt.NDArray[Scalar], num_rows: int) -> npt.NDArray[Scalar]:
        length = self._sequence_length
        windows = np.lib.stride_tricks.sliding_window_view(stream[: num_rows * length + 1], length + 1)[::length]
        return np.ascontiguousarray(windows)

    def _starts_by_row(self, num_rows: int) -> list[Tokens]:
        starts = np.asarray(self._starts, dtype=np.int64)
        first_tokens = np.arange(num_rows) * self._sequence_length
        low = np.searchsorted(starts, first_tokens, side="left")
        high = np.searchsorted(starts, first_tokens + self._sequence_length, side="right")
        return [(starts[a:b] - first).astype(np.int32) for a, b, first in zip(low, high, first_tokens, strict=True)]


def _joined(parts: list[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    """One array; a single part is not copied, so that cutting a long document block by block stays linear."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
