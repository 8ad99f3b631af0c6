"""The driver's watch over a run: it passes news on, ends what hangs, and asks workers to save when it is interrupted."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayapp.checkpoint.checkpoints import newest_intact
from rayapp.checkpoint.runs import RunFolder
from rayapp.cluster.inventory import WorkerResources, read_inventory
from rayapp.config.resolved import ResolvedRun
from rayapp.documents import TrainFailure
from rayapp.errors import InterruptedRunError, PlacementError, Problem, RayappError, StorageError, TerminatedRunError, WorkerError
from rayapp.storage import open_location
from rayapp.train.board import Board, News
from rayapp.train.failures import blamed, failure_document
from rayapp.train.group import GroupFailure, WorkerInfo
from rayapp.train.hang import hung_ranks
from rayapp.train.loop import Outcome
from rayapp.train.trainer import make_trainer

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
POLL_S = 0.25
WATCH_RETRY_S = 10.0
"""For the watch's own reads and writes: it has hangs to look for meanwhile."""

ONE_REQUEST_S = 1.0
LOG_LINES = 20
LOG_TIMEOUT_S = 15.0
ABORT_TIMEOUT_S = 10.0
PLACE_TRY_VARIABLE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
PLACE_TRY_S = 15.0
"""Ray Train asks for the placement group anew after so many seconds."""

HEALTH_CHECK_VARIABLE = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Seconds after which Ray Train itself gives a worker up that does not answer; it passes the variable on to its controller."""


@dataclass(frozen=True)
class Finished:
    """What the workers came to.

    Attributes:
        outcome: of the last group.
        restarts: how often a group had to be started again.
    """

    outcome: Outcome
    restarts: int


def fit(run: ResolvedRun, report: Report) -> Finished:
    """Run the workers and watch over them until the run ends.

    Ctrl-C and SIGTERM have the workers save and end; a second one leaves at once.

    Raises:
        InputError: a worker refused the run.
        PlacementError: the workers were not placed in time.
        InterruptedRunError: the run was asked to end.
        RunError: training failed.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    os.environ[HEALTH_CHECK_VARIABLE] = str(max(600.0, 2 * run.file.train.hang_timeout_s))  # the watch is to find hangs first
    os.environ[PLACE_TRY_VARIABLE] = str(PLACE_TRY_S)
    board = Board.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    fitting = _Fitting(make_trainer(run, board))
    with _signals() as signals:
        watch = _Watch(run, board, report, signals)
        fitting.start()
        try:
            while not fitting.ended.wait(POLL_S):
                watch.look()
            watch.look()  # what came between the last look and the end
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the connection to the cluster was lost: {error}") from error
        finally:
            _end(fitting, board, watch.controller)
    return watch.conclude(fitting)


def _end(fitting: _Fitting, board: Any, controller: Any) -> None:
    """Have Ray Train's controller end its workers and itself; it must not outlive the connection that it is waited for with."""
    if fitting.ended.is_set() or controller is None:
        return
    board.end.remote()  # heard between two tries to place the workers
    controller.abort.remote()  # heard while they run
    if not fitting.ended.wait(PLACE_TRY_S + ABORT_TIMEOUT_S):
        ray.kill(controller)
        fitting.ended.wait(ABORT_TIMEOUT_S)


