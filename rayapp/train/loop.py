"""The training loop: next rows, one step of the engine, figures, validation, checkpoint. It knows no Ray."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from rayapp.checkpoint.interval import SaveInterval
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.store import CheckpointStore, Saved
from rayapp.cluster.machine import detect_free_memory_bytes
from rayapp.config.resolved import ResolvedDevice, ResolvedRun
from rayapp.data.loader import Loader
from rayapp.engine import Batch, StepOutput, TrainEngine
from rayapp.errors import NonFiniteError
from rayapp.metrics.clock import StepClock, StepTiming
from rayapp.metrics.communication import measure_communication
from rayapp.metrics.memory import MemoryMeter
from rayapp.metrics.record import CheckpointRecord, EventRecord, StepRecord, ValidationRecord, perplexity
from rayapp.metrics.sink import Sink
from rayapp.models.build import named_seed
from rayapp.report.progress import progress_line
from rayapp.report.quantity import format_bytes
from rayapp.train.lifeline import Lifeline
from rayapp.train.schedule import learning_rate
from rayapp.train.spikes import is_spike, spike_limit, with_loss
from rayapp.train.status import Status, exchange

logger = logging.getLogger(__name__)

FIRST_PROFILED_STEP = 5
TELL_LATE_S = 60.0
FREE_MEMORY_SHARE = 0.9
"""Of the host's free memory, what copies of the states may take."""


@dataclass(frozen=True)
class Outcome:
    """What a run of the loop came to.

    Attributes:
        progress: how far the run is; a checkpoint of it is complete.
        device: what rank 0 computed on, and its peak.
        tokens_per_s: all ranks, over the steady steps; None for too few of them.
        peak_memory_bytes: of the rank that needed most.
        average_memory_bytes: mean over ranks and steps.
        stopped: True if the run was asked to end before its last step.
    """

    progress: Progress
    device: ResolvedDevice
    tokens_per_s: float | None
    peak_memory_bytes: int
    average_memory_bytes: int
    stopped: bool = False


class RewindError(Exception):
    """The loss went wrong and the run is to go on from the checkpoint before; raised on all ranks.

    Attributes:
        progress: of the step that went wrong.
        reason: for people.
    """

    def __init__(self, progress: Progress, reason: str) -> None:
        super().__init__(reason)
        self.progress, self.reason = progress, reason


@dataclass(frozen=True)
class Verdict:
    """On one step.

    Attributes:
        event: `loss_spike` or `skipped_step`; None: nothing is wrong.
        detail: for people.
        goes_back: the run continues from the checkpoint before.
        gives_up: too many steps in a row were not applied.
    """

    event: Literal["loss_spike", "skipped_step"] | None = None
    detail: str = ""
    goes_back: bool = False
    gives_up: bool = False


