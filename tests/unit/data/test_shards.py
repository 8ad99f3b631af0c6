"""Shards give back what was written, and damage is named."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs

from rayapp.config.schema import CacheSection
from rayapp.data.packing import Rows
from rayapp.data.shards import MANIFEST_NAME, PreparedData, Shard, ShardReader, ShardWriter, open_prepared
from rayapp.errors import DataError, StorageError
from rayapp.storage import Location, open_location

MakeData = Callable[..., "MadeData"]  # noqa: F821 - of the conftest, which importlib does not name


def check_rows(data, reader: ShardReader) -> None:
    assert len(reader) == len(data.tokens)
    for row_id in np.random.default_rng(0).permutation(len(reader)).tolist():
        row = reader[row_id]
        assert np.array_equal(row.tokens, data.tokens[row_id])
        assert np.array_equal(row.loss_mask, data.loss_mask[row_id])
        assert row.document_starts.tolist() == data.document_starts[row_id]


def remote(path: Path) -> Location:
    """A filesystem that is not this machine's own file tree, as far as rayapp can tell."""
    path.mkdir(parents=True, exist_ok=True)
    return Location(fs.SubTreeFileSystem(str(path), fs.LocalFileSystem()), "prepared", "mock://prepared")


@pytest.mark.parametrize("rows_per_shard", [1, 7, 10, 1000])
def test_every_row_comes_back_by_its_id(make_data: MakeData, rows_per_shard: int) -> None:
    data = make_data(train=(37, 5), validation=(11, 0), weights=(1.0, 2.0), rows_per_shard=rows_per_shard)
    assert (data.prepared.num_train_rows, data.prepared.num_validation_rows) == (42, 11)
    largest = max(shard.num_rows for shard in data.prepared.manifest.shards)
    assert largest == min(rows_per_shard, 37)
    with ShardReader(data.prepared, CacheSection()) as reader:
        check_rows(data, reader)


def test_remote_shards_come_through_the_cache(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(folder=remote(tmp_path / "bucket"))
    largest = max(shard.size_bytes for shard in data.prepared.manifest.shards)
    cache = CacheSection(path=str(tmp_path / "cache"), quota_bytes=2 * largest)
    with ShardReader(data.prepared, cache) as reader:
        check_rows(data, reader)
        cached = list((tmp_path / "cache").glob("*.arrow"))
        assert 0 < sum(path.stat().st_size for path in cached) <= 2 * largest
        assert {path.stem for path in cached} <= {shard.sha256 for shard in data.prepared.manifest.shards}


def test_rows_are_read_from_several_threads(make_data: MakeData) -> None:
    data = make_data()
    failures = []
    with ShardReader(data.prepared, CacheSection()) as reader:

        def read() -> None:
            try:
                check_rows(data, reader)
            except AssertionError as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_rows_are_mapped_and_not_copied(make_data: MakeData) -> None:
    data = make_data()
    before = pa.total_allocated_bytes()
    with ShardReader(data.prepared, CacheSection()) as reader:
        rows = [reader[i].tokens for i in range(len(reader))]
        assert not any(row.flags.owndata or row.flags.writeable for row in rows)
        assert pa.total_allocated_bytes() - before < data.tokens.nbytes


def test_a_row_that_is_not_there(make_data: MakeData) -> None:
    with ShardReader(make_data().prepared, CacheSection()) as reader:
        for row_id in (-1, len(reader)):
            with pytest.raises(IndexError):
                reader[row_id]


def test_manifest_names_size_and_hash_of_the_file(make_data: MakeData) -> None:
    prepared = make_data().prepared
    for shard in prepared.manifest.shards:
        content = (prepared.folder.local_path / shard.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.size_bytes, shard.sha256)
    prepared.verify(deep=True)


def test_a_flipped_byte_is_named(make_data: MakeData) -> None:
    prepared = make_data().prepared
    damaged = prepared.manifest.shards[2]
    path = prepared.folder.local_path / damaged.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    open_prepared(prepared.folder)  # sizes are right
    with pytest.raises(DataError, match=r"is damaged") as error:
        prepared.verify(deep=True)
    assert [problem.subject for problem in error.value.problems] == [f"shard {path}"]


def test_missing_and_short_shards_are_all_named(make_data: MakeData) -> None:
    prepared = make_data().prepared
    missing, short = (prepared.folder.local_path / shard.name for shard in prepared.manifest.shards[1:3])
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(DataError) as error:
        open_prepared(prepared.folder)
    assert [(p.subject, "missing" in p.rule) for p in error.value.problems] == [(f"shard {missing}", True), (f"shard {short}", False)]


def test_manifest_missing_or_invalid(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        open_prepared(open_location(str(tmp_path / "nothing")))
    prepared = make_data().prepared
    path = prepared.folder.local_path / MANIFEST_NAME
    good = json.loads(path.read_text())
    for bad in ({**good, "format_version": 2}, {**good, "surprise": 1}, {k: v for k, v in good.items() if k != "sources"}):
        path.write_text(json.dumps(bad))
        with pytest.raises(DataError, match="is invalid"):
            open_prepared(prepared.folder)
    path.write_text("{")
    with pytest.raises(DataError, match="is invalid"):
        open_prepared(prepared.folder)


def test_a_file_that_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"no shard")
    with pytest.raises(DataError, match="cannot be read"):
        Shard(tmp_path / "x.arrow", "x.arrow")


def test_a_shard_appears_when_it_is_complete(tmp_path: Path) -> None:
    folder = open_location(str(tmp_path))
    writer = ShardWriter(folder, "t", sequence_length=4, rows_per_shard=10, writer_id="w")
    writer.add(Rows(np.ones((3, 5), np.int32), np.ones((3, 5), bool), [np.zeros(0, np.int32)] * 3))
    assert [path.name for path in tmp_path.iterdir()] == ["t-000.arrow.w.partial"]
    assert [entry.num_rows for entry in writer.finish()] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["t-000.arrow"]


def test_an_unwritable_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = ShardWriter(open_location(str(tmp_path / "file")), "t", sequence_length=4, rows_per_shard=10, writer_id="w")
    with pytest.raises(StorageError, match="cannot be written"):
        writer.add(Rows(np.ones((3, 5), np.int32), np.ones((3, 5), bool), [np.zeros(0, np.int32)] * 3))


def test_the_document_of_the_verb(make_data: MakeData) -> None:
    prepared: PreparedData = make_data().prepared
    document = prepared.document()
    assert (document.data_dir, document.num_train_rows, document.num_validation_rows, document.reused) == (
        prepared.folder.uri,
        37,
        11,
        True,
    )
