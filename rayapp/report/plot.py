"""Line plots as SVG. Pure: points in, text out.

A plot has no colours of its own: the page that holds it styles the classes ``plot``, ``line``, ``band``, ``dot`` and ``series-0``,
``series-1``, ... for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float | None]
"""x, and y or None where there is no figure."""

HEIGHT = 260
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 66, 26, 12, 40
MOST_PIECES = 300
NUM_TICKS = 5
MOST_DECIMALS = 5


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: what the legend and the hover text call it.
        points: ordered by x. Where y is None the line has a gap.
        marked: draw a dot at each point, for series of few.
    """

    name: str
    points: Sequence[Point]
    marked: bool = False


@dataclass(frozen=True)
class Piece:
    """One point as drawn, which may stand for several neighbours.

    Attributes:
        x: its place; the middle one's of several.
        y: their mean.
        low: the lowest of them.
        high: the highest of them.
    """

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class _Drawn:
    """A series as drawn: lines without gaps."""

    name: str
    lines: list[list[Piece]]
    marked: bool

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for line in self.lines for piece in line)


@dataclass(frozen=True)
class _Scale:
    """Maps values to positions, both linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_plot(title: str, series: Sequence[Series], *, x_label: str, y_label: str, from_zero: bool = False, width: int = 640) -> str:
    """An SVG element with axes, ticks, a line for each series and, at each x, a strip whose title says the figures.

    Args:
        title: what screen readers call the plot.
        series: of one with more than 300 points, neighbours are drawn as one: their mean on a band from their lowest to their highest, so
            that no spike is lost.
        x_label: under the axis.
        y_label: what y is, with its unit.
        from_zero: let the y axis begin at zero.
        width: of the view box; the height is 260.
    """
    label = quoteattr(f"{title}. {_describe(series)}")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 {width} {HEIGHT}" aria-label={label}>'
    known = [(x, y) for s in series for x, y in s.points if y is not None]
    if not known:
        return f'{opening}<text class="empty" x="{width / 2}" y="{HEIGHT / 2}" text-anchor="middle">no figures</text></svg>'
    x_scale = _Scale(*_spread([x for x, _ in known]), MARGIN_LEFT, width - MARGIN_RIGHT)
    low, high = _spread([y for _, y in known], from_zero)
    y_scale = _Scale(low, high, HEIGHT - MARGIN_BOTTOM, MARGIN_TOP)
    drawn = [_Drawn(s.name, list(_unbroken(thin(s.points))), s.marked) for s in series]
    parts = [
        opening,
        *_axes(x_scale, y_scale, x_label, y_label),
        *(part for index, s in enumerate(drawn) for part in _lines(index, s, x_scale, y_scale)),
        *_strips(drawn, x_scale, y_scale, x_label),
        "</svg>",
    ]
    return "\n".join(parts)


def thin(points: Sequence[Point], most: int = MOST_PIECES) -> list[Piece | None]:
    """At most ``most`` pieces with equally many neighbours each; None for one without any figure."""
    num_pieces = min(most, len(points))
    borders = [len(points) * index // num_pieces for index in range(num_pieces + 1)] if points else []
    return [_piece(points[begin:end]) for begin, end in pairwise(borders)]


def _piece(points: Sequence[Point]) -> Piece | None:
    figures = [y for _, y in points if y is not None]
    x = points[len(points) // 2][0]
    return Piece(x, sum(figures) / len(figures), min(figures), max(figures)) if figures else None


def ticks(low: float, high: float, target: int = NUM_TICKS, whole: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``target`` of them, 1, 2 or 5 times a power of ten apart.

    Args:
        low: where they begin at the earliest.
        high: where they end at the latest; above ``low``.
        target: how many there should be.
        whole: only whole numbers.
    """
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        distance = max(1.0, distance)
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [index * distance for index in range(first, last + 1)]


