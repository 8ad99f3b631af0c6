"""What the engines hold in memory between two steps."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from support.runs import rank_batches, resolved

MODEL = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
"""Its matrices are too large for ZeRO-3 to keep them whole, as it does below 100,000 entries."""


def held_by_engines(cases: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Bytes of all tensors that an engine adds to the process, after two steps, by (strategy, precision). On every rank."""
    return {(strategy, precision): _held_by_engine(strategy, precision) for strategy, precision in cases}


def _held_by_engine(strategy: str, precision: str) -> int:
    from rayapp.parallel.select import build_engine

    before = _tensor_storages()
    run = resolved(
        "llama",
        strategy=strategy,
        accumulation=1,
        train={"precision": precision},
        model={"config": MODEL},
        parallel={"bucket_bytes": 1000},
    )
    engine = build_engine(run, torch.device("cpu"))
    for step in range(2):
        engine.train_step(rank_batches(step, dist.get_rank(), dist.get_world_size(), 2, 1), 1e-3)
    held = sum(size for address, size in _tensor_storages().items() if address not in before)
    engine.close()
    return held


def num_parameters() -> int:
    return resolved("llama", model={"config": MODEL}).num_parameters


def _tensor_storages() -> dict[int, int]:
    """Address and bytes of every storage that a tensor of this process refers to."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
