"""A small corpus of real text, a run file for it, a command line, and one cluster for all tests that need one."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.command_line import CommandLine, Head, ray_head
from support.family import Ended, Runs

from rayapp.documents import PrepareDocument

SMALLEST_MODULE_BYTES, LARGEST_MODULE_BYTES = 2_000, 12_000


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A folder that takes what Ray keeps. pytest's own are too deep for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="rayapp-e2e-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def commands(home: Path) -> CommandLine:
    """Commands that find no cluster."""
    folder = home / "own"
    folder.mkdir()
    return CommandLine.in_folder(folder)


@pytest.fixture(scope="session")
def head(home: Path) -> Iterator[Head]:
    """A cluster of two CPUs, started with ``ray start --head``."""
    folder = home / "head"
    folder.mkdir()
    with ray_head(folder, num_cpus=2) as started:
        yield started


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smaller modules of Python's standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if SMALLEST_MODULE_BYTES < path.stat().st_size < LARGEST_MODULE_BYTES:
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="session")
def run_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that takes seconds: a Llama of 0.1 million weights, 12 steps of 8 x 64 tokens on two CPU workers."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "tiny.yaml"
    llama = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
    tree = {
        "name": "tiny",
        "storage": {"path": str(folder / "storage")},
        "model": {"kind": "llama", "config": llama},
        "data": {
            "source": str(corpus),
            "sequence_length": 64,
            "tokenizer": {"train": {"vocab_size": 512}},
            "validation_fraction": 0.1,
            "rows_per_shard": 1000,
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "parallel": {"kind": "zero", "zero_stage": 2},
        "optim": {"learning_rate": 1.0e-2, "warmup_steps": 3},
        "train": {"num_steps": 12, "num_workers": 2, "device": "cpu", "precision": "bf16", "validation_rows": 64},
    }
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def runs(head: Head, run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Starts runs on the cluster, in a storage of their own."""
    folder = tmp_path_factory.mktemp("family")
    tree = yaml.safe_load(run_file.read_text())
    own = folder / "tiny.yaml"
    own.write_text(yaml.safe_dump({**tree, "storage": {"path": str(folder / "storage")}}, sort_keys=False))
    prepared = PrepareDocument.model_validate(head.commands.document("prepare", str(own)))
    return Runs(head, own, Path(prepared.data_dir).parents[1])


@pytest.fixture(scope="session")
def whole(runs: Runs) -> Ended:
    """A run that nothing happens to."""
    ended = runs.train("whole")
    assert ended.document.restarts == 0
    return ended
