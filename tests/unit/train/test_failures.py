"""A sentence for each way in which a worker group ends; Ray's texts are those of Ray 2.60."""

from __future__ import annotations

import pytest

from rayapp.documents import TrainFailure
from rayapp.train.failures import blamed, failure_document
from rayapp.train.group import GroupFailure, WorkerInfo

KILLED = (
    "WorkerHealthCheckFailedError",
    "A worker health check failed.\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
    "detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed",
)
OUT_OF_MEMORY = (
    "WorkerHealthCheckFailedError",
    "Task was killed due to the node running low on memory.\nMemory on the node was 9.5GB / 10GB",
)
NODE_LOST = ("WorkerHealthCheckFailedError", "The actor died because its node has died. Node Id: 8f0, the node was terminated unexpectedly")
UNREACHABLE = (
    "WorkerHealthCheckFailedError",
    "ActorUnavailableError: The actor 24c6a is unavailable: The actor is temporarily unavailable: RpcError: failed to connect",
)
PEER_LOST = ("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:20708: Connection reset by peer")


def failure(exceptions: dict[int, tuple[str, str]], **others: dict[int, str]) -> GroupFailure:
    workers = {rank: WorkerInfo("g", rank, 2, "id", "10.0.0.7", 40 + rank, None) for rank in range(2)}
    return GroupFailure(time=0.0, step=17, workers=workers, exceptions=exceptions, **others)


@pytest.mark.parametrize(
    ("exception", "meaning"),
    [
        (KILLED, "was killed (SIGKILL, or by the kernel for want of memory) or crashed"),
        (OUT_OF_MEMORY, "was killed because its node ran out of memory"),
        (NODE_LOST, "was lost with its node"),
        (UNREACHABLE, "cannot be reached any more: its process or its node is gone"),
        (("ActorDiedError", "something new"), "is gone: something new"),
    ],
)
def test_the_rank_that_died_is_named_and_not_the_one_that_lost_it(exception: tuple[str, str], meaning: str) -> None:
    assert blamed(failure({0: PEER_LOST, 1: exception}, reports={0: f"RuntimeError: {PEER_LOST[1]}"})) == (
        1,
        f"rank 1 on node 10.0.0.7 (pid 41) {meaning}",
    )


def test_a_verdict_comes_before_what_ray_saw_of_its_consequences() -> None:
    assert blamed(failure({0: KILLED, 1: PEER_LOST}, verdicts={0: "rank 0 hung"})) == (0, "rank 0 hung")


def test_the_rank_that_failed_by_itself_comes_before_those_that_lost_a_peer() -> None:
    reports = {0: f"RuntimeError: {PEER_LOST[1]}", 1: "ValueError: no such row"}
    assert blamed(failure({0: PEER_LOST, 1: ("ValueError", "no such row")}, reports=reports))[1].endswith("failed: ValueError: no such row")


def test_where_all_lost_a_peer_one_of_them_is_told() -> None:
    rank, sentence = blamed(failure({0: PEER_LOST, 1: PEER_LOST}))
    assert rank in (0, 1)
    assert "Connection reset" in sentence
    assert blamed(failure({}))[0] is None


def test_the_document_holds_the_last_lines_of_the_rank() -> None:
    document = failure_document(failure({1: KILLED}), {1: ["one", "two"], 0: ["other"]})
    assert TrainFailure.model_validate_json(document.model_dump_json()) == document
    assert (document.rank, document.node, document.step, document.log) == (1, "10.0.0.7", 17, ["one", "two"])
    assert document.time == "1970-01-01T00:00:00+00:00"
