"""`rayapp train`"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from rayapp.cli.arguments import AddressOption, JsonOption, OverridesArgument, RunFileArgument
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

    run_verb(work, lambda document: closing(document, file, overrides or ()), as_json=as_json)


def closing(document: TrainDocument, file: Path, overrides: Sequence[str]) -> Group:
    """What the run came to, where everything lies, and what to try next."""
    places = {
        "metrics": f"{document.run_dir}/metrics.jsonl",
        "TensorBoard": f"tensorboard --logdir {shlex.quote(document.run_dir + '/tensorboard')}",
    }
    lines = [f"{label:<12} {place}" for label, place in places.items()]
    next_commands = ["", "Next:", *(f"  {command}" for command in commands_to_try(document, file, overrides))]
    return Group(summary_table(document), "", *(Text(line) for line in [*lines, *next_commands]))


def commands_to_try(document: TrainDocument, file: Path, overrides: Sequence[str]) -> list[str]:
    """Complete the prompt, train on, export elsewhere: with the same overrides, so that each finds the run."""
    run_id = PurePosixPath(document.run_dir).name
    others = [override for override in overrides if not override.startswith("train.num_steps=")]
    run_file = shlex.join([str(file), *overrides])
    return [
        f"rayapp generate {run_file} --prompt 'def '",
        f"rayapp train {shlex.join([str(file), *others, f'train.num_steps={2 * document.steps}'])} --resume {run_id}",
        f"rayapp export {shlex.quote(document.run_dir)} exported --dtype fp32",
    ]
