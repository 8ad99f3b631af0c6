"""Prepared data on disk: shards of rows that are memory-mapped, and the manifest that vouches for them.

A prepared folder holds::

    manifest.json                                    written last: without it there is no prepared data
    tokenizer/                                       a Hugging Face folder
    source-000/train-000000-000.arrow                shard: source, group of files, part of the group
    source-000/validation-000000-000.arrow

A shard is an uncompressed Arrow IPC file, so that a row is read where the file is mapped. Shapes: S sequence length.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import fs
from pydantic import BaseModel, ConfigDict, ValidationError

from rayapp.config.schema import CacheSection
from rayapp.data.cache import ShardCache
from rayapp.data.packing import Mask, Rows, Tokens
from rayapp.documents import PrepareDocument
from rayapp.errors import DataError, Problem, StorageError
from rayapp.storage import Location

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer"
PREPARE_AGAIN = "remove the folder and run `rayapp prepare` again"
MAX_OPEN_SHARDS = 1024
MAX_LISTED_PROBLEMS = 20


class ManifestPart(BaseModel):
    """A frozen part of the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ShardEntry(ManifestPart):
    """One shard file."""

    name: str
    """Its path below the prepared folder."""
    num_rows: int
    """Rows in it."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Of the whole file, in hexadecimal."""


class SourceEntry(ManifestPart):
    """One source of the mixture."""

    path: str
    """As the run file gives it."""
    weight: float
    """Its share of the training rows, relative to the other sources' weights."""
    train: list[ShardEntry]
    """Shards to train on; their order numbers the rows."""
    validation: list[ShardEntry]
    """Shards of held-out documents."""

    @property
    def num_train_rows(self) -> int:
        return sum(shard.num_rows for shard in self.train)


class UnreadableFile(ManifestPart):
    """A file of the corpus whose content is defective."""

    name: str
    """Its location."""
    reason: str
    """What is wrong with it."""


class DataManifest(ManifestPart):
    """What a prepared folder holds."""

    format_version: Literal[1] = 1
    """Of this document and the shards."""
    fingerprint: str
    """Of the corpus, the tokenizer and how rows were made."""
    sequence_length: int
    """Tokens that a row feeds to the model; it holds one more."""
    vocab_size: int
    """Rows that an embedding needs for the tokenizer."""
    tokenizer_sha256: str
    """See `rayapp.data.tokenizer.tokenizer_sha256`."""
    eos_token_id: int
    """The token that ends each document, and fills the last row of a stream."""
    sources: list[SourceEntry]
    """The mixture."""
    num_documents: int
    """Documents that were kept, both splits."""
    num_validation_documents: int
    """Of them, held out."""
    num_train_tokens: int
    """Tokens of the training documents, with their end tokens, without filling."""
    num_validation_tokens: int
    """The same of the held-out documents."""
    dropped: dict[str, int]
    """Rows of the corpus that were left out, counted by reason."""
    num_unreadable_files: int
    """Files whose content is defective; what came before the defect is kept."""
    unreadable_files: list[UnreadableFile]
    """The first of them."""

    @property
    def shards(self) -> list[ShardEntry]:
        """All shards in the order of their row ids: those of every source to train on, then the held-out ones."""
        train = [shard for source in self.sources for shard in source.train]
        return train + [shard for source in self.sources for shard in source.validation]


@dataclass(frozen=True)
class PreparedData:
    """A complete prepared folder.

    Row ids number the rows: first the training rows, source by source, then the held-out ones.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
        reused: True if it was there before it was asked for.
    """

    folder: Location
    manifest: DataManifest
    reused: bool = True

    @property
    def num_train_rows(self) -> int:
        return sum(source.num_train_rows for source in self.manifest.sources)

    @property
    def num_validation_rows(self) -> int:
        return sum(shard.num_rows for source in self.manifest.sources for shard in source.validation)

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def tokenizer(self) -> Location:
        """The tokenizer's Hugging Face folder."""
        return self.folder / TOKENIZER_NAME

    def document(self) -> PrepareDocument:
        """What the `prepare` verb prints."""
        return PrepareDocument(
            data_dir=self.folder.uri,
            fingerprint=self.manifest.fingerprint,
            reused=self.reused,
            vocab_size=self.vocab_size,
            num_documents=self.manifest.num_documents,
            num_train_rows=self.num_train_rows,
            num_validation_rows=self.num_validation_rows,
            num_train_tokens=self.manifest.num_train_tokens,
            dropped=self.manifest.dropped,
        )

    def verify(self, *, deep: bool = False) -> None:
        """Check that every shard is there with its size; ``deep`` reads them all and checks their hashes too.

        Raises:
            DataError: names every shard that is missing or damaged.
        """
        sizes = _sizes_below(self.folder)
        problems = [problem for shard in self.manifest.shards if (problem := self._shard_problem(shard, sizes, deep))]
        if problems:
            raise DataError(*problems[:MAX_LISTED_PROBLEMS])

    def _shard_problem(self, shard: ShardEntry, sizes: dict[str, int], deep: bool) -> Problem | None:
        location = self.folder / shard.name
        if shard.name not in sizes:
            return Problem(f"shard {location.uri}", "is missing", PREPARE_AGAIN)
        if sizes[shard.name] != shard.size_bytes:
            return Problem(f"shard {location.uri}", f"has {sizes[shard.name]} bytes, not {shard.size_bytes}", PREPARE_AGAIN)
        if deep and location.sha256() != shard.sha256:
            return Problem(f"shard {location.uri}", "is damaged: its content has another SHA-256 than the manifest says", PREPARE_AGAIN)
        return None


