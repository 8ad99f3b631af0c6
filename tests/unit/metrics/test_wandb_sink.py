"""Read back with wandb's own reader of its files, and on a server that knows as much of its protocol as a run needs."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import fs
from support.wandb_server import WandbServer, wandb_server

from rayapp.config.resolved import ResolvedRun
from rayapp.config.schema import WandbSection
from rayapp.errors import RunFileError, StorageError
from rayapp.metrics import wandb as module
from rayapp.metrics.record import CheckpointRecord, EventRecord, ValidationRecord
from rayapp.metrics.tracker import TrackerSink
from rayapp.metrics.wandb import WandbSink
from rayapp.metrics.wandb_login import chosen_mode, has_login
from rayapp.storage import Location

pytestmark = pytest.mark.usefixtures("tracker_environment", "no_process_is_left")

OFFLINE = {"wandb": {"mode": "offline"}}
ONLINE = {"wandb": {}}
LAST_STEP = 20
KEY = "k" * 40


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.fixture
def server() -> Iterator[WandbServer]:
    os.environ["WANDB_API_KEY"] = KEY
    with wandb_server() as server:
        os.environ["WANDB_BASE_URL"] = server.url
        yield server


def starts_in(run_dir: Path) -> list[Path]:
    return sorted(path.parent for path in run_dir.glob("wandb/*run-2*/*.wandb"))


def records_in(start: Path) -> list[dict[str, Any]]:
    """Every record of a start's file, as `wandb leet inspect` prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(start)]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_in(start: Path) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in records_in(start) if record["type"] == "history"]


def points(rows: list[dict[str, Any]], tag: str) -> list[tuple[int, Any]]:
    return [(row["step"], row[tag]) for row in rows if tag in row]


def patient(run: ResolvedRun, **waits_s: float) -> TrackerSink:
    """The sink, with a flush that waits for slow machines."""
    return TrackerSink(module.WandbRun(run), **{"flush_wait_s": 60.0, **waits_s})


def test_wandb_reads_every_figure_at_its_step_and_time(tracked_run, step_record, tmp_path):
    sink = WandbSink(tracked_run(OFFLINE))
    sink.write(step_record(1, loss=8.0))
    sink.write(step_record(2, loss=7.5, tokens_per_s=5000.0, communication_share=0.25))
    sink.write(ValidationRecord(time=5.0, step=2, loss=7.0, perplexity=math.exp(7.0), seconds=2.0, num_valid_tokens=9, elapsed_s=3.0))
    sink.write(CheckpointRecord(time=6.0, step=2, seconds=0.5, bytes=2**20))
    sink.write(EventRecord(time=7.0, step=2, event="skipped_step", detail="gradient norm inf"))
    sink.write(step_record(LAST_STEP, loss=6.0))
    sink.close()
    (start,) = starts_in(tmp_path / "runs" / "r0")
    records = records_in(start)
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert points(rows, "train/loss") == [(1, 8.0), (2, 7.5), (LAST_STEP, 6.0)]
    assert points(rows, "throughput/tokens_per_s") == [(1, 5400.0), (2, 5000.0), (LAST_STEP, 5400.0)]
    assert points(rows, "share/communication") == [(2, 0.25)], "what was not measured is left out"
    assert points(rows, "validation/loss") == [(2, 7.0)]
    assert points(rows, "checkpoint/bytes") == [(2, 2**20)]
    assert points(rows, "event/skipped_step") == [(2, "gradient norm inf")]
    assert rows[0]["_timestamp"] == step_record(1).time
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert run["display_name"] == "test/r0"
    assert run["project"] == "test"
    assert run["config"]["update"]["optim"]["learning_rate"] == 3e-3
    assert run["config"]["update"]["world_size"] == 2
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    assert [metric["step_metric"] for metric in metrics if metric.get("glob_name") == "*"] == ["step"], (
        "charts are drawn over the run's steps"
    )
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [0]


def test_a_run_that_did_not_get_to_its_last_step_has_failed(tracked_run, step_record, tmp_path):
    sink = WandbSink(tracked_run(OFFLINE))
    sink.write(step_record(LAST_STEP - 1))
    sink.close()
    (start,) = starts_in(tmp_path / "runs" / "r0")
    assert [record["exit"]["exit_code"] for record in records_in(start) if record["type"] == "exit"] == [1]


def test_steps_that_are_logged_again_are_further_rows(tracked_run, step_record, tmp_path):
    sink = WandbSink(tracked_run(OFFLINE))
    for index, step in enumerate((1, 2, 3, 2, 3)):
        sink.write(step_record(step, loss=float(index)))
    sink.close()
    (start,) = starts_in(tmp_path / "runs" / "r0")
    rows = rows_in(start)
    assert points(rows, "train/loss") == [(1, 0.0), (2, 1.0), (3, 2.0), (2, 3.0), (3, 4.0)]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]


