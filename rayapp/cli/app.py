"""The verbs, put together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rayapp import __version__
from rayapp.cli.config import config
from rayapp.cli.export import export
from rayapp.cli.generate import generate
from rayapp.cli.prepare import prepare
from rayapp.cli.schema import schema
from rayapp.cli.train import NEWEST, train

app = typer.Typer(
    name="rayapp",
    help="Train, tune and serve large language models on a Ray cluster from one file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (prepare, train, export, generate, config, schema):
    app.command()(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rayapp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Train, tune and serve large language models on a Ray cluster from one file."""


def main() -> None:
    """Run the command line. Exits with 0 when done, 2 when the input is wrong, 1 when it failed, 130 on Ctrl-C."""
    app(args=spell_out_resume(sys.argv[1:]), prog_name="rayapp")


def spell_out_resume(arguments: Sequence[str]) -> list[str]:
    """``--resume`` without a run id as ``--resume=latest``: typer has no option whose value may be left out.

    What follows it is a run id unless it is another option, an override or a run file.
    """
    spelled: list[str] = []
    for index, argument in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        bare = argument == "--resume" and "--" not in spelled and not _is_run_id(following)
        spelled.append(f"--resume={NEWEST}" if bare else argument)
    return spelled


def _is_run_id(argument: str) -> bool:
    return not (argument.startswith("-") or any(mark in argument for mark in "=/") or argument.endswith((".yaml", ".yml")))
