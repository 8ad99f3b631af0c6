"""Run a function on several gloo ranks of this machine and collect what each returns."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """``[function(*arguments) on rank 0, on rank 1, ...]``; an exception on any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        mp.start_processes(_entry, args=(function, world_size, port, folder, arguments), nprocs=world_size, start_method="spawn")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _entry(rank: int, function: Callable[..., Any], world_size: int, port: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = function(*arguments)
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
