"""Reading a logical state from a folder of fragments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayapp.engine import ParameterState
from rayapp.errors import CheckpointError, Problem
from rayapp.fragments.index import BUFFER, PARTS, STATE_FILE, Part, StateIndex, rank_file


class FragmentedState:
    """A logical state (:class:`rayapp.engine.TrainingState`) that is read from a folder of fragments as it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = self._read_index()
        self._files = [self._open(rank) for rank in range(self.index.world_size)]
        self._starts: list[dict[str, int]] = [json.loads(file.metadata()["starts"]) for file in self._files]

    def _read_index(self) -> StateIndex:
        try:
            return StateIndex.model_validate_json((self.folder / STATE_FILE).read_text())
        except (OSError, ValidationError) as error:
            raise CheckpointError(
                Problem(f"checkpoint {self.folder}", f"has no usable {STATE_FILE}: {error}", "use another checkpoint")
            ) from error

    def _open(self, rank: int) -> safe_open:
        path = self.folder / rank_file(rank, self.index.world_size)
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(Problem(f"checkpoint file {path}", f"cannot be read: {error}", "use another checkpoint")) from error

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def loss_scale(self) -> float | None:
        return self.index.loss_scale

    def names(self) -> list[str]:
        return list(self.index.shapes)

    def whole(self, name: str, part: Part) -> Tensor:
        """One part of one parameter, in its shape, fp32, on the CPU."""
        shape = self.index.shapes[name]
        return self.run(name, part, 0, _numel(shape)).view(shape)

    def run(self, name: str, part: Part, start: int, numel: int) -> Tensor:
        """Elements ``start`` to ``start + numel`` of one part of one parameter; 1-D, fp32, on the CPU.

        Raises:
            CheckpointError: the fragments do not cover them.
        """
        out = torch.empty(numel, dtype=torch.float32)
        covered = 0
        for file, starts in zip(self._files, self._starts, strict=True):
            if name not in starts:
                continue
            source = file.get_slice(f"{part}/{name}")
            own_start, own_numel = starts[name], source.get_shape()[0]
            low, high = max(start, own_start), min(start + numel, own_start + own_numel)
            if low < high:
                out[low - start : high - start] = source[low - own_start : high - own_start]
                covered += high - low
        if covered != numel:
            raise CheckpointError(
                Problem(
                    f"parameter {name} of checkpoint {self.folder}",
                    f"has {covered} of the {numel} elements asked for",
                    "use another checkpoint, or the model that this one was trained with",
                )
            )
        return out

    def parameter(self, name: str) -> ParameterState:
        return ParameterState(name, *(self.whole(name, part) for part in PARTS))

    def __iter__(self) -> Iterator[ParameterState]:
        return map(self.parameter, self.names())

    def buffers(self) -> dict[str, Tensor]:
        """The model's own buffers that belong to its weights on disk."""
        keys = [(file, key) for file in self._files for key in file.keys() if key.startswith(f"{BUFFER}/")]  # noqa: SIM118 (it does not iterate)
        return {key.removeprefix(f"{BUFFER}/"): file.get_tensor(key) for file, key in keys}

    def check_shapes(self, shapes: dict[str, list[int]]) -> None:
        """Refuse a state of another model.

        Args:
            shapes: of the model that is to take it.

        Raises:
            CheckpointError: with the first difference.
        """
        for name in [*shapes, *self.index.shapes]:
            ours, theirs = shapes.get(name), self.index.shapes.get(name)
            if ours != theirs:
                raise CheckpointError(
                    Problem(
                        f"parameter {name}",
                        f"has shape {theirs} in checkpoint {self.folder} and {ours} in the model",
                        "resume with the model that the run was started with",
                    )
                )


def _numel(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


ReadRun = Callable[[str, Part, int, int], Tensor]


def reader_of(state: object) -> ReadRun:
    """How an engine reads runs of elements from any logical state, without assembling what it does not need."""
    if isinstance(state, FragmentedState):
        return state.run
    cache: dict[str, ParameterState] = {}

    def read(name: str, part: Part, start: int, numel: int) -> Tensor:
        if name not in cache:
            cache.clear()
            cache[name] = cast("FragmentedState", state).parameter(name)
        whole: Tensor = getattr(cache[name], part)
        return whole.flatten()[start : start + numel]

    return read
