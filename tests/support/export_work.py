"""Models that were trained a little, saved, and asked for their logits before they are let go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayapp.checkpoint.export import export_run
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.runs import RunFolder
from rayapp.checkpoint.store import CheckpointStore
from rayapp.config.resolved import ResolvedRun
from rayapp.storage import open_location
from support.runs import SEQUENCE, VOCAB, rank_batches
from support.snapshots import saved

STEPS = 3


@dataclass(frozen=True)
class Exported:
    """Of one run on rank 0: the live model's logits, those of its export in the same process, and what loading it said."""

    live: Tensor
    reloaded: Tensor
    missing: list[str]
    unexpected: list[str]


def probe_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, SEQUENCE), generator=torch.Generator().manual_seed(11))


def train_and_export(run_jsons: list[str]) -> list[Exported | None]:
    """Train, save and export every run to its own `model` folder."""
    return [_one(ResolvedRun.model_validate_json(text)) for text in run_jsons]


def _one(run: ResolvedRun) -> Exported | None:
    from rayapp.parallel.select import build_engine

    engine: Any = build_engine(run, torch.device("cpu"))
    for step in range(STEPS):
        engine.train_step(rank_batches(step, dist.get_rank(), dist.get_world_size(), 2, 2), 1e-2)
    folder = RunFolder(open_location(run.run_dir))
    store = CheckpointStore(folder.checkpoints, keep_last=1, keep_best=0, check_owner=lambda: None)
    saved(store, Progress(step=STEPS, data_fingerprint="0"), engine.snapshot(copied=False))
    live = live_logits(engine)
    engine.close()
    if dist.get_rank() == 0:
        export_run(folder.root, folder.model)
    dist.barrier()
    return _reloaded(folder.model.local_path, live) if dist.get_rank() == 0 else None


@torch.no_grad()
def live_logits(engine: Any) -> Tensor:
    """Logits of the model inside an engine; under ZeRO-3 DeepSpeed's hooks gather each weight as it is used."""
    model = engine._model.eval()
    output = model.network(input_ids=probe_tokens())
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.clone()


@torch.no_grad()
def _reloaded(folder: Path, live: Tensor) -> Exported:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    logits = model.eval()(input_ids=probe_tokens()).logits
    return Exported(live, logits, sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"]))
