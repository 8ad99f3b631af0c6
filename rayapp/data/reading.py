"""Reads a corpus's files to texts, in pieces that several processes can read at once.

A row that cannot be used is left out and counted by its reason, never repaired: a repaired text would be another text.
Storage that fails is an error; content that is defective is a count.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.data.sources import SourceFile
from rayapp.errors import Problem, StorageError
from rayapp.storage import Location

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BUFFER_BYTES = 2**20
PARQUET_ROWS_PER_READ = 128
ESTIMATED_COMPRESSION = 4
LONGEST_JSON_ESCAPE = 6  # \u0001 stands for one byte of text
OTHER_KEYS_BYTES = 2**20
CONTENT_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowInvalid, pa.ArrowNotImplementedError)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class DropReason(StrEnum):
    """Why a row of the corpus is left out."""

    MISSING = "missing"
    """The text column is null, or the row has none."""
    NOT_A_STRING = "not_a_string"
    """The text column holds something else."""
    INVALID_UTF8 = "invalid_utf8"
    """The bytes are no UTF-8, or the text has half a surrogate pair."""
    INVALID_JSON = "invalid_json"
    """The line is no JSON object."""
    EMPTY = "empty"
    """Nothing but white space."""
    TOO_LONG = "too_long"
    """More bytes than `data.max_document_bytes`."""
    NO_TOKENS = "no_tokens"
    """The tokenizer makes nothing of it."""


@dataclass(frozen=True)
class Unreadable:
    """The file's content is defective from here on; what came before is good.

    Attributes:
        reason: what the decoder says.
    """

    reason: str


@dataclass(frozen=True)
class Piece:
    """One of ``count`` parts of a file that do not overlap and together are the file.

    Attributes:
        file: the file.
        index: which part, from 0.
        count: parts of the file.
    """

    file: SourceFile
    index: int = 0
    count: int = 1

    @property
    def estimated_text_bytes(self) -> int:
        is_compressed = self.file.is_gzip or self.file.format == "parquet"
        return self.file.size_bytes * (ESTIMATED_COMPRESSION if is_compressed else 1) // self.count


def cut_file(file: SourceFile, piece_bytes: int) -> list[Piece]:
    """Parts of about ``piece_bytes`` of text: byte ranges of JSONL, row groups of Parquet, else the whole file."""
    is_whole = file.format == "text" or file.is_gzip
    count = 1 if is_whole else max(1, Piece(file).estimated_text_bytes // piece_bytes)
    return [Piece(file, index, count) for index in range(count)]


def read_piece(piece: Piece, max_document_bytes: int) -> Iterator[str | DropReason | Unreadable]:
    """The piece's documents in order, or why one is left out; ``Unreadable`` comes last, if at all.

    Raises:
        StorageError: the storage failed.
    """
    try:
        with _opened(piece.file) as stream:
            for row in _rows_of(stream, piece, max_document_bytes):
                yield _checked(row, max_document_bytes) if isinstance(row, str) else row
    except CONTENT_ERRORS as error:
        yield Unreadable(f"{type(error).__name__}: {error}")


def _rows_of(stream: io.BufferedIOBase, piece: Piece, max_document_bytes: int) -> Iterator[str | DropReason | Unreadable]:
    if piece.file.format == "parquet":
        return _read_parquet(stream, piece)
    if piece.file.format == "jsonl":
        return _read_jsonl(stream, piece, max_document_bytes)
    return iter([_read_text(stream, max_document_bytes)])


def _checked(text: str, max_document_bytes: int) -> str | DropReason:
    if not text or text.isspace():
        return DropReason.EMPTY
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        return DropReason.INVALID_UTF8
    return DropReason.TOO_LONG if num_bytes > max_document_bytes else text


def _decoded(content: bytes) -> str | DropReason:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return DropReason.INVALID_UTF8


def _read_text(stream: io.BufferedIOBase, max_document_bytes: int) -> str | DropReason:
    content = stream.read(max_document_bytes + 1)
    return DropReason.TOO_LONG if len(content) > max_document_bytes else _decoded(content)


def _read_jsonl(stream: io.BufferedIOBase, piece: Piece, max_document_bytes: int) -> Iterator[str | DropReason]:
    start = piece.file.size_bytes * piece.index // piece.count
    end = piece.file.size_bytes * (piece.index + 1) // piece.count if piece.count > 1 else None
    max_line_bytes = LONGEST_JSON_ESCAPE * max_document_bytes + OTHER_KEYS_BYTES
    for line in _lines(stream, start, end, max_line_bytes):
        if isinstance(line, DropReason):
            yield line
        elif line.strip():
            yield _text_of(line, piece.file.text_column)


def _lines(stream: io.BufferedIOBase, start: int, end: int | None, max_line_bytes: int) -> Iterator[bytes | DropReason]:
    """The lines whose first byte is in ``[start, end)``; a line too long to hold is skipped without being held."""
    position = start
    if start:
        stream.seek(start - 1)
        position = start - 1 + _skip_line(stream)
    while end is None or position < end:
        line = stream.readline(max_line_bytes)
        if not line:
            return
        is_first, position = position == 0, position + len(line)
        if len(line) == max_line_bytes and not line.endswith(b"\n"):
            position += _skip_line(stream)
            yield DropReason.TOO_LONG
        else:
            yield line.removeprefix(BYTE_ORDER_MARK) if is_first else line


def _skip_line(stream: io.BufferedIOBase) -> int:
    """Read up to and with the next newline; the bytes that were read."""
    num_bytes = 0
    while chunk := stream.readline(READ_BUFFER_BYTES):
        num_bytes += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return num_bytes


def _text_of(line: bytes, text_column: str) -> str | DropReason:
    text = _decoded(line)
    if isinstance(text, DropReason):
        return text
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return DropReason.INVALID_JSON
    if not isinstance(row, dict):
        return DropReason.INVALID_JSON
    value = row.get(text_column)
    if value is None:
        return DropReason.MISSING
    return value if isinstance(value, str) else DropReason.NOT_A_STRING


def _read_parquet(stream: io.BufferedIOBase, piece: Piece) -> Iterator[str | DropReason | Unreadable]:
    # without pre_buffer and with a buffer size, Arrow reads a column chunk as it is decoded instead of whole
    with pq.ParquetFile(stream, pre_buffer=False, buffer_size=READ_BUFFER_BYTES) as parquet:
        if piece.file.text_column not in parquet.schema_arrow.names:
            yield Unreadable(f"it has no column {piece.file.text_column!r}")
            return
        num_groups = parquet.num_row_groups
        groups = range(num_groups * piece.index // piece.count, num_groups * (piece.index + 1) // piece.count)
        if not groups:
            return
        for batch in parquet.iter_batches(PARQUET_ROWS_PER_READ, row_groups=list(groups), columns=[piece.file.text_column]):
            yield from _texts_of_column(batch.column(0))


def _texts_of_column(column: pa.Array) -> Iterable[str | DropReason]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        # Arrow does not check that strings are UTF-8: read them as bytes, and check here
        rows = (value.as_py() for value in column.cast(pa.large_binary()))
        return (DropReason.MISSING if row is None else _decoded(row) for row in rows)
    return (DropReason.NOT_A_STRING if is_valid else DropReason.MISSING for is_valid in column.is_valid().to_pylist())


@contextmanager
def _opened(file: SourceFile) -> Iterator[io.BufferedIOBase]:
    with ExitStack() as stack:
        if file.content is not None:
            yield stack.enter_context(io.BytesIO(file.content))
            return
        stream = stack.enter_context(io.BufferedReader(_StorageStream(file.location), READ_BUFFER_BYTES))
        if not file.is_gzip:
            yield stream
            return
        yield stack.enter_context(gzip.GzipFile(fileobj=stream))  # buffers by itself, little: a defect costs what is buffered


class _StorageStream(io.RawIOBase):
    """A file of the storage whose failures are ``StorageError``s, so that an ``OSError`` of a decoder means bad content."""

    def __init__(self, location: Location) -> None:
        self._location = location
        try:
            self._stream = location.filesystem.open_input_file(location.path)
        except OSError as error:
            raise self._failed(error) from error

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            return int(self._stream.readinto(view))
        except OSError as error:
            raise self._failed(error) from error

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._stream.seek(offset, whence)
        return int(self._stream.tell())

    def tell(self) -> int:
        return int(self._stream.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            Problem(f"file {self._location.uri}", f"cannot be read: {error}", "keep the corpus where every node reaches it")
        )
