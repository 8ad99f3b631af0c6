"""Every defect of a row or a file, and that pieces together are the whole."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from rayapp.data.reading import DropReason, Piece, Unreadable, cut_file, read_piece
from rayapp.data.sources import SourceFile, format_of
from rayapp.errors import StorageError
from rayapp.storage import Location, open_location

MAX_BYTES = 100


def source(path: Path, text_column: str = "text") -> SourceFile:
    return SourceFile(open_location(str(path)), path.name, format_of(path.name), text_column, path.stat().st_size)


def read(path: Path, max_bytes: int = MAX_BYTES) -> list[str | DropReason | Unreadable]:
    return list(read_piece(Piece(source(path)), max_bytes))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("grüße\r\n\tx\n".encode(), "grüße\r\n\tx\n"),
        (b"\xef\xbb\xbfmark", "\ufeffmark"),
        (b"", DropReason.EMPTY),
        (b" \n\t\xc2\xa0", DropReason.EMPTY),
        (b"caf\xe9", DropReason.INVALID_UTF8),
        (b"\xed\xa0\x80", DropReason.INVALID_UTF8),
        (b"x" * MAX_BYTES, "x" * MAX_BYTES),
        (b"x" * (MAX_BYTES + 1), DropReason.TOO_LONG),
        ("ü".encode() * MAX_BYTES, DropReason.TOO_LONG),
    ],
)
def test_text(tmp_path: Path, content: bytes, expected: str | DropReason) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content))
    assert read(tmp_path / "a.txt") == [expected]
    assert read(tmp_path / "b.txt.gz") == [expected]


LINES = [
    (b'{"text": "good"}', "good"),
    (b'  {"id": 1, "text": "a\\u00e9\\nb"}\r', "aé\nb"),
    (b'{"text": null}', DropReason.MISSING),
    (b'{"body": "x"}', DropReason.MISSING),
    (b'{"text": 3}', DropReason.NOT_A_STRING),
    (b'{"text": ["x"]}', DropReason.NOT_A_STRING),
    (b'{"text": "caf\xe9"}', DropReason.INVALID_UTF8),
    (b'{"text": "\\ud800"}', DropReason.INVALID_UTF8),
    (b'{"text": "x"', DropReason.INVALID_JSON),
    (b"[1]", DropReason.INVALID_JSON),
    (b"[" * 100_000, DropReason.INVALID_JSON),
    (b'{"text": ' + b"9" * 5000 + b"}", DropReason.INVALID_JSON),
    (b'{"text": " \\n"}', DropReason.EMPTY),
    (b'{"text": "' + b"x" * 101 + b'"}', DropReason.TOO_LONG),
    (b'{"text": "' + b"x" * 3_000_000 + b'"}', DropReason.TOO_LONG),
    (b'{"text": "last"}', "last"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json.gz"])
def test_jsonl(tmp_path: Path, ending: str) -> None:
    content = b"\xef\xbb\xbf" + b"\n\n".join(line for line, _ in LINES)
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    assert read(path) == [expected for _, expected in LINES]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 400])
def test_byte_ranges_of_jsonl_are_the_whole_file_once(tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    texts = ["é" * rng.randint(1, 60) for _ in range(50)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + rng.choice(["", "\n"]))
    pieces = [Piece(source(path), index, count) for index in range(count)]
    assert [row for piece in pieces for row in read_piece(piece, 1000)] == texts


def test_a_line_too_long_to_hold_is_skipped_in_every_range(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b'{"text": "' + b"x" * 5_000_000 + b'"}\n' + b'{"text": "b"}\n')
    rows = [row for index in range(9) for row in read_piece(Piece(source(path), index, 9), MAX_BYTES)]
    assert rows == ["a", DropReason.TOO_LONG, "b"]


def test_cutting_depends_on_size_and_format(tmp_path: Path) -> None:
    def file(name: str) -> SourceFile:
        return SourceFile(open_location(str(tmp_path / name)), name, format_of(name), "text", 1000)

    assert [len(cut_file(file(name), 100)) for name in ("a.jsonl", "a.parquet", "a.txt", "a.jsonl.gz")] == [10, 40, 1, 1]
    assert len(cut_file(file("a.jsonl"), 10_000)) == 1


def parquet(path: Path, column: pa.Array | pa.ChunkedArray, row_group_size: int = 2) -> Path:
    pq.write_table(pa.table({"id": pa.nulls(len(column)), "text": column}), path, row_group_size=row_group_size)
    return path


def invalid_utf8() -> pa.Array:
    return pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"caf\xe9"]).buffers())


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None, " ", "x" * 101, "é"]), ["a", DropReason.MISSING, DropReason.EMPTY, DropReason.TOO_LONG, "é"]),
        (pa.array(["a", None], pa.large_string()), ["a", DropReason.MISSING]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array([1, None]), [DropReason.NOT_A_STRING, DropReason.MISSING]),
        (pa.array([b"raw"]), [DropReason.NOT_A_STRING]),
        (invalid_utf8(), ["ok", DropReason.INVALID_UTF8]),
    ],
)
def test_parquet(tmp_path: Path, column: pa.Array, expected: list[str | DropReason]) -> None:
    assert read(parquet(tmp_path / "a.parquet", column)) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5, 13, 50])
def test_row_groups_are_the_whole_file_once(tmp_path: Path, count: int) -> None:
    texts = [f"document {i}" for i in range(25)]
    path = parquet(tmp_path / "a.parquet", pa.array(texts))
    assert [row for index in range(count) for row in read_piece(Piece(source(path), index, count), 1000)] == texts


def test_truncated_gzip_keeps_what_came_before_and_tells(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(30).hex() for _ in range(5000)]
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    rows = read(tmp_path / "a.jsonl.gz")
    assert isinstance(rows[-1], Unreadable)
    assert "EOFError" in rows[-1].reason
    assert 0 < len(rows) - 1 < 5000
    assert rows[:-1] == texts[: len(rows) - 1]


def test_defective_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"this is no gzip")
    (tmp_path / "a.parquet").write_bytes(b"this is no parquet")
    good = parquet(tmp_path / "b.parquet", pa.array([f"{i:064d}" for i in range(1000)]), row_group_size=1000).read_bytes()
    (tmp_path / "c.parquet").write_bytes(good[: len(good) // 2])
    (tmp_path / "d.parquet").write_bytes(good[:100] + bytes(400) + good[500:])
    for name in ("a.jsonl.gz", "a.parquet", "c.parquet", "d.parquet"):
        rows = read(tmp_path / name)
        assert isinstance(rows[-1], Unreadable), name
    pq.write_table(pa.table({"id": [1]}), tmp_path / "e.parquet")
    assert read(tmp_path / "e.parquet") == [Unreadable("it has no column 'text'")]


class BrokenHandler(fs.FSSpecHandler):
    """A filesystem whose files open, and fail when they are read."""

    def __init__(self) -> None:
        super().__init__(None)

    def open_input_file(self, path: str) -> pa.PythonFile:
        class Broken(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                raise OSError("connection reset")

        return pa.PythonFile(Broken(bytes(1000)), mode="r")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_failing_storage_is_no_defect_of_the_file(name: str) -> None:
    location = Location(fs.PyFileSystem(BrokenHandler()), name, f"broken://{name}")
    with pytest.raises(StorageError, match="connection reset"):
        list(read_piece(Piece(SourceFile(location, name, format_of(name), "text", 1000)), MAX_BYTES))


def test_a_file_that_went_away(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        list(read_piece(Piece(SourceFile(open_location(str(tmp_path / "a.txt")), "a.txt", "text", "text", 3)), MAX_BYTES))
