"""What experiment trackers have in common: a thread delivers to them, so that training never waits for one that is slow or gone."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from rayapp.errors import Problem, RayappError, StorageError
from rayapp.metrics.record import MetricsRecord

INTERVAL_S = 5.0
FLUSH_WAIT_S = 5.0
CLOSE_WAIT_S = 25.0
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
MOST_WAITING = 10_000
CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


class Tracker(Protocol):
    """One run in an experiment tracker. Its methods are called one after the other, from threads that training does not wait for."""

    def prepare(self) -> None:
        """Import what takes long to import. Called before training, so that its first steps are not slowed.

        Raises:
            ImportError: something is not installed here; the first ``send`` will say so.
        """

    @property
    def name(self) -> str:
        """Which tracker, and where: for messages."""

    def send(self, records: Sequence[MetricsRecord]) -> None:
        """Log records, opening or continuing the tracker's run at the first call.

        Raises:
            StorageError: they may not all have arrived, and will be sent again.
        """

    def flush(self) -> None:
        """Bring what was sent to where others read it.

        Raises:
            StorageError: the tracker or the storage refused.
        """

    def close(self) -> None:
        """End the tracker's run.

        Raises:
            StorageError: the tracker or the storage refused.
        """

    def abandon(self) -> None:
        """End what may still work for this tracker. Called, beside another method that does not return, when nobody waits any longer."""


@contextmanager
def refusals_of(tracker: str, remedy: str) -> Iterator[None]:
    """Whatever a tracker's package raises inside is a failure of that tracker.

    Trackers have no root of all that they raise: a bare ``Exception``, errors of their HTTP client and of their database come
    through as they are, and an installation can lack a module.

    Raises:
        StorageError: from the package's exception.
    """
    try:
        yield
    except RayappError:
        raise
    except Exception as error:
        text = without_passwords(" ".join(str(error).split())) or "no reason was given"
        raise StorageError(Problem(tracker, f"failed: {type(error).__name__}: {text}", remedy)) from error


def without_passwords(text: str) -> str:
    """A text whose URIs keep their users and passwords to themselves."""
    return CREDENTIALS.sub("***@", text)


class TrackerSink:
    """Hands records to a tracker, in a thread and several at a time.

    ``write`` costs microseconds, whatever the tracker does. Records go out every 5 seconds and at a flush. A delivery that failed
    is raised once, at the next call; its records are kept and sent again after a pause that doubles from 10 seconds to 5 minutes.
    Of more than 10,000 records that wait, the oldest are given up.

    Args:
        tracker: where records go.
        interval_s: seconds between two deliveries.
        flush_wait_s: seconds that a flush waits at most. What has not arrived by then is under way.
        close_wait_s: seconds that closing takes at most. What has not arrived by then is lost to the tracker.
        first_pause_s: seconds until the first new attempt.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        interval_s: float = INTERVAL_S,
        flush_wait_s: float = FLUSH_WAIT_S,
        close_wait_s: float = CLOSE_WAIT_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._tracker = tracker
        self._interval_s, self._flush_wait_s, self._close_wait_s = interval_s, flush_wait_s, close_wait_s
        self._first_pause_s = first_pause_s
        self._waiting: deque[MetricsRecord] = deque(maxlen=MOST_WAITING)
        self._sent: list[MetricsRecord] = []
        self._delivery: _Delivery | None = None
        self._failures_in_a_row = 0
        self._next_s = 0.0
        with suppress(ImportError):
            tracker.prepare()

    def write(self, record: MetricsRecord) -> None:
        """Take one record.

        Raises:
            StorageError: an earlier delivery failed. This record is kept.
        """
        self._waiting.append(record)
        self._collect(0.0)
        if time.monotonic() >= self._next_s:
            self._deliver(self._send)

    def flush(self) -> None:
        """Deliver what waits. After a failure nothing is tried before the pause is over.

        Raises:
            StorageError: a delivery failed.
        """
        deadline_s = time.monotonic() + self._flush_wait_s
        self._collect(self._flush_wait_s)
        if not self._failures_in_a_row or time.monotonic() >= self._next_s:
            self._deliver(self._send_and_flush)
            self._collect(deadline_s - time.monotonic())

    def close(self) -> None:
        """Deliver what waits, and end the tracker's run.

        Raises:
            StorageError: not everything was delivered in time.
        """
        deadline_s = time.monotonic() + self._close_wait_s
        if self._end(deadline_s) is not None:
            self._take_back()  # the last delivery tries again, and its failure is the one that counts
        self._deliver(self._send_and_close)
        if error := self._end(deadline_s):
            raise error

    def _deliver(self, work: Callable[[Sequence[MetricsRecord]], None]) -> None:
        if self._delivery is None:
            self._sent, self._waiting = list(self._waiting), deque(maxlen=MOST_WAITING)
            self._next_s = time.monotonic() + self._interval_s
            self._delivery = _Delivery(work, self._sent)
            self._delivery.start()

    def _collect(self, wait_s: float) -> None:
        """Take note of a delivery that has ended."""
        if self._delivery is None or not self._delivery.has_ended(wait_s):
            return
        error, self._delivery = self._delivery.error, None
        if error is None:
            self._failures_in_a_row = 0
            return
        self._take_back()
        self._next_s = time.monotonic() + min(self._first_pause_s * 2**self._failures_in_a_row, LONGEST_PAUSE_S)
        self._failures_in_a_row += 1
        raise error

    def _end(self, deadline_s: float) -> BaseException | None:
        """Wait for the delivery that is under way; gives what it failed with.

        Raises:
            StorageError: it does not come to an end.
        """
        if self._delivery is None:
            return None
        if not self._delivery.has_ended(deadline_s - time.monotonic()):
            self._tracker.abandon()
            num_lost = len(self._sent) + len(self._waiting)
            rule = f"did not take the last {num_lost} records within {self._close_wait_s:g} s"
            raise StorageError(Problem(self._tracker.name, rule, "metrics.jsonl has them"))
        error, self._delivery = self._delivery.error, None
        return error

    def _take_back(self) -> None:
        self._waiting = deque([*self._sent, *self._waiting], maxlen=MOST_WAITING)

    def _send(self, records: Sequence[MetricsRecord]) -> None:
        if records:  # a run without a record is not even opened
            self._tracker.send(records)

    def _send_and_flush(self, records: Sequence[MetricsRecord]) -> None:
        self._send(records)
        self._tracker.flush()

    def _send_and_close(self, records: Sequence[MetricsRecord]) -> None:
        try:
            self._send(records)
        finally:
            self._tracker.close()


class _Delivery(threading.Thread):
    """Work beside training. It does not keep the process alive."""

    def __init__(self, work: Callable[[Sequence[MetricsRecord]], None], records: Sequence[MetricsRecord]) -> None:
        super().__init__(name="rayapp-tracker", daemon=True)
        self._work, self._records = work, records
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work(self._records)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the sink raises it
            self.error = error

    def has_ended(self, wait_s: float) -> bool:
        self.join(max(0.0, wait_s))
        return not self.is_alive()
