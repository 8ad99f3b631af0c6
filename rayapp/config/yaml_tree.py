"""YAML as plain values that know their lines.

Scalars are read by YAML 1.2's core schema. PyYAML on its own follows YAML 1.1, where ``1e-4`` is a string, ``012`` is ten
and ``off`` is false.
Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from rayapp.config.provenance import KeyPath, Origin, SourcedTree, dotted, with_value
from rayapp.errors import Problem, RunFileError

MAX_DEPTH = 40
MAX_VALUES = 100_000

NULL, BOOL, INT, FLOAT, STR = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))
NON_FINITE = {"inf": float("inf"), "+inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class CoreSchemaLoader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema.

    One difference: a number with leading zeros stays a string. YAML 1.1 reads it as octal and 1.2 as decimal, and a git
    commit such as ``0123456`` is neither.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]


CoreSchemaLoader.add_implicit_resolver(NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
CoreSchemaLoader.add_implicit_resolver(BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
CoreSchemaLoader.add_implicit_resolver(
    INT, re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$", re.ASCII), list("-+0123456789")
)
CoreSchemaLoader.add_implicit_resolver(
    FLOAT,
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        re.ASCII,
    ),
    list("-+.0123456789"),
)


def read_yaml(text: str, source: str) -> tuple[SourcedTree, list[Problem]]:
    """Read one YAML document.

    Args:
        text: the document.
        source: how messages call it: the file's path, or the override.

    Returns:
        The values, and what is wrong with single keys and scalars. A scalar that cannot be read is None.

    Raises:
        RunFileError: it is not YAML.
    """
    reader = _TreeReader(source)
    try:
        root = yaml.compose(text, Loader=CoreSchemaLoader)
    except yaml.MarkedYAMLError as error:
        raise RunFileError(_syntax_problem(error, source)) from error
    except yaml.YAMLError as error:
        raise RunFileError(Problem("the text", f"is not YAML: {' '.join(str(error).split())}", where=source)) from error
    except RecursionError as error:
        raise RunFileError(_too_deep(source)) from error
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode: https://github.com/yaml/pyyaml/issues/412
        raise RunFileError(Problem("the text", f"is not YAML: {error}", "check the escapes in double quotes", source)) from error
    value = None if root is None else reader.value(root, ())
    return SourcedTree(value, reader.origins, reader.unreadable), reader.problems


class _TreeReader:
    """Turns the nodes of one document into values."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self.unreadable: set[KeyPath] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:  # also ends an alias that contains itself
            raise RunFileError(_too_deep(self._where(node)))
        if len(self.origins) >= MAX_VALUES:  # aliases of aliases grow without bound
            raise RunFileError(Problem("the text", f"has more than {MAX_VALUES} values", "use fewer aliases", self.source))
        self.origins[path] = Origin("file", node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, "a key", "is not plain text", "quote it")
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in result:
                self._refuse(key_node, dotted((*path, key)), f"is given twice, first in line {lines[key]}", "drop one of the two")
                continue
            lines[key] = line
            result[key] = self.value(value_node, (*path, key))
            self.origins[(*path, key)] = Origin("file", line)
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            return scalar(node.tag, node.value)
        except (ValueError, UnicodeEncodeError) as error:
            self.unreadable.add(path)
            self._refuse(node, with_value(dotted(path) or "the value", node.value), f"cannot be read: {error}")
            return None

    def _refuse(self, node: yaml.Node, subject: str, rule: str, remedy: str = "") -> None:
        self.problems.append(Problem(subject, rule, remedy, self._where(node)))

    def _where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"


def scalar(tag: str, text: str) -> str | int | float | bool | None:
    """The value of a scalar.

    Raises:
        ValueError: the text is not of the tag's type, or the tag is not of the core schema.
    """
    if tag == STR:
        text.encode("utf-8")  # an escaped surrogate is no text
        return text
    if tag == NULL:
        return None
    if tag == BOOL and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if tag == INT:
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if tag == FLOAT:
        return NON_FINITE[text.lower().replace(".", "")] if text.lower().lstrip("+-").startswith((".i", ".n")) else float(text)
    raise ValueError(f"the tag {tag} is not one of str, int, float, bool and null")


def resolve_plain(text: str) -> str | int | float | bool | None:
    """What a text means where it stands without quotes."""
    for tag, pattern in CoreSchemaLoader.yaml_implicit_resolvers.get(text[:1], []):
        if pattern.match(text):
            return scalar(tag, text)
    return text


def _syntax_problem(error: yaml.MarkedYAMLError, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}" if mark else source
    column = f" at column {mark.column + 1}" if mark else ""
    context = f" ({error.context})" if error.context else ""
    return Problem("the text", f"is not YAML: {error.problem}{column}{context}", where=where)


def _too_deep(where: str) -> Problem:
    return Problem("the text", f"is nested deeper than {MAX_DEPTH} levels", "a run file needs a handful", where)
