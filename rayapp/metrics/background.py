"""Takes the waiting for storage and network out of training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rayapp.errors import Problem, StorageError
from rayapp.metrics.record import MetricsRecord
from rayapp.metrics.sink import Sink

MOST_WAITING = 10_000
"""Calls that may wait. A sink that falls further behind holds training up, so that memory stays bounded."""


class BackgroundSink:
    """Hands every call on to a sink, in their order, in a thread of its own.

    What the sink raises is raised by the next call here; later calls of the sink are left out then.

    Args:
        sink: is called from the thread alone.
        close_timeout_s: seconds that ``close`` waits for what is left.
    """

    def __init__(self, sink: Sink, close_timeout_s: float) -> None:
        self._sink, self._close_timeout_s = sink, close_timeout_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def write(self, record: MetricsRecord) -> None:
        """Take one record.

        Raises:
            StorageError: an earlier call of the sink failed.
        """
        self._put(lambda: self._sink.write(record))

    def flush(self) -> None:
        """Have the sink flush when its turn comes.

        Raises:
            StorageError: an earlier call of the sink failed.
        """
        self._put(self._sink.flush)

    def close(self) -> None:
        """Wait until the sink has taken everything, and close it.

        Raises:
            StorageError: a call of the sink failed, or the sink did not get through in time.
        """
        self._calls.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            rule = f"did not take all records in {self._close_timeout_s:g} s"
            raise StorageError(Problem(f"metrics of {type(self._sink).__name__}", rule, "look after the storage and the trackers"))
        self._raise_failure()

    def _put(self, call: Callable[[], None]) -> None:
        self._raise_failure()
        self._calls.put(call)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        failed = False
        while (call := self._calls.get()) is not None:
            failed = failed or self._fails(call)
        self._fails(self._sink.close)

    def _fails(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (raised again by the next call)
            self._failure = self._failure or error
            return True
        return False
