from __future__ import annotations

import math
from pathlib import Path

import pytest
from pyarrow import fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayapp.errors import StorageError
from rayapp.metrics.record import CheckpointRecord, EventRecord, ValidationRecord
from rayapp.metrics.tensorboard import TensorBoardSink
from rayapp.storage import Location, open_location


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_every_figure_at_its_step_and_time(tmp_path, step_record):
    sink = TensorBoardSink(open_location(str(tmp_path)))
    sink.write(step_record(1, loss=8.0))
    sink.write(step_record(2, loss=7.5, tokens_per_s=5000.0, communication_share=0.25))
    sink.write(ValidationRecord(time=5.0, step=2, loss=7.0, perplexity=math.exp(7.0), seconds=2.0, num_valid_tokens=9, elapsed_s=3.0))
    sink.write(CheckpointRecord(time=6.0, step=2, seconds=0.5, bytes=2**20))
    sink.write(EventRecord(time=7.0, step=2, event="skipped step", detail="gradient norm inf"))
    sink.close()
    assert scalars(tmp_path, "train/loss") == [(1, 8.0), (2, 7.5)]
    assert scalars(tmp_path, "throughput/tokens_per_s") == [(1, 5400.0), (2, 5000.0)]
    assert scalars(tmp_path, "share/communication") == [(2, 0.25)], "what was not measured is left out"
    assert scalars(tmp_path, "validation/loss") == [(2, 7.0)]
    assert scalars(tmp_path, "checkpoint/bytes") == [(2, 2.0**20)]
    accumulator = read(tmp_path)
    assert accumulator.Scalars("train/loss")[0].wall_time == step_record(1).time
    assert "throughput/mfu" not in accumulator.Tags()["scalars"]
    (tag,) = accumulator.Tags()["tensors"]
    assert tag.startswith("event/skipped")
    assert b"gradient norm inf" in accumulator.Tensors(tag)[0].tensor_proto.string_val[0]


def test_a_flush_is_enough_to_be_read(tmp_path, step_record):
    sink = TensorBoardSink(open_location(str(tmp_path)))
    sink.write(step_record(1))
    sink.flush()
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [1]
    sink.close()


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path, step_record):
    first = TensorBoardSink(open_location(str(tmp_path)))
    for step in (1, 2, 3, 4):
        first.write(step_record(step, loss=float(step)))
    first.close()
    resumed = TensorBoardSink(open_location(str(tmp_path)), resume_step=2)
    resumed.write(step_record(3, loss=30.0))
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2, "the earlier file stays, and none is overwritten"
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_full_disk_is_an_error_and_what_is_written_afterwards_is_read(tmp_path, step_record, files_no_larger_than):
    sink = TensorBoardSink(open_location(str(tmp_path)))
    sink.write(step_record(1))
    sink.flush()
    (file,) = tmp_path.iterdir()

    def write_many() -> None:
        for step in range(2, 1000):
            sink.write(step_record(step))

    with files_no_larger_than(file.stat().st_size + 100), pytest.raises(StorageError, match="TensorBoard folder"):
        write_many()
    sink.write(step_record(1000))
    sink.flush()
    steps = [step for step, _ in scalars(tmp_path, "train/loss")]
    assert steps[0] == 1
    assert steps[-1] == 1000
    sink.close()


def test_elsewhere_the_files_arrive_at_the_flush(tmp_path, step_record):
    bucket = tmp_path / "bucket"
    (bucket / "run").mkdir(parents=True)
    remote = Location(fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem()), "run", "s3://bucket/run")
    sink = TensorBoardSink(remote)
    sink.write(step_record(1))
    assert list((bucket / "run").iterdir()) == []
    sink.flush()
    sink.write(step_record(2))
    sink.close()
    assert [step for step, _ in scalars(bucket / "run", "train/loss")] == [1, 2]