def test_offline_starts_become_one_run_when_they_are_synced(tracked_run, step_record, tmp_path, server):
    for first, loss in ((1, 1.0), (3, 10.0)):
        sink = WandbSink(tracked_run(OFFLINE))
        for step in range(first, first + 4):
            sink.write(step_record(step, loss=loss * step))
        sink.close()
    assert server.runs == {}
    assert len(starts_in(tmp_path / "runs" / "r0")) == 2
    command = [sys.executable, "-m", "wandb", "sync", str(tmp_path / "runs" / "r0" / "wandb")]
    subprocess.run(
        command, env={**os.environ, "WANDB_ERROR_REPORTING": "false"}, cwd=tmp_path, capture_output=True, check=True, timeout=120
    )
    (run,) = server.runs.values()
    assert run.num_starts == 2
    assert points(run.rows, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [row["_step"] for row in run.rows] == list(range(8))


def test_an_online_run_that_starts_again_is_continued(tracked_run, step_record, tmp_path, server):
    first = WandbSink(tracked_run(ONLINE))
    for step in (1, 2, 3, 4):
        first.write(step_record(step, loss=float(step)))
    first.close()
    (run,) = server.runs.values()
    assert run.exit_code == 1
    assert run.config["world_size"] == 2
    resumed = WandbSink(tracked_run(ONLINE, world_size=4))
    resumed.write(step_record(3, loss=30.0))
    resumed.write(step_record(LAST_STEP, loss=0.5))
    resumed.close()
    (again,) = server.runs.values()
    assert again is run
    assert run.name == "test/r0"
    assert run.num_starts == 2
    assert run.exit_code == 0
    assert run.config["world_size"] == 4
    assert points(run.rows, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0), (LAST_STEP, 0.5)]
    assert [row["_step"] for row in run.rows] == list(range(6))


def test_runs_of_one_name_in_other_folders_are_others(tracked_run, step_record, server):
    for folder in ("a", "b", "a"):
        sink = WandbSink(tracked_run(ONLINE, folder=folder))
        sink.write(step_record(1))
        sink.close()
    assert sorted(run.num_starts for run in server.runs.values()) == [1, 2]


