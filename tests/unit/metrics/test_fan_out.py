from __future__ import annotations

import logging

import pytest
from pyarrow import fs

from rayapp.metrics.jsonl import JsonlSink, read_records
from rayapp.metrics.sink import FanOut
from rayapp.metrics.tensorboard import TensorBoardSink
from rayapp.storage import Location, open_location


class Recorder:
    """A sink that keeps what it is given, or breaks as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.steps: list[int | None] = []
        self.calls: list[str] = []
        self.error = error

    def write(self, record) -> None:
        self.calls.append("write")
        if self.error is not None:
            raise self.error
        self.steps.append(record.step)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_every_sink_gets_everything(step_record):
    required, optional = Recorder(), Recorder()
    sink = FanOut(required, [optional])
    sink.write(step_record(1))
    sink.flush()
    sink.close()
    for recorder in (required, optional):
        assert recorder.steps == [1]
        assert recorder.calls == ["write", "flush", "close"]
    assert sink.failures == {"Recorder": 0}


def test_an_optional_sink_that_fails_is_warned_of_once_counted_and_tried_again(step_record, caplog):
    required, broken, other = Recorder(), Recorder(OSError(28, "No space left on device")), Recorder()
    sink = FanOut(required, [broken, other])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sink.write(step_record(step))
        assert len(caplog.records) == 1
        assert "No space left" in caplog.text
        broken.error = None
        sink.write(step_record(4))
        sink.close()
    assert required.steps == other.steps == [1, 2, 3, 4]
    assert broken.steps == [4]
    assert "failed 3 times" in caplog.records[-1].getMessage()


def test_the_required_sink_s_failure_is_raised_after_the_others_were_served(step_record):
    optional = Recorder()
    sink = FanOut(Recorder(OSError(28, "No space left on device")), [optional])
    with pytest.raises(OSError, match="No space left"):
        sink.write(step_record(1))
    assert optional.steps == [1]


def test_a_bug_is_raised_and_the_record_is_kept(step_record):
    required = Recorder()
    with pytest.raises(ZeroDivisionError):
        FanOut(required, [Recorder(ZeroDivisionError())]).write(step_record(1))
    assert required.steps == [1]


def test_the_real_sinks_together_lose_charts_but_no_record(tmp_path, step_record):
    (bucket := tmp_path / "bucket").mkdir()
    remote = Location(fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem()), "charts", "s3://bucket/charts")
    metrics = open_location(str(tmp_path / "metrics.jsonl"))
    sink = FanOut(JsonlSink(metrics), [TensorBoardSink(remote)])
    bucket.rmdir()
    for step in (1, 2):
        sink.write(step_record(step))
        sink.flush()
    sink.close()
    assert sink.failures == {"TensorBoardSink": 3}
    assert [record.step for record in read_records(metrics)] == [1, 2]
