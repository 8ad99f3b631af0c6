"""Damaged checkpoints, a full disk, two starts of one run: each with its sentence, and nothing lost."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.damage import flip, truncate
from support.family import INTERVAL_STEPS, NUM_STEPS, Ended, Runs, assert_nothing_is_left, assert_same_end
from support.interference import training

DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "has other content than was written (SHA-256 differs)"),
    "missing": (Path.unlink, "is missing"),
    "truncated": (truncate, "bytes where the manifest says"),
}


@pytest.mark.parametrize("kind", ["flipped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("missing", "truncated"))])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(runs: Runs, whole: Ended, kind: str) -> None:
    folder = runs.run_dir(kind)
    shutil.copytree(whole.run_dir, folder)
    newest, before = sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*/manifest.json"))[:-3:-1]
    assert newest == NUM_STEPS
    damage, sentence = DAMAGE[kind]
    damaged = folder / "checkpoints" / f"step-{newest:08d}" / "rank-00001-of-00002.safetensors"
    damage(damaged)
    resumed = runs.train(kind, resume=True)
    assert f"checkpoint file {damaged}" in resumed.stderr
    assert sentence in resumed.stderr
    assert f"continuing from the checkpoint of step {before}" in resumed.stderr
    assert_same_end(resumed, whole)


def test_of_two_starts_with_one_id_one_trains_and_the_other_is_told(runs: Runs, whole: Ended) -> None:
    arguments = runs.arguments("twice")
    with training(runs.head.commands, *arguments) as one, training(runs.head.commands, *arguments) as other:
        first, second = sorted((runs.ended(process, "twice") for process in (one, other)), key=lambda ended: ended.returncode)
    assert (first.returncode, second.returncode) == (0, 2), first.stderr + second.stderr
    assert_same_end(first, whole)
    (problem,) = json.loads(second.stdout)["problems"]
    assert "twice" in problem
    assert "is being trained by process" in problem or "exists already" in problem


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds two checkpoints of the tiny model, and not three."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_its_path_and_keeps_the_last_complete_checkpoint(runs: Runs, whole: Ended, small_disk: Path) -> None:
    data = runs.storage / "data"
    (small_disk / "data").symlink_to(data)
    size = sum(path.stat().st_size for path in (whole.run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}").iterdir())
    (small_disk / "filler").write_bytes(b"x" * (3 * 2**20 - int(1.7 * size)))
    overrides = (f"storage.path={small_disk}", "checkpoint.keep_last=3", "checkpoint.keep_best=0", "metrics.tensorboard=false")
    with training(runs.head.commands, *runs.arguments("full", *overrides)) as process:
        ended = runs.ended(process, "full")
    assert ended.returncode == 1, ended.stderr
    (problem,) = json.loads(ended.stdout)["problems"]
    assert str(small_disk) in problem
    assert "No space left on device" in problem
    run_dir = small_disk / "tiny" / "full"
    complete = [path.parent.name for path in run_dir.glob("checkpoints/step-*/manifest.json")]
    assert complete == [f"step-{INTERVAL_STEPS:08d}"]
    assert_nothing_is_left(runs.head)
    (small_disk / "filler").unlink()
    resumed = runs.train("full", *overrides[:1], "checkpoint.keep_last=1", "checkpoint.keep_best=0", *overrides[3:], resume=True)
    assert f"continuing from the checkpoint of step {INTERVAL_STEPS}" in resumed.stderr
    assert_same_end(Ended(resumed.returncode, resumed.stdout, resumed.stderr, run_dir), whole)
