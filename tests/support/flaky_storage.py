"""A folder behind a filesystem of its own kind, which fails when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs


class FlakyHandler(fs.FileSystemHandler):
    """Passes everything on to a folder of this machine, after ``before`` had a look at it and may have raised."""

    def __init__(self, root: Path, before: Callable[[str], None]) -> None:
        self._inner = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())
        self._before = before

    def get_type_name(self) -> str:
        return "flaky"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        self._before("look up")
        return self._inner.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        self._before("list")
        return self._inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._before("create")
        self._inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._before("remove")
        self._inner.delete_dir(path)

    def delete_file(self, path: str) -> None:
        self._before("remove")
        self._inner.delete_file(path)

    def open_input_stream(self, path: str) -> pa.PythonFile:
        self._before("open")
        return pa.PythonFile(_Stream(self._inner.open_input_stream(path), self._before), mode="r")

    def open_input_file(self, path: str) -> pa.PythonFile:
        self._before("open")
        return pa.PythonFile(_Stream(self._inner.open_input_file(path), self._before), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        self._before("open")
        return pa.PythonFile(_Stream(self._inner.open_output_stream(path), self._before), mode="w")

    def _not_used(self, *_: Any) -> None:
        raise NotImplementedError

    delete_dir_contents = delete_root_dir_contents = move = copy_file = open_append_stream = _not_used


class _Stream:
    def __init__(self, inner: pa.NativeFile, before: Callable[[str], None]) -> None:
        self._inner, self._before = inner, before

    def read(self, size: int = -1) -> bytes:
        self._before("read")
        return bytes(self._inner.read(size))

    def write(self, content: bytes) -> int:
        self._before("write")
        return int(self._inner.write(content))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()

    @property
    def closed(self) -> bool:
        return bool(self._inner.closed)
