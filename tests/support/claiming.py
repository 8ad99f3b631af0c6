"""Processes that claim runs at the same moment."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier, Event
from typing import Any

from rayapp.checkpoint.claims import claimed
from rayapp.errors import CheckpointError
from rayapp.storage import open_location

ANSWER_S = 120


@dataclass
class Claimants:
    """``number`` processes, each waiting for a round to begin."""

    number: int
    barrier: Barrier
    freed: Event
    orders: list[Any]
    answers: Any
    processes: list[Any]

    def claim(self, uri: str, delays_s: list[float]) -> dict[int, str | None]:
        """Let all of them claim one run, each after its delay; the winner keeps it until ``free``.

        Returns:
            For each process its refusal, or None where it has the run.
        """
        self.freed.clear()
        for orders, delay_s in zip(self.orders, delays_s, strict=True):
            orders.put((uri, delay_s))
        return dict(self.answers.get(timeout=ANSWER_S) for _ in self.orders)

    def free(self) -> None:
        self.freed.set()


@contextmanager
def claimants(number: int) -> Iterator[Claimants]:
    """Starts the processes, and ends them."""
    context = mp.get_context("spawn")
    barrier, freed, answers = context.Barrier(number), context.Event(), context.Queue()
    orders = [context.Queue() for _ in range(number)]
    processes = [context.Process(target=_work, args=(own, barrier, freed, answers), daemon=True) for own in orders]
    for process in processes:
        process.start()
    try:
        yield Claimants(number, barrier, freed, orders, answers, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(orders: Any, barrier: Barrier, freed: Event, answers: Any) -> None:
    while True:
        uri, delay_s = orders.get()
        run_dir = open_location(uri)
        run_dir.exists()  # what the first access costs is paid before
        barrier.wait(ANSWER_S)
        time.sleep(delay_s)
        try:
            with claimed(run_dir):
                answers.put((os.getpid(), None))
                freed.wait()
        except CheckpointError as error:
            answers.put((os.getpid(), str(error)))


def delays(number: int, seed: int) -> list[float]:
    """None at all, or some at random that are about as long as a claim settles."""
    chance = random.Random(seed)
    return [chance.random() * 0.7 if seed % 2 else 0.0 for _ in range(number)]
