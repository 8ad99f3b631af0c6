"""`rayapp config`"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from rayapp.cli.arguments import AddressOption, JsonOption, OverridesArgument, RunFileArgument
from rayapp.cli.console import Progress, run_verb
from rayapp.cluster.connect import connected
from rayapp.cluster.inventory import ClusterInventory, local_inventory, read_inventory
from rayapp.config.load import LoadedRunFile, load_run_file
from rayapp.config.provenance import dotted, leaves
from rayapp.config.schema import RunFile
from rayapp.documents import ConfigDocument, ConfigValue


def config(
    file: RunFileArgument,
    overrides: OverridesArgument = None,
    *,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved run file and where each value comes from. Without --address, for this machine."""

    def work(progress: Progress) -> ConfigDocument:
        loaded = load_run_file(file, overrides or ())
        from rayapp.preflight import derive

        resolved, notes = derive(loaded, _inventory(address))
        return config_document(loaded, resolved, notes)

    run_verb(work, config_table, as_json=as_json)


def config_document(loaded: LoadedRunFile, resolved: RunFile, notes: Mapping[str, str]) -> ConfigDocument:
    """Every value of a resolved run file with its origin.

    Args:
        loaded: the run file as it was read.
        resolved: the same with the open fields filled in.
        notes: for each field that was filled in, by dotted key, how.
    """
    return ConfigDocument(values=[_value(loaded, dotted(path), leaf, notes) for path, leaf in leaves(resolved.model_dump(mode="json"))])


def config_table(document: ConfigDocument) -> Table:
    """A line for each value, a gap between sections."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("key", "value", "origin"):
        table.add_column(title, overflow="fold")
    section = ""
    for entry in document.values:
        if section and entry.key.partition(".")[0] != section:
            table.add_row()
        section = entry.key.partition(".")[0]
        value = entry.value if isinstance(entry.value, str) else json.dumps(entry.value, ensure_ascii=False)
        origin = entry.origin + (f", {entry.note}" if entry.note else "")
        table.add_row(entry.key, Text(value), Text(origin), style="dim" if entry.origin == "default" else "")
    return table


def _value(loaded: LoadedRunFile, key: str, value: Any, notes: Mapping[str, str]) -> ConfigValue:
    if key in notes:
        return ConfigValue(key=key, value=value, origin="derived", note=notes[key])
    origin = loaded.origins.get(key)
    if origin is None or origin.kind == "default":
        return ConfigValue(key=key, value=value, origin="default")
    return ConfigValue(key=key, value=value, origin=origin.kind, note=loaded.where(key) or "")


def _inventory(address: str | None) -> ClusterInventory:
    if address is None:
        return local_inventory()
    with connected(address):
        return read_inventory()
