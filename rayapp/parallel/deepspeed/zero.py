"""ZeRO stages 1, 2 and 3 through DeepSpeed.

The run's checkpoints are rayapp's own fragments, not DeepSpeed's: no pickle is read, and any strategy can read what
another one wrote. What DeepSpeed keeps where is known to :class:`_Partitions` alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayapp.config.schema import OptimSection
from rayapp.engine import Batch, EvalOutput, ParameterState, StepOutput, TrainingState
from rayapp.fragments import PARTS, Fragment, FragmentedState, HostMemory, Part, RankSnapshot, StateIndex, reader_of, take_snapshot
from rayapp.models.language_model import LanguageModel
from rayapp.parallel.adam import adamw, decay_groups, is_decayed, set_step, steps_taken
from rayapp.parallel.tokens import count_valid_tokens, evaluate, loss_guard

logger = logging.getLogger(__name__)


def join_process_group() -> None:
    """Let DeepSpeed use the process group that is up. Every rank calls it before anything else of DeepSpeed's.

    On CPUs DeepSpeed would compile an operator for shared memory on the node first; gloo serves without it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def shard_parameters(parameters: list[nn.Parameter], config: dict[str, Any]) -> None:
    """Keep only this rank's part of each parameter (ZeRO-3). Every rank calls it with the same values."""
    deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=config)


class ZeroEngine:
    """A DeepSpeed engine with torch's AdamW on fp32 weights.

    A step whose gradient is not finite is skipped on all ranks.
    """

    def __init__(self, model: LanguageModel, *, config: dict[str, Any], optim: OptimSection, device: torch.device) -> None:
        """Hand a model over to DeepSpeed. With stage 3 its parameters are sharded already. Every rank calls it.

        Args:
            model: in the run's precision.
            config: from :func:`rayapp.parallel.deepspeed.ds_config.ds_config`.
            optim: AdamW's settings.
            device: of this rank.
        """
        self._model, self._device = model, device
        self._weights = dict(model.named_weights())
        self._stage = int(config["zero_optimization"]["stage"])
        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self._weights.items()}
        decays = [is_decayed(len(shape)) for shape in shapes.values()]
        groups = decay_groups(list(self._weights.values()), decays, optim.weight_decay)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        join_process_group()
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(groups, optim), config=config, dist_init_required=False)
        for name, buffer in buffers.items():  # DeepSpeed casts them, which costs rotary positions their precision
            model.get_buffer(name).data = buffer.to(device)
        self._partitions = _Partitions(self._engine.optimizer, self._stage, self._weights, shapes)
        self._memory = HostMemory()
        model.choose_loss(self._engine, device)
        model.choose_mask(self._engine, device)

    def train_step(self, micro_batches: list[Batch], learning_rate: float, max_loss: float | None = None) -> StepOutput:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.train()
        valid = count_valid_tokens(micro_batches, self._device)
        scale = (dist.get_world_size() / valid.clamp_min(1)).float()  # DeepSpeed takes the mean over ranks
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            self._engine.set_gradient_accumulation_boundary(is_last)
            loss = self._engine(batch.input_ids, batch.labels, batch.position_ids)
            loss_sum += loss.detach()
            if is_last and max_loss is not None:
                dist.all_reduce(loss_sum)
                scale = scale * loss_guard(loss_sum / valid, max_loss)
            self._engine.backward(loss * scale, scale_wrt_gas=False)
        loss_scale = self._partitions.loss_scale_state()
        self._engine.step()
        if max_loss is None:
            dist.all_reduce(loss_sum)
        loss = float(loss_sum / valid)
        if max_loss is not None and loss > max_loss:
            self._partitions.put_back(loss_scale)
        return StepOutput(loss, float(self._engine.get_global_grad_norm()), self._engine.was_step_applied(), int(valid))

    def eval_step(self, micro_batches: list[Batch]) -> EvalOutput:
        self._engine.eval()
        return evaluate(self._engine, micro_batches, self._device)

    def snapshot(self, *, copied: bool) -> RankSnapshot:
        return take_snapshot(
            dist.get_rank(),
            self._partitions.index(dist.get_world_size()),
            self._partitions.fragments(),
            dict(self._model.named_kept_buffers()),
            self._memory if copied else None,
        )

    def load(self, folder: Path) -> None:
        state = FragmentedState(folder)
        state.check_shapes(self._partitions.shapes)
        self.load_state(state)

    def load_state(self, state: TrainingState) -> None:
        self._partitions.load(state)

    def state(self) -> TrainingState:
        return _ZeroState(self._partitions, self._weights)

    def close(self) -> None:
        self._memory.release()
        self._engine.destroy()


