"""Overrides from the command line: ``section.key=value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayapp.config.provenance import KeyPath, SourcedTree, dotted, with_value
from rayapp.config.yaml_tree import read_yaml
from rayapp.errors import Problem, RunFileError

WHERE = "command line"


def apply_overrides(tree: SourcedTree, overrides: Sequence[str]) -> list[Problem]:
    """Write the overrides into a run file's tree, in order, so that the last of two wins.

    A value is YAML. A section that the file leaves out is made; a list's entry is named by its index.

    Returns:
        What is wrong with them. Such an override changes nothing.
    """
    problems: list[Problem] = []
    for override in overrides:
        try:
            path, value = _parse(override)
            _assign(tree, path, value, override)
        except RunFileError as error:
            problems += error.problems
    return problems


def _parse(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    segments = key.strip().split(".")
    if not equals or not all(segments) or any(character.isspace() for character in key.strip()):
        raise _refused(override, "is not an override", "write section.key=value, such as batch.global_batch_size=64")
    tree = _read_value(override, text)
    if not tree.origins:
        raise _refused(override, "has no value", f"write {key}=null to leave it open, or {key}='\"\"' for an empty text")
    return segments, tree.value


def _read_value(override: str, text: str) -> SourcedTree:
    try:
        tree, problems = read_yaml(text, WHERE)
    except RunFileError as error:
        tree, problems = SourcedTree(None), list(error.problems)
    if problems:
        raise RunFileError(*(Problem(override, f"has a value that does not work: {p.subject} {p.rule}", p.remedy, WHERE) for p in problems))
    return tree


def _assign(tree: SourcedTree, segments: list[str], value: Any, override: str) -> None:
    parent: Any = tree.value
    path: KeyPath = ()
    for segment in segments[:-1]:
        key = _key_in(parent, segment, path, override)
        if isinstance(parent, dict) and parent.get(key) is None:
            parent[key] = {}
            tree.replace((*path, key), {})
        parent, path = parent[key], (*path, key)
    key = _key_in(parent, segments[-1], path, override)
    parent[key] = value
    tree.replace((*path, key), value)


def _key_in(parent: Any, segment: str, path: KeyPath, override: str) -> str | int:
    if isinstance(parent, dict):
        return segment
    if isinstance(parent, list):
        if segment.isascii() and segment.isdigit() and int(segment) < len(parent):
            return int(segment)
        raise _refused(override, f"names no entry of {dotted(path)}, which has {len(parent)}", f"use an index below {len(parent)}")
    raise _refused(override, f"goes inside {with_value(dotted(path), parent)}, which holds no keys", f"override {dotted(path)} itself")


def _refused(override: str, rule: str, remedy: str) -> RunFileError:
    return RunFileError(Problem(override, rule, remedy, WHERE))
