"""What a verb writes: its result on stdout and nothing else there; progress, logs and errors on stderr."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from rayapp.documents import ErrorDocument
from rayapp.errors import InputError, RayappError

INTERRUPTED_STATUS = 130
PIPED_WIDTH = 160

DocumentT = TypeVar("DocumentT", bound=BaseModel)

logger = logging.getLogger(__name__)


def run_verb(work: Callable[[Progress], DocumentT], show: Callable[[DocumentT], RenderableType], *, as_json: bool) -> None:
    """Do a verb's work and write its result.

    Args:
        work: takes the sink for lines of progress and returns the document.
        show: the document for people.
        as_json: write the document itself, or the ``ErrorDocument`` of a failure.

    Raises:
        typer.Exit: the work failed; with the exit status.
    """
    with claimed_stdout() as stdout:
        failure: BaseException | None = None
        with Progress(Console(stderr=True)) as progress:
            _send_logs_to(progress.console)
            try:
                document = work(progress)
            except (RayappError, KeyboardInterrupt) as error:
                failure = error
            except Exception as error:
                logger.exception("This is not one of rayapp's own errors")
                failure = error
        if failure is not None:
            _write_failure(failure, stdout, as_json=as_json)
            raise typer.Exit(exit_status(failure))
        if as_json:
            stdout.write(document.model_dump_json(indent=2) + "\n")
        else:
            Console(file=stdout, width=None if stdout.isatty() else PIPED_WIDTH, highlight=False).print(show(document))


def exit_status(failure: BaseException) -> int:
    """2 where the input is wrong, 130 on Ctrl-C, else 1."""
    if isinstance(failure, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    return failure.exit_status if isinstance(failure, RayappError) else 1


def sentences(failure: BaseException) -> list[str]:
    """What went wrong, one line each."""
    if isinstance(failure, InputError):
        return [str(problem) for problem in failure.problems]
    if isinstance(failure, KeyboardInterrupt):
        return ["interrupted"]
    return [str(failure) or type(failure).__name__]


def _write_failure(failure: BaseException, stdout: TextIO, *, as_json: bool) -> None:
    lines = sentences(failure)
    for line in lines:
        Console(stderr=True).print(f"error: {line}", markup=False, highlight=False, soft_wrap=True, style="red")
    if as_json:
        stdout.write(ErrorDocument(error=type(failure).__name__, problems=lines).model_dump_json(indent=2) + "\n")


@contextmanager
def claimed_stdout() -> Iterator[TextIO]:
    """The real stdout for the result alone: inside the block, whatever this process or one that it starts prints goes to stderr."""
    stdout = sys.stdout
    stdout.flush()
    try:
        descriptor = stdout.fileno()
    except io.UnsupportedOperation:  # a stream in memory, which no other process can write to
        descriptor = None
    kept = None if descriptor is None else os.dup(descriptor)
    sys.stdout = sys.stderr
    try:
        if descriptor is None or kept is None:
            yield stdout
        else:
            os.dup2(sys.stderr.fileno(), descriptor)
            with open(kept, "w", encoding=stdout.encoding, errors="backslashreplace", closefd=False) as stream:
                yield stream
    finally:
        sys.stdout = stdout
        if descriptor is not None and kept is not None:
            os.dup2(kept, descriptor)
            os.close(kept)


class Progress:
    """A sink for lines of progress.

    On a terminal a line replaces the one before it if both begin with the same word, as the lines of a running training do.
    Elsewhere each is a line of its own.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._shown = ""

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __call__(self, line: str) -> None:
        if self._live is None:
            self._print(line)
            return
        if line.partition(" ")[0] != self._shown.partition(" ")[0]:
            self._keep()
        self._shown = line
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._keep()

    def _keep(self) -> None:
        """Leave the shown line above those that follow."""
        if self._shown:
            self._print(self._shown)
        self._shown = ""

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _send_logs_to(console: Console) -> None:
    """rayapp's messages from INFO, the libraries' from WARNING, both on stderr."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rayapp").setLevel(logging.INFO)
