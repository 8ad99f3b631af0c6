"""Which files a corpus is made of: a file, a folder or a pattern in any `pyarrow.fs` location."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayapp.config.schema import DataSection, SourceSection
from rayapp.errors import DataError, Problem, StorageError
from rayapp.storage import Location, open_location

FileFormat = Literal["text", "jsonl", "parquet"]

PYTHON_STDLIB = "python-stdlib"
STDLIB_LEFT_OUT = ("site-packages", "test", "tests", "idle_test", "__pycache__")
CONTAINER_ENDINGS = (".7z", ".arrow", ".avro", ".bz2", ".feather", ".lz4", ".orc", ".pdf", ".rar", ".tar", ".tgz", ".xz", ".zip", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
        location: where it lies.
        name: its path below the source, which orders and identifies it.
        format: how it is read.
        text_column: the column or key that holds the text, where the format has some.
        size_bytes: as stored.
        mtime_ns: its last change; 0 where the filesystem keeps none.
        content: what it holds, where it lies on the driver's node only.
    """

    location: Location
    name: str
    format: FileFormat
    text_column: str
    size_bytes: int
    mtime_ns: int = 0
    content: bytes | None = None

    @property
    def is_gzip(self) -> bool:
        return self.name.endswith(".gz")


@dataclass(frozen=True)
class ListedSource:
    """One source of the mixture and its files, sorted by name."""

    section: SourceSection
    files: tuple[SourceFile, ...]


def list_sources(data: DataSection) -> list[ListedSource]:
    """The corpus's sources with their files.

    Raises:
        DataError: a source that is missing, matches nothing, or cannot be read as asked; all of them at once.
    """
    sections = [SourceSection(path=data.source)] if isinstance(data.source, str) else data.source
    if not sections:
        raise DataError(Problem("data.source=[]", "names no source", "give a path, or a list with at least one source"))
    listed: list[ListedSource] = []
    problems: list[Problem] = []
    for section in sections:
        try:
            listed.append(ListedSource(section, tuple(list_source(section))))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    return listed


def list_source(section: SourceSection) -> list[SourceFile]:
    """One source's files, sorted by name.

    Raises:
        DataError: it is missing, matches nothing, or cannot be read as asked.
    """
    if section.path == PYTHON_STDLIB:
        return list_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    root, pattern = split_pattern(section.path)
    location = open_location(root)
    try:
        if pattern is not None and location.is_local and (literal := location / pattern).exists():
            return list_location(literal, section)
        if location.exists():
            return list_location(location, section, pattern)
    except (OSError, StorageError) as error:
        raise DataError(
            Problem(f"data.source={section.path!r}", f"cannot be listed: {error}", "check the address and this machine's access to it")
        ) from error
    raise DataError(
        Problem(f"data.source={section.path!r}", f"does not exist ({location.uri})", "check the path, and that this machine reaches it")
    )


def split_pattern(path: str) -> tuple[str, str | None]:
    """A path's folder without wildcards, and the pattern below it: ``s3://b/x/*/y.txt`` gives ``s3://b/x`` and ``*/y.txt``.

    A URI's query stays with the folder, so ``?`` is a wildcard in plain paths only.
    """
    is_uri = "://" in path
    body, question_mark, query = path.partition("?") if is_uri else (path, "", "")
    wildcards = "*[" if is_uri else "*[?"
    parts = body.split("/")
    first = next((i for i, part in enumerate(parts) if any(sign in part for sign in wildcards)), None)
    if first is None:
        return path, None
    folder = "/".join(parts[:first]) or ("/" if body.startswith("/") else ".")
    return folder + question_mark + query, "/".join(parts[first:])


def list_location(location: Location, section: SourceSection, pattern: str | None = None) -> list[SourceFile]:
    """The files at a location: itself, those below it that match the pattern, or all below it but hidden ones.

    Raises:
        DataError: there are none, or all are empty, or their format is unknown, or no Parquet file has the text column.
    """
    if not location.is_dir():
        info = location.filesystem.get_file_info(location.path)
        files = [_source_file(location, location.name, info, section)] if pattern is None else []
    else:
        wanted = _is_visible if pattern is None else _matcher(pattern, section)
        infos = ((_name_below(location, info), info) for info in _walk(location))
        files = [
            _source_file(location / name, name, info, section) for name, info in sorted(infos, key=lambda pair: pair[0]) if wanted(name)
        ]
    if not files:
        rule = "holds no file" if pattern is None else "matches no file"
        raise DataError(Problem(f"data.source={section.path!r}", rule, f"look at what lies in {location.uri}"))
    if not any(file.size_bytes for file in files):
        raise DataError(
            Problem(f"data.source={section.path!r}", f"holds no text: {len(files)} files of 0 bytes", "fill it, or give another path")
        )
    _refuse_containers(files, section)
    _require_column([file for file in files if file.format == "parquet"], section)
    return files


