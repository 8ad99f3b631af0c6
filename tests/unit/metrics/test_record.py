from __future__ import annotations

import json
import math

import pytest
from pydantic import BaseModel, ValidationError

from rayapp.metrics.record import CheckpointRecord, EventRecord, StepRecord, ValidationRecord, parse_record, perplexity


def refuse(literal: str) -> None:
    raise AssertionError(f"{literal} is not JSON")


def test_a_step_survives_the_way_through_json(step_record):
    record = step_record(7, communication_share=0.25)
    line = record.model_dump_json()
    assert json.loads(line)["kind"] == "step"
    assert parse_record(line) == record


@pytest.mark.parametrize(
    "record",
    [
        ValidationRecord(time=1.5, step=10, loss=5.0, perplexity=math.exp(5.0), seconds=2.0, num_valid_tokens=100, elapsed_s=30.0),
        CheckpointRecord(time=2.5, step=10, seconds=0.5, bytes=123),
        EventRecord(time=3.5, step=None, event="restart", detail='worker 1 "died"\n'),
    ],
)
def test_every_kind_is_one_line_and_comes_back_as_itself(record):
    line = record.model_dump_json()
    assert "\n" not in line
    assert parse_record(line) == record


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_named(step_record, figure):
    record = step_record(3, loss=figure, applied=False)
    line = json.loads(record.model_dump_json(), parse_constant=refuse)
    assert line["loss"] is None
    assert line["non_finite"] == ["loss"]
    assert line["applied"] is False
    assert parse_record(json.dumps(line)) == record


def test_null_because_unknown_is_not_named(step_record):
    record = step_record(mfu=None)
    assert record.mfu is None
    assert record.non_finite == ()


def test_several_figures_that_are_not_finite_are_all_named(step_record):
    assert step_record(loss=math.nan, grad_norm=math.inf).non_finite == ("loss", "grad_norm")


def test_a_figure_that_must_exist_cannot_be_nan(step_record):
    with pytest.raises(ValidationError, match="step_s"):
        step_record(step_s=math.nan)


def test_an_unknown_field_is_refused(step_record):
    with pytest.raises(ValidationError, match="los"):
        step_record(los=1.0)


@pytest.mark.parametrize("line", ['{"kind": "step"', '{"kind": "nothing"}', "[]", ""])
def test_what_is_not_a_record_is_refused(line):
    with pytest.raises(ValidationError):
        parse_record(line)


@pytest.mark.parametrize("model", [StepRecord, ValidationRecord, CheckpointRecord, EventRecord])
def test_every_field_says_what_it_is(model: type[BaseModel]):
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_perplexity():
    assert perplexity(0.0) == 1.0
    assert perplexity(2.0) == pytest.approx(7.38905609893065)
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
