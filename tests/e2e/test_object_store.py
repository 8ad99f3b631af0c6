"""A whole run on S3, through a proxy that answers every third PUT with an error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow.fs as fs
import pytest
from support.command_line import CommandLine
from support.family import NUM_STEPS, Ended, Runs
from support.s3 import Proxy, s3_server

from rayapp.documents import PrepareDocument, TrainDocument

BUCKET = "training"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(scope="module")
def flaky() -> Iterator[Proxy]:
    """In front of an S3 that holds nothing yet."""
    with s3_server() as port:
        proxy = Proxy(port)
        store = fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
        )
        store.create_dir(BUCKET)
        yield proxy
        proxy.close()


def test_a_run_whose_storage_fails_every_third_write_learns_the_same(runs: Runs, commands: CommandLine, whole: Ended, flaky: Proxy) -> None:
    """On a Ray of its own, whose processes all have the credentials."""
    alone = CommandLine({**commands.environment, **CREDENTIALS})
    storage = f"storage.path=s3://{BUCKET}/runs?endpoint_override=127.0.0.1:{flaky.port}&scheme=http"
    prepared = PrepareDocument.model_validate(alone.document("prepare", str(runs.run_file), storage, "--address", "local"))
    assert prepared.data_dir.startswith(f"s3://{BUCKET}/runs/data/")
    writes = itertools.count(1)
    flaky.fault = lambda method: "503" if method == "PUT" and next(writes) % 3 == 0 else None
    trained = TrainDocument.model_validate(alone.document("train", *runs.arguments("on-s3", storage)[:-1], "--address", "local"))
    assert (trained.steps, trained.restarts, trained.failures) == (NUM_STEPS, 0, [])
    assert trained.validation_loss == whole.document.validation_loss
    assert trained.loss_last == whole.document.loss_last
    assert next(writes) > 30, "hardly anything was written"
    assert alone.processes() == []
