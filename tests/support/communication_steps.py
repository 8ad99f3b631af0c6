"""Steps whose communication is known, each measured on the rank that runs it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from rayapp.metrics.communication import measure_communication

COMPUTE_S = 0.3


def compute() -> None:
    """Takes 0.3 s without a collective."""
    time.sleep(COMPUTE_S)


def plain_steps() -> dict[str, tuple[float | None, float]]:
    """Shares and seconds of a step without a collective, of one with a late rank, and of one that only communicates."""

    def late_rank() -> str:
        if dist.get_rank() == 1:
            compute()
        dist.all_reduce(torch.ones(4))
        compute()
        return "result"

    large = torch.ones(16_000_000)
    measured = {}
    for name, step in {"compute": compute, "late": late_rank, "communicate": lambda: dist.all_reduce(large)}.items():
        dist.barrier()
        measurement = measure_communication(step)
        assert measurement.result == ("result" if name == "late" else None)
        measured[name] = (measurement.share, measurement.seconds)
    return measured


def ddp_step() -> tuple[float | None, float | None]:
    """Shares of a backward pass that reduces 64 MB of gradients behind DDP's back, and of one that does not."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]))
    rows = torch.ones(1, 2048)

    def step() -> None:
        model(rows).sum().backward()

    step()
    reduced = measure_communication(step).share
    with model.no_sync():
        return reduced, measure_communication(step).share


def deepspeed_step() -> float | None:
    """Share of a whole ZeRO-2 step."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, and communicates beside gloo
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    configuration = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=configuration)
    rows = torch.ones(1, 1024)

    def step() -> None:
        engine.backward(engine(rows).sum())
        engine.step()

    step()
    return measure_communication(step).share
