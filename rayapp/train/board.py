"""Carries what workers tell to the driver."""

from __future__ import annotations

import ray

from rayapp.errors import RayappError


@ray.remote(num_cpus=0)
class Board:
    """Keeps the lines that were told until the driver takes them."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._starts = 0
        self._refusal: RayappError | None = None

    def started(self) -> None:
        """A worker group is up and training begins."""
        self._starts += 1

    def tell(self, line: str) -> None:
        """A line of progress. A line replaces an untaken one that begins with the same word, so that a slow reader misses no news."""
        if self._lines and self._lines[-1].partition(" ")[0] == line.partition(" ")[0] == "step":
            self._lines[-1] = line
        else:
            self._lines.append(line)

    def refuse(self, error: RayappError) -> None:
        """A rank cannot go on, and starting again would not help. Its peers may be waiting for it, so the driver ends the run."""
        self._refusal = self._refusal or error

    def take(self) -> tuple[list[str], int, RayappError | None]:
        """The lines since the last call, how often a worker group has started, and why a rank refused the run."""
        lines, self._lines = self._lines, []
        return lines, self._starts, self._refusal
