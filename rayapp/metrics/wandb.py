"""Figures for Weights & Biases."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rayapp.config.resolved import ResolvedRun
from rayapp.errors import Problem, StorageError
from rayapp.metrics.record import EventRecord, MetricsRecord, StepRecord
from rayapp.metrics.tags import event_tag, figures
from rayapp.metrics.tracked_run import run_parameters, tracked_id, tracked_name
from rayapp.metrics.tracker import TrackerSink, refusals_of
from rayapp.metrics.wandb_login import Mode, chosen_mode, has_login
from rayapp.storage import open_location

INIT_TIMEOUT_S = 12.0
FINISH_TIMEOUT_S = 10.0
"""Together less than a sink may take to close."""

STEP = "step"
SERVICE = "wandb-core"
KILL_WAIT_S = 5.0
REMEDY = "check metrics.wandb, WANDB_API_KEY and the network; metrics.jsonl has every figure"

logger = logging.getLogger(__name__)


class WandbSink(TrackerSink):
    """Logs a run to Weights & Biases, without waiting for it.

    Args:
        run: the resolved run.
    """

    def __init__(self, run: ResolvedRun) -> None:
        super().__init__(WandbRun(run))


class WandbRun:
    """A run in Weights & Biases, continued under the same id whenever the run starts again.

    wandb counts its own steps, one for each row that is logged, and takes none back. So every row carries ``step`` of the run, and
    charts are drawn over that: a step that is logged again after a return to a checkpoint is a second row of the same step.
    The resolved run is its config; an event is a text in the row of its step. The run ends as finished after its last step, and as
    failed before.

    wandb's service process writes everything into ``wandb/`` of the run's folder, and sends it from there; where that folder is not in
    this machine's file tree, into a temporary one, from which ``flush`` and ``close`` upload what is still to be synced.
    Each start of an offline run has a folder of its own there; ``wandb sync`` of the folder above makes one run of them. A worker that
    is killed takes the last rows with it: the service writes in blocks of 32 KiB.

    Where there is no key, or the server cannot be reached at the start, the run goes on offline. A server that goes away later
    is waited for by the service alone.

    Args:
        run: the resolved run.
    """

    def __init__(self, run: ResolvedRun) -> None:
        section = run.file.metrics.wandb
        assert section is not None, "the run file asks for Weights & Biases"
        self._run, self._section = run, section
        self._run_dir = open_location(run.run_dir)
        self._spool_folder = None if self._run_dir.is_local else tempfile.TemporaryDirectory(prefix="rayapp-wandb-")
        self._wandb_run: Any = None
        self._is_complete = False

    @property
    def name(self) -> str:
        return f"Weights & Biases {self._project}/{tracked_id(self._run)}"

    def prepare(self) -> None:
        """Import wandb, without its own telemetry.

        Raises:
            ImportError: it is not installed here.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: F401 - for those that use it

    def send(self, records: Sequence[MetricsRecord]) -> None:
        """Log records.

        Raises:
            StorageError: wandb refused, or its service has ended.
        """
        try:
            with refusals_of(self.name, REMEDY):
                if self._wandb_run is None:
                    self._wandb_run = self._start()
                for record in records:
                    self._wandb_run.log(_row(record))
        except StorageError:
            self._wandb_run = None  # so that a service that has died is started anew with the next records
            self._end_service()
            raise
        self._is_complete |= any(isinstance(r, StepRecord) and r.step >= self._run.file.train.num_steps for r in records)

    def flush(self) -> None:
        """Upload what an offline run has written, where the run's folder is elsewhere.

        Raises:
            StorageError: the storage refused.
        """
        if self._wandb_run is not None and self._wandb_run.offline:
            self._upload()

    def close(self) -> None:
        """End the run and the service.

        Raises:
            StorageError: not everything reached the server in time, or the storage refused.
        """
        try:
            if self._wandb_run is not None:
                self._finish()
        finally:
            self._end_service()
            if self._spool_folder is not None:
                self._spool_folder.cleanup()

    def abandon(self) -> None:
        """Kill the service, which is the only process of its name that this one has started, and what it has started itself."""
        services = [child for child in psutil.Process().children() if child.name() == SERVICE]
        processes = [process for service in services for process in (*service.children(recursive=True), service)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=KILL_WAIT_S)

    @property
    def _project(self) -> str:
        return self._section.project or self._run.file.name

    def _start(self) -> Any:
        mode = chosen_mode(self._section, os.environ)
        if mode != "online":
            return self._init(mode)
        try:
            if not has_login(os.environ):
                raise StorageError(Problem(self.name, "has no key on this node", "set WANDB_API_KEY in the workers' environment"))
            with refusals_of(self.name, REMEDY):
                return self._init("online")
        except StorageError as error:
            self._end_service()
            run = self._init("offline")
            logger.warning("%s. The run goes on offline; %s", error, self._how_to_sync(run))
            return run

    def _init(self, mode: Mode) -> Any:
        self.prepare()
        import wandb

        wandb.setup(
            wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
                stop_fn=_say_how_to_stop,
            )
        )
        run = wandb.init(
            project=self._project,
            entity=self._section.entity,
            id=tracked_id(self._run),
            name=tracked_name(self._run),
            config=run_parameters(self._run),
            dir=self._folder(),
            mode=mode,
            resume="allow",
            reinit="create_new",
        )
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        logger.info("Weights & Biases: %s", run.url or self._how_to_sync(run))
        return run

    def _folder(self) -> Path:
        return self._run_dir.local_path if self._spool_folder is None else Path(self._spool_folder.name)

    def _finish(self) -> None:
        run = self._wandb_run
        try:
            with refusals_of(self.name, self._how_to_sync(run)):
                run.finish(exit_code=0 if self._is_complete else 1)
        except StorageError:
            self._upload()
            raise
        self.flush()

    def _end_service(self) -> None:
        with refusals_of(self.name, REMEDY):
            import wandb

            try:
                wandb.teardown()
            except SystemExit as error:
                raise StorageError(Problem(self.name, f"ended its service with status {error.code}", REMEDY)) from error

    def _upload(self) -> None:
        if self._spool_folder is not None:
            folder = _run_folder(self._wandb_run)
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    (self._run_dir / str(path.relative_to(self._folder()))).upload(path)

    def _how_to_sync(self, run: Any) -> str:
        if run.offline:
            return f"upload it later with: wandb sync {self._run_dir / 'wandb'}"
        return f"upload the rest with: wandb sync --include-online {self._run_dir / 'wandb' / _run_folder(run).name}"


def _run_folder(run: Any) -> Path:
    """The folder of one start, which ``run.dir`` is inside of."""
    return Path(run.dir).parent


def _row(record: MetricsRecord) -> dict[str, float | str]:
    row: dict[str, float | str] = {"_timestamp": record.time, **figures(record)}
    if record.step is not None:
        row[STEP] = record.step
    if isinstance(record, EventRecord):
        row[event_tag(record)] = record.detail
    return row


def _say_how_to_stop() -> None:
    """Stopped by a signal, as wandb would do it, the worker would be started again."""
    logger.warning("the stop button of Weights & Biases does not stop a run of rayapp; interrupt the command, or stop the job")