def _sizes_below(folder: Location) -> dict[str, int]:
    """The size of every file below a folder, by its path from there: one listing, however many shards there are."""
    selector = fs.FileSelector(folder.path, recursive=True, allow_not_found=True)
    infos = folder.filesystem.get_file_info(selector)
    return {info.path.removeprefix(f"{folder.path}/"): int(info.size) for info in infos if info.type == fs.FileType.File}


def open_prepared(folder: Location, *, reused: bool = True) -> PreparedData:
    """Open a prepared folder and check that its shards are there.

    Raises:
        DataError: the manifest is missing or invalid, or a shard is missing or has another size.
    """
    manifest = folder / MANIFEST_NAME
    if not manifest.exists():
        raise DataError(Problem(f"prepared data {folder.uri}", f"has no {MANIFEST_NAME}", "run `rayapp prepare`, which writes it last"))
    try:
        prepared = PreparedData(folder, DataManifest.model_validate_json(manifest.read_bytes()), reused)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(Problem(f"manifest {manifest.uri}", f"is invalid: {where} {first['msg']}", PREPARE_AGAIN)) from error
    prepared.verify()
    return prepared


def _schema(row_length: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("tokens", pa.list_(pa.int32(), row_length), nullable=False),
            pa.field("loss_mask", pa.list_(pa.bool_(), row_length), nullable=False),
            pa.field("document_starts", pa.list_(pa.int32()), nullable=False),
        ]
    )


def _record_batch(rows: Rows) -> pa.RecordBatch:
    row_length = rows.tokens.shape[1]
    offsets = np.cumsum([0, *(len(starts) for starts in rows.document_starts)], dtype=np.int32)
    starts = np.concatenate(rows.document_starts)
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(rows.tokens.reshape(-1)), row_length),
        pa.FixedSizeListArray.from_arrays(pa.array(rows.loss_mask.reshape(-1)), row_length),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(starts)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(row_length))


class _ShardFile:
    """A shard while it is written; it appears under its name only when it is complete.

    A local file is renamed into place. An object store shows an object when its upload ends.
    """

    def __init__(self, folder: Location, name: str, row_length: int, writer_id: str) -> None:
        self._target = folder / name
        self._name = name
        partial = folder / f"{name}.{writer_id}.partial"
        self._partial = partial if folder.is_local else self._target
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self.num_rows = 0
        try:
            self._sink = self._partial.filesystem.open_output_stream(self._partial.path)
        except OSError as error:
            raise self._refused(error) from error
        self._writer = pa.ipc.new_file(pa.PythonFile(self, mode="w"), _schema(row_length))

    def add(self, rows: Rows) -> None:
        self._writer.write_batch(_record_batch(rows))
        self.num_rows += len(rows)

    def finish(self) -> ShardEntry:
        self._writer.close()
        try:
            self._sink.close()
            if self._partial != self._target:
                self._target.filesystem.move(self._partial.path, self._target.path)
        except OSError as error:
            raise self._refused(error) from error
        return ShardEntry(name=self._name, num_rows=self.num_rows, size_bytes=self._size_bytes, sha256=self._digest.hexdigest())

    # what Arrow's writer asks of a Python file

    closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content)
        self._digest.update(view)
        self._size_bytes += view.nbytes
        try:
            self._sink.write(view)
        except OSError as error:
            raise self._refused(error) from error
        return view.nbytes

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """The file is closed by ``finish``."""

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(Problem(f"shard {self._target.uri}", f"cannot be written: {error}", "check the permissions and the free space"))


