"""Where every value of a run file comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

KeyPath = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""

MAX_SHOWN = 80


@dataclass(frozen=True)
class Origin:
    """Who set a value.

    Attributes:
        kind: the file, an override of the command line, or the schema's default.
        line: the file's line, counted from 1; None for the other kinds.
    """

    kind: Literal["file", "override", "default"]
    line: int | None = None


@dataclass
class SourcedTree:
    """What a YAML text says, as plain values, and the origin of each of them.

    Attributes:
        value: a scalar, or nested dicts and lists.
        origins: by path, of mappings and lists too. The whole tree has the empty path.
        unreadable: paths of scalars that stand as None because they could not be read.
    """

    value: Any
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    unreadable: set[KeyPath] = field(default_factory=set)

    def nearest_origin(self, path: KeyPath) -> Origin | None:
        """The origin of a value, or of the closest mapping or list around it where the value itself is absent."""
        for length in range(len(path), -1, -1):
            if origin := self.origins.get(path[:length]):
                return origin
        return None

    def replace(self, path: KeyPath, value: Any) -> None:
        """Note that an override set a value, with all that is inside it."""
        stale = [known for known in self.origins if known[: len(path)] == path]
        for known in stale:
            del self.origins[known]
        for inner in paths_in(value):
            self.origins[path + inner] = Origin("override")


def dotted(path: KeyPath) -> str:
    """``("data", "source", 0, "weight")`` as ``data.source.0.weight``."""
    return ".".join(str(key) for key in path)


def with_value(name: str, value: Any) -> str:
    """``name=value`` for a message, the value as YAML would have it, shortened to one line."""
    plain = isinstance(value, str) and value.strip() == value != ""
    text = value if plain else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return f"{name}={text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + '...'}"


def paths_in(value: Any) -> Iterator[KeyPath]:
    """The paths of a tree's values, the empty one of the tree itself included."""
    yield ()
    for key, child in _children(value):
        for path in paths_in(child):
            yield (key, *path)


def leaves(value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The values that hold no further keys. A list of scalars is one value, and so is an empty mapping or list."""
    children = _children(value)
    if not children or (isinstance(value, list | tuple) and not any(_children(child) for _, child in children)):
        yield (), value
        return
    for key, child in children:
        for path, leaf in leaves(child):
            yield (key, *path), leaf


def _children(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return []
