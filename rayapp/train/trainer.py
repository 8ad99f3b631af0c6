"""Ray Train's side of a run: what is asked of it, and what runs on its workers."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from datetime import UTC, datetime
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import ErroredState, ReschedulingState, RestartingState, ShuttingDownState
from ray.train.v2.api.exceptions import PreemptionError

from rayapp.checkpoint.runs import RunFolder
from rayapp.cluster.interface import NodeInterfaceTorchConfig
from rayapp.config.resolved import ResolvedRun
from rayapp.metrics.record import EventRecord
from rayapp.storage import open_location
from rayapp.train.failures import blamed
from rayapp.train.group import GroupFailure, WorkerInfo
from rayapp.train.heartbeat import Heartbeat
from rayapp.train.loop import Outcome
from rayapp.train.whereabouts import RECORDER_ENVIRONMENT
from rayapp.train.worker import Refusal

WORKER_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # the profiler reports its every start on stderr otherwise
COLLECTIVE_TIMEOUT_FACTOR = 2.0
"""Collectives give up later than the driver does, which knows whom to blame."""

REPORT_TIMEOUT_S = 5.0


def make_trainer(run: ResolvedRun, board: Any) -> TorchTrainer:
    """The trainer of a run.

    Args:
        run: the resolved run.
        board: the actor that takes its news.
    """
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
    environment = {**WORKER_ENVIRONMENT, **RECORDER_ENVIRONMENT, "DS_ACCELERATOR": run.device.kind, **file.resources.env}
    # a name of its own for every start: Ray Train resumes a name that exists, and rayapp resumes from its own checkpoints
    config = RunConfig(
        name=f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}",
        storage_path=str(open_location(run.run_dir) / "ray"),
        failure_config=FailureConfig(max_failures=file.train.max_failures),
        worker_runtime_env={"env_vars": environment},
        logging_config=LoggingConfig(log_level="WARNING"),
        callbacks=[_ControllerNews(board)],
    )
    return TorchTrainer(
        _train_function,
        train_loop_config={"run": run.model_dump_json(), "board": board},
        torch_config=NodeInterfaceTorchConfig(timeout_s=int(COLLECTIVE_TIMEOUT_FACTOR * file.train.hang_timeout_s)),
        scaling_config=scaling,
        run_config=config,
    )


class RunEndedError(Exception):
    """Has Ray Train's controller end."""


class _ControllerNews(ControllerCallback):  # type: ignore[misc]
    """Tells the board what Ray Train's controller does. Runs in the controller."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray Train; the driver can have this actor end."""
        ray.get(self._board.lead.remote(ray.get_runtime_context().current_actor))

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Called by Ray Train, once for every failure: before it starts the group again, and before it gives up.

        Raises:
            RunEndedError: the driver has given the run up, which a controller that waits for a place learns here alone.
        """
        if not isinstance(current_state, ShuttingDownState) and not current_state.is_terminal() and ray.get(self._board.has_ended.remote()):
            raise RunEndedError
        state = current_state.next_state if isinstance(current_state, ShuttingDownState) else current_state
        if isinstance(state, ReschedulingState):
            ray.get(self._board.fail_to_start.remote(str(state.training_failed_error)))
        elif isinstance(state, RestartingState) or (isinstance(state, ErroredState) and state is not current_state):
            error = state.training_failed_error
            failures = getattr(error, "worker_failures", {})
            told = {rank: _class_and_text(failure) for rank, failure in failures.items()}
            ray.get(self._board.fail.remote(told, str(error), isinstance(error, PreemptionError)))


def _class_and_text(error: Exception) -> tuple[str, str]:
    """What is behind a failed health check is told without Ray's description of the worker before it."""
    inner = getattr(error, "health_check_failure", None)
    text = str(error) if inner is None else f"{type(inner).__name__}: {inner}"
    return type(error).__name__, text


def _train_function(config: dict[str, Any]) -> Outcome | Refusal:
    """Runs on every Ray Train worker."""
    from rayapp.train.worker import run_worker

    board, worker = config["board"], _this_worker()
    earlier: GroupFailure | None = ray.get(board.join.remote(worker))
    with Heartbeat(board, worker) as heartbeat:
        try:
            outcome = run_worker(
                config["run"],
                device=ray.train.torch.get_device(),
                lifeline=heartbeat,
                optional_sinks=_optional_sinks,
                events=[] if earlier is None else [_restart_event(earlier)],
            )
        except Exception as error:
            with contextlib.suppress(ray.exceptions.RayError):  # what is raised matters more than that it could not be reported
                ray.get(board.report.remote(worker.group, worker.rank, f"{type(error).__name__}: {error}"), timeout=REPORT_TIMEOUT_S)
            raise
    if isinstance(outcome, Refusal):
        ray.get(board.refuse.remote(outcome.error))
    return outcome


def _this_worker() -> WorkerInfo:
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())  # collectives of Python objects travel through the current device
    context, runtime = ray.train.get_context(), ray.get_runtime_context()
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    return WorkerInfo(
        group=token[0],
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        node_id=runtime.get_node_id(),
        address=ray.util.get_node_ip_address(),
        pid=os.getpid(),
        log_path=_stderr_path(),
        actor=runtime.current_actor,
    )


def _stderr_path() -> str | None:
    """The file that Ray has this process write its stderr to."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def _restart_event(failure: GroupFailure) -> EventRecord:
    return EventRecord(time=time.time(), step=None, event="restart", detail=f"after step {failure.step}: {blamed(failure)[1]}")


def _optional_sinks(run: ResolvedRun, step: int) -> list[Any]:
    from rayapp.metrics.mlflow import MlflowSink
    from rayapp.metrics.ray_gauge import RayGaugeSink
    from rayapp.metrics.tensorboard import TensorBoardSink
    from rayapp.metrics.wandb import WandbSink

    sinks: list[Any] = []
    if run.file.metrics.tensorboard:
        sinks.append(TensorBoardSink(RunFolder(open_location(run.run_dir)).tensorboard, step))
    if run.file.metrics.ray:
        sinks.append(RayGaugeSink(run.run_id, run.file.name))
    if run.file.metrics.mlflow is not None:
        sinks.append(MlflowSink(run))
    if run.file.metrics.wandb is not None:
        sinks.append(WandbSink(run))
    return sinks
