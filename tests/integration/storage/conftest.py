"""An S3 server, and buckets in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from support.s3 import Proxy, s3_server

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def server_port() -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with s3_server() as port:
            yield port


@pytest.fixture(scope="session")
def client(server_port: int) -> Any:
    """Another program's view of the server."""
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server_port}")


@pytest.fixture
def bucket(client: Any) -> str:
    """A new bucket's name."""
    name = f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def root_uri(server_port: int, bucket: str) -> str:
    """A place in the bucket."""
    return f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{server_port}&scheme=http"


@pytest.fixture
def proxy(server_port: int) -> Iterator[Proxy]:
    made = Proxy(server_port)
    yield made
    made.close()


@pytest.fixture
def proxied_uri(proxy: Proxy, bucket: str) -> str:
    """The same place, reached through the proxy."""
    return f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{proxy.port}&scheme=http"
