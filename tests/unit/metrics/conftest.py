from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runs import resolved

from rayapp.config.resolved import ResolvedRun
from rayapp.metrics.record import StepRecord


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """A step's record with plausible figures; any of them can be replaced."""

    def make(step: int = 1, **figures: Any) -> StepRecord:
        plausible: dict[str, Any] = {
            "time": 1_790_000_000.0 + step,
            "step": step,
            "loss": 8.0 - step / 10,
            "grad_norm": 1.5,
            "learning_rate": 2.0e-3,
            "tokens_per_s": 5400.0,
            "samples_per_s": 21.1,
            "step_s": 1.5,
            "data_wait_share": 0.004,
            "checkpoint_share": 0.0,
            "mfu": None,
            "mfu_causal": None,
            "memory_bytes": 1_310_000_000,
            "peak_memory_bytes": 1_900_000_000,
            "num_valid_tokens": 8192,
            "applied": True,
            "skipped_steps": 0,
        }
        return StepRecord(**{**plausible, **figures})

    return make


@pytest.fixture
def files_no_larger_than() -> Callable[[int], AbstractContextManager[None]]:
    """Inside, the kernel lets no file of this process grow beyond so many bytes, as on a full disk."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def tracker_environment(tmp_path: Path) -> Iterator[None]:
    """An environment without a tracker's variables, in a home without a login; what is set inside is undone."""
    before = dict(os.environ)
    for name in before:
        if name == "NETRC" or name.startswith(("WANDB_", "MLFLOW_")):
            del os.environ[name]
    home = tmp_path / "home"
    home.mkdir()
    os.environ["HOME"] = str(home)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tracked_run(tmp_path: Path) -> Callable[..., ResolvedRun]:
    """A resolved run of 20 steps whose folder is ``tmp_path/runs/r0``; ``metrics`` is that section of its run file."""

    def make(metrics: dict[str, Any], world_size: int = 2, folder: str = "r0") -> ResolvedRun:
        run = resolved(world_size=world_size, metrics=metrics)
        return run.model_copy(update={"run_dir": str(tmp_path / "runs" / folder)})

    return make


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
