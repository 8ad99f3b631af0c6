"""One rank's part of the logical state, ready to be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayapp.fragments.host_memory import HostMemory
from rayapp.fragments.index import BUFFER, STATE_FILE, Part, StateIndex, rank_file
from rayapp.fragments.safetensors_file import safetensors_pieces

Pieces = Callable[[], Iterator[memoryview]]
"""Gives the bytes of a file from its beginning, every time it is called."""


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements that a rank owns.

    Attributes:
        name: the parameter's Hugging Face name.
        start: index of the first element in row-major order.
        parts: weight, exp_avg and exp_avg_sq: 1-D fp32 tensors of equal length on any device.
    """

    name: str
    start: int
    parts: dict[Part, Tensor]


@dataclass(frozen=True)
class RankSnapshot:
    """What one rank writes.

    Attributes:
        rank: who writes.
        tensors: by their names in the rank's file.
        starts: where each parameter's fragment starts.
        index: of the whole state; every rank has the same.
    """

    rank: int
    tensors: Mapping[str, Tensor]
    starts: Mapping[str, int]
    index: StateIndex

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def files(self) -> dict[str, Pieces]:
        """The rank's files by name; rank 0 writes the index too."""
        metadata = {"starts": json.dumps(dict(self.starts))}
        files: dict[str, Pieces] = {
            rank_file(self.rank, self.index.world_size): lambda: safetensors_pieces(self.tensors, metadata),
        }
        if self.rank == 0:
            files[STATE_FILE] = lambda: iter([memoryview(self.index.model_dump_json(indent=1).encode())])
        return files


def take_snapshot(
    rank: int,
    index: StateIndex,
    fragments: Iterable[Fragment],
    buffers: Mapping[str, Tensor],
    memory: HostMemory | None,
) -> RankSnapshot:
    """Copy a rank's fragments to the host.

    Args:
        rank: whose they are.
        index: of the whole state.
        fragments: what the rank owns.
        buffers: of the model; rank 0 writes them.
        memory: takes the copies; None: the snapshot refers to the tensors themselves and must be written before the next step.
    """
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for fragment in fragments:
        starts[fragment.name] = fragment.start
        for part, values in fragment.parts.items():
            tensors[f"{part}/{fragment.name}"] = values.detach().float()
    if rank == 0:
        tensors |= {f"{BUFFER}/{name}": buffer.detach() for name, buffer in buffers.items()}
    if memory is not None:
        memory.start(list(tensors.values()))
        copies = {name: memory.copy(tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        tensors = copies
    return RankSnapshot(rank, tensors, starts, index)
