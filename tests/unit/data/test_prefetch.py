"""The thread that works ahead: order, bound, exceptions, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rayapp.data.prefetch import prefetched


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rayapp-prefetch"]


def test_all_items_in_order() -> None:
    assert list(prefetched(lambda: iter(range(100)), 3)) == list(range(100))
    assert list(prefetched(lambda: iter(()), 3)) == []
    assert not threads()


def test_it_stays_a_bounded_number_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    ahead = prefetched(items, 3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(made) == 5  # one was taken, three wait, one is held
    ahead.close()
    assert not threads()


def test_an_exception_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken shard")

    ahead = prefetched(items, 3)
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="broken shard"):
        next(ahead)
    assert not threads()


def test_closing_ends_the_thread_and_the_items() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead = prefetched(items, 2)
    next(ahead)
    ahead.close()
    assert closed.is_set()
    assert not threads()


def test_dropping_it_ends_the_thread() -> None:
    ahead = prefetched(lambda: iter(int, 1), 2)
    next(ahead)
    del ahead
    assert not threads()
