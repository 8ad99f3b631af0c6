"""Tokenizes and packs one group of files: the unit of parallel work.

What a group holds depends on the corpus and the run file only, and each group is its own stream of tokens, so the shards are
the same bytes however many processes work, in whatever order, and however often one of them starts again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer

from rayapp.data.packing import Packer
from rayapp.data.reading import DropReason, Piece, Unreadable, cut_file, read_piece
from rayapp.data.shards import ManifestPart, ShardEntry, ShardWriter, UnreadableFile
from rayapp.data.sources import SourceFile
from rayapp.storage import Location

SMALLEST_GROUP_BYTES = 2**20
GROUPS_OF_A_SMALL_CORPUS = 64
ESTIMATED_BYTES_PER_TOKEN = 4
ENCODE_BYTES = 2**20
BLOCK_TOKENS = 2**20


@dataclass(frozen=True)
class RowFormat:
    """How documents become rows: what every group has in common.

    Attributes:
        tokenizer_json: the tokenizer, as `tokenizers` writes it.
        eos_token_id: ends each document.
        sequence_length: tokens that a row feeds to the model.
        rows_per_shard: rows of a full shard.
        validation_fraction: share of documents that is held out.
        max_document_bytes: a longer document is left out.
    """

    tokenizer_json: str
    eos_token_id: int
    sequence_length: int
    rows_per_shard: int
    validation_fraction: float
    max_document_bytes: int


@dataclass(frozen=True)
class Group:
    """Consecutive pieces of one source.

    Attributes:
        source: the source's index.
        index: which group of the source.
        pieces: in the source's order.
    """

    source: int
    index: int
    pieces: tuple[Piece, ...]

    def stem(self, split: str) -> str:
        return f"source-{self.source:03d}/{split}-{self.index:06d}"


class SplitResult(ManifestPart):
    """What a group gave to one split."""

    shards: list[ShardEntry] = Field(default_factory=list)
    """Its shards, in order."""
    num_documents: int = 0
    """Documents in them."""
    num_tokens: int = 0
    """Tokens in them, end tokens included, filling left out."""


class GroupResult(ManifestPart):
    """What became of one group."""

    source: int
    """The source's index."""
    index: int
    """Which group of the source."""
    train: SplitResult
    """To train on."""
    validation: SplitResult
    """Held out."""
    dropped: dict[str, int]
    """Rows that were left out, counted by reason."""
    unreadable_files: list[UnreadableFile]
    """Files whose content is defective."""


def form_groups(source: int, files: Iterable[SourceFile], row_format: RowFormat) -> list[Group]:
    """Cut a source into groups: small ones for a small corpus, of about one full shard for a large one."""
    files = list(files)
    group_bytes = _group_bytes(sum(Piece(file).estimated_text_bytes for file in files), row_format)
    groups: list[Group] = []
    pieces: list[Piece] = []
    num_bytes = 0
    for piece in (piece for file in files for piece in cut_file(file, group_bytes)):
        pieces.append(piece)
        num_bytes += piece.estimated_text_bytes
        if num_bytes >= group_bytes:
            groups.append(Group(source, len(groups), tuple(pieces)))
            pieces, num_bytes = [], 0
    return [*groups, Group(source, len(groups), tuple(pieces))] if pieces else groups


def _group_bytes(corpus_bytes: int, row_format: RowFormat) -> int:
    shard_bytes = row_format.rows_per_shard * row_format.sequence_length * ESTIMATED_BYTES_PER_TOKEN
    return max(SMALLEST_GROUP_BYTES, min(corpus_bytes // GROUPS_OF_A_SMALL_CORPUS, shard_bytes))


def is_held_out(text: str, validation_fraction: float) -> bool:
    """Whether a document is held out: by a hash of its text, so that every copy of it is on the same side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < validation_fraction * 2**64


class _Split:
    """One split of a group while it is written."""

    def __init__(self, group: Group, name: str, row_format: RowFormat, folder: Location, writer_id: str) -> None:
        rows_per_block = max(1, min(row_format.rows_per_shard, BLOCK_TOKENS // row_format.sequence_length))
        self._packer = Packer(row_format.sequence_length, row_format.eos_token_id, rows_per_block)
        self._writer = ShardWriter(
            folder,
            group.stem(name),
            sequence_length=row_format.sequence_length,
            rows_per_shard=row_format.rows_per_shard,
            writer_id=writer_id,
        )
        self._num_documents = 0
        self._num_tokens = 0

    def add(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        self._num_documents += 1
        self._num_tokens += len(tokens)
        for rows in self._packer.add(tokens, np.ones(len(tokens), dtype=np.bool_)):
            self._writer.add(rows)

    def finish(self) -> SplitResult:
        rows = self._packer.finish()
        if rows is not None:
            self._writer.add(rows)
        return SplitResult(shards=self._writer.finish(), num_documents=self._num_documents, num_tokens=self._num_tokens)


def prepare_group(group: Group, row_format: RowFormat, folder: Location) -> GroupResult:
    """Read, tokenize, pack and write one group, holding a block of rows and a batch of documents at a time.

    Raises:
        StorageError: the corpus cannot be read or the shards cannot be written.
    """
    (folder / f"source-{group.source:03d}").make_dirs()
    writer_id = uuid.uuid4().hex[:8]
    train, validation = (_Split(group, name, row_format, folder, writer_id) for name in ("train", "validation"))
    dropped: Counter[str] = Counter()
    unreadable: list[UnreadableFile] = []
    for text, ids in _encoded(_texts(group, row_format, dropped, unreadable), row_format.tokenizer_json):
        if not ids:
            dropped[DropReason.NO_TOKENS] += 1
            continue
        split = validation if is_held_out(text, row_format.validation_fraction) else train
        split.add(np.asarray([*ids, row_format.eos_token_id], dtype=np.int32))
    return GroupResult(
        source=group.source,
        index=group.index,
        train=train.finish(),
        validation=validation.finish(),
        dropped=dict(dropped),
        unreadable_files=unreadable,
    )


def prepare_item(item: dict[str, Any], row_format: RowFormat, folder: Location) -> dict[str, str]:
    """``prepare_group`` as Ray Data calls it. It is here because a worker that needs no transformers starts seconds sooner.

    Args:
        item: under ``group``, a pickled group.
        row_format: see ``prepare_group``.
        folder: see ``prepare_group``.

    Returns:
        Under ``result``, the group's result as JSON.
    """
    group: Group = pickle.loads(item["group"])
    return {"result": prepare_group(group, row_format, folder).model_dump_json()}


def _texts(group: Group, row_format: RowFormat, dropped: Counter[str], unreadable: list[UnreadableFile]) -> Iterator[str]:
    """The group's documents; the rest is counted."""
    for piece in group.pieces:
        for row in read_piece(piece, row_format.max_document_bytes):
            if isinstance(row, DropReason):
                dropped[row] += 1
            elif isinstance(row, Unreadable):
                unreadable.append(UnreadableFile(name=piece.file.location.uri, reason=row.reason))
            else:
                yield row


def _encoded(texts: Iterator[str], tokenizer_json: str) -> Iterator[tuple[str, list[int]]]:
    """Every text with its ids."""
    tokenizer = encoder(tokenizer_json)
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield from ((text, encoding.ids) for text, encoding in zip(batch, encodings, strict=True))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= ENCODE_BYTES:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1)
def encoder(tokenizer_json: str) -> Tokenizer:
    """The tokenizer for one process of many.

    It encodes all of a text (a truncation that the tokenizer's file may ask for is left out), in one thread (the other
    processes use the other cores), and text that spells a special token stays text: no document can end another.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
