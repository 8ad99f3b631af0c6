"""Figures for TensorBoard."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import text

from rayapp.errors import Problem, StorageError
from rayapp.metrics.record import CheckpointRecord, EventRecord, MetricsRecord, StepRecord, ValidationRecord
from rayapp.storage import Location

STEP_TAGS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/num_valid_tokens": "num_valid_tokens",
    "train/skipped_steps": "skipped_steps",
    "throughput/tokens_per_s": "tokens_per_s",
    "throughput/samples_per_s": "samples_per_s",
    "throughput/step_s": "step_s",
    "throughput/mfu": "mfu",
    "throughput/mfu_causal": "mfu_causal",
    "share/data_wait": "data_wait_share",
    "share/communication": "communication_share",
    "share/checkpoint": "checkpoint_share",
    "memory/memory_bytes": "memory_bytes",
    "memory/peak_memory_bytes": "peak_memory_bytes",
}
VALIDATION_TAGS = {"validation/loss": "loss", "validation/perplexity": "perplexity", "validation/seconds": "seconds"}
CHECKPOINT_TAGS = {"checkpoint/seconds": "seconds", "checkpoint/bytes": "bytes"}
"""TensorBoard's tags and the fields of records that they show."""


class TensorBoardSink:
    """Writes TensorBoard event files into a folder.

    It writes through tensorboardX's ``EventsWriter``, in the caller's thread. The ``SummaryWriter`` of the same package hands events to a
    thread that ends at the first failed write; its queue of ten then fills, and the next call waits for ever.

    Where the storage is not this machine's file tree, the file is written locally and ``flush`` uploads it as a whole.

    Args:
        folder: where event files go. Those of earlier processes of the run stay.
        resume_step: the step that the run continues from, 0 at its beginning. TensorBoard hides what earlier processes wrote of later
            steps.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Location, resume_step: int = 0) -> None:
        self._folder = folder
        self._spool_folder = None if folder.is_local else tempfile.TemporaryDirectory(prefix="rayapp-tensorboard-")
        self._file_folder = folder.local_path if self._spool_folder is None else Path(self._spool_folder.name)
        self._writer: EventsWriter | None = None
        self._write(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: MetricsRecord) -> None:
        """Add the record's figures. Those that are null are left out.

        Raises:
            StorageError: they cannot be written. The next call starts a new file, since a reader stops at a torn event.
        """
        self._write(Event(wall_time=record.time, step=record.step or 0, summary=_summary(record)))

    def flush(self) -> None:
        """Bring the file to the disk, or to the storage.

        Raises:
            StorageError: the storage refused.
        """
        try:
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            raise self._refused(error) from error
        if self._spool_folder is not None:
            for path in sorted(self._file_folder.iterdir()):
                (self._folder / path.name).upload(path)

    def close(self) -> None:
        """Flush and close.

        Raises:
            StorageError: the storage refused.
        """
        try:
            self.flush()
            if self._writer is not None:
                self._writer.close()
        finally:
            self._writer = None
            if self._spool_folder is not None:
                self._spool_folder.cleanup()

    def _write(self, event: Event) -> None:
        try:
            self._open_writer().write_event(event)
        except OSError as error:
            self._writer = None  # which closes the file
            raise self._refused(error) from error

    def _open_writer(self) -> EventsWriter:
        """The current file's writer. Files are read in the order of their names, which start with the time in seconds."""
        if self._writer is None:
            self._file_folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._file_folder / "events"), f".{time.time_ns()}")
        return self._writer

    def _refused(self, error: OSError) -> StorageError:
        remedy = "check the path, the permissions and the free space"
        return StorageError(Problem(f"TensorBoard folder {self._folder}", f"cannot be written: {error}", remedy))


def _summary(record: MetricsRecord) -> Summary:
    match record:
        case StepRecord():
            return _scalars(record, STEP_TAGS)
        case ValidationRecord():
            return _scalars(record, VALIDATION_TAGS)
        case CheckpointRecord():
            return _scalars(record, CHECKPOINT_TAGS)
        case EventRecord():
            return text(f"event/{record.event}", record.detail)


def _scalars(record: MetricsRecord, tags: dict[str, str]) -> Summary:
    figures = {tag: getattr(record, field) for tag, field in tags.items()}
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items() if value is not None])
