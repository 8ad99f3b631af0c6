"""`rayapp export`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rayapp.cli.arguments import JsonOption
from rayapp.cli.console import Progress, run_verb
from rayapp.documents import ExportDocument
from rayapp.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from rayapp.storage import Location

DEFAULT_STORAGE = "runs"


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or URI, or NAME/RUN_ID under ./runs.", show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder or URI to write to.", show_default=False)],
    *,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The checkpoint's step. Without it: the newest.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The type of the weights. Without it: the run file's.", metavar="TYPE", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a run's checkpoint as a Hugging Face folder."""

    def work(progress: Progress) -> ExportDocument:
        run_dir = find_run(run)
        from rayapp.checkpoint.export import export_run
        from rayapp.storage import open_location

        return export_run(run_dir, open_location(out), step, dtype)

    run_verb(work, _show, as_json=as_json)


def find_run(run: str) -> Location:
    """The folder of a run that the user named.

    Raises:
        CheckpointError: there is none.
    """
    from rayapp.storage import open_location

    candidates = [open_location(run)]
    if "://" not in run and not Path(run).is_absolute():
        candidates.append(open_location(f"{DEFAULT_STORAGE}/{run}"))
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " nor ".join(candidate.uri for candidate in candidates)
    raise CheckpointError(Problem(f"run {run}", f"is not there: {looked} is no folder", "name a run's folder, such as runs/NAME/RUN_ID"))


def _show(document: ExportDocument) -> Text:
    weights = f"{document.num_parameters:,} weights in {document.dtype}"
    return Text(f"Exported step {document.step:,} of {document.run_dir} to {document.model_dir} ({weights})")
