"""What a source lists, in folders, patterns and filesystems; and what it refuses."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from rayapp.config.schema import DataSection, SourceSection
from rayapp.data.sources import format_of, list_location, list_source, list_sources, list_stdlib, pattern_regex, split_pattern
from rayapp.errors import DataError
from rayapp.storage import Location

FILES = ["a.txt", "b.jsonl", "c/d.py", "c/e/f.parquet", "c/e/g.jsonl.gz", ".hidden/x.txt", "c/.y.txt"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in FILES:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "corpus" / "c/e/f.parquet")
    return tmp_path / "corpus"


def names(path: str) -> list[str]:
    return [file.name for file in list_source(SourceSection(path=path))]


def test_a_folder_lists_all_but_hidden_files_with_their_formats(corpus: Path) -> None:
    files = list_source(SourceSection(path=str(corpus)))
    assert [(file.name, file.format) for file in files] == [
        ("a.txt", "text"),
        ("b.jsonl", "jsonl"),
        ("c/d.py", "text"),
        ("c/e/f.parquet", "parquet"),
        ("c/e/g.jsonl.gz", "jsonl"),
    ]
    assert [file.size_bytes for file in files] == [(corpus / file.name).stat().st_size for file in files]
    assert all(file.mtime_ns > 0 for file in files)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt"]),
        ("?.*", ["a.txt", "b.jsonl"]),
        ("c/*.py", ["c/d.py"]),
        ("*/*/*", ["c/e/f.parquet", "c/e/g.jsonl.gz"]),
        ("**/*.parquet", ["c/e/f.parquet"]),
        ("c/[de]*", ["c/d.py"]),
        ("c/**", ["c/.y.txt", "c/d.py", "c/e/f.parquet", "c/e/g.jsonl.gz"]),
    ],
)
def test_patterns(corpus: Path, pattern: str, expected: list[str]) -> None:
    below = pattern.split("/", maxsplit=1)[0] if "/" in pattern and "*" not in pattern.split("/", maxsplit=1)[0] else ""
    assert [f"{below}/{name}".lstrip("/") for name in names(f"{corpus}/{pattern}")] == expected
    assert names(f"file://{corpus}/{pattern}") == names(f"{corpus}/{pattern}") or "?" in pattern


@given(st.text("ab./", max_size=8), st.text("ab*?[]!.", min_size=1, max_size=6))
def test_a_name_pattern_matches_as_pathlib_says(name: str, pattern: str) -> None:
    """Within one name, pathlib is the oracle."""
    name = name.replace("/", "") or "a"
    if name in (".", "..") or pattern in (".", "..") or "**" in pattern or PurePosixPath(pattern).name != pattern:
        return
    assert bool(re.fullmatch(pattern_regex(pattern), name)) == PurePosixPath(name).match(pattern)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/x/*/y.txt", ("s3://b/x", "*/y.txt")),
        ("s3://b/x/*.txt?region=eu", ("s3://b/x?region=eu", "*.txt")),
        ("s3://b/x?region=eu", ("s3://b/x?region=eu", None)),
        ("/*.txt", ("/", "*.txt")),
        ("*.txt", (".", "*.txt")),
        ("books/a?.txt", ("books", "a?.txt")),
        ("books/a.txt", ("books/a.txt", None)),
    ],
)
def test_split_pattern(path: str, expected: tuple[str, str | None]) -> None:
    assert split_pattern(path) == expected


def test_a_name_with_a_wildcard_in_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    (tmp_path / "b[1]").mkdir()
    (tmp_path / "b[1]" / "c.txt").write_text("x")
    assert names(str(tmp_path / "a[1].txt")) == names(str(tmp_path / "a[[]1].txt")) == ["a[1].txt"]
    assert names(str(tmp_path / "b[1]")) == ["c.txt"]


def test_a_remote_filesystem_is_listed_the_same(corpus: Path) -> None:
    remote = Location(fs.SubTreeFileSystem(str(corpus.parent), fs.LocalFileSystem()), "corpus", "mock://corpus")
    files = list_location(remote, SourceSection(path="mock://corpus/**/*.jsonl*"), "**/*.jsonl*")
    assert [(file.name, file.location.uri) for file in files] == [
        ("b.jsonl", "mock://corpus/b.jsonl"),
        ("c/e/g.jsonl.gz", "mock://corpus/c/e/g.jsonl.gz"),
    ]
    assert files[0].location.read_text() == "x"


def test_stdlib_has_the_library_and_no_tests() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {file.name: file for file in list_stdlib(root)}
    assert files["ast.py"].content == (root / "ast.py").read_bytes()
    assert "json/decoder.py" in files
    assert not [name for name in files if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/")[:-1])]
    assert list(files) == sorted(files)
    assert names("python-stdlib") == list(files)


@pytest.mark.parametrize("override", ["text", "jsonl", "parquet"])
def test_an_explicit_format_wins(tmp_path: Path, override: str) -> None:
    (tmp_path / "a.dat").write_text("x")
    assert [file.format for file in list_source(SourceSection(path=str(tmp_path), format=override))] == [override]
    assert format_of("a.dat") == "text"


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("nowhere", "does not exist"),
        ("nowhere/*.txt", "does not exist"),
        ("corpus/*.csv", "matches no file"),
        ("corpus/[z-a]*", "is no pattern"),
        ("corpus/a.txt/*", "matches no file"),
        ("empty", "holds no file"),
        ("blank", "holds no text: 1 files of 0 bytes"),
        ("packed", "format that cannot be read"),
    ],
)
def test_refusals(corpus: Path, path: str, match: str) -> None:
    (corpus.parent / "empty").mkdir()
    (corpus.parent / "blank").touch()
    (corpus.parent / "packed").mkdir()
    (corpus.parent / "packed" / "x.tar").write_text("x")
    with pytest.raises(DataError, match=match) as error:
        list_source(SourceSection(path=str(corpus.parent / path)))
    assert error.value.problems[0].remedy


def test_a_missing_text_column_names_those_that_there_are(corpus: Path) -> None:
    with pytest.raises(DataError, match="the columns are text, id"):
        list_source(SourceSection(path=str(corpus), text_column="body"))


def test_all_sources_problems_come_at_once(tmp_path: Path) -> None:
    sources = [SourceSection(path=str(tmp_path / "one")), SourceSection(path=str(tmp_path / "two"))]
    with pytest.raises(DataError) as error:
        list_sources(DataSection(source=sources))
    assert len(error.value.problems) == 2
    with pytest.raises(DataError, match="names no source"):
        list_sources(DataSection(source=[]))
