from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from rayapp.metrics.record import EventRecord, StepRecord, ValidationRecord
from rayapp.report.page import run_page

VOID = {"meta"}
HOSTILE = '<img src=x onerror="alert(1)">&\'"</script>'


class Page(HTMLParser):
    """The elements of a page, the text of each, and whether every one was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def text_of(self, tag: str) -> list[str]:
        return [text for element, text in self.texts if element == tag]

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            element == tag and all((found.get(key.rstrip("_")) or "") == value for key, value in attributes.items())
            for element, found in self.elements
        )


def step(number: int, **figures) -> dict:
    plausible = {
        "time": 1.79e9 + number,
        "step": number,
        "loss": 8.0 - number / 10,
        "grad_norm": 1.5,
        "learning_rate": 2e-3,
        "tokens_per_s": 5400.0,
        "samples_per_s": 21.0,
        "step_s": 1.5,
        "data_wait_share": 0.01,
        "checkpoint_share": 0.0,
        "mfu": None,
        "mfu_causal": None,
        "memory_bytes": 2**30,
        "peak_memory_bytes": 2**31,
        "num_valid_tokens": 8192,
        "applied": True,
        "skipped_steps": 0,
    }
    return StepRecord(**{**plausible, **figures}).model_dump(mode="json")


def validation(number: int, loss: float) -> dict:
    record = ValidationRecord(time=0.0, step=number, loss=loss, perplexity=123.456, seconds=1.0, num_valid_tokens=1, elapsed_s=72.0)
    return record.model_dump(mode="json")


def event(detail: str) -> dict:
    return EventRecord(time=0.0, step=None, event="restart", detail=detail).model_dump(mode="json")


def test_the_page_has_its_figures_and_one_plot_a_quantity(train_document):
    records = [step(number) for number in range(1, 21)] + [validation(10, 7.25), validation(20, 6.5), event("worker 1 died")]
    page = Page(run_page(records, train_document(), "quickstart / 20261201-k3f9"))
    assert page.open == []
    assert page.text_of("h1") == ["quickstart / 20261201-k3f9"]
    assert page.text_of("h2") == ["Loss", "Throughput", "Memory", "Learning rate", "Gradient norm"]
    assert page.count("svg", class_="plot", role="img") == 5
    assert page.count("g", class_="strip") == 5 * 20
    assert page.count("circle", class_="dot series-1") >= 2, "validations are marked"
    assert {"4.810", "4.720", "71.9k", "59.8 %", "85.0 GiB"} <= set(page.text_of("dd"))
    assert {"7.2500", "6.5000", "123.46", "1m12s", "worker 1 died"} <= set(page.text_of("td"))


def test_it_needs_nothing_from_outside(train_document):
    text = run_page([step(1), step(2)], train_document(), "run")
    without_namespaces = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=|<script|<link|<iframe", without_namespaces)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("field", ["run_dir", "strategy", "peak_flops_source"])
def test_hostile_texts_stay_texts(train_document, field):
    summary = train_document(**{field: HOSTILE, "mfu": None})
    page = Page(run_page([step(1), step(2), event(HOSTILE)], summary, HOSTILE))
    assert page.count("img") == page.count("script") == 0
    assert page.text_of("h1") == page.text_of("title")[:1] == [HOSTILE]
    assert HOSTILE in page.text_of("td")


def test_shares_are_weighed_by_the_steps_seconds(train_document):
    records = [step(1, step_s=1.0, data_wait_share=0.5), step(2, step_s=3.0, data_wait_share=0.1, communication_share=0.25)]
    figures = Page(run_page(records, train_document(), "run")).text_of("dd")
    assert "20.0 %" in figures, "(0.5 x 1 + 0.1 x 3) / 4"
    assert "25.0 %" in figures


def test_a_run_without_records_or_figures_has_a_page_too(train_document):
    unknown = train_document(
        loss_first=None, loss_last=None, validation_loss=None, tokens_per_s=None, mfu=None, mfu_causal=None, target_loss_step=None, steps=0
    )
    page = Page(run_page([], unknown, "run"))
    assert page.text_of("text") == ["no figures"] * 5
    assert page.text_of("summary") == ["Summary"]


def test_a_step_that_was_not_finite_breaks_the_line(train_document):
    records = [step(1), step(2), step(3, loss=float("nan"), applied=False), step(4), step(5)]
    page = Page(run_page(records, train_document(), "run"))
    assert page.count("polyline", class_="line series-0") == 2 + 4, "two pieces of loss, one line for each other plot"
