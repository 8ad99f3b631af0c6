"""What the board keeps of groups that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest

from rayapp.errors import NonFiniteError
from rayapp.train.board import Board, News
from rayapp.train.group import Beat, WorkerInfo

T = TypeVar("T")


class Here:
    """The board without an actor around it."""

    def __init__(self) -> None:
        self.board: Any = Board.__ray_metadata__.modified_class()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._run(getattr(self.board, name)(*arguments))

    def _run(self, call: Awaitable[T]) -> T:
        async def wait() -> T:
            return await call

        return asyncio.run(wait())

    def news(self) -> News:
        found: News = self.take()
        return found


@pytest.fixture
def board() -> Here:
    return Here()


def worker(group: str, rank: int, pid: int = 1) -> WorkerInfo:
    return WorkerInfo(group, rank, 2, "node", "10.0.0.1", pid, None)


def beat(num_marks: int, step: int = 3) -> Beat:
    return Beat("training step", step, num_marks)


def test_a_group_runs_when_all_of_its_ranks_are_up(board: Here) -> None:
    assert not board.news().is_running
    board.join(worker("a", 1))
    assert not board.news().is_running
    board.join(worker("a", 0))
    news = board.news()
    assert (news.is_running, news.starts, news.world_size) == (True, 1, 2)


def test_a_failure_closes_the_group_and_is_told_once(board: Here) -> None:
    for rank in (0, 1):
        board.join(worker("a", rank, pid=10 + rank))
    board.beat("a", 1, beat(7, step=17))
    board.fail({1: ("ActorDiedError", "gone")}, "text", False)
    news = board.news()
    (failure,) = news.failures
    assert (failure.step, failure.workers[1].pid, failure.exceptions) == (17, 11, {1: ("ActorDiedError", "gone")})
    assert (news.is_running, news.views, board.news().failures) == (False, {}, [])
    assert board.join(worker("b", 0)) is failure


def test_a_rank_of_a_group_that_failed_may_come_late(board: Here) -> None:
    board.join(worker("a", 0, pid=100))
    board.fail({0: ("ActorDiedError", "gone")}, "", False)
    board.join(worker("a", 1, pid=101))
    board.join(worker("b", 0, pid=200))
    board.join(worker("b", 1, pid=201))
    news = board.news()
    assert news.is_running
    assert {rank: view.worker.pid for rank, view in news.views.items()} == {0: 200, 1: 201}


def test_what_a_group_says_after_it_failed_is_not_taken_for_the_next_one(board: Here) -> None:
    for group in ("a", "b"):
        for rank in (0, 1):
            board.join(worker(group, rank))
        board.report("a", 0, "RuntimeError: Connection closed by peer")
        board.judge("a", {1: "it hung"})
        board.beat("a", 0, beat(99, step=99))
        board.fail({}, "", False)
    first, second = board.news().failures
    assert (first.reports, first.verdicts) == ({0: "RuntimeError: Connection closed by peer"}, {1: "it hung"})
    assert (second.reports, second.verdicts, second.step) == ({}, {}, 0)


def test_progress_is_a_growing_number_of_marks(board: Here) -> None:
    board.join(worker("a", 0))
    board.join(worker("a", 1))
    board.beat("a", 0, beat(1))
    changed = board.board._ranks[0].changed_s
    board.beat("a", 0, beat(1))
    assert board.board._ranks[0].changed_s == changed
    board.beat("a", 0, beat(2))
    assert board.board._ranks[0].changed_s > changed
    board.leave("a", 0)
    assert [view.has_left for view in board.news().views.values()] == [True, False]


def test_progress_lines_are_thinned_and_others_are_not(board: Here) -> None:
    for line in ("building", "step 1/9", "step 2/9", "validation at step 2", "step 3/9", "step 4/9"):
        board.tell(line)
    assert board.news().lines == ["building", "step 2/9", "validation at step 2", "step 4/9"]
    assert board.news().lines == []


def test_the_first_refusal_counts(board: Here) -> None:
    board.refuse(NonFiniteError("first"))
    board.refuse(NonFiniteError("second"))
    assert str(board.news().refusal) == "first"


def test_why_a_group_could_not_start_is_known_until_one_does(board: Here) -> None:
    board.fail_to_start("no place")
    assert board.news().start_error == "no place"
    board.join(worker("a", 0))
    board.join(worker("a", 1))
    assert board.news().start_error is None
