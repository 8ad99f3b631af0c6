"""Reads a run file and its overrides, and reports everything that is wrong with them at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rayapp.config.explain import explain
from rayapp.config.overrides import WHERE, apply_overrides
from rayapp.config.provenance import Origin, SourcedTree, dotted, leaves
from rayapp.config.schema import RunFile
from rayapp.config.yaml_tree import read_yaml
from rayapp.errors import Problem, RunFileError


@dataclass(frozen=True)
class LoadedRunFile:
    """A run file with its overrides.

    Attributes:
        file: the validated tree.
        path: where it was read.
        origins: for every value of the tree, by dotted key, where it comes from.
    """

    file: RunFile
    path: Path
    origins: Mapping[str, Origin]

    def where(self, key: str) -> str | None:
        """The place that a message on a value names: ``jobs/x.yaml:12`` or ``command line``; None for a default."""
        origin = self.origins.get(key)
        if origin is None or origin.kind == "default":
            return None
        return WHERE if origin.kind == "override" else f"{self.path}:{origin.line}"


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> LoadedRunFile:
    """Read, override and validate.

    Args:
        path: the YAML file.
        overrides: ``section.key=value`` each.

    Raises:
        RunFileError: with every problem of the file and the overrides.
    """
    tree, problems = read_yaml(_read_text(path), str(path))
    if tree.value is None:
        raise RunFileError(Problem("the run file", "is empty", "start it with name: ...", str(path)))
    if not isinstance(tree.value, dict):
        raise RunFileError(Problem("the run file", "is not a mapping of keys", "start it with name: ...", str(path)))
    problems += apply_overrides(tree, overrides)
    try:
        file = RunFile.model_validate(tree.value)
    except ValidationError as error:
        problems += explain(error.errors(include_url=False), tree, str(path))
        raise RunFileError(*sorted(problems, key=_line_order)) from error
    if problems:
        raise RunFileError(*sorted(problems, key=_line_order))
    return LoadedRunFile(file, path, _origins(file, tree))


def _line_order(problem: Problem) -> tuple[bool, int]:
    """The file's problems from top to bottom, then the command line's."""
    line = (problem.where or "").rpartition(":")[2]
    return problem.where == WHERE, int(line) if line.isdecimal() else 0


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise RunFileError(Problem(f"run file {path}", "does not exist", _similar_files(path))) from error
    except IsADirectoryError as error:
        raise RunFileError(Problem(f"run file {path}", "is a folder", "name one of the files in it")) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise RunFileError(Problem(f"run file {str(path)!r}", f"cannot be read: {error}")) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RunFileError(Problem("the text", f"is not UTF-8: {error.reason}", "save the file as UTF-8", f"{path}:{line}")) from error


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return "check the path"
    names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else "check the path"


def _origins(file: RunFile, tree: SourcedTree) -> dict[str, Origin]:
    """A default's mapping or list has an origin of its own only where the file or an override wrote it."""
    default = Origin("default")
    return {dotted(path): tree.origins.get(path, default) for path, _ in leaves(file.model_dump())}
