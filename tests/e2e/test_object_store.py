"""A whole run on S3, through a proxy that answers every third write with an error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pyarrow.fs as fs
import pytest
from support.command_line import CommandLine, Head
from support.family import Ended, Runs, assert_nothing_is_left
from support.s3 import Proxy, s3_server

from rayapp.documents import PrepareDocument

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


def test_a_run_whose_storage_fails_every_third_write_learns_the_same(runs: Runs, head: Head, whole: Ended, flaky: Proxy) -> None:
    """Its worker processes get the credentials as a user gives them: by `resources.env`, since the cluster runs already."""
    commands = CommandLine({**head.commands.environment, **CREDENTIALS})
    here = replace(runs, head=replace(head, commands=commands))
    storage = f"storage.path=s3://{BUCKET}/runs?endpoint_override=127.0.0.1:{flaky.port}&scheme=http"
    credentials = [f"resources.env.{name}={value}" for name, value in CREDENTIALS.items()]
    prepared = PrepareDocument.model_validate(commands.document("prepare", str(runs.run_file), storage, *credentials))
    assert prepared.data_dir.startswith(f"s3://{BUCKET}/runs/data/")
    writes = itertools.count(1)
    flaky.fault = lambda method: "503" if method in ("PUT", "POST") and next(writes) % 3 == 0 else None
    ended = here.train("on-s3", storage, *credentials)
    assert ended.document.validation_loss == whole.document.validation_loss
    assert ended.document.restarts == 0
    assert next(writes) > 30, "hardly anything was written"
    assert_nothing_is_left(here.head)