class ShardWriter:
    """Writes one stream's rows to shards.

    Args:
        folder: the prepared folder.
        stem: the shards' names, up to their number.
        sequence_length: S.
        rows_per_shard: rows of every shard but the last.
        writer_id: tells the unfinished files of two writers of one stream apart.

    Raises:
        StorageError: the storage refused.
    """

    def __init__(self, folder: Location, stem: str, *, sequence_length: int, rows_per_shard: int, writer_id: str) -> None:
        self._folder = folder
        self._stem = stem
        self._row_length = sequence_length + 1
        self._rows_per_shard = rows_per_shard
        self._writer_id = writer_id
        self._file: _ShardFile | None = None
        self._entries: list[ShardEntry] = []

    def add(self, rows: Rows) -> None:
        """Append rows; a full shard is closed and the next one begun."""
        while len(rows):
            if self._file is None:
                name = f"{self._stem}-{len(self._entries):03d}.arrow"
                self._file = _ShardFile(self._folder, name, self._row_length, self._writer_id)
            room = self._rows_per_shard - self._file.num_rows
            self._file.add(rows[:room])
            rows = rows[room:]
            if self._file.num_rows == self._rows_per_shard:
                self._close_file()

    def finish(self) -> list[ShardEntry]:
        """Close the last shard; all of them in order."""
        self._close_file()
        return self._entries

    def _close_file(self) -> None:
        if self._file is not None:
            self._entries.append(self._file.finish())
            self._file = None


@dataclass(frozen=True)
class Row:
    """One row. It views the mapped file: copy what is to be kept.

    Attributes:
        tokens: [S+1] int32.
        loss_mask: [S+1]; True where the token counts as a target of the loss.
        document_starts: positions in 0..S where a document begins, ascending.
    """

    tokens: Tokens
    loss_mask: Mask
    document_starts: Tokens


class Shard:
    """One shard file, mapped into memory.

    Raises:
        DataError: it is no shard.
    """

    def __init__(self, path: Path, uri: str) -> None:
        try:
            with pa.memory_map(str(path)) as source:
                reader = pa.ipc.open_file(source)
                self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(Problem(f"shard {uri}", f"cannot be read: {error}", PREPARE_AGAIN)) from error
        self._first_rows = [0, *accumulate(int(batch.num_rows) for batch in self._batches)]

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, index: int) -> Row:
        which = bisect_right(self._first_rows, index) - 1
        tokens, loss_mask, starts = self._batches[which].columns
        row = index - self._first_rows[which]
        return Row(
            tokens[row].values.to_numpy(zero_copy_only=True),
            loss_mask[row].values.to_numpy(zero_copy_only=False),  # bits become bytes, of this row only
            starts[row].values.to_numpy(zero_copy_only=True),
        )


class ShardReader:
    """Random access to the rows of prepared data by their ids, from any thread.

    Local shards are mapped where they lie, others through the node's cache.

    Args:
        prepared: the data.
        cache: of this node.
    """

    def __init__(self, prepared: PreparedData, cache: CacheSection) -> None:
        self._folder = prepared.folder
        self._shards = prepared.manifest.shards
        self._first_rows = [0, *accumulate(shard.num_rows for shard in self._shards)]
        self._cache = None if prepared.folder.is_local else ShardCache(cache)
        largest_bytes = max((shard.size_bytes for shard in self._shards), default=1)
        self._max_open = MAX_OPEN_SHARDS if self._cache is None else self._cache.fair_share(largest_bytes)
        self._open: OrderedDict[int, tuple[Shard, ExitStack]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, row_id: int) -> Row:
        if not 0 <= row_id < len(self):
            raise IndexError(f"row {row_id} of {len(self)}")
        which = bisect_right(self._first_rows, row_id) - 1
        with self._lock:
            return self._shard(which)[row_id - self._first_rows[which]]

    def close(self) -> None:
        """Let go of the shards, so that the cache may replace them."""
        with self._lock:
            while self._open:
                self._release_oldest()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _shard(self, which: int) -> Shard:
        if which not in self._open:
            while len(self._open) >= self._max_open:
                self._release_oldest()
            self._open[which] = self._map(self._shards[which])
        self._open.move_to_end(which)
        return self._open[which][0]

    def _release_oldest(self) -> None:
        _, (_, lease) = self._open.popitem(last=False)
        lease.close()

    def _map(self, entry: ShardEntry) -> tuple[Shard, ExitStack]:
        location = self._folder / entry.name
        with ExitStack() as lease:
            if self._cache is None:
                path = location.local_path
            else:
                path = lease.enter_context(self._cache.lease(location, size_bytes=entry.size_bytes, sha256=entry.sha256))
            return Shard(path, location.uri), lease.pop_all()
