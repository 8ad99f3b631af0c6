"""`rayapp schema`"""

from __future__ import annotations

import json
from typing import Any

import typer

from rayapp.cli.arguments import JsonOption
from rayapp.config.schema import RunFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(as_json: JsonOption = False) -> None:
    """Print the JSON schema of a run file, with which an editor completes one. It is JSON with and without --json."""
    typer.echo(json.dumps(run_file_schema(), indent=None if as_json else 2))


def run_file_schema() -> dict[str, Any]:
    """The schema, with every field's description."""
    return {"$schema": DIALECT, **RunFile.model_json_schema()}
