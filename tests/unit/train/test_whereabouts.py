"""Where a thread is, and how many collectives this process has entered."""

from __future__ import annotations

import threading
import time

from support.ranks import run_ranks
from support.whereabouts_work import waiting_place

from rayapp.train.whereabouts import place_of


def test_a_place_in_the_code_is_named_with_its_line() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(30,))
    thread.start()
    deadline = time.monotonic() + 10
    while "threading.py" not in place_of(thread.ident or 0):
        assert time.monotonic() < deadline
    done.set()
    thread.join()
    assert place_of(thread.ident or 0) == "nothing"


def test_a_rank_that_waits_for_a_late_one_is_inside_the_collective_and_ahead() -> None:
    (early, entered_early), (late, entered_late) = run_ranks(waiting_place, 2)
    assert early == "collective all_reduce"
    assert late.startswith("whereabouts_work.py:")
    assert entered_early is not None
    assert entered_late is not None
    assert entered_early[0] == entered_late[0] + 1
    assert entered_early[1] == "all_reduce"
