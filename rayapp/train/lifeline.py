"""What connects a worker with whoever started it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Lifeline(Protocol):
    """Takes news of one rank, and says whether it should stop."""

    def tell(self, line: str) -> None:
        """A line of progress, for people."""

    def mark(self, doing: str, step: int) -> None:
        """What this rank begins to do. As long as marks change it makes progress.

        Args:
            doing: in a few words: `training step`.
            step: steps that the run has behind it.
        """

    @property
    def stop_requested(self) -> bool:
        """True if the run should be saved and ended after this step."""


class LocalLifeline:
    """For a worker that nobody watches.

    Args:
        tell: takes lines of progress.
        stop_at: the step after which the run is asked to stop; None: never.
    """

    def __init__(self, tell: Callable[[str], None], stop_at: int | None = None) -> None:
        self._tell, self._stop_at, self._step = tell, stop_at, 0

    def tell(self, line: str) -> None:
        """Hand the line on."""
        self._tell(line)

    def mark(self, doing: str, step: int) -> None:
        """Remember the step."""
        self._step = step

    @property
    def stop_requested(self) -> bool:
        """True from the chosen step on."""
        return self._stop_at is not None and self._step >= self._stop_at
