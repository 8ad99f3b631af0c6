from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from pyarrow import fs

from rayapp.errors import StorageError
from rayapp.metrics.jsonl import JsonlSink, read_records
from rayapp.metrics.record import EventRecord
from rayapp.storage import Location, open_location


@pytest.fixture
def path(tmp_path: Path) -> Location:
    return open_location(str(tmp_path / "run" / "metrics.jsonl"))


@pytest.fixture
def remote(tmp_path: Path) -> Location:
    """A real filesystem that is not this machine's file tree as far as rayapp can tell."""
    (tmp_path / "bucket").mkdir()
    return Location(
        fs.SubTreeFileSystem(str(tmp_path / "bucket"), fs.LocalFileSystem()), "run/metrics.jsonl", "s3://bucket/run/metrics.jsonl"
    )


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_every_line_is_there_as_soon_as_it_is_written(path, step_record):
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.write(step_record(step))
        assert steps_in(path.local_path) == list(range(1, step + 1))
    sink.close()
    assert read_records(path) == [step_record(1), step_record(2), step_record(3)]


def test_a_resumed_run_cuts_what_came_after_its_checkpoint_and_keeps_the_rest(path, step_record):
    restart = EventRecord(time=0.0, step=None, event="restart", detail="worker 1 died")
    sink = JsonlSink(path)
    for record in (step_record(1), step_record(2), restart, step_record(3), step_record(4)):
        sink.write(record)
    sink.close()
    resumed = JsonlSink(path, resume_step=2)
    assert read_records(path) == [step_record(1), step_record(2), restart]
    resumed.write(step_record(3, loss=1.0))
    resumed.close()
    assert read_records(path) == [step_record(1), step_record(2), restart, step_record(3, loss=1.0)]


def test_a_run_that_starts_over_leaves_no_step_of_the_last_attempt(path, step_record):
    sink = JsonlSink(path)
    sink.write(step_record(1))
    sink.close()
    JsonlSink(path).close()
    assert path.local_path.read_bytes() == b""


@pytest.mark.parametrize("lost_bytes", [1, 2, 50, 300])
def test_a_torn_last_line(path, step_record, lost_bytes):
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.write(step_record(step))
    sink.close()
    path.local_path.write_bytes(path.local_path.read_bytes()[:-lost_bytes])
    whole = [1, 2, 3] if lost_bytes == 1 else [1, 2]  # the first byte lost is the line's end alone
    assert [record.step for record in read_records(path)] == whole
    resumed = JsonlSink(path, resume_step=3)
    resumed.write(step_record(4))
    resumed.close()
    assert steps_in(path.local_path) == [*whole, 4]


def test_a_damaged_line_in_the_middle_is_said_and_cut(path, step_record, caplog):
    path.local_path.parent.mkdir()
    path.local_path.write_text(f'{step_record(1).model_dump_json()}\n{{"kind": "st\n17\n{step_record(2).model_dump_json()}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2"):
        read_records(path)
    with caplog.at_level(logging.WARNING):
        JsonlSink(path, resume_step=2).close()
    assert "2 lines" in caplog.text
    assert steps_in(path.local_path) == [1, 2]


def test_the_cut_is_one_move(path, step_record):
    """A reader that has the old file open goes on reading the old file, and no other file is left."""
    sink = JsonlSink(path)
    sink.write(step_record(1))
    sink.write(step_record(2))
    sink.close()
    with path.local_path.open() as reader:
        JsonlSink(path, resume_step=1).close()
        assert len(reader.readlines()) == 2
    assert [child.name for child in path.local_path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_an_error_and_the_file_can_be_resumed(path, step_record, files_no_larger_than):
    sink = JsonlSink(path)
    sink.write(step_record(1))
    with files_no_larger_than(path.size_bytes() + 100):
        with pytest.raises(StorageError, match="free space"):
            sink.write(step_record(2))
        with pytest.raises(StorageError):
            sink.close()
    assert path.size_bytes() > len(step_record(1).model_dump_json()) + 1, "a part of the line was written"
    JsonlSink(path, resume_step=2).close()
    assert read_records(path) == [step_record(1)]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be opened"):
        JsonlSink(open_location(str(tmp_path / "file" / "metrics.jsonl")))


def test_a_missing_file_cannot_be_read(path):
    with pytest.raises(StorageError, match="cannot be read"):
        read_records(path)


def test_elsewhere_lines_arrive_at_the_flush(remote, step_record, tmp_path):
    file = tmp_path / "bucket" / "run" / "metrics.jsonl"
    file.parent.mkdir()
    sink = JsonlSink(remote)
    sink.write(step_record(1))
    assert not file.exists()
    sink.flush()
    assert steps_in(file) == [1]
    sink.write(step_record(2))
    sink.write(step_record(3))
    sink.close()
    assert steps_in(file) == [1, 2, 3]
    resumed = JsonlSink(remote, resume_step=2)
    resumed.write(step_record(3, loss=0.5))
    resumed.close()
    assert read_records(remote) == [step_record(1), step_record(2), step_record(3, loss=0.5)]


def test_elsewhere_a_refusal_is_an_error(remote, step_record, tmp_path):
    sink = JsonlSink(remote)
    sink.write(step_record(1))
    (tmp_path / "bucket").rmdir()
    with pytest.raises(StorageError, match="s3://bucket/run/metrics"):
        sink.flush()
