"""Trackers that are slow, gone or broken, and a sink that does not wait for them."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from rayapp.errors import Problem, StorageError
from rayapp.metrics import tracker
from rayapp.metrics.tracker import TrackerSink, refusals_of, without_passwords


class Recorder:
    """A tracker that keeps the steps it is given, fails as it is told to, and stands still while ``gate`` is shut."""

    name = "Recorder"

    def __init__(self) -> None:
        self.steps: list[int | None] = []
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self) -> None:
        """Nothing takes long."""

    def send(self, records) -> None:
        self.calls.append("send")
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.steps += [record.step for record in records]

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    def abandon(self) -> None:
        self.calls.append("abandon")


REFUSED = StorageError(Problem("the tracker", "is away"))


def test_records_arrive_in_order_and_several_at_a_time(step_record):
    recorder = Recorder()
    sink = TrackerSink(recorder)
    for step in range(100):
        sink.write(step_record(step))
    sink.flush()
    assert recorder.steps == list(range(100))
    assert recorder.calls.count("send") == 2, "the first record opens the run, the others wait for the flush"
    assert recorder.calls[-1] == "flush"
    sink.write(step_record(100))
    sink.close()
    assert recorder.steps == list(range(101))
    assert recorder.calls[-1] == "close"


def test_records_go_out_by_themselves_after_the_interval(step_record):
    recorder = Recorder()
    sink = TrackerSink(recorder, interval_s=0.05)
    for step in range(20):
        sink.write(step_record(step))
        time.sleep(0.02)
    assert len(recorder.steps) > 10
    assert recorder.calls.count("send") < 20
    sink.close()


def test_a_failure_is_raised_once_and_its_records_are_sent_again_after_a_pause(step_record):
    recorder = Recorder()
    recorder.error = REFUSED
    sink = TrackerSink(recorder, interval_s=0.0, first_pause_s=0.2)
    sink.write(step_record(1))
    with pytest.raises(StorageError, match="is away"):
        sink.flush()
    sink.write(step_record(2))
    sink.flush()
    assert recorder.calls == ["send"], "nothing is tried before the pause is over, and nothing is raised again"
    recorder.error = None
    time.sleep(0.25)
    sink.flush()
    assert recorder.steps == [1, 2]
    sink.close()


def test_the_pause_doubles(step_record):
    recorder = Recorder()
    recorder.error = REFUSED
    sink = TrackerSink(recorder, interval_s=0.0, first_pause_s=0.1)
    attempts_s = []
    sink.write(step_record(1))
    started_s = time.monotonic()
    while len(attempts_s) < 4:
        try:
            sink.flush()
        except StorageError:
            attempts_s.append(time.monotonic() - started_s)
        time.sleep(0.005)
    pauses_s = [after - before for before, after in itertools.pairwise(attempts_s)]
    assert pauses_s[0] >= 0.1
    assert pauses_s[1] >= 0.2
    assert pauses_s[2] >= 0.4


def test_a_tracker_that_stands_still_costs_no_time_and_is_abandoned_at_the_end(step_record):
    recorder = Recorder()
    recorder.gate.clear()
    sink = TrackerSink(recorder, interval_s=0.0, flush_wait_s=0.1, close_wait_s=0.2)
    started_s = time.monotonic()
    for step in range(1000):
        sink.write(step_record(step))
    assert time.monotonic() - started_s < 0.5
    sink.flush()
    with pytest.raises(StorageError, match=r"Recorder did not take the last 1000 records within 0\.2 s; metrics\.jsonl has them"):
        sink.close()
    assert time.monotonic() - started_s < 1.5
    assert recorder.calls == ["send", "abandon"]
    recorder.gate.set()


def test_at_the_end_there_is_one_more_attempt_whatever_the_pause(step_record):
    recorder = Recorder()
    recorder.error = REFUSED
    sink = TrackerSink(recorder, interval_s=0.0, first_pause_s=1000.0)
    sink.write(step_record(1))
    with pytest.raises(StorageError):
        sink.flush()
    sink.write(step_record(2))
    recorder.error = None
    sink.close()
    assert recorder.steps == [1, 2]
    assert recorder.calls == ["send", "send", "close"]


def test_what_fails_while_the_sink_is_closed_is_sent_once_more(step_record):
    class FailsOnce(Recorder):
        def send(self, records) -> None:
            self.error = None if self.calls else REFUSED
            super().send(records)

    recorder = FailsOnce()
    recorder.gate.clear()
    sink = TrackerSink(recorder)
    sink.write(step_record(1))
    sink.write(step_record(2))
    threading.Timer(0.1, recorder.gate.set).start()
    sink.close()
    assert recorder.steps == [1, 2]


def test_a_failure_at_the_end_is_raised_and_the_run_is_still_closed(step_record):
    recorder = Recorder()
    recorder.error = REFUSED
    sink = TrackerSink(recorder)
    sink.write(step_record(1))
    with pytest.raises(StorageError, match="is away"):
        sink.close()
    assert recorder.calls[-1] == "close"


def test_the_oldest_records_are_given_up_when_too_many_wait(step_record, monkeypatch):
    monkeypatch.setattr(tracker, "MOST_WAITING", 10)
    recorder = Recorder()
    recorder.error = REFUSED
    sink = TrackerSink(recorder, interval_s=0.0, first_pause_s=1000.0)
    sink.write(step_record(0))
    with pytest.raises(StorageError):
        sink.flush()
    for step in range(1, 30):
        sink.write(step_record(step))
    recorder.error = None
    sink.close()
    assert recorder.steps == list(range(20, 30))


def test_what_is_not_installed_is_for_the_first_delivery_to_say(step_record):
    class Missing(Recorder):
        def prepare(self) -> None:
            raise ModuleNotFoundError("No module named 'tracker'")

    recorder = Missing()
    recorder.error = REFUSED
    sink = TrackerSink(recorder)
    sink.write(step_record(1))
    with pytest.raises(StorageError):
        sink.close()


def test_a_bug_is_raised_as_it_is(step_record):
    recorder = Recorder()
    recorder.error = ZeroDivisionError("a bug")
    sink = TrackerSink(recorder)
    sink.write(step_record(1))
    with pytest.raises(ZeroDivisionError):
        sink.flush()
    recorder.error = None
    sink.close()


def test_whatever_a_package_raises_is_a_storage_error_without_its_passwords():
    with (
        pytest.raises(StorageError, match=r"^MLflow failed: KeyError: 'no http://\*\*\*@host/api'; look there$") as error,
        refusals_of("MLflow", "look there"),
    ):
        raise KeyError("no http://me:secret@host/api")
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://host:5000/x", "http://host:5000/x"),
        ("http://me:secret@host:5000", "http://***@host:5000"),
        ("postgresql+psycopg2://me:s/ecret@db/x", "postgresql+psycopg2://me:s/ecret@db/x"),  # no URI: a slash must be quoted
        ("at http://token@a and ftp://b:c@d/e", "at http://***@a and ftp://***@d/e"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_passwords_are_not_shown(text, shown):
    assert without_passwords(text) == shown
