"""Checkpoints of one rank on S3, also while the way to it fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.s3 import Proxy
from support.snapshots import FileSnapshot, saved

from rayapp.checkpoint.checkpoints import checkpoint_at, complete_checkpoints, newest_intact
from rayapp.checkpoint.progress import Progress
from rayapp.checkpoint.store import CheckpointStore
from rayapp.storage import open_location


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def progress(step: int) -> Progress:
    return Progress(step=step, data_fingerprint="f")


def test_checkpoints_outlive_outages(proxy: Proxy, proxied_uri: str, root_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(open_location(proxied_uri) / "checkpoints", keep_last=2, keep_best=0, check_owner=lambda: None)
    contents = {step: os.urandom(2**20) for step in (1, 2, 3)}
    for step, content in contents.items():
        if step == 2:
            proxy.refuse()
            threading.Timer(4, proxy.listen).start()
        saved(store, progress(step), FileSnapshot({"rank-0": content, "state.json": b"{}"}))
    assert "it is tried again in" in caplog.text
    folder = open_location(root_uri) / "checkpoints"
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [2, 3]
    newest = newest_intact(folder)
    assert newest is not None
    assert newest.step == 3
    for step in (2, 3):
        with checkpoint_at(folder, step).opened() as files:
            assert (files / "rank-0").read_bytes() == contents[step]
