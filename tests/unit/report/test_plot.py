from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.report.plot import Series, line_plot, thin, ticks

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series: Series, **options) -> ElementTree.Element:
    return ElementTree.fromstring(line_plot("Loss", series, x_label="step", y_label="nats", **options))


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.attrib["points"].split())]


def lines(svg: ElementTree.Element, index: int = 0) -> list[ElementTree.Element]:
    return [line for line in svg.iter(f"{SVG}polyline") if f"series-{index}" in line.attrib["class"]]


def titles(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter(f"{SVG}title")]


def tick_labels(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text") if text.attrib["class"] == "tick"]


def test_a_line_has_its_points_where_they_belong():
    svg = draw(Series("training", [(0, 0.0), (50, 10.0), (100, 5.0)]))
    (line,) = lines(svg)
    (x0, y0), (x1, y1), (x2, y2) = points(line)
    assert x1 - x0 == pytest.approx(x2 - x1), "the steps are equally far apart"
    assert y0 > y2 > y1, "y grows upwards"
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.2), "5 is halfway between 0 and 10"
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points(line))


def test_a_null_breaks_the_line_and_a_lone_point_is_a_dot():
    svg = draw(Series("training", [(1, 1.0), (2, 2.0), (3, None), (4, 4.0), (5, None), (6, 6.0), (7, 7.0), (8, 8.0)]))
    assert [len(points(line)) for line in lines(svg)] == [2, 3]
    strips = svg.findall(f"{SVG}g")
    assert len(strips) == 6, "one for each step that has a figure"
    assert len(svg.findall(f"{SVG}circle")) == 1


def test_hovering_says_the_figures_of_all_series_at_that_step():
    svg = draw(Series("training", [(10, 6.5), (20, 6.25)]), Series("validation", [(20, 6.125)], marked=True))
    assert titles(svg) == ["step 10\ntraining: 6.5", "step 20\ntraining: 6.25\nvalidation: 6.125"]


def test_strips_cover_the_plot_without_gaps():
    svg = draw(Series("training", [(0, 1.0), (10, 2.0), (100, 3.0)]))
    rects = [strip.find(f"{SVG}rect") for strip in svg.findall(f"{SVG}g")]
    edges = [(float(rect.attrib["x"]), float(rect.attrib["x"]) + float(rect.attrib["width"])) for rect in rects]
    assert all(end == pytest.approx(begin, abs=0.11) for (_, end), (begin, _) in pairwise(edges))


def test_many_points_become_few_and_no_spike_is_lost():
    values = [(step, 1.0) for step in range(1, 30_001)]
    values[12_344] = (12_345, 99.0)
    svg = draw(Series("training", values))
    (line,) = lines(svg)
    assert len(points(line)) == 300
    assert len(svg.findall(f"{SVG}g")) == 300
    assert any("99" in title for title in titles(svg))
    (band,) = svg.findall(f"{SVG}polygon")
    assert len(points(band)) == 600


def test_up_to_three_hundred_points_are_drawn_as_they_are():
    svg = draw(Series("training", [(step, step / 10) for step in range(300)]))
    assert len(points(lines(svg)[0])) == 300
    assert svg.findall(f"{SVG}polygon") == []


def test_series_have_classes_of_their_own():
    svg = draw(Series("a", [(1, 1.0), (2, 2.0)]), Series("b", [(1, 2.0), (2, 1.0)]))
    assert len(lines(svg, 0)) == len(lines(svg, 1)) == 1


def test_ticks_are_labelled_with_the_values_of_their_places():
    svg = draw(Series("training", [(0, 0.0), (100, 100.0)]))
    assert [label for label in tick_labels(svg) if label == "20"] == ["20", "20"], "once on each axis"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 0.002, ["0.0000", "0.0005", "0.0010", "0.0015", "0.0020"]),
        (0.0, 1e-7, ["0", "2e-08", "4e-08", "6e-08", "8e-08", "1e-07"]),
        (5.001, 5.003, ["5.0010", "5.0015", "5.0020", "5.0025", "5.0030"]),
        (0.0, 50_000.0, ["0", "10,000", "20,000", "30,000", "40,000", "50,000"]),
    ],
)
def test_tick_labels_tell_neighbours_apart(low, high, expected):
    labels = tick_labels(draw(Series("rate", [(1, low), (2, high)])))
    assert labels[: len(expected)] == expected


def test_an_axis_from_zero_begins_at_zero():
    series = Series("tokens", [(1, 5000.0), (2, 5100.0)])
    assert "0" not in tick_labels(draw(series))
    assert "0" in tick_labels(draw(series, from_zero=True))


@pytest.mark.parametrize(
    "values", [[(1, 5.0)], [(1, 5.0), (2, 5.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0)], [(1, 1e-12), (2, 2e-12)], [(1, 1e30), (2, -1e30)]]
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_every_range_can_be_drawn(values, from_zero):
    svg = draw(Series("training", values), from_zero=from_zero)
    assert len(svg.findall(f"{SVG}g")) == len(values)
    assert "nan" not in ElementTree.tostring(svg, encoding="unicode")


@pytest.mark.parametrize("values", [[], [(1, None), (2, None)]])
def test_without_figures_it_says_so(values):
    svg = draw(Series("training", values))
    assert [text.text for text in svg.iter(f"{SVG}text")] == ["no figures"]


def test_screen_readers_hear_what_the_lines_show():
    label = draw(Series("training", [(1, 8.0), (2, 9.0), (3, 5.5)])).attrib["aria-label"]
    assert label == "Loss. training: from 8 to 5.5, lowest 5.5, highest 9."


def test_hostile_names_stay_text():
    name = '"><script>alert(1)</script>&'
    text = line_plot(name, [Series(name, [(1, 1.0), (2, 2.0)])], x_label=name, y_label=name)
    svg = ElementTree.fromstring(text)
    assert "<script" not in text
    assert name in titles(svg)[0]
    assert svg.attrib["aria-label"].startswith(name)


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 100, False, [0, 20, 40, 60, 80, 100]),
        (4.7, 8.4, False, [5, 6, 7, 8]),
        (0, 0.002, False, [0, 0.0005, 0.001, 0.0015, 0.002]),
        (1, 3, True, [1, 2, 3]),
        (1, 3, False, [1, 1.5, 2, 2.5, 3]),
    ],
)
def test_ticks_are_round(low, high, whole, expected):
    assert ticks(low, high, whole=whole) == pytest.approx(expected)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e9))
def test_ticks_are_few_and_inside(low, length):
    found = ticks(low, low + length)
    assert len(found) <= 7
    assert all(low - length * 1e-6 <= tick <= low + length * (1 + 1e-6) for tick in found)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_extremes(values, most):
    pieces = thin(list(enumerate(values)), most)
    known = [value for value in values if value is not None]
    drawn = [piece for piece in pieces if piece is not None]
    assert len(pieces) <= most
    assert bool(drawn) == bool(known)
    if known:
        assert (min(piece.low for piece in drawn), max(piece.high for piece in drawn)) == (min(known), max(known))


def test_numbers_have_no_exponents_that_people_would_not_write():
    svg = draw(Series("steps", [(100_000, 12_500.5), (2_000_000, 99_999.5)]))
    assert not re.search(r"\de[+-]?\d", " ".join(titles(svg) + tick_labels(svg)))