class _Partitions:
    """Where DeepSpeed keeps this rank's fp32 weights and Adam moments."""

    def __init__(self, optimizer: Any, stage: int, weights: dict[str, nn.Parameter], shapes: dict[str, list[int]]) -> None:
        self._optimizer, self._stage, self._weights = optimizer, stage, weights
        self.shapes = shapes

    @property
    def _flat_partitions(self) -> list[Tensor]:
        flat = self._optimizer.fp32_partitioned_groups_flat if self._stage == 3 else self._optimizer.single_partition_of_fp32_groups
        return list(flat)

    @property
    def adam(self) -> torch.optim.Optimizer:
        adam: torch.optim.Optimizer = self._optimizer.optimizer
        return adam

    def index(self, world_size: int) -> StateIndex:
        scaler = self._optimizer.loss_scaler if self._optimizer.dynamic_loss_scale else None
        good_steps = 0 if scaler is None else int(scaler.cur_iter - scaler.last_overflow_iter - 1)
        return StateIndex(
            world_size=world_size,
            step=steps_taken(self.adam),
            loss_scale=None if scaler is None else float(scaler.cur_scale),
            loss_scale_good_steps=0 if scaler is None else good_steps % scaler.scale_window,
            shapes=self.shapes,
        )

    def loss_scale_state(self) -> dict[str, Any]:
        """fp16's dynamic loss scale and what it counts; empty for other precisions."""
        return dict(vars(self._optimizer.loss_scaler)) if self._optimizer.dynamic_loss_scale else {}

    def put_back(self, loss_scale: dict[str, Any]) -> None:
        """Forget an overflow that was none: a step was left out for its loss."""
        if loss_scale:
            vars(self._optimizer.loss_scaler).update(loss_scale)

    def _start_moments(self, step: int) -> None:
        for partition in self._flat_partitions:
            set_step(self.adam, partition, step)

    def fragments(self) -> Iterator[Fragment]:
        """What this rank owns."""
        if not self.adam.state:  # no step was applied yet
            self._start_moments(0)
        for name in self._weights:
            owned = self._owned(name)
            if owned is not None:
                yield Fragment(name, owned[0], {part: self._view(name, part, owned[1]) for part in PARTS})

    def whole(self, name: str, part: Part) -> Tensor:
        """One part of one parameter, put together from all ranks; every rank calls it."""
        if not self.adam.state:
            self._start_moments(0)
        shape = self.shapes[name]
        values = torch.zeros(math.prod(shape), dtype=torch.float32, device=self._weights[name].device)
        owned = self._owned(name)
        if owned is not None:
            start, numel = owned
            values[start : start + numel] = self._view(name, part, numel).to(values.device)
        dist.all_reduce(values)
        return values.view(shape)

    def _owned(self, name: str) -> tuple[int, int] | None:
        """Start and length of this rank's run of a parameter's elements."""
        parameter: Any = self._weights[name]
        if self._stage != 3:
            mapping = parameter._hp_mapping
            return None if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)
        size = parameter.ds_tensor.ds_numel
        start = dist.get_rank() * size
        numel = min(size, parameter.ds_numel - start)
        return (start, numel) if numel > 0 else None

    def _view(self, name: str, part: Part, numel: int) -> Tensor:
        """This rank's run of one part, as memory that DeepSpeed works on."""
        parameter: Any = self._weights[name]
        if self._stage != 3:
            group, offset = parameter._hp_mapping.param_group_index, parameter._hp_mapping.hp_fragment_address.start
        else:
            group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        flat = self._flat_partitions[group]
        values: Tensor = flat if part == "weight" else self.adam.state[flat][part]
        return values.detach().narrow(0, offset, numel)

    @torch.no_grad()
    def load(self, state: TrainingState) -> None:
        """Take this rank's runs from any logical state, then make the low-precision weights anew."""
        read = reader_of(state)
        self._start_moments(state.step)
        for name in self._weights:
            owned = self._owned(name)
            start, numel = owned if owned is not None else (0, 0)
            for part in PARTS:  # every rank reads every parameter, for states that are read together
                values = read(name, part, start, numel)
                if owned is not None:
                    self._view(name, part, numel).copy_(values)
        self._refresh_weights()
        self._load_scale(state)

    def _refresh_weights(self) -> None:
        if self._stage != 3:
            self._optimizer.update_lp_params()
            return
        self._optimizer._partition_all_parameters()
        for group in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def _load_scale(self, state: TrainingState) -> None:
        if state.loss_scale is None or not self._optimizer.dynamic_loss_scale:
            return
        scaler = self._optimizer.loss_scaler
        scaler.cur_scale = state.loss_scale
        good_steps = state.index.loss_scale_good_steps if isinstance(state, FragmentedState) else 0
        scaler.last_overflow_iter = scaler.cur_iter - good_steps - 1


class _ZeroState:
    """The logical state of a running engine. A parameter is put together on every rank, one at a time."""

    def __init__(self, partitions: _Partitions, weights: dict[str, nn.Parameter]) -> None:
        self._partitions, self._weights = partitions, weights

    @property
    def step(self) -> int:
        return steps_taken(self._partitions.adam)

    @property
    def loss_scale(self) -> float | None:
        return self._partitions.index(1).loss_scale

    def names(self) -> list[str]:
        return list(self._weights)

    def parameter(self, name: str) -> ParameterState:
        return ParameterState(name, *(self._partitions.whole(name, part).cpu() for part in PARTS))

    def __iter__(self) -> Iterator[ParameterState]:
        return map(self.parameter, self.names())
