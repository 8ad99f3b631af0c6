"""Pydantic's errors in the words of a run file: the value, the rule, the remedy, the line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rayapp.config.overrides import WHERE
from rayapp.config.provenance import KeyPath, SourcedTree, dotted, with_value
from rayapp.config.schema import RunFile, Section
from rayapp.config.yaml_tree import resolve_plain
from rayapp.errors import Problem

NOT_A = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys",
    "model": "a mapping of keys",
}
BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def explain(errors: Iterable[ErrorDetails], tree: SourcedTree, file_name: str) -> list[Problem]:
    """One problem for each value that is wrong, in the order of the errors.

    Args:
        errors: of validating ``tree.value`` against the run file's tree.
        tree: the values and their lines.
        file_name: how messages call the file.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_path_of(error, tree.value), []).append(error)
    return [
        _problem(path, group, tree, file_name)
        for path, group in by_path.items()
        if path not in tree.unreadable and not _entered(path, by_path)
    ]


def _path_of(error: ErrorDetails, value: Any) -> KeyPath:
    """The location of an error without the names of a union's members, which pydantic puts in between."""
    path: KeyPath = ()
    for segment in error["loc"]:
        inside = (isinstance(value, dict) and segment in value) or (isinstance(value, list) and segment in range(len(value)))
        if inside:
            value = value[segment]
            path = (*path, segment)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else path


def _entered(path: KeyPath, paths: Iterable[KeyPath]) -> bool:
    """True if another error lies deeper: then a union's other members, which wanted another type, are beside the point."""
    return path != () and any(len(other) > len(path) and other[: len(path)] == path for other in paths)


def _problem(path: KeyPath, errors: list[ErrorDetails], tree: SourcedTree, file_name: str) -> Problem:
    where = _where(path, tree, file_name)
    first = errors[0]
    value = first["input"]
    if first["type"] == "missing":
        return Problem(dotted(path), "is missing", "add it", where)
    if first["type"] == "extra_forbidden":
        return Problem(with_value(dotted(path), value), *_unknown_key(path), where)
    if first["type"] == "value_error":
        rule, _, remedy = str(first["ctx"]["error"]).partition("; ")
        return Problem(f"{dotted(path)}:" if path else "the run file:", rule, remedy, where)
    if path == ():
        return Problem("the run file", "is not a mapping of keys", "start it with name: ...", where)
    rules = [_rule(error) for error in errors]
    return Problem(with_value(dotted(path), value), _either(rules), _remedy(value, errors), where)


def _where(path: KeyPath, tree: SourcedTree, file_name: str) -> str:
    origin = tree.nearest_origin(path)
    if origin is not None and origin.kind == "override":
        return WHERE
    return file_name if origin is None or path == () else f"{file_name}:{origin.line}"


def _rule(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        return f"is not {words} {context[bound]:g}"
    if kind == "literal_error":
        return f"is not {context['expected']}"
    if kind == "finite_number":
        return "is not a finite number"
    if kind == "string_pattern_mismatch":
        return f"does not match {context['pattern']}"
    if kind in ("too_long", "string_too_long"):
        return f"is longer than {context['max_length']}"
    name = kind.split("_")[0]
    return f"is not {NOT_A[name]}" if name in NOT_A else f"is refused: {error['msg']}"


def _either(rules: list[str]) -> str:
    """The rules of a union's members as one."""
    distinct = list(dict.fromkeys(rules))
    if all(rule.startswith("is not ") for rule in distinct):
        return "is not " + " or ".join(rule.removeprefix("is not ") for rule in distinct)
    return ", and ".join(distinct)


def _remedy(value: Any, errors: list[ErrorDetails]) -> str:
    """What to write instead, where the value shows what was meant."""
    kinds = {error["type"].split("_")[0] for error in errors}
    if value is None:
        return "leave the key out for its default"
    if "literal" in kinds and (close := _closest(str(value), _literal_choices(errors))):
        return f"did you mean {close}?"
    bounds = [_within(value, error) for error in errors if error["type"] in BOUNDS]
    if bounds or kinds & {"int", "float"}:
        return " and ".join(bounds) or _write_number(value)
    if "bool" in kinds and str(value).lower() in YES_NO:
        return f"write {YES_NO[str(value).lower()]}"
    if "string" in kinds:
        return "put it in quotes" if isinstance(value, bool | int | float) else ""
    return "write it as [a, b]" if kinds & {"list", "tuple"} else ""


def _within(value: Any, error: ErrorDetails) -> str:
    """What would keep to a bound."""
    name, words = BOUNDS[error["type"]]
    bound = error["ctx"][name]
    return f"use {bound + 1:g} or more" if name == "gt" and isinstance(value, int) else f"use a value {words} {bound:g}"


def _write_number(value: Any) -> str:
    """The number that a float or a text stands for: 32.0, "32", 1_000, 012."""
    if isinstance(value, str) and isinstance(resolve_plain(value), int | float):
        return f"write {value} without quotes"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and len(value) < 20 and value.replace("_", "").isdecimal():
        return f"write {int(value.replace('_', ''))}"
    return "write a plain number"


def _literal_choices(errors: list[ErrorDetails]) -> list[str]:
    expected = " or ".join(error["ctx"]["expected"] for error in errors if error["type"] == "literal_error")
    return [choice.strip(" '") for choice in expected.replace(" or ", ",").split(",")]


def _unknown_key(path: KeyPath) -> tuple[str, str]:
    """The rule and the remedy for a key that its section does not have."""
    section = _section_at(path[:-1])
    keys = list(section.model_fields)
    key, place = str(path[-1]), dotted(path[:-1]) or "the run file"
    rule = f"is not a key of {place}"
    if close := _closest(key, keys):
        return rule, f"did you mean {close}?"
    elsewhere = {full.rpartition(".")[2]: full for full in reversed(list(_dotted_keys(RunFile)))}
    if close := _closest(key, elsewhere):
        return rule, f"did you mean {elsewhere[close]}?"
    return rule, f"its keys are {', '.join(keys)}"


def _section_at(path: KeyPath) -> type[BaseModel]:
    section: type[BaseModel] = RunFile
    for key in path:
        if isinstance(key, str):  # an index stays with the list's section
            section = _sections_in(section.model_fields[key].annotation)[0]
    return section


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _sections_in(field.annotation):
            yield from _dotted_keys(inner, f"{prefix}{name}.")


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type holds, inside unions and lists too."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _closest(word: str, choices: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.7)), None)
