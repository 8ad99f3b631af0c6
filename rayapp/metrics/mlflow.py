"""Figures for MLflow."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rayapp.config.provenance import dotted, leaves
from rayapp.config.resolved import ResolvedRun
from rayapp.metrics.record import EventRecord, MetricsRecord, StepRecord
from rayapp.metrics.tags import event_tag, figures
from rayapp.metrics.tracked_run import run_parameters, tracked_id, tracked_name
from rayapp.metrics.tracker import TrackerSink, refusals_of, without_passwords
from rayapp.storage import Location, open_location

Item = TypeVar("Item")

URI_VARIABLE = "MLFLOW_TRACKING_URI"
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""What is set where the worker's environment does not: by itself MLflow tries for more than ten minutes."""

DATABASE = "mlflow.db"
ID_TAG = "rayapp.id"
METRICS_PER_BATCH = 1000
ITEMS_PER_BATCH = 100
"""Source: mlflow/utils/validation.py; the REST API documents the same limits."""

PARAMETER_CHARACTERS = 6000
TAG_CHARACTERS = 5000
NOT_IN_A_KEY = re.compile(r"[^\w.\-/: ]")
REMEDY = "check metrics.mlflow, MLFLOW_TRACKING_URI and the server; metrics.jsonl has every figure"


class MlflowSink(TrackerSink):
    """Logs a run to MLflow, without waiting for it.

    Args:
        run: the resolved run.
    """

    def __init__(self, run: ResolvedRun) -> None:
        super().__init__(MlflowRun(run))


