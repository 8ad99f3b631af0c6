"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from rayapp.documents import TrainDocument
from rayapp.report.quantity import format_bytes, format_count, format_duration, format_share

NOT_KNOWN = "–"


def summary_rows(summary: TrainDocument) -> list[tuple[str, str]]:
    """What a run came to: labels and values."""
    rows = [
        ("run", summary.run_dir),
        ("model", summary.model_dir or NOT_KNOWN),
        ("strategy", f"{summary.strategy}, {summary.world_size} {'rank' if summary.world_size == 1 else 'ranks'}"),
        ("steps", f"{summary.steps:,}"),
        ("loss, first to last step", f"{_loss(summary.loss_first)} to {_loss(summary.loss_last)}"),
        ("validation loss", _loss(summary.validation_loss)),
        ("tokens/s", NOT_KNOWN if summary.tokens_per_s is None else format_count(summary.tokens_per_s)),
        ("MFU", _mfu(summary)),
        ("memory, peak and average", f"{format_bytes(summary.peak_memory_bytes)}, {format_bytes(summary.average_memory_bytes)}"),
        ("skipped steps", f"{summary.skipped_steps:,}"),
        ("restarts", f"{summary.restarts:,}"),
    ]
    if summary.target_loss_step is not None and summary.target_loss_s is not None:
        rows.append(("target loss reached", f"step {summary.target_loss_step:,}, after {format_duration(summary.target_loss_s)}"))
    return rows


def summary_table(summary: TrainDocument) -> Table:
    """What a run came to."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in summary_rows(summary):
        table.add_row(label, Text(value))
    return table


def memory_table(memory_bytes: Mapping[str, int], capacity_bytes: int | None = None) -> Table:
    """The memory that one rank needs, by kind.

    Args:
        memory_bytes: bytes of each kind.
        capacity_bytes: what the device has; None where it is not known.
    """
    total_bytes = sum(memory_bytes.values())
    table = Table("memory of one rank", title_justify="left")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    for kind, num_bytes in memory_bytes.items():
        table.add_row(Text(kind), format_bytes(num_bytes), _share_of(num_bytes, total_bytes))
    table.add_section()
    table.add_row("total", format_bytes(total_bytes), _share_of(total_bytes, total_bytes), style="bold")
    if capacity_bytes is not None:
        table.add_row("device", format_bytes(capacity_bytes), f"{_share_of(total_bytes, capacity_bytes)} used")
    return table


def _share_of(part: int, whole: int) -> str:
    return format_share(part / whole) if whole else NOT_KNOWN


def _loss(loss: float | None) -> str:
    return NOT_KNOWN if loss is None else f"{loss:.3f}"


def _mfu(summary: TrainDocument) -> str:
    if summary.mfu is None or summary.mfu_causal is None:
        return f"{NOT_KNOWN} ({summary.peak_flops_source})"
    return f"{format_share(summary.mfu)}, causal {format_share(summary.mfu_causal)} (peak: {summary.peak_flops_source})"
