"""What is decided before Ray is asked."""

from __future__ import annotations

import json

import pytest

from rayapp.cluster.connect import connected, in_submitted_job
from rayapp.errors import PlacementError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        ("", False),
        (json.dumps({"runtime_env": {}}), False),
        (json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}}), True),
    ],
)
def test_a_submitted_job_is_known_by_its_configuration(monkeypatch: pytest.MonkeyPatch, config: str | None, expected: bool) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    if config is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    assert in_submitted_job() is expected


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("ray://head:10001", "is not one that training can be driven through"),
        ("http://head:8265", "is not one that training can be driven through"),
        ("127.0.0.1:1", "does not answer"),
        ("no-such-host.invalid:6379", "does not answer"),
        ("127.0.0.1", "is not host:port"),
        ("127.0.0.1:99999", "does not answer"),
        ("127.0.0.1:x", "does not answer"),
    ],
)
@pytest.mark.parametrize("by_environment", [False, True])
def test_an_address_that_cannot_work_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, rule: str, by_environment: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if by_environment:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PlacementError, match=rule), connected(None if by_environment else address):
        pass
