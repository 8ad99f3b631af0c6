"""Trains a run by workers that `torchrun` starts on this machine."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from rayapp.config.resolved import ResolvedRun
from rayapp.train.worker import Refusal

WORKER = Path(__file__).parent / "torchrun_worker.py"


def run_under_torchrun(run: ResolvedRun, output: TextIO) -> None:
    """Train to the run's last step.

    Args:
        run: its folder is claimed.
        output: takes what torchrun and the workers print.

    Raises:
        RayappError: the run was refused.
        subprocess.CalledProcessError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_file, result = Path(folder) / "run.json", Path(folder) / "outcome"
        run_file.write_text(run.model_dump_json())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.layout.world_size}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": run.device.kind}
        subprocess.run([*command, str(WORKER), str(run_file), str(result)], check=True, env=environment, stdout=output, stderr=output)
        outcome = pickle.loads(result.read_bytes())
    if isinstance(outcome, Refusal):
        raise outcome.error
    assert outcome.progress.step == run.file.train.num_steps
