"""Runs of one family on one cluster, compared with one that nothing happened to."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from rayapp.documents import TrainDocument
from support.command_line import Head
from support.interference import records, workers

NUM_STEPS = 40
INTERVAL_STEPS = 8
LONG = [f"train.num_steps={NUM_STEPS}", f"checkpoint.interval_steps={INTERVAL_STEPS}", "batch.global_batch_size=32", "train.precision=fp32"]


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        returncode: its exit status.
        stdout: everything on it.
        stderr: everything on it.
        run_dir: of its run.
    """

    returncode: int
    stdout: str
    stderr: str
    run_dir: Path

    @property
    def document(self) -> TrainDocument:
        assert self.returncode == 0, self.stderr
        return TrainDocument.model_validate_json(self.stdout)

    @property
    def losses(self) -> dict[int, float]:
        """By step; a step that was made again after a failure stands once, with what counts."""
        return {record["step"]: record["loss"] for record in records(self.run_dir)}


@dataclass(frozen=True)
class Runs:
    """Starts runs of one family."""

    head: Head
    run_file: Path
    storage: Path

    def run_dir(self, run_id: str) -> Path:
        return self.storage / "tiny" / run_id

    def arguments(self, run_id: str, *overrides: str, resume: bool = False) -> list[str]:
        """Of `rayapp train`."""
        return [str(self.run_file), *LONG, *overrides, "--resume" if resume else "--run-id", run_id, "--json"]

    def train(self, run_id: str, *overrides: str, resume: bool = False) -> Ended:
        """Train to the end."""
        done = self.head.commands.rayapp("train", *self.arguments(run_id, *overrides, resume=resume))
        return Ended(done.returncode, done.stdout, done.stderr, self.run_dir(run_id))

    def ended(self, process: subprocess.Popen[str], run_id: str, timeout_s: float = 240) -> Ended:
        """Wait for a command."""
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Ended(process.returncode, stdout, stderr, self.run_dir(run_id))


def assert_same_end(ended: Ended, whole: Ended) -> None:
    """Bit for bit: every step's loss, the validation's, and the weights."""
    assert list(ended.losses) == list(range(1, NUM_STEPS + 1))
    assert ended.losses == whole.losses
    assert ended.document.validation_loss == whole.document.validation_loss
    ours, theirs = (load_file(run.run_dir / "model" / "model.safetensors") for run in (ended, whole))
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def assert_nothing_is_left(head: Head) -> None:
    """No worker, no actor and no placement group of a run, a moment after it. Names with an underscore are Ray's own, one a cluster."""
    script = (
        "import json, ray, logging; from ray.util.state import list_actors; ray.init(logging_level=logging.ERROR); "
        "groups = [group for group in ray.util.placement_group_table().values() if group['state'] != 'REMOVED']; "
        "actors = [actor.class_name for actor in list_actors(filters=[('state', '=', 'ALIVE')], limit=1000)]; "
        "print(json.dumps([len(groups), [name for name in actors if not name.startswith(('_', 'Job'))]]))"
    )
    deadline = time.monotonic() + 30
    while True:
        done = head.commands.run("python", "-c", script)
        left = json.loads(done.stdout.splitlines()[-1])
        if left == [0, []] and not workers(head.commands):
            return
        assert time.monotonic() < deadline, left
        time.sleep(1)
