"""`rayapp prepare`"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from rayapp.cli.arguments import AddressOption, JsonOption, OverridesArgument, RunFileArgument
from rayapp.cli.console import Progress, run_verb
from rayapp.cluster.connect import connected
from rayapp.config.load import load_run_file
from rayapp.documents import PrepareDocument


def prepare(
    file: RunFileArgument,
    overrides: OverridesArgument = None,
    *,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn the corpus into shards of tokens. Data that is there already is used as it is."""

    def work(progress: Progress) -> PrepareDocument:
        loaded = load_run_file(file, overrides or ())
        from rayapp.data.prepare import find_prepared
        from rayapp.data.prepare import prepare as prepare_data
        from rayapp.preflight.resolve import open_storage

        storage = open_storage(loaded)
        if (found := find_prepared(loaded.file, storage)) is not None:
            return found.document()
        with connected(address):
            return prepare_data(loaded.file, storage, progress).document()

    run_verb(work, prepare_table, as_json=as_json)


def prepare_table(document: PrepareDocument) -> Table:
    """What was prepared."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in sorted(document.dropped.items())) or "none"
    rows = {
        "data": document.data_dir + (" (was there already)" if document.reused else ""),
        "documents": f"{document.num_documents:,}",
        "rows to train on": f"{document.num_train_rows:,} ({document.num_train_tokens:,} tokens)",
        "rows held out": f"{document.num_validation_rows:,}",
        "vocabulary": f"{document.vocab_size:,}",
        "rows of the corpus left out": dropped,
    }
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table
