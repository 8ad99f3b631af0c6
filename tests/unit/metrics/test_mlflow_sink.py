"""Read back with MLflow's own client."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from pyarrow import fs

from rayapp.config.resolved import ResolvedRun
from rayapp.errors import StorageError
from rayapp.metrics import mlflow as module
from rayapp.metrics.mlflow import MlflowSink
from rayapp.metrics.record import CheckpointRecord, EventRecord, ValidationRecord
from rayapp.metrics.tracker import TrackerSink
from rayapp.storage import Location

pytestmark = pytest.mark.usefixtures("tracker_environment")

LAST_STEP = 20


def uri_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def runs_at(uri: str, experiment: str = "test") -> tuple[MlflowClient, list[Run]]:
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return client, list(client.search_runs([found.experiment_id]))


def only_run(uri: str, experiment: str = "test") -> tuple[MlflowClient, Run]:
    client, (run,) = runs_at(uri, experiment)
    return client, run


def history(uri: str, tag: str) -> list[tuple[int, float]]:
    client, run = only_run(uri)
    points = client.get_metric_history(run.info.run_id, tag)
    return [(point.step, point.value) for point in sorted(points, key=lambda point: (point.step, point.timestamp))]


def patient(run: ResolvedRun, **waits_s: float) -> TrackerSink:
    """The sink, with a flush that waits for slow machines."""
    return TrackerSink(module.MlflowRun(run), **{"flush_wait_s": 60.0, **waits_s})


def test_mlflow_reads_every_figure_at_its_step_and_time(tracked_run, step_record, tmp_path):
    sink = MlflowSink(tracked_run({"mlflow": {}}))
    sink.write(step_record(1, loss=8.0))
    sink.write(step_record(2, loss=7.5, tokens_per_s=5000.0, communication_share=0.25))
    sink.write(ValidationRecord(time=5.0, step=2, loss=7.0, perplexity=math.exp(7.0), seconds=2.0, num_valid_tokens=9, elapsed_s=3.0))
    sink.write(CheckpointRecord(time=6.0, step=2, seconds=0.5, bytes=2**20))
    sink.write(EventRecord(time=7.0, step=2, event="skipped_step", detail="gradient norm inf"))
    sink.write(EventRecord(time=8.0, step=None, event="restart", detail="worker 1 died"))
    sink.write(step_record(LAST_STEP, loss=6.0))
    sink.close()
    uri = uri_in(tmp_path / "runs" / "r0")
    assert history(uri, "train/loss") == [(1, 8.0), (2, 7.5), (LAST_STEP, 6.0)]
    assert history(uri, "throughput/tokens_per_s") == [(1, 5400.0), (2, 5000.0), (LAST_STEP, 5400.0)]
    assert history(uri, "share/communication") == [(2, 0.25)], "what was not measured is left out"
    assert history(uri, "validation/loss") == [(2, 7.0)]
    assert history(uri, "checkpoint/bytes") == [(2, 2.0**20)]
    client, run = only_run(uri)
    (first, *_) = client.get_metric_history(run.info.run_id, "train/loss")
    assert first.timestamp == 1000 * step_record(1).time
    assert "throughput/mfu" not in run.data.metrics
    assert run.data.tags["event/skipped_step"] == "step 2: gradient norm inf"
    assert run.data.tags["event/restart"] == "worker 1 died"
    assert run.info.run_name == "test/r0"
    assert run.info.status == "FINISHED"


def test_the_resolved_run_is_its_parameters(tracked_run, step_record, tmp_path):
    resolved = tracked_run({"mlflow": {}})
    secret = resolved.file.resources.model_copy(update={"env": {"NCCL_DEBUG": "hush"}, "labels": {"zone (a)": "x"}})
    sink = MlflowSink(resolved.model_copy(update={"file": resolved.file.model_copy(update={"resources": secret})}))
    sink.write(step_record(1))
    sink.close()
    _, run = only_run(uri_in(tmp_path / "runs" / "r0"))
    parameters = run.data.params
    assert parameters["optim.learning_rate"] == "0.003"
    assert parameters["model.config.hidden_size"] == "32"
    assert parameters["optim.betas"] == "[0.9, 0.95]"
    assert parameters["strategy"] == "zero-2"
    assert parameters["world_size"] == "2"
    assert parameters["num_parameters"] == str(resolved.num_parameters)
    assert parameters["resources.env"] == "['NCCL_DEBUG']", "names alone"
    assert parameters["resources.labels.zone _a_"] == "x", "MLflow takes no parentheses"
    assert run.data.tags["rayapp.run_dir"] == resolved.run_dir


def test_a_run_that_starts_again_is_continued_and_tells_what_changed(tracked_run, step_record, tmp_path):
    first = patient(tracked_run({"mlflow": {}}))
    for step in (1, 2, 3, 4):
        first.write(step_record(step, loss=float(step)))
    first.close()
    uri = uri_in(tmp_path / "runs" / "r0")
    _, before = only_run(uri)
    assert before.info.status == "FAILED", "its last step was not its last one"
    resumed = patient(tracked_run({"mlflow": {}}, world_size=4))
    resumed.write(step_record(3, loss=30.0, time=2e9))
    resumed.flush()
    assert only_run(uri)[1].info.status == "RUNNING"
    resumed.write(step_record(LAST_STEP, loss=0.5, time=2e9 + 1))
    resumed.close()
    _, after = only_run(uri)
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert history(uri, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0), (LAST_STEP, 0.5)]
    assert after.data.params["world_size"] == "2"
    assert after.data.tags["restarted/world_size"] == "4"
    assert "restarted/strategy" not in after.data.tags


def test_steps_that_are_logged_again_within_one_process(tracked_run, step_record, tmp_path):
    sink = MlflowSink(tracked_run({"mlflow": {}}))
    for index, step in enumerate((1, 2, 3, 2, 3)):
        sink.write(step_record(step, loss=float(index), time=1000.0 + index))
    sink.close()
    assert history(uri_in(tmp_path / "runs" / "r0"), "train/loss") == [(1, 0.0), (2, 1.0), (2, 3.0), (3, 2.0), (3, 4.0)]


def test_runs_of_one_name_in_other_folders_are_others(tracked_run, step_record, tmp_path):
    uri = uri_in(tmp_path)
    for folder in ("a", "b", "a"):
        sink = MlflowSink(tracked_run({"mlflow": {"tracking_uri": uri, "experiment": "mine"}}, folder=folder))
        sink.write(step_record(1))
        sink.close()
    _, runs = runs_at(uri, "mine")
    assert sorted(run.data.tags["rayapp.run_dir"] for run in runs) == [str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "b")]
    assert not (tmp_path / "runs").exists(), "nothing is kept in the run's folder"


def test_the_workers_environment_says_where(tracked_run, step_record, tmp_path):
    os.environ["MLFLOW_TRACKING_URI"] = uri_in(tmp_path)
    sink = MlflowSink(tracked_run({"mlflow": {}}))
    sink.write(step_record(1))
    sink.close()
    assert history(uri_in(tmp_path), "train/loss") == [(1, 7.9)]


def test_a_folder_as_a_store(tracked_run, step_record, tmp_path):
    store = tmp_path / "store"
    sink = MlflowSink(tracked_run({"mlflow": {"tracking_uri": str(store)}}))
    sink.write(step_record(1))
    sink.close()
    assert history(store.as_uri(), "train/loss") == [(1, 7.9)]


def test_no_request_holds_more_than_mlflow_takes(tracked_run, step_record, tmp_path, monkeypatch):
    sizes = []
    log_batch = MlflowClient.log_batch

    def measured(client: MlflowClient, run_id: str, **items: list[Any]) -> None:
        sizes.append({kind: len(batch) for kind, batch in items.items()})
        log_batch(client, run_id, **items)

    monkeypatch.setattr(MlflowClient, "log_batch", measured)
    resolved = tracked_run({"mlflow": {}})
    many = resolved.file.resources.model_copy(update={"labels": {f"label-{index}": "x" for index in range(150)}})
    sink = MlflowSink(resolved.model_copy(update={"file": resolved.file.model_copy(update={"resources": many})}))
    for step in range(1, 301):
        sink.write(step_record(step))
    sink.close()
    # https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch
    assert max(size.get("metrics", 0) for size in sizes) <= 1000
    assert max(size.get("params", 0) for size in sizes) <= 100
    uri = uri_in(tmp_path / "runs" / "r0")
    assert [step for step, _ in history(uri, "train/loss")] == list(range(1, 301))
    assert [step for step, _ in history(uri, "memory/memory_bytes")] == list(range(1, 301))
    assert only_run(uri)[1].data.params["resources.labels.label-149"] == "x"


def test_elsewhere_the_database_arrives_at_the_flush_and_is_continued(tracked_run, step_record, tmp_path, monkeypatch):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    remote = Location(fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem()), "run", "s3://bucket/run")
    (bucket / "run").mkdir()
    monkeypatch.setattr(module, "open_location", lambda _: remote)
    sink = patient(tracked_run({"mlflow": {}}))
    sink.write(step_record(1))
    sink.flush()
    assert history(uri_in(bucket / "run"), "train/loss") == [(1, 7.9)]
    sink.write(step_record(2))
    sink.close()
    resumed = patient(tracked_run({"mlflow": {}}))
    resumed.write(step_record(3))
    resumed.close()
    read = tmp_path / "read.db"  # a fresh name: MLflow's reader keeps connections by name
    read.write_bytes((bucket / "run" / "mlflow.db").read_bytes())
    assert history(f"sqlite:///{read}", "train/loss") == [(1, 7.9), (2, 7.8), (3, 7.7)]


def test_a_node_without_the_package_is_an_error_of_the_tracker(tracked_run, step_record, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    sink = MlflowSink(tracked_run({"mlflow": {}}))
    sink.write(step_record(1))
    with pytest.raises(StorageError, match="ModuleNotFoundError"):
        sink.close()


def timed(call: Any) -> float:
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s


def test_a_server_that_is_gone_is_an_error_and_costs_no_time(tracked_run, step_record, dead_port):
    sink = MlflowSink(tracked_run({"mlflow": {"tracking_uri": f"http://127.0.0.1:{dead_port}"}}))
    assert timed(lambda: sink.write(step_record(1))) < 0.5
    with pytest.raises(StorageError, match=f"MLflow http://127.0.0.1:{dead_port} failed: MlflowException"):
        sink.flush()
    assert timed(lambda: sink.write(step_record(2))) < 0.5
    assert timed(sink.flush) < 0.5, "it pauses"

    def close() -> None:
        with pytest.raises(StorageError, match=r"metrics\.jsonl has every figure"):
            sink.close()

    assert timed(close) < 10


def test_a_server_that_does_not_answer_costs_bounded_time(tracked_run, step_record, silent_port):
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "1"
    os.environ["MLFLOW_TRACKING_URI"] = f"http://me:secret@127.0.0.1:{silent_port}"
    sink = MlflowSink(tracked_run({"mlflow": {}}))
    for step in range(1000):
        assert timed(lambda: sink.write(step_record(step))) < 0.5  # noqa: B023 - it is called at once
    with pytest.raises(StorageError) as error:
        sink.flush()
    assert "secret" not in str(error.value)

    def close() -> None:
        with pytest.raises(StorageError):
            sink.close()

    assert timed(close) < 10
