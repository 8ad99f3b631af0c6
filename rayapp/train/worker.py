"""What one worker does, from a resolved run to its outcome. It knows no Ray: it runs under any launcher that sets up ranks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayapp.checkpoint.runs import RunFolder
from rayapp.checkpoint.store import CheckpointStore, Progress, checkpoint_at, newest_intact
from rayapp.config.resolved import ResolvedRun
from rayapp.data.loader import Loader
from rayapp.data.shards import open_prepared
from rayapp.engine import TrainEngine
from rayapp.errors import CheckpointError, EngineError, Problem, RayappError, StorageError
from rayapp.metrics.jsonl import JsonlSink
from rayapp.metrics.sink import FanOut, Sink
from rayapp.parallel.select import build_engine
from rayapp.preflight.resolve import peak_flops_of
from rayapp.storage import open_location
from rayapp.train.loop import Outcome, Tell, TrainLoop

logger = logging.getLogger(__name__)

MakeSinks = Callable[[ResolvedRun, int], list[Sink]]


@dataclass(frozen=True)
class Refusal:
    """The run cannot go on, and starting it again would not help."""

    error: RayappError


def run_worker(run_json: str, *, device: torch.device, tell: Tell, optional_sinks: MakeSinks) -> Outcome | Refusal:
    """Train on this rank. The process group is up, and every rank calls it.

    Args:
        run_json: the resolved run; it is validated again here.
        device: of this rank.
        tell: takes lines of progress; called on rank 0.
        optional_sinks: makes the sinks besides `metrics.jsonl`, for the run and the step that it continues from; called on rank 0.

    Returns:
        The outcome, or why the run was refused. Other failures are raised, and a new start from the newest checkpoint may help.
    """
    # torch renames collectives that DeepSpeed calls; the warning would come with every one of them
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of Python objects travel through the current device
    run = with_real_device(ResolvedRun.model_validate_json(run_json), device)
    logging.getLogger("rayapp").setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    try:
        _check_shared_storage(run)
    except StorageError as error:
        return Refusal(error)
    try:
        return _train(run, device, tell if dist.get_rank() == 0 else _quiet, optional_sinks)
    except StorageError:
        raise  # storage comes back; the newest checkpoint is still there
    except RayappError as error:
        logger.error("rank %d: %s", dist.get_rank(), error)
        return Refusal(error)


def with_real_device(run: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Take the peak from the name that the device itself gives: Ray's names cover several products."""
    if device.type != "cuda" or run.file.metrics.peak_flops is not None:
        return run
    name = torch.cuda.get_device_name(device)
    peak, source = peak_flops_of(name, run.file.train.precision)
    return run.model_copy(update={"device": run.device.model_copy(update={"name": name, "peak_flops": peak, "peak_flops_source": source})})


def _quiet(_: str) -> None:
    """Ranks other than the first tell nothing."""


def _check_shared_storage(run: ResolvedRun) -> None:
    """Every rank must see what the driver wrote; all ranks raise if one does not."""
    marker = open_location(run.run_dir) / "marker"
    problem: Problem | None = None
    try:
        found = marker.read_text()
        if found != run.storage_marker:
            problem = Problem(
                f"storage marker {marker}", f"reads {found!r} on rank {dist.get_rank()}, not what the driver wrote", "share storage.path"
            )
    except OSError as error:
        problem = Problem(
            f"storage.path of {run.run_dir}",
            f"is not shared with the node of rank {dist.get_rank()}: {error}",
            "use a location that every node mounts or reaches",
        )
    problems: list[Problem | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found_problems = [p for p in problems if p is not None]
    if found_problems:
        raise StorageError(*found_problems)


def _train(run: ResolvedRun, device: torch.device, tell: Tell, optional_sinks: MakeSinks) -> Outcome:
    tell(f"building {run.strategy} with {run.num_parameters / 1e6:.1f} M weights on {run.layout.world_size} x {run.device.name}")
    folder = RunFolder(open_location(run.run_dir))
    engine = build_engine(run, device)
    progress = _restore(run, folder, engine, tell)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(engine.close)
        sink = _sinks(run, folder, progress.step, optional_sinks) if dist.get_rank() == 0 else None
        if sink is not None:
            cleanup.callback(sink.close)
        with _loader(run) as loader:
            store = CheckpointStore(folder.checkpoints, keep_last=run.file.checkpoint.keep_last, keep_best=run.file.checkpoint.keep_best)
            loop = TrainLoop(run, engine=engine, loader=loader, store=store, sink=sink, tell=tell, device=device, progress=progress)
            try:
                return loop.run()
            except torch.OutOfMemoryError as error:
                raise EngineError(_out_of_memory(run, error)) from error


def _out_of_memory(run: ResolvedRun, error: torch.OutOfMemoryError) -> str:
    text = str(error).splitlines()[0]
    return (
        f"rank {dist.get_rank()} ran out of device memory with batch.micro_batch_size={run.layout.micro_batch_size} under {run.strategy}: "
        f"{text}. Use a smaller batch.micro_batch_size, train.activation_checkpointing=true, a higher parallel.zero_stage, or "
        "parallel.offload_optimizer=cpu"
    )


def _sinks(run: ResolvedRun, folder: RunFolder, step: int, optional_sinks: MakeSinks) -> Sink:
    return FanOut(JsonlSink(folder.metrics, step), optional_sinks(run, step))


def _loader(run: ResolvedRun) -> Loader:
    file, layout = run.file, run.layout
    return Loader(
        open_prepared(open_location(run.data.folder)),
        seed=file.train.seed,
        shuffle=file.data.shuffle,
        reset_attention=file.data.reset_attention,
        global_batch_size=file.batch.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        dp_rank=layout.layout.dp_rank(dist.get_rank()),
        dp_size=layout.dp_size,
        pin_memory=run.device.kind == "cuda",
        cache=file.data.cache,
    )


def _restore(run: ResolvedRun, folder: RunFolder, engine: TrainEngine, tell: Tell) -> Progress:
    """Continue from the newest intact checkpoint of the run, if it has one."""
    chosen: list[int | RayappError | None] = [None]
    if dist.get_rank() == 0:
        try:
            newest = newest_intact(folder.checkpoints)
            chosen = [None if newest is None else newest.step]
        except CheckpointError as error:
            chosen = [error]
    dist.broadcast_object_list(chosen, src=0)
    step = chosen[0]
    if isinstance(step, RayappError):
        raise step
    if step is None:
        return Progress(step=0, data_fingerprint=run.data.fingerprint)
    checkpoint = checkpoint_at(folder.checkpoints, step, verify=False)
    with checkpoint.opened() as files:
        engine.load(files)
    tell(f"continuing from the checkpoint of step {step}")
    return checkpoint.manifest.progress
