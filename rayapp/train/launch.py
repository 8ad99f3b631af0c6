"""Starts a run on a cluster: checks, data, workers through Ray Train's TorchTrainer, export."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ray
import ray.train
import yaml
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayapp.checkpoint.export import export_run
from rayapp.checkpoint.runs import RunFolder, named_run, new_run_id, newest_run, read_resolved
from rayapp.checkpoint.store import Checkpoint, newest_intact
from rayapp.cluster.connect import connected, finds_cluster
from rayapp.cluster.interface import NodeInterfaceTorchConfig
from rayapp.cluster.inventory import local_inventory, read_inventory
from rayapp.config.load import LoadedRunFile
from rayapp.config.resolved import ResolvedRun
from rayapp.config.schema import NAME_PATTERN
from rayapp.data.prepare import prepare
from rayapp.documents import TrainDocument
from rayapp.errors import CheckpointError, PlacementError, Problem, RunFileError, WorkerError
from rayapp.metrics.jsonl import read_records
from rayapp.preflight.derive import derive_all
from rayapp.preflight.resolve import check_prepared, claim_run, open_storage, resolve
from rayapp.preflight.start import check_start, find_usable
from rayapp.report.page import run_page
from rayapp.storage import Location, open_location
from rayapp.train.board import Board
from rayapp.train.environment import describe_environment
from rayapp.train.loop import Outcome
from rayapp.train.worker import Refusal

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
NEWEST = "latest"
POLL_S = 0.5
COLLECTIVE_TIMEOUT_S = 1800
WORKER_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # the profiler reports its every start on stderr otherwise


def train(loaded: LoadedRunFile, *, resume: str | None, run_id: str | None, address: str | None, report: Report) -> TrainDocument:
    """Train what a run file describes and export the result.

    Args:
        loaded: the run file.
        resume: a run's id, or ``latest`` for the newest of the family; None starts a new run.
        run_id: the new run's id; None: made from the time.
        address: of the cluster; see :func:`rayapp.cluster.connect.connected`.
        report: takes lines of progress.

    Raises:
        InputError: something cannot work; no worker was started.
        RunError: training failed.
    """
    storage = open_storage(loaded)
    run_dir, checkpoint = _choose_run(loaded, storage, resume, run_id)
    before = None if checkpoint is None else read_resolved(run_dir)
    prepared = find_usable(loaded.file, storage, before)
    if checkpoint is not None and _is_finished(checkpoint, run_dir, loaded):
        report(f"run {run_dir.name} has all of its {checkpoint.step} steps; exporting it again")
        export_run(run_dir, RunFolder(run_dir).model)
        return TrainDocument.model_validate_json(RunFolder(run_dir).summary.read_bytes())
    if not finds_cluster(address):
        check_start(loaded, local_inventory(), prepared, before)  # refuse what cannot work before a Ray is started for it
    with connected(address):
        inventory = read_inventory()
        check_start(loaded, inventory, prepared, before)
        if prepared is None:
            prepared = prepare(loaded.file, storage, report)
            check_prepared(prepared)
        run = resolve(derive_all(loaded, inventory, prepared), prepared, run_dir, checkpoint)
        claim_run(run_dir, run, yaml.safe_dump(loaded.file.model_dump(mode="json"), sort_keys=False))
        RunFolder(run_dir).environment.write_text(json.dumps(describe_environment(inventory), indent=1))
        report(f"run {run.file.name}/{run.run_id}: {run.strategy} on {run.layout.world_size} x {run.device.name} ({run.strategy_reason})")
        finished = fit(run, report)
    report("exporting the model")
    model_dir = export_run(run_dir, RunFolder(run_dir).model).model_dir
    return _conclude(run, run_dir, finished, model_dir)


def _choose_run(loaded: LoadedRunFile, storage: Location, resume: str | None, run_id: str | None) -> tuple[Location, Checkpoint | None]:
    name = loaded.file.name
    if resume is None:
        _check_run_id(run_id)
        run_dir = storage / name / (run_id or new_run_id())
        if RunFolder(run_dir).resolved.exists():
            raise CheckpointError(
                Problem(f"run {run_dir}", "exists already", f"continue it with --resume {run_dir.name}, or take another --run-id")
            )
        return run_dir, None
    run_dir = newest_run(storage, name) if resume == NEWEST else named_run(storage, name, resume)
    checkpoint = newest_intact(RunFolder(run_dir).checkpoints)
    if checkpoint is None:
        logger.warning("run %s has no complete checkpoint; it starts from step 0", run_dir)
    elif checkpoint.step > loaded.file.train.num_steps:
        rule = f"is less than the {checkpoint.step} steps that run {run_dir.name} has behind it"
        remedy = f"use more than {checkpoint.step}, or start a new run"
        raise CheckpointError(Problem(f"train.num_steps={loaded.file.train.num_steps}", rule, remedy, loaded.where("train.num_steps")))
    return run_dir, checkpoint


def _is_finished(checkpoint: Checkpoint, run_dir: Location, loaded: LoadedRunFile) -> bool:
    return checkpoint.step == loaded.file.train.num_steps and RunFolder(run_dir).summary.exists()


def _check_run_id(run_id: str | None) -> None:
    if run_id is not None and (run_id == NEWEST or not re.fullmatch(NAME_PATTERN, run_id)):
        rule = f"is not a name that matches {NAME_PATTERN}, or is the word {NEWEST}"
        raise RunFileError(Problem(f"--run-id {run_id}", rule, "use letters, digits, dots, dashes and underscores"))


@dataclass(frozen=True)
class Finished:
    """What the workers came to, and how often they had to be started again."""

    outcome: Outcome
    restarts: int


def fit(run: ResolvedRun, report: Report) -> Finished:
    """Run the workers and pass on what they tell.

    Raises:
        InputError: a worker refused the run.
        PlacementError: the workers were not placed in time.
        RunError: training failed.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = Board.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    fitting = _Fitting(_trainer(run, board))
    fitting.start()
    waited_s, starts = 0.0, 0
    while fitting.is_alive():
        fitting.join(POLL_S)
        starts = _pass_on(board, report)
        waited_s = 0.0 if starts else waited_s + POLL_S
        if waited_s > run.file.train.start_timeout_s:
            raise PlacementError(_not_placed(run))
    starts = _pass_on(board, report)
    return Finished(fitting.value(), max(0, starts - 1))