def _matcher(pattern: str, section: SourceSection) -> Callable[[str], object]:
    try:
        return re.compile(pattern_regex(pattern)).fullmatch
    except re.error as error:
        raise DataError(Problem(f"data.source={section.path!r}", f"is no pattern: {error}", "write a range as [a-z]")) from error


def pattern_regex(pattern: str) -> str:
    """The regular expression of a path pattern: ``*``, ``?`` and ``[...]`` stay inside a name, ``**`` crosses folders."""
    regex = ""
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        if part == "**":
            regex += ".*" if is_last else "(?:[^/]+/)*"
        else:
            regex += _name_regex(part) + ("" if is_last else "/")
    return regex


def _name_regex(pattern: str) -> str:
    """The regular expression of one component of a pattern."""
    regex = ""
    for sign in re.findall(r"\[!?+[^/][^\]]*\]|.", pattern, flags=re.DOTALL):
        if sign == "*":
            regex += "[^/]*"
        elif sign == "?":
            regex += "[^/]"
        elif len(sign) > 1:
            negation, members = ("^/", sign[2:-1]) if sign[1] == "!" else ("", sign[1:-1])
            escaped = re.sub(r"([\\^\[\]&~|])", r"\\\1", members)
            regex += f"[{negation}{escaped}]"
        else:
            regex += re.escape(sign)
    return regex


def list_stdlib(root: Path) -> list[SourceFile]:
    """The source of Python's standard library, read here: other nodes may have another version.

    Raises:
        DataError: this Python has no source files.
    """
    files = []
    for name in sorted(_stdlib_names(root)):
        path = root / name
        content = path.read_bytes()
        location = Location(fs.LocalFileSystem(), str(path), str(path))
        files.append(SourceFile(location, name, "text", "", len(content), content=content))
    if not files:
        raise DataError(
            Problem(
                f"data.source={PYTHON_STDLIB!r}",
                f"finds no source in {root}",
                "use a Python that comes with its sources, or another source",
            )
        )
    return files


def _stdlib_names(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        below = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
        yield from ((below / name).as_posix() for name in names if name.endswith(".py"))


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/"))


def _walk(location: Location) -> Iterator[fs.FileInfo]:
    selector = fs.FileSelector(location.path, recursive=True)
    return (info for info in location.filesystem.get_file_info(selector) if info.type == fs.FileType.File)


def _name_below(location: Location, info: fs.FileInfo) -> str:
    return str(PurePosixPath(info.path).relative_to(PurePosixPath(location.path)))


def _source_file(location: Location, name: str, info: fs.FileInfo, section: SourceSection) -> SourceFile:
    return SourceFile(location, name, section.format or format_of(name), section.text_column, int(info.size), info.mtime_ns or 0)


def format_of(name: str) -> FileFormat:
    """The format that a file name's ending tells."""
    if name.endswith((".jsonl", ".jsonl.gz", ".json.gz")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _refuse_containers(files: list[SourceFile], section: SourceSection) -> None:
    problems = [
        Problem(
            f"file {file.location.uri}",
            f"has a format that cannot be read ({PurePosixPath(file.name).suffix})",
            "unpack it to text, .jsonl, .jsonl.gz or .parquet, or give a pattern that leaves it out",
        )
        for file in files
        if section.format is None and file.name.lower().endswith(CONTAINER_ENDINGS)
    ]
    if problems:
        raise DataError(*problems[:20])


def _require_column(files: list[SourceFile], section: SourceSection) -> None:
    """Some Parquet file has the text column. Files that cannot be read are counted later, when they are."""
    found: dict[str, None] = {}
    for file in files:
        try:
            with file.location.filesystem.open_input_file(file.location.path) as stream:
                names = pq.read_schema(stream).names
        except (OSError, pa.ArrowInvalid):
            continue
        if section.text_column in names:
            return
        found.update(dict.fromkeys(names))
    if found:
        raise DataError(
            Problem(
                f"text_column={section.text_column!r}",
                f"is in no Parquet file of {section.path!r}",
                f"the columns are {', '.join(found)}",
            )
        )
