"""One group of files becomes shards: what is kept, what is counted, where a document goes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rayapp.config.schema import SourceSection
from rayapp.data.group import Group, GroupResult, RowFormat, SplitResult, form_groups, is_held_out, prepare_group
from rayapp.data.reading import Piece
from rayapp.data.shards import Shard
from rayapp.data.sources import SourceFile, list_source
from rayapp.data.tokenizer import backend_json, train_tokenizer
from rayapp.storage import open_location

EOS = 0
TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(40)]


@pytest.fixture(scope="module")
def row_format() -> RowFormat:
    tokenizer = train_tokenizer(iter(TEXTS), 280)
    assert tokenizer.eos_token_id == EOS
    return RowFormat(backend_json(tokenizer), EOS, sequence_length=16, rows_per_shard=5, validation_fraction=0.3, max_document_bytes=1000)


def write_jsonl(path: Path, texts: list[str]) -> list[SourceFile]:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return list_source(SourceSection(path=str(path)))


def run(files: list[SourceFile], row_format: RowFormat, folder: Path) -> GroupResult:
    return prepare_group(Group(0, 0, tuple(Piece(file) for file in files)), row_format, open_location(str(folder)))


def stream(split: SplitResult, folder: Path) -> list[int]:
    """A split's tokens as the rows tell them: each row but for its last token, then the last row's last one."""
    rows = [shard[i] for entry in split.shards for shard in [Shard(folder / entry.name, entry.name)] for i in range(len(shard))]
    return [int(token) for row in rows for token in row.tokens[:-1]] + ([int(rows[-1].tokens[-1])] if rows else [])


def texts_of(tokens: list[int], row_format: RowFormat) -> list[str]:
    """The documents of a stream, by the plain tokenizer; the filling at the end is made of end tokens too."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents.append([]) if token == EOS else documents[-1].append(token)
    return [Tokenizer.from_str(row_format.tokenizer_json).decode(document) for document in documents if document]


def test_documents_come_back_each_on_its_side(tmp_path: Path, row_format: RowFormat) -> None:
    texts = [*TEXTS, "<|endoftext|> is only text here"]
    result = run(write_jsonl(tmp_path / "a.jsonl", texts), row_format, tmp_path)
    train = texts_of(stream(result.train, tmp_path), row_format)
    validation = texts_of(stream(result.validation, tmp_path), row_format)
    held_out = [int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 2**64 < 0.3 for text in texts]
    assert train == [text for text, held in zip(texts, held_out, strict=True) if not held]
    assert validation == [text for text, held in zip(texts, held_out, strict=True) if held]
    assert 5 < len(validation) < 20
    assert (result.train.num_documents, result.validation.num_documents) == (len(train), len(validation))
    assert sum(entry.num_rows for entry in result.train.shards) == -(-(result.train.num_tokens - 1) // 16)
    assert [entry.num_rows for entry in result.train.shards[:-1]] == [5] * (len(result.train.shards) - 1)


def test_copies_of_a_document_are_on_one_side(tmp_path: Path, row_format: RowFormat) -> None:
    result = run(write_jsonl(tmp_path / "a.jsonl", TEXTS * 3), row_format, tmp_path)
    train = set(texts_of(stream(result.train, tmp_path), row_format))
    validation = set(texts_of(stream(result.validation, tmp_path), row_format))
    assert train | validation == set(TEXTS)
    assert not train & validation


def test_held_out_share() -> None:
    held = sum(is_held_out(f"text {i}", 0.02) for i in range(20_000))
    assert 320 < held < 480
    assert not is_held_out("x", 0.0)


def test_everything_defective_is_counted_and_the_rest_is_used(tmp_path: Path, row_format: RowFormat) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [b'{"text": "good one"}', b'{"text": null}', b'{"x": 1}', b'{"text": 1}', b'{"text": "\xff"}', b"{", b'{"text": ""}']
    (corpus / "a.jsonl").write_bytes(b"\n".join([*lines, json.dumps({"text": "y" * 1001}).encode()]))
    (corpus / "b.jsonl.gz").write_bytes(b"no gzip")
    (corpus / "c.txt").write_bytes(b"good two")
    (corpus / "d.txt").write_bytes(b"\xff\xfe")
    result = run(list_source(SourceSection(path=str(corpus))), replace(row_format, validation_fraction=0.0), tmp_path)
    assert texts_of(stream(result.train, tmp_path), row_format) == ["good one", "good two"]
    assert result.dropped == {
        "missing": 2,
        "not_a_string": 1,
        "invalid_utf8": 2,
        "invalid_json": 1,
        "empty": 1,
        "too_long": 1,
    }
    assert [file.name for file in result.unreadable_files] == [str(corpus / "b.jsonl.gz")]
    assert "BadGzipFile" in result.unreadable_files[0].reason


def test_nothing_usable_gives_no_shard(tmp_path: Path, row_format: RowFormat) -> None:
    result = run(write_jsonl(tmp_path / "a.jsonl", ["", " "]), row_format, tmp_path)
    assert result.train.shards == result.validation.shards == []
    assert result.dropped == {"empty": 2}


def test_doing_it_again_writes_the_same_bytes(tmp_path: Path, row_format: RowFormat) -> None:
    files = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = run(files, row_format, tmp_path / "one")
    assert run(files, row_format, tmp_path / "two") == first
    assert run(files, row_format, tmp_path / "one") == first
    assert not list((tmp_path / "one").rglob("*.partial"))


def test_groups_follow_the_files_and_cover_them(row_format: RowFormat, tmp_path: Path) -> None:
    location = open_location(str(tmp_path))
    sizes = [300_000] * 10 + [5_000_000] + [10] * 100
    files = [SourceFile(location, f"{i:03d}.jsonl", "jsonl", "text", size) for i, size in enumerate(sizes)]
    groups = form_groups(3, files, replace(row_format, rows_per_shard=10_000, sequence_length=1024))
    pieces = [piece for group in groups for piece in group.pieces]
    assert [group.index for group in groups] == list(range(len(groups)))
    assert {group.source for group in groups} == {3}
    assert [(piece.file.name, piece.index) for piece in pieces] == [
        (file.name, index) for file in files for index in range(4 if file.size_bytes == 5_000_000 else 1)
    ]
    group_bytes = [sum(piece.estimated_text_bytes for piece in group.pieces) for group in groups]
    assert min(group_bytes[:-1]) >= 2**20
    assert max(group_bytes) < 2 * 2**20


def test_a_large_corpus_has_groups_of_about_a_shard(row_format: RowFormat, tmp_path: Path) -> None:
    file = SourceFile(open_location(str(tmp_path)), "a.jsonl", "jsonl", "text", 10**12)
    groups = form_groups(0, [file], replace(row_format, rows_per_shard=8192, sequence_length=1024))
    assert 10**12 / (8192 * 1024 * 4) * 0.9 < len(groups) < 10**12 / (8192 * 1024 * 4) * 1.1