class MlflowRun:
    """A run in MLflow, found again by its tag ``rayapp.id`` whenever the run starts again.

    The resolved run becomes its parameters. MLflow never changes a parameter: what a later start resolves differently goes
    into tags ``restarted/<parameter>``. A step that is logged again after a return to a checkpoint stands beside the first one at
    the same step. The newest event of each kind is a tag. The run ends as FINISHED after its last step, and as FAILED before.

    Without a tracking URI it lies in the database ``mlflow.db`` of the run's folder. Where that is not in this machine's file tree,
    the database is a local file, which ``flush`` uploads as a whole.

    Args:
        run: the resolved run.
    """

    def __init__(self, run: ResolvedRun) -> None:
        section = run.file.metrics.mlflow
        assert section is not None, "the run file asks for MLflow"
        self._run, self._section = run, section
        self._uri = section.tracking_uri or os.environ.get(URI_VARIABLE) or None
        self._database = _Database(open_location(run.run_dir) / DATABASE) if self._uri is None else None
        self._client: Any = None
        self._mlflow_id = ""
        self._is_complete = False

    @property
    def name(self) -> str:
        return f"MLflow {without_passwords(self._uri) if self._uri else self._database}"

    def prepare(self) -> None:
        """Import MLflow, with the settings that it reads then.

        Raises:
            ImportError: it is not installed here.
        """
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        import mlflow.tracking

        if self._database is not None:
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - MLflow itself imports it when it opens a database

    def send(self, records: Sequence[MetricsRecord]) -> None:
        """Log records.

        Raises:
            StorageError: MLflow refused, or did not answer in time.
        """
        with refusals_of(self.name, REMEDY):
            self._open()
            from mlflow.entities import Metric, RunTag

            metrics = [Metric(tag, value, int(r.time * 1000), r.step) for r in records for tag, value in figures(r).items()]
            for batch in _batches(metrics, METRICS_PER_BATCH):
                self._client.log_batch(self._mlflow_id, metrics=batch)
            events = {_key(event_tag(event)): _event_text(event) for event in records if isinstance(event, EventRecord)}
            for tags in _batches(events.items(), ITEMS_PER_BATCH):
                self._client.log_batch(self._mlflow_id, tags=[RunTag(key, text) for key, text in tags])
        self._is_complete |= any(isinstance(r, StepRecord) and r.step >= self._run.file.train.num_steps for r in records)

    def flush(self) -> None:
        """Upload the database, where the run's folder is elsewhere.

        Raises:
            StorageError: the storage refused.
        """
        if self._database is not None and self._client is not None:
            self._database.upload()

    def close(self) -> None:
        """End MLflow's run.

        Raises:
            StorageError: MLflow or the storage refused.
        """
        try:
            if self._client is not None:
                with refusals_of(self.name, REMEDY):
                    self._client.set_terminated(self._mlflow_id, status="FINISHED" if self._is_complete else "FAILED")
                self.flush()
        finally:
            if self._database is not None:
                self._database.close()

    def abandon(self) -> None:
        """Requests end by themselves, and there is no other process."""

    def _open(self) -> None:
        if self._client is not None:
            return
        self.prepare()
        uri = self._uri or self._database_uri()
        if urlsplit(uri).scheme in ("", "file"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # naming a folder is the consent that MLflow asks for
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        self._mlflow_id = self._find_or_create(client)
        self._client = client

    def _database_uri(self) -> str:
        from mlflow.utils.file_utils import path_to_local_sqlite_uri

        assert self._database is not None
        return str(path_to_local_sqlite_uri(self._database.fetch()))

    def _find_or_create(self, client: Any) -> str:
        experiment_id = self._experiment(client)
        identity = tracked_id(self._run)
        found = client.search_runs(
            [experiment_id], f"tags.`{ID_TAG}` = '{identity}'", max_results=1, order_by=["attributes.start_time DESC"]
        )
        parameters = _texts(run_parameters(self._run))
        if found:
            mlflow_id, known = found[0].info.run_id, found[0].data.params
            client.update_run(mlflow_id, status="RUNNING")
        else:
            tags = {ID_TAG: identity, "rayapp.run_dir": self._run.run_dir, "mlflow.source.name": "rayapp"}
            mlflow_id, known = client.create_run(experiment_id, tags=tags, run_name=tracked_name(self._run)).info.run_id, {}
        _log_parameters(client, mlflow_id, parameters, known)
        return str(mlflow_id)

    def _experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        name = self._section.experiment or self._run.file.name
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(client.create_experiment(name))
            except MlflowException:
                experiment = client.get_experiment_by_name(name)  # another run of the family was faster
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


class _Database:
    """An SQLite file in a run's folder."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._spool_folder = None if location.is_local else tempfile.TemporaryDirectory(prefix="rayapp-mlflow-")

    def __str__(self) -> str:
        return str(self._location)

    def fetch(self) -> Path:
        """Where the file is, or is to be, on this machine."""
        if self._spool_folder is None:
            self._location.local_path.parent.mkdir(parents=True, exist_ok=True)
            return self._location.local_path
        path = Path(self._spool_folder.name) / self._location.name
        if not path.exists() and self._location.exists():
            self._location.download(path)
        return path

    def upload(self) -> None:
        if self._spool_folder is not None:
            self._location.upload(self.fetch())

    def close(self) -> None:
        if self._spool_folder is not None:
            self._spool_folder.cleanup()


def _log_parameters(client: Any, mlflow_id: str, parameters: dict[str, str], known: dict[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    new = {key: text for key, text in parameters.items() if key not in known}
    changed = {key: text for key, text in parameters.items() if key in known and known[key] != text}
    for batch in _batches(new.items(), ITEMS_PER_BATCH):
        client.log_batch(mlflow_id, params=[Param(key, text) for key, text in batch])
    for batch in _batches(changed.items(), ITEMS_PER_BATCH):
        client.log_batch(mlflow_id, tags=[RunTag(f"restarted/{key}", text[:TAG_CHARACTERS]) for key, text in batch])


def _texts(parameters: dict[str, Any]) -> dict[str, str]:
    """Nested values as the flat texts that MLflow takes."""
    return {_key(dotted(path)): str(value)[:PARAMETER_CHARACTERS] for path, value in leaves(parameters)}


def _key(name: str) -> str:
    return NOT_IN_A_KEY.sub("_", name)


def _event_text(event: EventRecord) -> str:
    place = "" if event.step is None else f"step {event.step}: "
    return f"{place}{event.detail}"[:TAG_CHARACTERS]


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
