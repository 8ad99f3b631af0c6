"""A run file of three lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rayapp.config.load import LoadedRunFile, load_run_file


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedRunFile]:
    """Loads a run file of a Llama on a tokenizer of 300 entries, with overrides."""

    def load_with(*overrides: str) -> LoadedRunFile:
        path = tmp_path / "run.yaml"
        path.write_text("name: x\nmodel: {kind: llama}\ndata: {sequence_length: 16, tokenizer: {train: {vocab_size: 300}}}\n")
        return load_run_file(path, overrides)

    return load_with