def _pass_on(board: Any, report: Report) -> int:
    """Report what was told since the last time; gives how often a worker group has started.

    Raises:
        RayappError: a worker refused the run.
    """
    lines, starts, refusal = ray.get(board.take.remote())
    for line in lines:
        report(line)
    if refusal is not None:
        raise refusal
    return int(starts)


class _Fitting(threading.Thread):
    """Waits for Ray Train beside the main thread, which keeps Ctrl-C for itself."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = trainer
        self._result: Any = None
        self._error: TrainingFailedError | ray.exceptions.RayError | None = None

    def run(self) -> None:
        try:
            self._result = self._trainer.fit()
        except (TrainingFailedError, ray.exceptions.RayError) as error:
            self._error = error

    def value(self) -> Any:
        """What rank 0 returned.

        Raises:
            WorkerError: the worker group failed more often than it may.
        """
        if self._error is not None:
            raise WorkerError(_cause(self._error)) from self._error
        if self._result is None:
            raise WorkerError("Ray Train ended without a result; see the log above")
        return self._result.return_value


def _cause(error: Exception) -> str:
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, failure = sorted(error.worker_failures.items())[0]
        return f"rank {rank} failed: {failure}"
    return str(error)


def _not_placed(run: ResolvedRun) -> Problem:
    return Problem(
        f"train.start_timeout_s={run.file.train.start_timeout_s:g}",
        f"passed before all {run.layout.world_size} workers were placed",
        "wait for what else runs on the cluster, or ask for fewer workers",
    )


def _trainer(run: ResolvedRun, board: Any) -> TorchTrainer:
    file = run.file
    resources = {"CPU": file.resources.cpus_per_worker or 1}
    if run.device.kind == "cuda":
        resources["GPU"] = 1
    labels = {"label_selector": dict(file.resources.labels)} if file.resources.labels else {}
    scaling = ScalingConfig(
        num_workers=run.layout.world_size,
        use_gpu=run.device.kind == "cuda",
        resources_per_worker=resources,
        accelerator_type=file.resources.gpu_type,
        placement_strategy="PACK",
        **labels,
    )
    # a name of its own for every start: Ray Train resumes a name that exists, and rayapp resumes from its own checkpoints
    config = RunConfig(
        name=f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}",
        storage_path=str(open_location(run.run_dir) / "ray"),
        failure_config=FailureConfig(max_failures=file.train.max_failures),
        worker_runtime_env={"env_vars": {**WORKER_ENVIRONMENT, "DS_ACCELERATOR": run.device.kind, **file.resources.env}},
        logging_config=LoggingConfig(log_level="WARNING"),
    )
    return TorchTrainer(
        _train_function,
        train_loop_config={"run": run.model_dump_json(), "board": board},
        torch_config=NodeInterfaceTorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=scaling,
        run_config=config,
    )


def _train_function(config: dict[str, Any]) -> Outcome | Refusal:
    """Runs on every Ray Train worker."""
    from rayapp.train.worker import run_worker

    board = config["board"]
    if ray.train.get_context().get_world_rank() == 0:
        board.started.remote()
    return run_worker(config["run"], device=ray.train.torch.get_device(), tell=board.tell.remote, optional_sinks=_optional_sinks)


def _optional_sinks(run: ResolvedRun, step: int) -> list[Any]:
    from rayapp.metrics.ray_gauge import RayGaugeSink
    from rayapp.metrics.tensorboard import TensorBoardSink

    sinks: list[Any] = []
    if run.file.metrics.tensorboard:
        sinks.append(TensorBoardSink(RunFolder(open_location(run.run_dir)).tensorboard, step))
    if run.file.metrics.ray:
        sinks.append(RayGaugeSink(run.run_id, run.file.name))
    return sinks


def _conclude(run: ResolvedRun, run_dir: Location, finished: Finished, model_dir: str) -> TrainDocument:
    """The summary, written beside the run together with its page."""
    outcome = finished.outcome
    progress, device = outcome.progress, outcome.device
    per_peak = None
    if outcome.tokens_per_s is not None and device.peak_flops is not None:
        per_peak = outcome.tokens_per_s / (device.peak_flops * run.layout.world_size)
    document = TrainDocument(
        run_dir=str(run_dir),
        model_dir=model_dir,
        steps=progress.step,
        loss_first=progress.loss_first,
        loss_last=progress.loss_last,
        validation_loss=progress.validation_loss,
        tokens_per_s=outcome.tokens_per_s,
        mfu=None if per_peak is None else per_peak * run.flops_per_token,
        mfu_causal=None if per_peak is None else per_peak * run.flops_per_token_causal,
        peak_flops_source=device.peak_flops_source,
        peak_memory_bytes=outcome.peak_memory_bytes,
        average_memory_bytes=outcome.average_memory_bytes,
        skipped_steps=progress.skipped_steps,
        restarts=finished.restarts,
        target_loss_step=progress.target_loss_step,
        target_loss_s=progress.target_loss_s,
        strategy=run.strategy,
        world_size=run.layout.world_size,
    )
    folder = RunFolder(run_dir)
    folder.report.write_text(
        run_page([record.model_dump(mode="json") for record in read_records(folder.metrics)], document, f"{run.file.name}/{run.run_id}")
    )
    folder.summary.write_text(document.model_dump_json(indent=1))
    return document
