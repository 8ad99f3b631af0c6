"""Data parallelism in plain torch: every rank holds the whole model and all of its states."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rayapp.config.schema import OptimSection, Precision
from rayapp.engine import Batch, EvalOutput, ParameterState, StepOutput, TrainingState
from rayapp.fragments import PARTS, Fragment, FragmentedState, HostMemory, Part, RankSnapshot, StateIndex, reader_of, take_snapshot
from rayapp.models.language_model import LanguageModel
from rayapp.parallel.adam import LOSS_SCALE_WINDOW, adamw, decay_groups, is_decayed, set_step, steps_taken
from rayapp.parallel.tokens import count_valid_tokens, evaluate, loss_guard


class DdpEngine:
    """``DistributedDataParallel`` with AdamW on fp32 weights.

    In bf16 and fp16 the model's weights are a copy of the fp32 ones, made anew after every step. A step whose gradient is
    not finite is skipped on all ranks.
    """

    def __init__(self, model: LanguageModel, *, optim: OptimSection, precision: Precision, device: torch.device, bucket_bytes: int) -> None:
        """Wrap a model whose parameters have the run's precision already. Every rank calls it."""
        self._model, self._optim, self._device = model, optim, device
        self._weights = dict(model.named_weights())
        self._masters = {name: p if precision == "fp32" else nn.Parameter(p.detach().float()) for name, p in self._weights.items()}
        self._is_copy = precision != "fp32"
        decays = [is_decayed(p.dim()) for p in self._masters.values()]
        self._optimizer = adamw(decay_groups(list(self._masters.values()), decays, optim.weight_decay), optim)
        self._scaler = torch.amp.GradScaler(device.type, growth_interval=LOSS_SCALE_WINDOW, enabled=precision == "fp16")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its successor does not exist in every torch that is supported
            self._ddp = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=max(1, bucket_bytes // 2**20)
            )
        self._memory = HostMemory()
        model.choose_loss(self._ddp, device)
        model.choose_mask(self._ddp, device)

    def train_step(self, micro_batches: list[Batch], learning_rate: float, max_loss: float | None = None) -> StepOutput:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._model.train()
        valid = count_valid_tokens(micro_batches, self._device)
        loss_sum = self._accumulate(micro_batches, valid, max_loss)
        grad_norm = self._take_gradients()
        applied = bool(torch.isfinite(grad_norm))
        if applied and self._optim.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._optim.max_grad_norm, grad_norm)
        if applied:
            self._scaler.step(self._optimizer)
        loss = float(loss_sum / valid)
        loss_scale = self._scaler.state_dict()
        self._scaler.update()
        if self._scaler.is_enabled() and max_loss is not None and loss > max_loss:
            self._scaler.load_state_dict(loss_scale)  # a step that is left out for its loss is no overflow
        self._drop_gradients()
        if applied:
            self._refresh_copies()
        return StepOutput(loss, float(grad_norm), applied, int(valid))

    def _accumulate(self, micro_batches: list[Batch], valid: Tensor, max_loss: float | None) -> Tensor:
        """Backward through all micro-batches; gives the summed loss of all ranks."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        scale = (dist.get_world_size() / valid.clamp_min(1)).float()  # DDP takes the mean over ranks
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                loss = self._ddp(batch.input_ids, batch.labels, batch.position_ids)
                loss_sum += loss.detach()
                if is_last and max_loss is not None:
                    dist.all_reduce(loss_sum)
                    scale = scale * loss_guard(loss_sum / valid, max_loss)
                self._scaler.scale(loss * scale).backward()
        if max_loss is None:
            dist.all_reduce(loss_sum)
        return loss_sum

    def _take_gradients(self) -> Tensor:
        """Hand the gradients to the fp32 weights, unscaled, and give their norm."""
        if self._is_copy:
            for name, parameter in self._weights.items():
                self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        grads = [p.grad for p in self._masters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def _drop_gradients(self) -> None:
        for parameter in (*self._weights.values(), *self._masters.values()):
            parameter.grad = None

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self._is_copy:
            torch._foreach_copy_(list(self._weights.values()), list(self._masters.values()))

    def eval_step(self, micro_batches: list[Batch]) -> EvalOutput:
        self._model.eval()
        return evaluate(self._model, micro_batches, self._device)

    def snapshot(self, *, copied: bool) -> RankSnapshot:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return take_snapshot(
            rank,
            self._index(world_size),
            self._fragments(rank, world_size),
            dict(self._model.named_kept_buffers()),
            self._memory if copied else None,
        )

    def _fragments(self, rank: int, world_size: int) -> Iterator[Fragment]:
        """An equal share of every parameter for each rank."""
        for name, master in self._masters.items():
            low, high = master.numel() * rank // world_size, master.numel() * (rank + 1) // world_size
            if low < high:
                yield Fragment(name, low, {part: self._part(name, part).flatten()[low:high] for part in PARTS})

    def _part(self, name: str, part: Part) -> Tensor:
        master = self._masters[name]
        if part == "weight":
            return master.detach()
        state = self._optimizer.state.get(master)
        return torch.zeros_like(master) if not state else state[part]

    def _index(self, world_size: int) -> StateIndex:
        scale = self._scaler.state_dict()
        return StateIndex(
            world_size=world_size,
            step=steps_taken(self._optimizer),
            loss_scale=scale["scale"] if scale else None,
            loss_scale_good_steps=scale["_growth_tracker"] if scale else 0,
            shapes={name: list(p.shape) for name, p in self._masters.items()},
        )

    def load(self, folder: Path) -> None:
        state = FragmentedState(folder)
        state.check_shapes({name: list(p.shape) for name, p in self._masters.items()})
        self.load_state(state)

    @torch.no_grad()
    def load_state(self, state: TrainingState) -> None:
        read = reader_of(state)
        for name, master in self._masters.items():
            set_step(self._optimizer, master, state.step)
            for part in PARTS:
                self._part(name, part).copy_(read(name, part, 0, master.numel()).view_as(master))
        self._refresh_copies()
        if self._scaler.is_enabled() and state.loss_scale is not None:
            good_steps = state.index.loss_scale_good_steps if isinstance(state, FragmentedState) else 0
            self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": state.loss_scale, "_growth_tracker": good_steps})

    def state(self) -> TrainingState:
        return _DdpState(self)

    def close(self) -> None:
        self._memory.release()
        self._optimizer.state.clear()
        self._masters.clear()
        self._weights.clear()


class _DdpState:
    """The logical state of a running engine: every rank has all of it."""

    def __init__(self, engine: DdpEngine) -> None:
        self._engine = engine

    @property
    def step(self) -> int:
        return steps_taken(self._engine._optimizer)

    @property
    def loss_scale(self) -> float | None:
        return self._engine._index(1).loss_scale

    def names(self) -> list[str]:
        return list(self._engine._masters)

    def parameter(self, name: str) -> ParameterState:
        return ParameterState(name, *(self._engine._part(name, part).to("cpu", torch.float32, copy=True) for part in PARTS))

    def __iter__(self) -> Iterator[ParameterState]:
        return map(self.parameter, self.names())
