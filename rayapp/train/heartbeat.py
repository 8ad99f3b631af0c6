"""A worker's signs of life, sent by a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any

import ray

from rayapp.train.group import Beat, WorkerInfo
from rayapp.train.whereabouts import collectives_entered, place_of

logger = logging.getLogger(__name__)

BEAT_S = 1.0
LOOK_AFTER_S = 3.0
"""Seconds without a mark after which it is looked where the training thread is."""


class Heartbeat:
    """Ray's lifeline of a worker (see :class:`rayapp.train.lifeline.Lifeline`), made by the thread that trains.

    Args:
        board: the driver's actor.
        worker: this process.
    """

    def __init__(self, board: Any, worker: WorkerInfo) -> None:
        self._board, self._group, self._rank = board, worker.group, worker.rank
        self._doing, self._step, self._num_marks, self._marked_s = "starting", 0, 0, time.monotonic()
        self._watched_thread = threading.get_ident()
        self._stop_requested = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_S)
        self._board.leave.remote(self._group, self._rank)

    def tell(self, line: str) -> None:
        """Send a line of progress."""
        self._board.tell.remote(line)

    def mark(self, doing: str, step: int) -> None:
        """Note what training begins to do."""
        self._doing, self._step, self._marked_s = doing, step, time.monotonic()
        self._num_marks += 1

    @property
    def stop_requested(self) -> bool:
        """True once the driver has asked for it."""
        return self._stop_requested

    def _run(self) -> None:
        stop = self._board.wait_for_stop.remote()
        while not self._ended.is_set():
            self._board.beat.remote(self._group, self._rank, self._beat())
            if self._stop_requested:
                self._ended.wait(BEAT_S)
            elif ray.wait([stop], timeout=BEAT_S)[0]:
                self._stop_requested = _came_through(stop)
                if not self._stop_requested:  # the call was lost on its way
                    self._ended.wait(BEAT_S)
                    stop = self._board.wait_for_stop.remote()

    def _beat(self) -> Beat:
        if time.monotonic() - self._marked_s < LOOK_AFTER_S:
            return Beat(self._doing, self._step, self._num_marks)
        entered = collectives_entered()
        inside = place_of(self._watched_thread)
        if entered is None:
            return Beat(self._doing, self._step, self._num_marks, inside)
        number, last = entered
        return Beat(self._doing, self._step, self._num_marks, f"{inside}; last collective: {last}, number {number}", number)


def _came_through(call: Any) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        logger.warning("the driver cannot be reached: %s", error)
        return False
    return True
