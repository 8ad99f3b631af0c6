"""Records reach the sink in their order, without whoever writes waiting for it, and what it raises is not lost."""

from __future__ import annotations

import threading
import time

import pytest

from rayapp.errors import Problem, StorageError
from rayapp.metrics import background
from rayapp.metrics.background import BackgroundSink
from rayapp.metrics.record import EventRecord, MetricsRecord


def event(step: int) -> EventRecord:
    return EventRecord(time=0.0, step=step, event="test", detail="")


class Recorder:
    """Notes its calls; the one of ``fails_at`` is refused, and nothing happens before ``open`` is set."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.open = threading.Event()
        self.open.set()
        self._fails_at = fails_at
        self.fails = fails_at is not None

    def write(self, record: MetricsRecord) -> None:
        assert self.open.wait(30)
        self.threads.add(threading.get_ident())
        if record.step == self._fails_at:
            self.fails = False
            raise StorageError(Problem("file x", "cannot be written", "free space"))
        self.calls.append(f"write {record.step}")

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_calls_come_in_their_order_from_a_thread_of_their_own() -> None:
    recorder = Recorder()
    sink = BackgroundSink(recorder, close_timeout_s=30)
    for step in range(100):
        sink.write(event(step))
    sink.flush()
    sink.close()
    assert recorder.calls == [*(f"write {step}" for step in range(100)), "flush", "close"]
    assert recorder.threads != {threading.get_ident()}


def test_whoever_writes_does_not_wait_for_the_sink() -> None:
    recorder = Recorder()
    recorder.open.clear()
    sink = BackgroundSink(recorder, close_timeout_s=30)
    for step in range(50):
        sink.write(event(step))
    sink.flush()
    assert recorder.calls == []
    recorder.open.set()
    sink.close()
    assert len(recorder.calls) == 52


def test_a_failure_is_raised_by_the_next_call_and_the_sink_is_closed_all_the_same() -> None:
    recorder = Recorder(fails_at=1)
    sink = BackgroundSink(recorder, close_timeout_s=30)
    sink.write(event(0))
    sink.write(event(1))
    deadline = time.monotonic() + 30
    while recorder.fails and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(StorageError, match="file x cannot be written"):
        sink.write(event(2))
    sink.close()
    assert recorder.calls == ["write 0", "close"], "after a failure nothing is written behind a gap"


def test_a_failure_at_the_end_is_raised_by_close() -> None:
    sink = BackgroundSink(Recorder(fails_at=0), close_timeout_s=30)
    sink.write(event(0))
    with pytest.raises(StorageError, match="file x cannot be written"):
        sink.close()


def test_a_sink_that_stands_still_is_left_after_a_while() -> None:
    recorder = Recorder()
    recorder.open.clear()
    sink = BackgroundSink(recorder, close_timeout_s=0.2)
    sink.write(event(0))
    with pytest.raises(StorageError, match=r"Recorder did not take all records in 0\.2 s"):
        sink.close()
    recorder.open.set()


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    recorder = Recorder()
    recorder.open.clear()
    sink = BackgroundSink(recorder, close_timeout_s=30)
    writer = threading.Thread(target=lambda: [sink.write(event(step)) for step in range(10)])
    writer.start()
    writer.join(0.3)
    assert writer.is_alive(), "whoever writes waits once the queue is full"
    recorder.open.set()
    writer.join(30)
    sink.close()
    assert recorder.calls == [*(f"write {step}" for step in range(10)), "close"]
