"""What one worker does, from a resolved run to its outcome. It knows no Ray: it runs under any launcher that sets up ranks."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.restore import newest_opened
from rayapp.checkpoint.runs import RunFolder
from rayapp.checkpoint.store import CheckpointStore
from rayapp.config.resolved import ResolvedRun
from rayapp.data.loader import Loader
from rayapp.data.shards import open_prepared
from rayapp.engine import TrainEngine
from rayapp.errors import CheckpointError, EngineError, NonFiniteError, Problem, RayappError, StorageError, StorageLostError
from rayapp.metrics.background import BackgroundSink
from rayapp.metrics.jsonl import JsonlSink
from rayapp.metrics.record import EventRecord
from rayapp.metrics.sink import FanOut, Sink
from rayapp.parallel.select import build_engine
from rayapp.preflight.resolve import peak_flops_of
from rayapp.storage import Location, open_location
from rayapp.train.lifeline import Lifeline
from rayapp.train.loop import Outcome, RewindError, TrainLoop

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""For sinks to take what is left, besides what the storage may take to come back."""

MakeSinks = Callable[[ResolvedRun, int], list[Sink]]


@dataclass(frozen=True)
class Refusal:
    """The run cannot go on, and starting it again would not help."""

    error: RayappError


def run_worker(
    run_json: str, *, device: torch.device, lifeline: Lifeline, optional_sinks: MakeSinks, events: Sequence[EventRecord] = ()
) -> Outcome | Refusal:
    """Train on this rank. The process group is up, and every rank calls it.

    Args:
        run_json: the resolved run; it is validated again here.
        device: of this rank.
        lifeline: takes this rank's news.
        optional_sinks: makes the sinks besides `metrics.jsonl`, for the run and the step that it continues from; called on rank 0.
        events: what happened before this start, for the record.

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
        return _Worker(run, device, lifeline, optional_sinks).work(events)
    except StorageError as error:  # it was tried again for storage.retry_s seconds, or refused for good
        logger.error("rank %d: %s", dist.get_rank(), error)
        return Refusal(StorageLostError(str(error)))
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


def _check_shared_storage(run: ResolvedRun) -> None:
    """Every rank must see what the driver wrote; all ranks raise if one does not."""
    marker = RunFolder(_run_dir(run)).marker
    problem: Problem | None = None
    try:
        found = marker.read_text()
        if found != run.storage_marker:
            problem = Problem(
                f"storage marker {marker}", f"reads {found!r} on rank {dist.get_rank()}, not what the driver wrote", "share storage.path"
            )
    except (OSError, StorageError) as error:
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


def _run_dir(run: ResolvedRun) -> Location:
    return open_location(run.run_dir, retry_s=run.file.storage.retry_s)


class _Worker:
    """One rank's work on a run, from building the model to the outcome."""

    def __init__(self, run: ResolvedRun, device: torch.device, lifeline: Lifeline, optional_sinks: MakeSinks) -> None:
        self._run, self._device, self._lifeline, self._optional_sinks = run, device, lifeline, optional_sinks
        self._folder = RunFolder(_run_dir(run))

    def work(self, events: Sequence[EventRecord]) -> Outcome:
        """Train until the run ends, going back to a checkpoint as often as its loss asks for it."""
        run = self._run
        self._tell(f"building {run.strategy} with {run.num_parameters / 1e6:.1f} M weights on {run.layout.world_size} x {run.device.name}")
        self._lifeline.mark("building the model", run.resume_step or 0)
        engine = build_engine(run, self._device)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(engine.close)
            store = CheckpointStore(
                self._folder.checkpoints,
                keep_last=run.file.checkpoint.keep_last,
                keep_best=run.file.checkpoint.keep_best,
                check_owner=self._check_owner,
            )
            progress = self._restore(engine)
            while True:
                try:
                    return self._train(engine, store, progress, events)
                except NonFiniteError:
                    store.finish(self._mark_saving)  # what is on its way is not lost
                    raise
                except RewindError as error:
                    store.finish(self._mark_saving)
                    progress = self._rewound(self._restore(engine), error)
                    events = [self._rewind_event(progress, error)]

    def _train(self, engine: TrainEngine, store: CheckpointStore, progress: Progress, events: Sequence[EventRecord]) -> Outcome:
        with contextlib.ExitStack() as cleanup:
            sink = self._sink(progress.step) if dist.get_rank() == 0 else None
            if sink is not None:
                cleanup.callback(sink.close)
                for event in events:
                    sink.write(event)
            loader = cleanup.enter_context(self._loader())
            loop = TrainLoop(
                self._run,
                engine=engine,
                loader=loader,
                store=store,
                sink=sink,
                lifeline=self._lifeline,
                device=self._device,
                progress=progress,
            )
            try:
                return loop.run()
            except torch.OutOfMemoryError as error:
                if loop.has_trained:
                    raise  # it went well before: a new start may
                raise EngineError(_out_of_memory(self._run, error)) from error

    def _tell(self, line: str) -> None:
        if dist.get_rank() == 0:
            self._lifeline.tell(line)

    def _mark_saving(self) -> None:
        self._lifeline.mark("checkpoint", self._run.resume_step or 0)

    def _check_owner(self) -> None:
        """Refuse to complete a checkpoint of a run that somebody else has started since."""
        marker = self._folder.marker.read_text()
        if marker != self._run.storage_marker:
            raise CheckpointError(
                Problem(f"run {self._run.run_dir}", "was taken over by a later start; this one ends", "watch the later one")
            )

    def _sink(self, step: int) -> Sink:
        sinks = FanOut(JsonlSink(self._folder.metrics, step), self._optional_sinks(self._run, step))
        return BackgroundSink(sinks, close_timeout_s=self._run.file.storage.retry_s + CLOSE_TIMEOUT_S)

    def _loader(self) -> Loader:
        file, layout = self._run.file, self._run.layout
        return Loader(
            open_prepared(open_location(self._run.data.folder, retry_s=file.storage.retry_s)),
            seed=file.train.seed,
            shuffle=file.data.shuffle,
            reset_attention=file.data.reset_attention,
            global_batch_size=file.batch.global_batch_size,
            micro_batch_size=layout.micro_batch_size,
            gradient_accumulation_steps=layout.gradient_accumulation_steps,
            dp_rank=layout.layout.dp_rank(dist.get_rank()),
            dp_size=layout.dp_size,
            pin_memory=self._run.device.kind == "cuda",
            cache=file.data.cache,
        )

    def _restore(self, engine: TrainEngine) -> Progress:
        """Continue from the newest intact checkpoint of the run, if it has one, whatever wrote it."""
        step = self._run.resume_step or 0

        def reading() -> None:
            self._lifeline.mark("reading the checkpoint", step)

        reading()
        with newest_opened(self._folder.checkpoints, node=_node(), tell=self._tell, reading=reading) as opened:
            if opened is None:
                return Progress(step=0, data_fingerprint=self._run.data.fingerprint)
            engine.load(opened.files)
        writers = opened.checkpoint.manifest.world_size
        by_others = "" if writers == self._run.layout.world_size else f", which {writers} ranks wrote"
        self._tell(f"continuing from the checkpoint of step {opened.checkpoint.step}{by_others}")
        return opened.checkpoint.manifest.progress

    def _rewound(self, progress: Progress, error: RewindError) -> Progress:
        """A checkpoint's progress, with the rows between it and the step that went wrong left out."""
        position = error.progress.step + error.progress.data_offset
        return progress.model_copy(update={"data_offset": position - progress.step, "rewinds": error.progress.rewinds + 1})

    def _rewind_event(self, progress: Progress, error: RewindError) -> EventRecord:
        detail = (
            f"{error.reason} at step {error.progress.step}; back to the checkpoint of step {progress.step}, and the rows of the "
            f"{error.progress.step - progress.step} steps since then are left out"
        )
        self._tell(f"rewind: {detail}")
        return EventRecord(time=time.time(), step=progress.step, event="rewind", detail=detail)


def _node() -> str:
    """Tells machines apart, also those that share a name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


def _out_of_memory(run: ResolvedRun, error: torch.OutOfMemoryError) -> str:
    text = str(error).splitlines()[0]
    return (
        f"rank {dist.get_rank()} ran out of device memory with batch.micro_batch_size={run.layout.micro_batch_size} under {run.strategy}: "
        f"{text}. Use a smaller batch.micro_batch_size, train.activation_checkpointing=true, a higher parallel.zero_stage, or "
        "parallel.offload_optimizer=cpu"
    )