class _Signals:
    """Counts the requests to end, of Ctrl-C and of SIGTERM, which `ray job stop` sends.

    Some senders signal a process and then its group: what follows within a second is the same request.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None
        self._last_s = -math.inf

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler. It raises nothing, so that no news is lost half-way."""
        now_s = time.monotonic()
        if now_s - self._last_s >= ONE_REQUEST_S:
            self.count += 1
        self.last, self._last_s = signal.Signals(number), now_s


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Take SIGINT and SIGTERM; in another thread than the main one they belong to somebody else."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """Looks at the board, and acts on what it sees."""

    def __init__(self, run: ResolvedRun, board: Any, report: Report, signals: _Signals) -> None:
        self._run, self._board, self._report, self._signals = run, board, report, signals
        self._folder = RunFolder(open_location(run.run_dir, retry_s=WATCH_RETRY_S))
        self._waiting_since_s: float | None = time.monotonic()
        self._judged: set[tuple[str, int]] = set()
        self._failures = 0
        self._restarts = 0
        self._last_failure: TrainFailure | None = None
        self._is_stopping = False
        self.controller: Any = None

    def look(self) -> None:
        """Pass on what was told, and see to failures, hangs, workers that do not come up, and requests to end.

        Raises:
            RayappError: a worker refused the run.
            PlacementError: the workers were not placed in time.
            InterruptedRunError: the run is to end at once.
        """
        news: News = ray.get(self._board.take.remote())
        self.controller = news.controller
        for line in news.lines:
            self._report(line)
        if news.refusal is not None:
            raise news.refusal
        for failure in news.failures:
            self._record(failure)
        self._check_placed(news)
        self._end_what_hangs(news)
        self._heed_signals(news)

    def _check_placed(self, news: News) -> None:
        if news.is_running:
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if time.monotonic() - self._waiting_since_s > self._run.file.train.start_timeout_s:
            raise PlacementError(_not_placed(self._run, news))

    def _end_what_hangs(self, news: News) -> None:
        found = hung_ranks(news.views, self._run.file.train.hang_timeout_s) if news.is_running else {}
        group = next((view.worker.group for view in news.views.values()), "")
        hung = {rank: sentence for rank, sentence in found.items() if (group, rank) not in self._judged}
        if not hung:
            return
        self._judged |= {(group, rank) for rank in hung}
        for sentence in hung.values():
            self._report(f"train.hang_timeout_s={self._run.file.train.hang_timeout_s:g} has passed: {sentence}")
        ray.get(self._board.judge.remote(group, hung))
        for rank in hung:
            ray.kill(news.views[rank].worker.actor)

    def _record(self, failure: GroupFailure) -> None:
        rank, reason = blamed(failure)
        worker = None if rank is None else failure.workers.get(rank)
        log = {} if worker is None else {worker.rank: _last_log_lines(worker)}
        self._last_failure = document = failure_document(failure, log)
        self._report(f"failed after step {failure.step}: {reason}")
        for line in document.log:
            self._report(f"  {line}")
        self._failures += not failure.is_preemption
        most = self._run.file.train.max_failures
        if failure.is_preemption:
            self._report("restart from the newest complete checkpoint; a node that is taken back uses up none of train.max_failures")
        elif self._failures <= most:
            self._report(f"restart {self._failures} of {most}, from the newest complete checkpoint")
        self._restarts += failure.is_preemption or self._failures <= most
        try:
            known = self._folder.failures.read_bytes() if self._folder.failures.exists() else b""
            self._folder.failures.write_bytes(known + document.model_dump_json().encode() + b"\n")
        except StorageError as error:
            logger.warning("the failure is not in the run's folder: %s", error)

    def _heed_signals(self, news: News) -> None:
        if not self._signals.count:
            return
        if self._signals.count > 1 or not news.is_running:
            raise self._interrupted("at once")
        if not self._is_stopping:
            self._is_stopping = True
            self._board.stop.remote()
            self._report("stopping: the workers save a checkpoint after this step; once more to leave at once")

    def conclude(self, fitting: _Fitting) -> Finished:
        """What came of it all.

        Raises:
            InterruptedRunError: the run was asked to end, and did.
            WorkerError: the worker group failed more often than it may.
        """
        outcome = fitting.value(self._last_failure, self._run.file.train.max_failures)
        if outcome.stopped:
            raise self._interrupted(f"after step {outcome.progress.step}")
        return Finished(outcome, self._restarts)

    def _interrupted(self, when: str) -> InterruptedRunError:
        try:
            newest = newest_intact(self._folder.checkpoints, deep=False)
            kept = "has no checkpoint yet" if newest is None else f"has its newest checkpoint at step {newest.step}"
        except RayappError as error:
            kept = f"its checkpoints cannot be listed ({error})"
        kind = TerminatedRunError if self._signals.last is signal.SIGTERM else InterruptedRunError
        resume = f"go on with: rayapp train FILE --resume {self._run.run_id}"
        return kind(f"interrupted: run {self._run.file.name}/{self._run.run_id} ended {when} and {kept}; {resume}")


class _Fitting(threading.Thread):
    """Waits for Ray Train beside the main thread, which takes signals."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = trainer
        self.ended = threading.Event()
        self._result: Any = None
        self._error: TrainingFailedError | ray.exceptions.RayError | None = None

    def run(self) -> None:
        try:
            self._result = self._trainer.fit()
        except (TrainingFailedError, ray.exceptions.RayError) as error:
            self._error = error
        finally:
            self.ended.set()

    def value(self, last_failure: TrainFailure | None, max_failures: int) -> Outcome:
        """What rank 0 returned.

        Raises:
            WorkerError: the worker group failed more often than it may.
        """
        if isinstance(self._error, WorkerGroupError) and last_failure is not None:
            log = "".join(f"\n  {line}" for line in last_failure.log)
            limit = f"train.max_failures={max_failures}"
            raise WorkerError(f"{last_failure.reason}, after step {last_failure.step}; {limit} is used up{log}") from self._error
        if self._error is not None:
            raise WorkerError(str(self._error)) from self._error
        if self._result is None:
            raise WorkerError("Ray Train ended without a result; see the log above")
        outcome = self._result.return_value
        assert isinstance(outcome, Outcome), outcome  # a refusal is raised by the watch
        return outcome


def _not_placed(run: ResolvedRun, news: News) -> Problem:
    file = run.file
    worker = WorkerResources(
        num_cpus=file.resources.cpus_per_worker or 1,
        num_gpus=1 if run.device.kind == "cuda" else 0,
        gpu_type=file.resources.gpu_type,
        labels=file.resources.labels,
    )
    free = ray.available_resources()
    rule = (
        f"passed before all {run.layout.world_size} workers of {worker} each were up ({len(news.views)} are). The cluster has "
        f"{read_inventory()}, of which {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free"
        f"{f'. Ray says: {news.start_error}' if news.start_error else ''}"
    )
    remedy = f"wait for what else runs on the cluster, add nodes, or continue with fewer workers: --resume {run.run_id} train.num_workers=N"
    return Problem(f"train.start_timeout_s={file.train.start_timeout_s:g}", rule, remedy)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _read_last_lines(path: str, count: int) -> list[str]:
    """The last lines of a file of the node that this runs on, at most 64 KiB of them."""
    with Path(path).open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - 65_536))
        return stream.read().decode(errors="replace").splitlines()[-count:]


def _last_log_lines(worker: WorkerInfo) -> list[str]:
    """What a worker wrote last; nothing where its node is gone."""
    if worker.log_path is None:
        return []
    there = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
    lines = _read_last_lines.options(scheduling_strategy=there).remote(worker.log_path, LOG_LINES)
    try:
        found: list[str] = ray.get(lines, timeout=LOG_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.info("the last lines of %s cannot be read: %s", worker, error)
        return []
    return [line for line in found if not line.startswith(":")]  # Ray's own marks, such as :actor_name:


def read_failures(folder: RunFolder) -> list[TrainFailure]:
    """Everything that went wrong with the run's workers, over all of its starts."""
    if not folder.failures.exists():
        return []
    return [TrainFailure.model_validate(json.loads(line)) for line in folder.failures.read_bytes().splitlines()]
