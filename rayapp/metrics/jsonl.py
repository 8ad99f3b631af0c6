"""`metrics.jsonl`: the record of a run that is always written."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rayapp.errors import Problem, StorageError
from rayapp.metrics.record import MetricsRecord, parse_record
from rayapp.storage import Location

logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends records to a file, one line each.

    Where the storage is this machine's file tree, every line is in the file when ``write`` returns, and on the disk when ``flush`` does.
    Elsewhere (objects cannot be appended to) lines collect in a local file, which ``flush`` uploads as a whole.

    Args:
        path: the file.
        resume_step: the step that the run continues from, 0 at its beginning. Records of later steps come from a process that got
            farther than its last checkpoint; they are cut off, in one move: whoever reads sees the old file or the new one.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Location, resume_step: int = 0) -> None:
        self._path = path
        self._spool_folder = None if path.is_local else tempfile.TemporaryDirectory(prefix="rayapp-metrics-")
        self._file_path = path.local_path if self._spool_folder is None else Path(self._spool_folder.name) / path.name
        with self._refusing("cannot be opened"):
            self._file_path.parent.mkdir(parents=True, exist_ok=True)
            if self._spool_folder is not None and path.exists():
                path.download(self._file_path)
            if self._file_path.exists():
                _cut_after(self._file_path, resume_step)
            self._stream = self._file_path.open("ab")

    def write(self, record: MetricsRecord) -> None:
        """Append one line.

        Raises:
            StorageError: it cannot be written; the file may end in a part of the line, which a resumed run cuts off.
        """
        with self._refusing("cannot be written"):
            self._stream.write(record.model_dump_json().encode() + b"\n")
            self._stream.flush()

    def flush(self) -> None:
        """Bring the lines to the disk, or to the storage.

        Raises:
            StorageError: the storage refused.
        """
        with self._refusing("cannot be written"):
            self._stream.flush()
            if self._spool_folder is None:
                os.fsync(self._stream.fileno())
        if self._spool_folder is not None:
            self._path.upload(self._file_path)

    def close(self) -> None:
        """Flush and close.

        Raises:
            StorageError: the storage refused.
        """
        try:
            self.flush()
        finally:
            if self._spool_folder is not None:
                self._spool_folder.cleanup()
            with self._refusing("cannot be written"):
                self._stream.close()

    @contextmanager
    def _refusing(self, rule: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "check the path, the permissions and the free space"
            raise StorageError(Problem(f"metrics file {self._path}", f"{rule}: {error}", remedy)) from error


def read_records(path: Location) -> list[MetricsRecord]:
    """Every whole record of a metrics file. The last line may be torn: its writer was stopped, or is at it.

    Raises:
        StorageError: the file is not there, cannot be read, or a line other than the last is not a record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise StorageError(Problem(f"metrics file {path}", f"cannot be read: {error}", "check the run's folder")) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_record(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            rule = f"is not a record of this version of rayapp: {error}"
            raise StorageError(Problem("line", rule, "remove the line, or use the version that wrote it", f"{path}:{number}")) from error
    return records


def _cut_after(path: Path, step: int) -> None:
    """Leave only whole lines whose step is at most ``step``, or that have none."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with path.open("rb") as lines, partial.open("wb") as kept:
            num_unreadable = _copy_up_to(lines, kept, step)
            kept.flush()
            os.fsync(kept.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if num_unreadable:
        logger.warning("%s: left %d lines out that were not whole JSON objects", path, num_unreadable)


def _copy_up_to(lines: BinaryIO, kept: BinaryIO, step: int) -> int:
    num_unreadable = 0
    for line in lines:
        try:
            record_step = json.loads(line).get("step")
        except (ValueError, AttributeError):
            num_unreadable += 1
            continue
        if record_step is None or record_step <= step:
            kept.write(line.rstrip(b"\n") + b"\n")
    return num_unreadable
