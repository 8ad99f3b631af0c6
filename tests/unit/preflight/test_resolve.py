"""The storage of a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayapp.config.load import load_run_file
from rayapp.errors import RunFileError
from rayapp.preflight.resolve import open_storage


def test_the_storage_takes_its_time_from_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"name: x\nstorage: {{path: {tmp_path / 'runs'}}}\ndata: {{source: python-stdlib}}\n")
    assert open_storage(load_run_file(path)).retry_s == 300
    assert open_storage(load_run_file(path, ["storage.retry_s=7.5"])).retry_s == 7.5
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(RunFileError, match=r"storage\.retry_s=0"):
        load_run_file(path, ["storage.retry_s=0"])
