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
from rayapp.metrics.record import EventRecord, MetricsRecord
from rayapp.metrics.tags import event_tag, figures
from rayapp.storage import Location


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
    if isinstance(record, EventRecord):
        return text(event_tag(record), record.detail)
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in figures(record).items()])
