"""The training loop: next rows, one step of the engine, figures, validation, checkpoint. It knows no Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayapp.checkpoint.store import CheckpointStore, Progress
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
from rayapp.train.schedule import learning_rate

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
FIRST_PROFILED_STEP = 5


@dataclass(frozen=True)
class Outcome:
    """What a run of the loop came to.

    Attributes:
        progress: how far the run is.
        tokens_per_s: all ranks, over the steady steps; None for too few of them.
        peak_memory_bytes: of the rank that needed most.
        average_memory_bytes: mean over ranks and steps.
        device: what rank 0 computed on, and its peak.
    """

    progress: Progress
    device: ResolvedDevice
    tokens_per_s: float | None
    peak_memory_bytes: int
    average_memory_bytes: int


class TrainLoop:
    """One process's way through the steps that are left. Every rank makes the same calls.

    Args:
        run: the resolved run.
        engine: has its weights and states already.
        loader: of this rank.
        store: takes the checkpoints.
        sink: takes the figures; rank 0's alone is written to.
        tell: takes a line of progress; rank 0's alone is called.
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
        tell: Tell,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._run, self._engine, self._loader, self._store = run, engine, loader, store
        self._sink, self._tell, self._device, self._progress = sink, tell, device, progress
        self._train, self._layout = run.file.train, run.layout
        self._first_step = progress.step
        self._dp_rank = run.layout.layout.dp_rank(dist.get_rank())
        tokens = run.file.batch.global_batch_size * run.file.data.sequence_length
        self._clock = StepClock(self._train.num_steps - progress.step, tokens, trained_s=progress.training_s)
        self._memory = MemoryMeter(run.device.kind)
        self._peak_bytes = self._average_bytes = 0

    def run(self) -> Outcome:
        """Train to the run's last step, validate and save at the end.

        Raises:
            NonFiniteError: too many steps in a row were not finite.
            StorageError: a checkpoint or the figures could not be written.
        """
        with contextlib.closing(self._loader.train_batches(self._progress.step)) as batches:
            self._train_on(batches)
        return Outcome(self._progress, self._run.device, self._clock.tokens_per_s, self._peak_bytes, self._average_bytes)

    def _train_on(self, batches: Iterator[list[Batch]]) -> None:
        self._clock.start()
        for step in range(self._progress.step, self._train.num_steps):
            with self._clock.part("data"):
                micro_batches = [batch.to(self._device) for batch in next(batches)]
            rate = learning_rate(self._run.file.optim, step, self._train.num_steps)
            profiled = self._is_profiled(step)
            with self._clock.part("compute"):
                output, share = self._step(step, micro_batches, rate, profiled)
            self._advance(step + 1, output)
            self._validate_and_save()
            self._record(output, rate, share, self._clock.end_step(profiled=profiled))
            if self._is_saved_step() and self._sink is not None:
                self._sink.flush()
            self._check_finite(output)

    def _is_profiled(self, step: int) -> bool:
        interval = self._run.file.metrics.communication_interval_steps
        done = step - self._first_step
        return self._layout.world_size > 1 and done % interval == min(FIRST_PROFILED_STEP, interval - 1)

    def _step(self, step: int, micro_batches: list[Batch], rate: float, profiled: bool) -> tuple[StepOutput, float | None]:
        """One optimizer step; dropout is a function of seed, step and rank, so that a resumed run draws the same."""
        torch.manual_seed(named_seed(self._train.seed, f"dropout/{step}/{self._dp_rank}"))
        if not profiled:
            return self._engine.train_step(micro_batches, rate), 0.0 if self._layout.world_size == 1 else None
        measured = measure_communication(lambda: self._engine.train_step(micro_batches, rate))
        return measured.result, measured.share

    def _advance(self, step: int, output: StepOutput) -> None:
        before = self._progress
        self._progress = before.model_copy(
            update={
                "step": step,
                "loss_first": output.loss if step == 1 else before.loss_first,
                "loss_last": output.loss,
                "skipped_steps": before.skipped_steps + (not output.applied),
                "skipped_in_a_row": 0 if output.applied else before.skipped_in_a_row + 1,
                "training_s": self._clock.trained_s,
            }
        )

    def _validate_and_save(self) -> None:
        step, file = self._progress.step, self._run.file
        is_last = step == self._train.num_steps
        assert file.train.validation_interval_steps is not None
        if is_last or step % file.train.validation_interval_steps == 0:
            with self._clock.part("validation"):
                self._validate()
        if self._is_saved_step():
            with self._clock.part("checkpoint"):
                self._save()

    def _is_saved_step(self) -> bool:
        interval = self._run.file.checkpoint.interval_steps
        assert interval is not None
        return self._progress.step % interval == 0 or self._progress.step == self._train.num_steps

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

    def _save(self) -> None:
        started = time.perf_counter()
        checkpoint = self._store.save(self._progress, self._engine.save)
        seconds = time.perf_counter() - started
        self._write(CheckpointRecord(time=time.time(), step=checkpoint.step, seconds=seconds, bytes=checkpoint.size_bytes))

    def _record(self, output: StepOutput, rate: float, share: float | None, timing: StepTiming) -> None:
        memory_bytes, self._peak_bytes = self._memory_of_all_ranks()
        done = self._progress.step - self._first_step
        self._average_bytes += (memory_bytes - self._average_bytes) // done
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
                memory_bytes=memory_bytes,
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
                loss=output.loss if output.loss == output.loss else None,
                learning_rate=rate,
                tokens_per_s=speed,
                mfu=speed * self._run.flops_per_token / peak if speed and peak else None,
                left_s=self._clock.left_s,
            )
        )

    def _memory_of_all_ranks(self) -> tuple[int, int]:
        """Mean of what is in use, and the largest peak, in bytes."""
        sample = self._memory.sample()
        own = torch.tensor([sample.used_bytes, sample.peak_bytes], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(self._layout.world_size)]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone).cpu()
        return int(table[:, 0].sum()) // self._layout.world_size, int(table[:, 1].max())

    def _check_finite(self, output: StepOutput) -> None:
        if output.applied:
            return
        detail = f"loss {output.loss}, gradient norm {output.grad_norm}; the step was not applied"
        self._write(EventRecord(time=time.time(), step=self._progress.step, event="skipped_step", detail=detail))
        self._tell(f"skipped step {self._progress.step}: {detail}")
        if self._progress.skipped_in_a_row >= self._train.max_skipped_steps:
            raise NonFiniteError(
                f"{self._progress.skipped_in_a_row} steps in a row up to step {self._progress.step} were not finite ({detail}); "
                f"train.max_skipped_steps={self._train.max_skipped_steps}. Lower optim.learning_rate, lengthen optim.warmup_steps, "
                "or look at the data of these steps"
            )

    def _write(self, record: StepRecord | ValidationRecord | CheckpointRecord | EventRecord) -> None:
        if self._sink is not None:
            self._sink.write(record)
