from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from rayapp.report.table import memory_table, summary_table


def lines(table: Table) -> list[str]:
    console = Console(file=StringIO(), width=120, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()


def line_of(table: Table, label: str) -> str:
    (line,) = [line for line in lines(table) if label in line]
    return line


def test_the_summary_says_every_figure(train_document):
    table = summary_table(train_document())
    assert "zero-2, 8 ranks" in line_of(table, "strategy")
    assert "8.410 to 4.720" in line_of(table, "first to last")
    assert "71.9k" in line_of(table, "tokens/s")
    assert "59.8 %, causal 57.1 % (peak: 989 TFLOP/s" in line_of(table, "MFU")
    assert "85.0 GiB, 46.0 GiB" in line_of(table, "memory")
    assert "step 900, after 2h05m" in line_of(table, "target loss")


def test_what_is_not_known_is_a_dash_with_its_reason(train_document):
    unknown = train_document(mfu=None, mfu_causal=None, peak_flops_source="no peak for cpu", tokens_per_s=None, target_loss_step=None)
    table = summary_table(unknown)
    assert "– (no peak for cpu)" in line_of(table, "MFU")
    assert line_of(table, "tokens/s").rstrip().endswith("–")
    assert not any("target" in line for line in lines(table))


def test_names_are_not_read_as_markup(train_document):
    assert "/data/[red]runs[/]" in line_of(summary_table(train_document(run_dir="/data/[red]runs[/]", model_dir=None)), "runs")


def test_memory_adds_up():
    table = memory_table({"weights": 2 * 2**30, "[bold]optimizer": 6 * 2**30}, capacity_bytes=16 * 2**30)
    assert "2.00 GiB" in line_of(table, "weights")
    assert "25.0 %" in line_of(table, "weights")
    assert "75.0 %" in line_of(table, "[bold]optimizer")
    assert "8.00 GiB" in line_of(table, "total")
    assert "50.0 % used" in line_of(table, "device")


def test_memory_of_nothing():
    assert "0 B" in line_of(memory_table({}), "total")
