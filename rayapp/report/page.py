"""One HTML page for a run, with everything it needs inside: it works from a mail or a bucket, without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rayapp.documents import TrainDocument
from rayapp.report.plot import Point, Series, line_plot
from rayapp.report.quantity import format_bytes, format_count, format_duration, format_share
from rayapp.report.table import NOT_KNOWN, summary_rows

Record = Mapping[str, Any]
"""One line of `metrics.jsonl`, as a JSON object."""

GIB = 2**30
MIB = 2**20
WIDE, NARROW = 1080, 530


@dataclass(frozen=True)
class _Figure:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class _Panel:
    title: str
    svg: Markup
    legend: tuple[str, ...]
    wide: bool


def run_page(records: Iterable[Record], summary: TrainDocument, title: str) -> str:
    """The page.

    Args:
        records: the lines of `metrics.jsonl`, in order.
        summary: what the run came to.
        title: the heading, such as the run's family and name.
    """
    by_kind: dict[str, list[Record]] = {"step": [], "validation": [], "checkpoint": [], "event": []}
    for record in records:
        by_kind[record["kind"]].append(record)
    steps, validations = by_kind["step"], by_kind["validation"]
    template = files("rayapp.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title,
        subtitle=_subtitle(summary),
        figures=[*_figures(summary), *_shares(steps)],
        panels=_panels(steps, validations),
        events=[{"step": _or_dash(e["step"]), "name": e["event"], "detail": e["detail"]} for e in by_kind["event"]],
        validations=[_validation_row(validation) for validation in validations],
        rows=summary_rows(summary),
    )


def _subtitle(summary: TrainDocument) -> str:
    ranks = "rank" if summary.world_size == 1 else "ranks"
    return f"{summary.steps:,} steps · {summary.strategy} on {summary.world_size} {ranks} · {summary.run_dir}"


def _figures(summary: TrainDocument) -> list[_Figure]:
    first = "" if summary.loss_first is None else f"{summary.loss_first:.3f} at the first step"
    reached = "" if summary.target_loss_step is None else f"target reached at step {summary.target_loss_step:,}"
    causal = "" if summary.mfu_causal is None else f"causal {format_share(summary.mfu_causal)}"
    return [
        _Figure("Validation loss", _or_dash(summary.validation_loss, ".3f"), reached),
        _Figure("Training loss", _or_dash(summary.loss_last, ".3f"), first),
        _Figure("Tokens per second", NOT_KNOWN if summary.tokens_per_s is None else format_count(summary.tokens_per_s)),
        _Figure("MFU", NOT_KNOWN if summary.mfu is None else format_share(summary.mfu), causal or "peak not known"),
        _Figure("Peak memory", format_bytes(summary.peak_memory_bytes), f"average {format_bytes(summary.average_memory_bytes)}"),
        _Figure("Skipped steps", f"{summary.skipped_steps:,}", f"{summary.restarts:,} restart{'s' * (summary.restarts != 1)}"),
    ]


def _shares(steps: Sequence[Record]) -> list[_Figure]:
    """Where the steps' time went: means that weigh a step by its seconds."""
    figures = [("Waiting for data", "data_wait_share", "of the steps' time"), ("Communication", "communication_share", "of profiled steps")]
    return [_Figure(label, NOT_KNOWN if share is None else format_share(share), note) for label, share, note in _weighed(steps, figures)]


def _weighed(steps: Sequence[Record], figures: Sequence[tuple[str, str, str]]) -> Iterable[tuple[str, float | None, str]]:
    for label, field, note in figures:
        known = [(step[field], step["step_s"]) for step in steps if step[field] is not None]
        seconds = sum(step_s for _, step_s in known)
        yield label, sum(share * step_s for share, step_s in known) / seconds if seconds else None, note


def _panels(steps: Sequence[Record], validations: Sequence[Record]) -> list[_Panel]:
    loss = [Series("training", _points(steps, "loss"))]
    if validations:
        loss.append(Series("validation", _points(validations, "loss"), marked=True))
    rate, rate_unit = _thousands(steps)
    unit_bytes, memory_unit = _memory_unit(steps)
    memory = [
        Series("average over ranks", _points(steps, "memory_bytes", unit_bytes)),
        Series("peak, largest rank", _points(steps, "peak_memory_bytes", unit_bytes)),
    ]
    return [
        _panel("Loss", loss, "nats", wide=True),
        _panel("Throughput", [Series("tokens per second", _points(steps, "tokens_per_s", rate))], rate_unit, from_zero=True),
        _panel("Memory", memory, memory_unit, from_zero=True),
        _panel("Learning rate", [Series("learning rate", _points(steps, "learning_rate"))], "learning rate", from_zero=True),
        _panel("Gradient norm", [Series("gradient norm", _points(steps, "grad_norm"))], "2-norm before clipping", from_zero=True),
    ]


def _panel(title: str, series: Sequence[Series], unit: str, from_zero: bool = False, wide: bool = False) -> _Panel:
    svg = line_plot(title, series, x_label="step", y_label=unit, from_zero=from_zero, width=WIDE if wide else NARROW)
    return _Panel(title, Markup(svg), tuple(s.name for s in series), wide)  # line_plot escapes every text it is given


def _points(records: Sequence[Record], field: str, unit: float = 1.0) -> list[Point]:
    return [(record["step"], None if record[field] is None else record[field] / unit) for record in records]


def _thousands(steps: Sequence[Record]) -> tuple[float, str]:
    fastest = max((step["tokens_per_s"] for step in steps), default=0.0)
    return (1000.0, "thousand tokens/s") if fastest >= 10_000 else (1.0, "tokens/s")


def _memory_unit(steps: Sequence[Record]) -> tuple[float, str]:
    largest = max((step["peak_memory_bytes"] for step in steps), default=0)
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def _validation_row(validation: Record) -> dict[str, str]:
    return {
        "step": f"{validation['step']:,}",
        "loss": _or_dash(validation["loss"], ".4f"),
        "perplexity": _or_dash(validation["perplexity"], ",.2f"),
        "elapsed": format_duration(validation["elapsed_s"]),
    }


def _or_dash(value: float | None, form: str = ",") -> str:
    return NOT_KNOWN if value is None else format(value, form)
