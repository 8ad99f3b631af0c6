"""`rayapp generate`"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from rayapp.cli.arguments import JsonOption, OverridesArgument, RunFileArgument
from rayapp.cli.closing import closing, config_command, export_command, generate_command
from rayapp.cli.console import Progress, run_verb
from rayapp.config.load import load_run_file
from rayapp.documents import GenerateDocument


def generate(
    file: RunFileArgument,
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="A text to complete. May be repeated.", show_default=False)],
    overrides: OverridesArgument = None,
    *,
    run: Annotated[
        str | None, typer.Option(metavar="ID", help="The run. Without it: the newest complete one of the family.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Complete prompts with the exported model of a run."""

    def work(progress: Progress) -> GenerateDocument:
        loaded = load_run_file(file, overrides or ())
        from rayapp.checkpoint.runs import RunFolder, newest_complete_run
        from rayapp.models.completion import complete
        from rayapp.storage import open_location

        storage = open_location(loaded.file.storage.path, retry_s=loaded.file.storage.retry_s)
        run_dir = newest_complete_run(storage, loaded.file.name, run)
        return complete(RunFolder(run_dir).model, prompt, loaded.file.generate)

    run_verb(work, lambda document: _show(document, str(file), overrides or ()), as_json=as_json)


def _show(document: GenerateDocument, file: str, overrides: Sequence[str]) -> Group:
    lines = [Text.assemble((completion.prompt, "bold"), completion.completion) for completion in document.completions]
    run_dir = re.sub(r"/model(?=\?|$)", "", document.model_dir)  # a URI's options stand behind it
    commands = [config_command(file, overrides), generate_command(file, [*overrides, "generate.temperature=1.0"]), export_command(run_dir)]
    return Group(*lines, closing(run_dir, commands))
