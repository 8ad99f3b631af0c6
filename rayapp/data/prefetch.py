"""A background thread that stays a few items ahead of whoever uses them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

POLL_S = 0.1


@dataclass(frozen=True)
class _End:
    """The producer has ended, by itself or by an exception."""

    error: BaseException | None = None


class _Channel(Generic[Item]):
    """A bounded queue whose two ends notice when the other is gone."""

    def __init__(self, depth: int) -> None:
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self.closed = threading.Event()

    def put(self, item: Item | _End) -> bool:
        """Wait for room; False if the consumer is gone."""
        while not self.closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def get(self) -> Item | _End:
        return self._queue.get()


def prefetched(make_items: Callable[[], Iterator[Item]], depth: int) -> Generator[Item, None, None]:
    """The items, up to ``depth`` of which are made ahead by a thread.

    An exception of the thread is raised here, after the items before it. When this iterator is closed or dropped, the thread
    ends and the items' own iterator is closed.

    Args:
        make_items: called in the thread.
        depth: items that wait at most.
    """
    channel: _Channel[Item] = _Channel(depth)
    thread = threading.Thread(target=_produce, args=(make_items, channel), name="rayapp-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := channel.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        channel.closed.set()
        thread.join()


def _produce(make_items: Callable[[], Iterator[Item]], channel: _Channel[Item]) -> None:
    try:
        for item in make_items():
            if not channel.put(item):
                return
        channel.put(_End())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer raises it
        channel.put(_End(error))