def _spread(values: Sequence[float], from_zero: bool = False) -> tuple[float, float]:
    """The range of an axis: of its values, never empty."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high) * 1.05
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high


def _axes(x_scale: _Scale, y_scale: _Scale, x_label: str, y_label: str) -> Iterator[str]:
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    for tick, label in _labelled(ticks(y_scale.low, y_scale.high)):
        y = y_scale(tick)
        yield f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<line class="axis" x1="{left:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}"/>'
    for tick, label in _labelled(ticks(x_scale.low, x_scale.high, whole=True)):
        x = x_scale(tick)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:g}" y2="{bottom + 4:g}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18:g}" text-anchor="middle">{label}</text>'
    middle = (top + bottom) / 2
    yield f'<text class="label" x="{(left + right) / 2:g}" y="{bottom + 35:g}" text-anchor="middle">{escape(x_label)}</text>'
    yield f'<text class="label" transform="translate(13 {middle:g}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def _labelled(places: Sequence[float]) -> Iterator[tuple[float, str]]:
    """Ticks with as many decimals as tell neighbours apart."""
    distance = places[1] - places[0] if len(places) > 1 else 1.0
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    for place in places:
        yield place, f"{place:.3g}" if decimals > MOST_DECIMALS else f"{place:,.{decimals}f}"


def _lines(index: int, series: _Drawn, x_scale: _Scale, y_scale: _Scale) -> Iterator[str]:
    for line in series.lines:
        if any(piece.low < piece.high for piece in line):
            there = [(x_scale(piece.x), y_scale(piece.high)) for piece in line]
            back = [(x_scale(piece.x), y_scale(piece.low)) for piece in reversed(line)]
            yield f'<polygon class="band series-{index}" points="{_places(there + back)}"/>'
        places = [(x_scale(piece.x), y_scale(piece.y)) for piece in line]
        if len(places) > 1:
            yield f'<polyline class="line series-{index}" points="{_places(places)}"/>'
        if series.marked or len(places) == 1:
            yield from (f'<circle class="dot series-{index}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)


def _places(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _unbroken(pieces: Sequence[Piece | None]) -> Iterator[list[Piece]]:
    for known, run in groupby(pieces, key=lambda piece: piece is not None):
        if known:
            yield [piece for piece in run if piece is not None]


def _strips(series: Sequence[_Drawn], x_scale: _Scale, y_scale: _Scale, x_label: str) -> Iterator[str]:
    """At each x an invisible strip, from halfway to the x before to halfway to the next, that shows its figures under the pointer."""
    figures: dict[float, list[tuple[int, str, Piece]]] = {}
    for index, s in enumerate(series):
        for piece in s.pieces:
            figures.setdefault(piece.x, []).append((index, s.name, piece))
    xs = sorted(figures)
    places = [x_scale(x) for x in xs]
    borders = [x_scale.start, *((a + b) / 2 for a, b in pairwise(places)), x_scale.end]
    top, height = y_scale.end, y_scale.start - y_scale.end
    for x, place, begin, end in zip(xs, places, borders[:-1], borders[1:], strict=True):
        text = "\n".join([f"{x_label} {_number(x)}", *(f"{name}: {_figure(piece)}" for _, name, piece in figures[x])])
        yield f'<g class="strip"><title>{escape(text)}</title>'
        yield f'<rect x="{begin:.1f}" y="{top:g}" width="{end - begin:.1f}" height="{height:g}"/>'
        yield f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{top:g}" y2="{y_scale.start:g}"/>'
        yield from (f'<circle class="dot series-{i}" cx="{place:.1f}" cy="{y_scale(piece.y):.1f}" r="4"/>' for i, _, piece in figures[x])
        yield "</g>"


def _figure(piece: Piece) -> str:
    if piece.low == piece.high:
        return _number(piece.y)
    return f"{_number(piece.y)} ({_number(piece.low)} to {_number(piece.high)})"


def _describe(series: Sequence[Series]) -> str:
    """What a screen reader says of the lines."""
    sentences = []
    for s in series:
        known = [y for _, y in s.points if y is not None]
        if known:
            ends = f"from {_number(known[0])} to {_number(known[-1])}"
            sentences.append(f"{s.name}: {ends}, lowest {_number(min(known))}, highest {_number(max(known))}.")
    return " ".join(sentences) or "No figures."


def _number(value: float) -> str:
    """Four digits, no exponent where people would not use one."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
