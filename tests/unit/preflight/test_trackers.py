"""Trackers that cannot work are refused before a worker starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rayapp.config.load import LoadedRunFile
from rayapp.errors import Problem, RunFileError
from rayapp.preflight.settings import check_settings
from rayapp.preflight.trackers import tracker_problems

Load = Callable[..., LoadedRunFile]


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name == "NETRC" or name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def refusals(load: Load, *overrides: str) -> list[Problem]:
    with pytest.raises(RunFileError) as error:
        check_settings(load(*overrides), "cpu")
    return list(error.value.problems)


@pytest.mark.parametrize(
    "overrides",
    [
        ["metrics.mlflow={}"],
        ["metrics.mlflow.tracking_uri=http://127.0.0.1:5000"],
        ["metrics.mlflow.tracking_uri=https://tracking.our.org/mlflow"],
        ["metrics.mlflow.tracking_uri=sqlite:////shared/mlflow.db"],
        ["metrics.mlflow.tracking_uri=postgresql+psycopg2://reader@db/mlflow"],
        ["metrics.mlflow.tracking_uri=databricks"],
        ["metrics.mlflow.tracking_uri=databricks://profile"],
        ["metrics.mlflow.tracking_uri=/shared/mlruns"],
        ["metrics.mlflow.tracking_uri=file:///shared/mlruns"],
        ["metrics.wandb.mode=offline"],
        ["metrics.wandb={}", "resources.env={WANDB_MODE: offline}"],
        ["metrics.wandb={}", "resources.env={WANDB_MODE: disabled}"],
    ],
)
def test_what_can_work(load: Load, overrides: list[str]) -> None:
    check_settings(load(*overrides), "cpu")


@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("http://", "names no host"),
        ("http://:5000", "names no host"),
        ("http://host:port", "is not a URI"),
        ("http://[::1", "is not a URI"),
        ("htp://host:5000", "has a scheme that MLflow does not know: htp"),
        ("s3://bucket/mlruns", "has a scheme that MLflow does not know: s3"),
        ("localhost:5000", "has a scheme that MLflow does not know: localhost"),
        ("mlruns", "is a relative path"),
        ("''", "is a relative path"),
        ("file:mlruns", "is a relative path"),
        ("sqlite:///mlflow.db", "is a relative path, and workers start in folders that are thrown away (an absolute one has four slashes)"),
    ],
)
def test_a_tracking_uri_that_is_none(load: Load, uri: str, rule: str) -> None:
    (problem,) = refusals(load, f"metrics.mlflow.tracking_uri={uri}")
    assert problem.subject == f"metrics.mlflow.tracking_uri={uri.strip(chr(39))}"
    assert problem.rule.startswith(rule)
    assert problem.remedy.startswith("use http://host:5000")
    assert problem.where == "command line"


def test_the_environment_s_tracking_uri_is_checked_too(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    (problem,) = refusals(load, "metrics.mlflow={}")
    assert problem.subject == "MLFLOW_TRACKING_URI=mlruns"
    check_settings(load("metrics.mlflow.tracking_uri=http://host"), "cpu")


def test_a_password_is_neither_stored_nor_shown(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = refusals(load, "metrics.mlflow.tracking_uri=http://me:secret@host:5000")
    assert "password" in problem.rule
    assert "MLFLOW_TRACKING_PASSWORD" in problem.remedy
    assert "secret" not in str(problem)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:5000")
    check_settings(load("metrics.mlflow={}"), "cpu")


@pytest.mark.parametrize(
    ("overrides", "hidden", "subject", "missing", "extra"),
    [
        (["metrics.mlflow={}"], ["mlflow"], "metrics.mlflow", "mlflow", "mlflow"),
        (["metrics.mlflow={}"], ["sqlalchemy", "alembic"], "metrics.mlflow", "sqlalchemy, alembic", "mlflow"),
        (["metrics.wandb.mode=offline"], ["wandb"], "metrics.wandb", "wandb", "wandb"),
    ],
)
def test_a_package_that_is_not_installed(
    load: Load, monkeypatch: pytest.MonkeyPatch, overrides: list[str], hidden: list[str], subject: str, missing: str, extra: str
) -> None:
    for package in hidden:
        monkeypatch.setitem(sys.modules, package, None)
    (problem,) = refusals(load, *overrides)
    assert problem.subject == subject
    assert problem.rule == f"needs what is not installed: {missing}"
    assert f"pip install 'rayapp[{extra}]'" in problem.remedy
    check_settings(load(), "cpu")


def test_a_server_needs_no_database_packages(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    check_settings(load("metrics.mlflow.tracking_uri=http://host"), "cpu")


def test_online_without_a_key_says_what_to_do(load: Load, tmp_path: Path) -> None:
    (problem,) = refusals(load, "metrics.wandb={}")
    assert problem.subject == "metrics.wandb.mode=online"
    assert "set WANDB_API_KEY" in problem.remedy
    assert "metrics.wandb.mode=offline" in problem.remedy
    check_settings(load("metrics.wandb={}", "resources.env={WANDB_API_KEY: k}"), "cpu")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k")
    check_settings(load("metrics.wandb={}"), "cpu")


def test_a_mode_that_is_none(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    (problem,) = refusals(load, "metrics.wandb={}")
    assert problem.subject == "WANDB_MODE=sometimes"
    check_settings(load("metrics.wandb.mode=offline"), "cpu")


def test_everything_is_said_at_once(load: Load) -> None:
    problems = refusals(load, "metrics.mlflow.tracking_uri=mlruns", "metrics.wandb={}", "train.precision=fp16")
    assert [problem.subject.partition("=")[0] for problem in problems] == [
        "metrics.mlflow.tracking_uri",
        "metrics.wandb.mode",
        "train.precision",
    ]


def test_trackers_that_were_not_asked_for_need_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    assert tracker_problems(load().file) == []
