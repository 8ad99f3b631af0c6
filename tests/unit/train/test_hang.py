"""Which rank is blamed for a hang."""

from __future__ import annotations

import pytest

from rayapp.train.group import Beat, RankView, WorkerInfo
from rayapp.train.hang import hung_ranks


def view(
    rank: int,
    *,
    silent_s: float = 0.5,
    unchanged_s: float = 0.5,
    inside: str | None = None,
    collective: int | None = None,
    left: bool = False,
) -> RankView:
    worker = WorkerInfo("g", rank, 3, "node", f"10.0.0.{rank}", 100 + rank, None)
    return RankView(worker, Beat("training step", 17, 40, inside, collective), silent_s, unchanged_s, left)


WAITS = {"unchanged_s": 61.0, "inside": "collective all_reduce; last collective: all_reduce, number 88", "collective": 88}


def test_a_group_that_makes_progress_is_left_alone() -> None:
    assert hung_ranks({rank: view(rank, unchanged_s=59.0) for rank in range(3)}, 60.0) == {}
    assert hung_ranks({}, 60.0) == {}


def test_ranks_that_wait_for_one_that_makes_progress_are_left_alone() -> None:
    assert hung_ranks({0: view(0, **WAITS), 1: view(1, unchanged_s=2.0), 2: view(2, **WAITS)}, 60.0) == {}


def test_a_silent_rank_is_to_blame_for_those_that_wait() -> None:
    hung = hung_ranks({0: view(0, **WAITS), 1: view(1, silent_s=62.0, unchanged_s=62.0), 2: view(2, **WAITS)}, 60.0)
    assert list(hung) == [1]
    assert hung[1].startswith(
        "rank 1 on node 10.0.0.1 (pid 101) has not been heard of for 62 s, since step 17 (training step): its process is"
    )
    assert "waiting for it: ranks 0, 2 in collective all_reduce" in hung[1]


def test_without_a_silent_one_the_rank_that_entered_fewer_collectives_is_to_blame() -> None:
    late = view(2, unchanged_s=61.0, inside="collective broadcast; last collective: broadcast, number 87", collective=87)
    hung = hung_ranks({0: view(0, **WAITS), 1: view(1, **WAITS), 2: late}, 60.0)
    assert list(hung) == [2]
    assert "inside collective broadcast" in hung[2]
    assert "made no progress for 61 s" in hung[2]


def test_without_such_counts_the_rank_outside_of_any_collective_is_to_blame() -> None:
    waiting = {"unchanged_s": 61.0, "inside": "collective all_reduce"}
    hung = hung_ranks({0: view(0, unchanged_s=61.0, inside="loader.py:88 in read"), 1: view(1, **waiting), 2: view(2, **waiting)}, 60.0)
    assert list(hung) == [0]
    assert "inside loader.py:88 in read" in hung[0]


def test_ranks_that_wait_for_each_other_are_all_to_blame() -> None:
    assert sorted(hung_ranks({rank: view(rank, **WAITS) for rank in range(3)}, 60.0)) == [0, 1, 2]


def test_a_rank_that_has_done_its_work_is_not_waited_for() -> None:
    done = view(0, silent_s=500.0, unchanged_s=500.0, left=True)
    assert hung_ranks({0: done, 1: view(1), 2: view(2)}, 60.0) == {}


@pytest.mark.parametrize("timeout_s", [12.0, 60.0])
def test_a_late_beat_is_no_silence(timeout_s: float) -> None:
    """The rank whose last beat is a few seconds old is not blamed for the one that makes no progress."""
    stuck = {"unchanged_s": timeout_s + 1, "inside": "loader.py:88 in read"}
    waiting = {"silent_s": 9.0, "unchanged_s": timeout_s + 1, "inside": "collective all_reduce"}
    assert list(hung_ranks({0: view(0, **waiting), 1: view(1, **stuck)}, timeout_s)) == [1]
