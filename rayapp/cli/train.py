"""`rayapp train`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

import typer
from rich.console import Group

from rayapp.cli.arguments import AddressOption, JsonOption, OverridesArgument, RunFileArgument
from rayapp.cli.closing import closing, export_command, generate_command, resume_command
from rayapp.cli.console import Progress, run_verb
from rayapp.config.load import load_run_file
from rayapp.documents import TrainDocument
from rayapp.report.table import summary_table

NEWEST = "latest"


def train(
    file: RunFileArgument,
    overrides: OverridesArgument = None,
    *,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN_ID]", help="Continue a run; without an id, the newest of the family.", show_default=False),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The new run's name in its family. Without it: the time.", show_default=False)
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the model and export it as a Hugging Face folder. What is missing of the data is prepared first."""
    if resume is not None and run_id is not None:
        raise typer.BadParameter("goes with a new run, not with --resume", param_hint="--run-id")

    def work(progress: Progress) -> TrainDocument:
        loaded = load_run_file(file, overrides or ())
        from rayapp.train.launch import train as launch

        return launch(loaded, resume=resume, run_id=run_id, address=address, report=progress)

    run_verb(work, lambda document: _show(document, str(file), overrides or ()), as_json=as_json)


def _show(document: TrainDocument, file: str, overrides: Sequence[str]) -> Group:
    return Group(summary_table(document), closing(document.run_dir, commands_to_try(document, file, overrides)))


def commands_to_try(document: TrainDocument, file: str, overrides: Sequence[str]) -> list[str]:
    """Complete a prompt, train on, export elsewhere: with the same overrides, so that each finds the run."""
    run_id = PurePosixPath(document.run_dir.partition("?")[0]).name
    return [
        generate_command(file, overrides),
        resume_command(file, overrides, run_id, 2 * document.steps),
        export_command(document.run_dir),
    ]
