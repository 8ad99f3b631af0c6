"""Where records go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from rayapp.errors import RayappError
from rayapp.metrics.record import MetricsRecord

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes records, one after the other, from one thread of one rank."""

    def write(self, record: MetricsRecord) -> None:
        """Take one record."""

    def flush(self) -> None:
        """All that was written can be read by others from now on."""

    def close(self) -> None:
        """Flush, and free what the sink holds. It cannot be used afterwards."""


class FanOut:
    """One sink that writes to several.

    A run without its record is worth little, a run without a chart is still a run. So what fails in the ``required`` sink is raised, once
    the others have been served; an ``optional`` sink that fails is warned of once, goes on being tried, since disks are freed and
    networks come back, and what it lost is counted and said at the end. Only the failures of storage and network are
    treated so (``OSError`` and rayapp's own errors): anything else is a bug and is raised.

    Args:
        required: the sink that must not fail.
        optional: the others.
    """

    def __init__(self, required: Sink, optional: Sequence[Sink] = ()) -> None:
        self._required = required
        self._optional = tuple(optional)
        self._failures = [0] * len(self._optional)

    @property
    def failures(self) -> dict[str, int]:
        """Calls that failed so far, by the class of optional sinks."""
        failures: dict[str, int] = {}
        for sink, count in zip(self._optional, self._failures, strict=True):
            name = type(sink).__name__
            failures[name] = failures.get(name, 0) + count
        return failures

    def write(self, record: MetricsRecord) -> None:
        """Hand the record to every sink.

        Raises:
            StorageError: the required sink could not take it.
        """
        self._each(lambda sink: sink.write(record))

    def flush(self) -> None:
        """Flush every sink.

        Raises:
            StorageError: the required sink could not be flushed.
        """
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink.

        Raises:
            StorageError: the required sink could not be flushed.
        """
        self._each(lambda sink: sink.close())
        for name, count in self.failures.items():
            if count:
                logger.warning("%s failed %d times in this run: its figures have gaps; metrics.jsonl has all of them", name, count)

    def _each(self, call: Callable[[Sink], None]) -> None:
        try:
            for index, sink in enumerate(self._optional):
                self._try(index, sink, call)
        finally:
            call(self._required)

    def _try(self, index: int, sink: Sink, call: Callable[[Sink], None]) -> None:
        try:
            call(sink)
        except (OSError, RayappError) as error:
            self._failures[index] += 1
            if self._failures[index] == 1:
                logger.warning("%s failed and is left with a gap; training goes on: %s", type(sink).__name__, error)