class TrainLoop:
    """One process's way through the steps that are left. Every rank makes the same calls.

    Args:
        run: the resolved run.
        engine: has its weights and states already.
        loader: of this rank.
        store: takes the checkpoints.
        sink: takes the figures; rank 0's alone is written to.
        lifeline: of this rank; rank 0's alone is told lines.
        device: of this rank.
        progress: where the run is.
    """

    def __init__(
        self,
        run: ResolvedRun,
        *,
        engine: TrainEngine,
        loader: Loader,
        store: CheckpointStore,
        sink: Sink | None,
        lifeline: Lifeline,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._run, self._engine, self._loader, self._store = run, engine, loader, store
        self._sink, self._lifeline, self._device, self._progress = sink, lifeline, device, progress
        self._train, self._layout = run.file.train, run.layout
        self._first_step = progress.step
        self._dp_rank = run.layout.layout.dp_rank(dist.get_rank())
        tokens = run.file.batch.global_batch_size * run.file.data.sequence_length
        self._clock = StepClock(self._train.num_steps - progress.step, tokens, trained_s=progress.training_s)
        self._memory = MemoryMeter(run.device.kind)
        self._interval = SaveInterval(run.file.checkpoint, progress.step)
        self._copies: bool | None = None
        self._held_up_s = 0.0
        self._peak_bytes = self._average_bytes = 0
        self._has_stopped = False
        self._told_late_s = -math.inf

    @property
    def has_trained(self) -> bool:
        """True once a step was made."""
        return self._progress.step > self._first_step

    def run(self) -> Outcome:
        """Train to the run's last step, or to where it is asked to stop; validate at the end and save.

        Raises:
            NonFiniteError: too many steps in a row were not applied, or the run went back too often.
            RewindError: the run is to go back, which the caller does.
            StorageError: a checkpoint or the figures could not be written.
        """
        first = self._progress.step + self._progress.data_offset
        with contextlib.closing(self._loader.train_batches(first)) as batches:
            self._train_on(batches)
        return Outcome(self._progress, self._run.device, self._clock.tokens_per_s, self._peak_bytes, self._average_bytes, self._has_stopped)

    def _train_on(self, batches: Iterator[list[Batch]]) -> None:
        self._save_the_start()
        self._clock.start()
        for step in range(self._progress.step, self._train.num_steps):
            self._lifeline.mark("waiting for data", step)
            with self._clock.part("data"):
                micro_batches = [batch.to(self._device) for batch in next(batches)]
            rate = learning_rate(self._run.file.optim, step, self._train.num_steps)
            profiled = self._is_profiled(step)
            self._lifeline.mark("training step", step)
            limit = spike_limit(self._progress.recent_losses, self._train.spike_threshold)
            with self._clock.part("compute"):
                output, share = self._step(step, micro_batches, rate, limit if self._train.on_spike == "skip" else None, profiled)
            self._advance(step + 1, output)
            status = exchange(self._own_status(), self._device)
            verdict = self._judge(output, limit)
            if not verdict.goes_back:  # what went wrong is not saved
                self._validate_and_save(status)
            self._record(output, rate, share, status, self._clock.end_step(profiled=profiled))
            self._act_on(verdict)
            if self._has_stopped:
                return

    def _own_status(self) -> Status:
        sample = self._memory.sample()
        return Status(
            memory_bytes=sample.used_bytes,
            peak_memory_bytes=sample.peak_bytes,
            save_is_due=self._interval.is_due(self._progress.step),
            save_is_running=self._store.is_busy,
            save_has_failed=self._store.has_failed,
            stop_requested=self._lifeline.stop_requested,
        )

    def _is_profiled(self, step: int) -> bool:
        interval = self._run.file.metrics.communication_interval_steps
        done = step - self._first_step
        return self._layout.world_size > 1 and done % interval == min(FIRST_PROFILED_STEP, interval - 1)

    def _step(
        self, step: int, micro_batches: list[Batch], rate: float, max_loss: float | None, profiled: bool
    ) -> tuple[StepOutput, float | None]:
        """One optimizer step; dropout is a function of seed, step and rank, so that a resumed run draws the same."""
        torch.manual_seed(named_seed(self._train.seed, f"dropout/{step}/{self._dp_rank}"))
        if not profiled:
            return self._engine.train_step(micro_batches, rate, max_loss), 0.0 if self._layout.world_size == 1 else None
        measured = measure_communication(lambda: self._engine.train_step(micro_batches, rate, max_loss))
        return measured.result, measured.share

    def _advance(self, step: int, output: StepOutput) -> None:
        before = self._progress
        self._progress = before.model_copy(
            update={
                "step": step,
                "loss_first": output.loss if step == 1 else before.loss_first,
                "loss_last": output.loss,
                "recent_losses": with_loss(before.recent_losses, output.loss) if output.applied else before.recent_losses,
                "skipped_steps": before.skipped_steps + (not output.applied),
                "skipped_in_a_row": 0 if output.applied else before.skipped_in_a_row + 1,
                "training_s": self._clock.trained_s,
            }
        )

    def _validate_and_save(self, status: Status) -> None:
        step, train = self._progress.step, self._train
        is_last = step == train.num_steps
        self._has_stopped = status.stop_requested and not is_last
        assert train.validation_interval_steps is not None
        if is_last or step % train.validation_interval_steps == 0:
            self._lifeline.mark("validation", step)
            with self._clock.part("validation"):
                self._validate()
        self._lifeline.mark("checkpoint", step)
        with self._clock.part("checkpoint"):
            self._save_what_is_due(status, must=is_last or self._has_stopped)

    def _save_the_start(self) -> None:
        """With nothing saved there is nothing to go back to."""
        if self._train.on_spike == "rewind" and self._progress.step == 0:
            self._lifeline.mark("checkpoint", 0)
            self._save(wait=True)

    def _save_what_is_due(self, status: Status, *, must: bool) -> None:
        if must or status.save_has_failed:
            self._saved(self._store.finish(self._mark_saving))
        else:
            self._saved(self._store.collect())
        if must or (status.save_is_due and not status.save_is_running):
            self._save(wait=must)
        elif status.save_is_due and time.monotonic() - self._told_late_s > TELL_LATE_S:
            self._told_late_s = time.monotonic()
            self._tell(f"a checkpoint is due at step {self._progress.step}, and the one before is still being written")

    def _save(self, *, wait: bool) -> None:
        """Begin a checkpoint of this step. Without room for a copy, or at the end, wait until it is complete."""
        started = time.perf_counter()
        step = self._progress.step
        copied = not wait and self._takes_copies()
        self._store.begin(self._progress, self._engine.snapshot(copied=copied))
        saved = None if copied else self._store.finish(self._mark_saving)
        self._held_up_s = time.perf_counter() - started
        self._saved(saved)
        self._interval.begun(step, self._held_up_s)

    def _mark_saving(self) -> None:
        self._lifeline.mark("checkpoint", self._progress.step)

    def _takes_copies(self) -> bool:
        """True if every rank's host has the memory for a copy; asked before the first one alone, for its memory is kept."""
        if self._copies is None:
            self._copies = self._run.file.checkpoint.asynchronous and self._room_for_copies()
        return self._copies

    def _room_for_copies(self) -> bool:
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = self._engine.snapshot(copied=False).size_bytes * neighbours
        free = int(FREE_MEMORY_SHARE * detect_free_memory_bytes())
        lacks = torch.tensor([needed > free], dtype=torch.int64, device=self._device)
        dist.all_reduce(lacks)
        if not int(lacks):
            return True
        if dist.get_rank() == 0:
            logger.warning(
                "A copy of the states takes %s of a host's memory and there is less than that (here %s are free): training waits for "
                "checkpoints. checkpoint.asynchronous=false says so from the start",
                format_bytes(needed),
                format_bytes(free),
            )
        return False

    def _saved(self, saved: Saved | None) -> None:
        """Record a checkpoint that became complete."""
        if saved is None:
            return
        checkpoint = saved.checkpoint
        self._write(
            CheckpointRecord(
                time=time.time(),
                step=checkpoint.step,
                seconds=self._held_up_s,
                write_seconds=saved.seconds,
                bytes=checkpoint.size_bytes,
            )
        )
        if self._sink is not None:
            self._sink.flush()

    def _validate(self) -> None:
        started = time.perf_counter()
        loss_sum, num_valid_tokens = 0.0, 0
        for micro_batches in self._loader.validation_batches(self._train.validation_rows):
            output = self._engine.eval_step([batch.to(self._device) for batch in micro_batches])
            loss_sum, num_valid_tokens = loss_sum + output.loss_sum, num_valid_tokens + output.num_valid_tokens
        if not num_valid_tokens:
            return
        loss = loss_sum / num_valid_tokens
        update: dict[str, float | int] = {"validation_loss": loss, "validation_step": self._progress.step}
        target = self._train.target_loss
        if target is not None and loss <= target and self._progress.target_loss_step is None:
            update |= {"target_loss_step": self._progress.step, "target_loss_s": self._progress.training_s}
        self._progress = self._progress.model_copy(update=update)
        seconds = time.perf_counter() - started
        self._tell(f"validation at step {self._progress.step}: loss {loss:.4f}")
        self._write(
            ValidationRecord(
                time=time.time(),
                step=self._progress.step,
                loss=loss,
                perplexity=perplexity(loss),
                seconds=seconds,
                num_valid_tokens=num_valid_tokens,
                elapsed_s=self._progress.training_s,
            )
        )

    def _record(self, output: StepOutput, rate: float, share: float | None, status: Status, timing: StepTiming) -> None:
        self._peak_bytes = status.peak_memory_bytes
        done = self._progress.step - self._first_step
        self._average_bytes += (status.memory_bytes - self._average_bytes) // done
        device = self._run.device
        peak = device.peak_flops * self._layout.world_size if device.peak_flops else None
        mfu = timing.tokens_per_s * self._run.flops_per_token / peak if peak else None
        self._write(
            StepRecord(
                time=time.time(),
                step=self._progress.step,
                loss=output.loss,
                grad_norm=output.grad_norm,
                learning_rate=rate,
                tokens_per_s=timing.tokens_per_s,
                samples_per_s=timing.tokens_per_s / self._run.file.data.sequence_length,
                step_s=timing.step_s,
                data_wait_share=timing.data_wait_share,
                communication_share=share,
                checkpoint_share=timing.checkpoint_share,
                mfu=mfu,
                mfu_causal=timing.tokens_per_s * self._run.flops_per_token_causal / peak if peak else None,
                memory_bytes=status.memory_bytes,
                peak_memory_bytes=self._peak_bytes,
                num_valid_tokens=output.num_valid_tokens,
                applied=output.applied,
                skipped_steps=self._progress.skipped_steps,
            )
        )
        speed = self._clock.smoothed_tokens_per_s
        self._tell(
            progress_line(
                step=self._progress.step,
                num_steps=self._train.num_steps,
                loss=output.loss if math.isfinite(output.loss) else None,
                learning_rate=rate,
                tokens_per_s=speed,
                mfu=speed * self._run.flops_per_token / peak if speed and peak else None,
                left_s=self._clock.left_s,
            )
        )

    def _judge(self, output: StepOutput, limit: float | None) -> Verdict:
        """What is wrong with the step, and whether the run goes back for it. Every rank comes to the same."""
        spiked = is_spike(output.loss, limit)
        if output.applied and not spiked:
            return Verdict()
        detail = f"loss {output.loss:.4g}, gradient norm {output.grad_norm:.4g}"
        if spiked:
            detail += f"; more than {limit:.4g}, {self._train.spike_threshold:g} standard deviations above the level of the steps before"
        if not output.applied:
            detail += "; the step was not applied"
        gives_up = self._progress.skipped_in_a_row >= self._train.max_skipped_steps
        goes_back = self._train.on_spike == "rewind" and (spiked or gives_up)
        return Verdict("loss_spike" if spiked else "skipped_step", detail, goes_back=goes_back, gives_up=gives_up)

    def _act_on(self, verdict: Verdict) -> None:
        if verdict.event is None:
            return
        step, detail = self._progress.step, verdict.detail
        self._write(EventRecord(time=time.time(), step=step, event=verdict.event, detail=detail))
        self._tell(f"{'loss spike at' if verdict.event == 'loss_spike' else 'skipped'} step {step}: {detail}")
        if verdict.goes_back:
            if self._progress.rewinds < self._train.max_rewinds:
                raise RewindError(self._progress, detail)
            raise NonFiniteError(
                f"the loss went wrong again at step {step} ({detail}) after train.max_rewinds={self._train.max_rewinds} "
                "times back to a checkpoint. Lower optim.learning_rate, lengthen optim.warmup_steps, or look at the data"
            )
        if verdict.gives_up:
            raise NonFiniteError(
                f"{self._progress.skipped_in_a_row} steps in a row up to step {step} were not applied ({detail}); "
                f"train.max_skipped_steps={self._train.max_skipped_steps}. Lower optim.learning_rate, lengthen optim.warmup_steps, "
                "or look at the data of these steps"
            )

    def _tell(self, line: str) -> None:
        if dist.get_rank() == 0:
            self._lifeline.tell(line)

    def _write(self, record: StepRecord | ValidationRecord | CheckpointRecord | EventRecord) -> None:
        if self._sink is not None:
            self._sink.write(record)
