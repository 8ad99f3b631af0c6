"""The driver's watch over a run: it passes news on, ends what hangs, and asks workers to save when it is interrupted."""

from __future__ import annotations

import json
import logging
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
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayapp.checkpoint.checkpoints import newest_intact
from rayapp.checkpoint.runs import RunFolder
from rayapp.cluster.inventory import WorkerResources, read_inventory
from rayapp.config.resolved import ResolvedRun
from rayapp.documents import TrainFailure
from rayapp.errors import InterruptedRunError, PlacementError, Problem, TerminatedRunError, WorkerError
from rayapp.storage import open_location
from rayapp.train.board import Board, News
from rayapp.train.failures import blamed, failure_document
from rayapp.train.group import GroupFailure, WorkerInfo
from rayapp.train.hang import hung_ranks
from rayapp.train.loop import Outcome
from rayapp.train.trainer import make_trainer

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
POLL_S = 0.5
LOG_LINES = 20
LOG_TIMEOUT_S = 15.0
ABORT_TIMEOUT_S = 15.0


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
    board = Board.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    watch = _Watch(run, board, report)
    fitting = _Fitting(make_trainer(run, board))
    with _sigterm_raises():
        fitting.start()
        try:
            while not fitting.ended.is_set():
                try:
                    fitting.ended.wait(POLL_S)
                    watch.look()
                except KeyboardInterrupt as interrupt:
                    watch.interrupt(interrupt)
            watch.look()  # what came between the last look and the end
        finally:
            _end(fitting, board)
    return watch.conclude(fitting)


def _end(fitting: _Fitting, board: Any) -> None:
    """Have Ray Train's controller end its workers and itself; it must not outlive the connection that it is waited for with."""
    if fitting.ended.is_set():
        return
    controller = ray.get(board.controller.remote())
    if controller is not None:
        controller.abort.remote()
    if not fitting.ended.wait(ABORT_TIMEOUT_S):
        logger.warning("Ray Train did not end its workers in %g s; they end with the connection", ABORT_TIMEOUT_S)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which `ray job stop` sends."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM an exception of the main thread, as Ctrl-C is; elsewhere signals belong to somebody else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Watch:
    """Looks at the board, and acts on what it sees."""

    def __init__(self, run: ResolvedRun, board: Any, report: Report) -> None:
        self._run, self._board, self._report = run, board, report
        self._folder = RunFolder(open_location(run.run_dir, retry_s=run.file.storage.retry_s))
        self._waiting_since_s: float | None = time.monotonic()
        self._news: News | None = None
        self._failures = 0
        self._last_failure: TrainFailure | None = None
        self._interrupt: KeyboardInterrupt | None = None

    def look(self) -> None:
        """Pass on what was told, and see to failures, hangs and workers that do not come up.

        Raises:
            RayappError: a worker refused the run.
            PlacementError: the workers were not placed in time.
        """
        self._news = news = ray.get(self._board.take.remote())
        for line in news.lines:
            self._report(line)
        if news.refusal is not None:
            raise news.refusal
        for failure in news.failures:
            self._record(failure)
        self._check_placed(news)
        self._end_what_hangs(news)

    def _check_placed(self, news: News) -> None:
        if news.is_running:
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if time.monotonic() - self._waiting_since_s > self._run.file.train.start_timeout_s:
            raise PlacementError(_not_placed(self._run, len(news.views)))

    def _end_what_hangs(self, news: News) -> None:
        hung = hung_ranks(news.views, self._run.file.train.hang_timeout_s) if news.is_running else {}
        if not hung:
            return
        for sentence in hung.values():
            self._report(f"train.hang_timeout_s={self._run.file.train.hang_timeout_s:g} has passed: {sentence}")
        ray.get(self._board.judge.remote(hung))
        for rank in hung:
            ray.kill(news.views[rank].worker.actor)

    def _record(self, failure: GroupFailure) -> None:
        rank, reason = blamed(failure)
        worker = None if rank is None else failure.workers.get(rank)
        log = {} if worker is None else {worker.rank: _last_log_lines(worker)}
        self._last_failure = document = failure_document(failure, log)
        self._failures += 1
        known = self._folder.failures.read_bytes() if self._folder.failures.exists() else b""
        self._folder.failures.write_bytes(known + document.model_dump_json().encode() + b"\n")
        self._report(f"failed after step {failure.step}: {reason}")
        for line in document.log:
            self._report(f"  {line}")
        most = self._run.file.train.max_failures
        if self._failures <= most:
            self._report(f"restart {self._failures} of {most}, from the newest complete checkpoint")

    def interrupt(self, interrupt: KeyboardInterrupt) -> None:
        """Ask the workers to save and to end; where they cannot, or were asked already, leave.

        Raises:
            InterruptedRunError: nothing is left to wait for.
        """
        if self._interrupt is not None or self._news is None or not self._news.is_running:
            raise self._interrupted(interrupt, "at once")
        self._interrupt = interrupt
        self._board.stop.remote()
        self._report("stopping: the workers save a checkpoint after this step; once more to leave at once")

    def conclude(self, fitting: _Fitting) -> Finished:
        """What came of it all.

        Raises:
            InterruptedRunError: the run was asked to end, and did.
            WorkerError: the worker group failed more often than it may.
        """
        outcome = fitting.value(self._last_failure, self._run.file.train.max_failures)
        assert self._news is not None
        if self._interrupt is not None and outcome.stopped:
            raise self._interrupted(self._interrupt, f"after step {outcome.progress.step}")
        return Finished(outcome, max(0, self._news.starts - 1))

    def _interrupted(self, interrupt: KeyboardInterrupt, when: str) -> InterruptedRunError:
        newest = newest_intact(self._folder.checkpoints, deep=False)
        kind = TerminatedRunError if isinstance(interrupt, Terminated) else InterruptedRunError
        kept = "has no checkpoint yet" if newest is None else f"has its newest checkpoint at step {newest.step}"
        resume = f"go on with: rayapp train FILE --resume {self._run.run_id}"
        return kind(f"interrupted: run {self._run.file.name}/{self._run.run_id} ended {when} and {kept}; {resume}")


class _Fitting(threading.Thread):
    """Waits for Ray Train beside the main thread, which keeps Ctrl-C for itself."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = trainer
        self.ended = threading.Event()
        """Set at the end. A ``join`` that a signal interrupts takes a running thread for ended (CPython 3.11)."""
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
        if self._error is not None and last_failure is not None:
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


def _not_placed(run: ResolvedRun, placed: int) -> Problem:
    file = run.file
    worker = WorkerResources(
        num_cpus=file.resources.cpus_per_worker or 1,
        num_gpus=1 if run.device.kind == "cuda" else 0,
        gpu_type=file.resources.gpu_type,
        labels=file.resources.labels,
    )
    free = ray.available_resources()
    rule = (
        f"passed before all {run.layout.world_size} workers of {worker} each were up ({placed} are). The cluster has {read_inventory()}, "
        f"of which {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free"
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