def test_a_node_without_the_package_is_an_error_of_the_tracker(tracked_run, step_record, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink(tracked_run(OFFLINE))
    sink.write(step_record(1))
    with pytest.raises(StorageError, match="ModuleNotFoundError"):
        sink.close()


def timed(call: Any) -> float:
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s


@pytest.mark.parametrize("case", ["gone", "silent"])
def test_a_server_that_cannot_be_reached_leaves_an_offline_run(
    case, tracked_run, step_record, tmp_path, dead_port, silent_port, monkeypatch, caplog
):
    monkeypatch.setattr(module, "INIT_TIMEOUT_S", 2.0)
    port = dead_port if case == "gone" else silent_port
    os.environ.update(WANDB_API_KEY=KEY, WANDB_BASE_URL=f"http://127.0.0.1:{port}")
    sink = WandbSink(tracked_run(ONLINE))
    with caplog.at_level(logging.WARNING, logger="rayapp"):
        for step in (1, 2, 3):
            assert timed(lambda: sink.write(step_record(step))) < 0.5  # noqa: B023 - it is called at once
        assert timed(sink.close) < 12
    assert "The run goes on offline" in caplog.text
    assert f"wandb sync {tmp_path / 'runs' / 'r0' / 'wandb'}" in caplog.text
    (start,) = [start for start in starts_in(tmp_path / "runs" / "r0") if start.name.startswith("offline-run")]
    assert [step for step, _ in points(rows_in(start), "train/loss")] == [1, 2, 3]


def test_without_a_key_nobody_is_asked_and_the_run_is_offline(tracked_run, step_record, tmp_path, caplog):
    sink = WandbSink(tracked_run(ONLINE))
    with caplog.at_level(logging.WARNING, logger="rayapp"):
        sink.write(step_record(1))
        sink.close()
    assert "has no key on this node; set WANDB_API_KEY" in caplog.text
    (start,) = starts_in(tmp_path / "runs" / "r0")
    assert points(rows_in(start), "train/loss") == [(1, 7.9)]


def test_a_server_that_goes_away_costs_bounded_time_and_what_is_left_can_be_synced(tracked_run, step_record, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FINISH_TIMEOUT_S", 2.0)
    os.environ["WANDB_API_KEY"] = KEY
    sink = patient(tracked_run(ONLINE))
    with wandb_server() as server:
        os.environ["WANDB_BASE_URL"] = server.url
        sink.write(step_record(1))
        sink.flush()
    for step in range(2, 100):
        assert timed(lambda: sink.write(step_record(step))) < 0.5  # noqa: B023 - it is called at once

    def close() -> None:
        with pytest.raises(StorageError, match=r"TimeoutError: .*; upload the rest with: wandb sync --include-online /.*/wandb/run-2"):
            sink.close()

    assert timed(close) < 12
    (start,) = starts_in(tmp_path / "runs" / "r0")
    assert [step for step, _ in points(rows_in(start), "train/loss")] == list(range(1, 100))


def kill_service() -> None:
    (service,) = (process for process in children() if process.name() == "wandb-core")
    service.kill()
    service.wait(10)


def test_a_service_that_was_killed_is_an_error_and_started_anew(tracked_run, step_record, tmp_path):
    sink = patient(tracked_run(OFFLINE), first_pause_s=0.0)
    sink.write(step_record(1))
    sink.flush()
    kill_service()
    sink.write(step_record(2))
    with pytest.raises(StorageError, match="Weights & Biases test/r0-"):
        sink.flush()
    sink.write(step_record(3))
    sink.close()
    assert points(rows_in(starts_in(tmp_path / "runs" / "r0")[-1]), "train/loss") == [(2, 7.8), (3, 7.7)]


def test_a_service_that_was_killed_at_the_end_is_an_error_and_nothing_is_left(tracked_run, step_record):
    sink = patient(tracked_run(OFFLINE))
    sink.write(step_record(1))
    sink.flush()
    kill_service()

    def close() -> None:
        with pytest.raises(StorageError, match="Weights & Biases test/r0-"):
            sink.close()

    assert timed(close) < 15


def test_a_service_that_hangs_is_killed(tracked_run, step_record):
    sink = patient(tracked_run(OFFLINE), close_wait_s=1.0)
    sink.write(step_record(1))
    sink.flush()
    processes = children()
    (service,) = (process for process in processes if process.name() == "wandb-core")
    service.suspend()

    def close() -> None:
        with pytest.raises(StorageError, match="did not take the last"):
            sink.close()

    try:
        assert timed(close) < 8
        assert [process for process in processes if process.is_running()] == []
    finally:
        if service.is_running():
            service.kill()


def test_elsewhere_the_files_arrive_at_the_end(tracked_run, step_record, tmp_path, monkeypatch):
    bucket = tmp_path / "bucket"
    (bucket / "run").mkdir(parents=True)
    remote = Location(fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem()), "run", "s3://bucket/run")

    def create_parents(location: Location, source: Path, upload=Location.upload) -> None:
        (bucket / location.path).parent.mkdir(parents=True, exist_ok=True)  # an object store needs no folders
        upload(location, source)

    monkeypatch.setattr(Location, "upload", create_parents)
    monkeypatch.setattr(module, "open_location", lambda _: remote)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    sink = patient(tracked_run(OFFLINE))
    sink.write(step_record(1))
    sink.flush()
    assert len(starts_in(bucket / "run")) == 1, "a run that is killed now leaves what was written"
    sink.write(step_record(2))
    sink.close()
    (start,) = starts_in(bucket / "run")
    assert points(rows_in(start), "train/loss") == [(1, 7.9), (2, 7.8)]
    assert list(temporary.glob("rayapp-*")) == []


def test_disabled_by_the_environment(tracked_run, step_record, tmp_path):
    os.environ["WANDB_MODE"] = "disabled"
    sink = patient(tracked_run(ONLINE))
    sink.write(step_record(1))
    sink.flush()
    sink.close()
    assert starts_in(tmp_path / "runs" / "r0") == []


def test_a_run_without_figures_leaves_nothing(tracked_run, tmp_path):
    WandbSink(tracked_run(OFFLINE)).close()
    assert starts_in(tmp_path / "runs" / "r0") == []


@pytest.mark.parametrize(
    ("section", "variable", "mode"),
    [
        ({}, None, "online"),
        ({}, "offline", "offline"),
        ({}, "dryrun", "offline"),
        ({}, "disabled", "disabled"),
        ({"mode": "offline"}, "online", "offline"),
        ({"mode": "online"}, "offline", "online"),
    ],
)
def test_the_run_file_s_mode_comes_before_the_environment_s(section, variable, mode):
    environ = {} if variable is None else {"WANDB_MODE": variable}
    assert chosen_mode(WandbSection(**section), environ) == mode


def test_a_mode_that_is_none():
    with pytest.raises(RunFileError, match="WANDB_MODE=on is not a mode"):
        chosen_mode(WandbSection(), {"WANDB_MODE": "on"})


@pytest.mark.parametrize(
    ("file", "text", "environ", "found"),
    [
        (None, "", {}, False),
        (None, "", {"WANDB_API_KEY": KEY}, True),
        (None, "", {"WANDB_IDENTITY_TOKEN_FILE": "/token"}, True),
        (".netrc", f"machine api.wandb.ai login user password {KEY}", {}, True),
        (".netrc", f"machine other.org login user password {KEY}", {}, False),
        (".netrc", f"machine our.org login user password {KEY}", {"WANDB_BASE_URL": "https://our.org"}, True),
        (".netrc", f"machine api.wandb.ai login user password {KEY}", {"WANDB_BASE_URL": "https://our.org"}, False),
        (".netrc", "machine", {}, False),
        (".config/wandb/settings", f"[default]\napi_key = {KEY}\n", {}, True),
        (".config/wandb/settings", "[default]\nentity = us\n", {}, False),
        (".config/wandb/settings", "no section", {}, False),
    ],
)
def test_where_a_key_is_found(file, text, environ, found):
    if file is not None:
        path = Path.home() / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert has_login(environ) is found
