"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The run file, such as jobs/quickstart.yaml.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDES", help="section.key=value, any number of them. They win over the file.", show_default=False),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster, or local for one of its own. Without it: RAY_ADDRESS, a cluster started here, else one of its own.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]
