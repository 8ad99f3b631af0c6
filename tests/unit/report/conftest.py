from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayapp.documents import TrainDocument


@pytest.fixture
def train_document() -> Callable[..., TrainDocument]:
    """A run's summary with plausible figures; any of them can be replaced."""

    def make(**figures: Any) -> TrainDocument:
        plausible: dict[str, Any] = {
            "run_dir": "/data/runs/quickstart/20261201-k3f9",
            "model_dir": "/data/runs/quickstart/20261201-k3f9/model",
            "steps": 1200,
            "loss_first": 8.41,
            "loss_last": 4.72,
            "validation_loss": 4.81,
            "tokens_per_s": 71_900.0,
            "mfu": 0.598,
            "mfu_causal": 0.571,
            "peak_flops_source": "989 TFLOP/s, H200 data sheet",
            "peak_memory_bytes": 85 * 2**30,
            "average_memory_bytes": 46 * 2**30,
            "skipped_steps": 2,
            "restarts": 1,
            "target_loss_step": 900,
            "target_loss_s": 7500.0,
            "strategy": "zero-2",
            "world_size": 8,
        }
        return TrainDocument(**{**plausible, **figures})

    return make
