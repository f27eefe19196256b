"""SVG charts: lines over steps, and intervals on a scale. Pure functions; CSS classes set the colours."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Point = tuple[float, float]

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 10, 26
INTERVAL_WIDTH, INTERVAL_HEIGHT, INTERVAL_MARGIN = 270, 34, 18
BAR_WIDTH = 120
MAX_POINTS = 240
"""Maximum number of points of a line. More points are averaged, so that the page stays small."""
MAX_TARGETS = 80
"""Maximum number of points of a line with a tooltip. More would overlap."""
MAX_MARKS = 24
"""Maximum number of rings of a line. More would cover it."""
NUM_COLOURS = 8
TITLE_CHARACTERS = 56
"""Maximum number of characters in a line of a title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int
    """Number of the colour class, ``c0`` to ``c7``."""
    smooth: float = 0.0
    """Share of the old value in the moving average. Above 0, the raw line is drawn faintly below it."""
    marks: Sequence[Point] = ()
    """Single measurements, drawn as rings."""
    band: Sequence[tuple[float, float, float]] = ()
    """Intervals (x, low, high) around the line, drawn as an area."""
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A measured share and its confidence interval, all in 0..1."""

    value: float
    low: float
    high: float


def line_chart(
    series: Sequence[Series],
    *,
    label: Callable[[float], str],
    bottom: float | None = 0.0,
    top: float | None = None,
    x_name: str = "step",
) -> str:
    """Return a line chart, or an empty string if there is no point to draw.

    Args:
        series: the lines.
        label: formats a value of the y axis.
        bottom: start of the y axis; None is the smallest value.
        top: minimum end of the y axis.
        x_name: unit of the x axis.
    """
    points = [point for one in series for point in (*one.points, *one.marks)]
    points += [(x, y) for one in series for x, *ends in one.band for y in ends]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ticks = nice_ticks(
        min(ys) if bottom is None else min(bottom, *ys), max(ys) if top is None else max(top, *ys)
    )
    frame = _Frame(x_low=min(0.0, *xs), x_high=max(xs), y_low=ticks[0], y_high=ticks[-1])
    lines = "".join(_band(one, frame) for one in series)
    lines += "".join(_line(one, frame, label, x_name) for one in series)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"{_y_axis(ticks, frame, label)}{_x_axis(frame, x_name)}{lines}</svg>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart with its legend."""

    chart: str
    """The result of ``line_chart``."""
    names: Sequence[tuple[str, int]]
    """Name and colour of each line."""


def standalone(panels: Sequence[Panel], *, title: str) -> str:
    """Return charts, in two columns if there are several, as a separate file with title and style.

    Args:
        panels: the charts.
        title: drawn above them, in as many lines as it needs.
    """
    style = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
    columns = min(2, len(panels))
    lines = textwrap.wrap(title, TITLE_CHARACTERS * columns)
    words = "".join(f'<tspan x="12" y="{20 + 16 * i}">{escape(line)}</tspan>' for i, line in enumerate(lines))
    y, parts = 12 + 16 * len(lines), []
    cells = [_panel(panel) for panel in panels]
    for first in range(0, len(cells), columns):
        row = cells[first : first + columns]
        parts += [f'<g transform="translate({WIDTH * i} {y})">{part}</g>' for i, (part, _) in enumerate(row)]
        y += max(height for _, height in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * columns} {y}" '
        'font-family="system-ui, sans-serif">'
        f"<title>{escape(title)}</title><style>{style} .card {{ fill: var(--card); }} "
        ".title { fill: var(--ink); font-size: 13px; font-weight: 600; }</style>"
        f'<rect class="card" width="100%" height="100%" rx="10"/><text class="title">{words}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(panel: Panel) -> tuple[str, int]:
    """Return a chart below its legend, and their height."""
    x, y, keys = LEFT, 12, []
    for name, colour in panel.names:
        width = 30 + 6.6 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 17
        keys.append(
            f'<g class="c{colour % NUM_COLOURS}">'
            f'<polyline class="line" points="{x},{y - 4} {x + 14},{y - 4}"/>'
            f'<text class="tick" x="{x + 20}" y="{y}">{escape(name)}</text></g>'
        )
        x += round(width)
    inside = re.sub(r'<circle class="hover".*?</circle>|^<svg[^>]*>|</svg>$', "", panel.chart)
    return f'{"".join(keys)}<g transform="translate(0 {y + 8})">{inside}</g>', y + 10 + HEIGHT


def interval_chart(before: Interval | None, after: Interval | None) -> str:
    """Return two shares with their intervals on one scale from 0 to 100 %."""
    rows = ((before, 11, "before"), (after, 23, "after"))
    marks = "".join(
        f'<g class="{name}"><line class="whisker" x1="{_place(one.low)}" x2="{_place(one.high)}" '
        f'y1="{y}" y2="{y}"/><circle cx="{_place(one.value)}" cy="{y}" r="4.5"/></g>'
        for one, y, name in rows
        if one is not None
    )
    grid = "".join(
        f'<line class="grid" x1="{_place(x)}" x2="{_place(x)}" y1="0" y2="{INTERVAL_HEIGHT}"/>'
        for x in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return f'<svg class="interval" viewBox="0 0 {INTERVAL_WIDTH} {INTERVAL_HEIGHT}">{grid}{marks}</svg>'


def interval_axis() -> str:
    """Return the scale of ``interval_chart``."""
    numbers = "".join(
        f'<text class="tick" x="{_place(x)}" y="12" text-anchor="middle">{percent_label(x)}</text>'
        for x in (0.0, 0.5, 1.0)
    )
    return f'<svg class="interval" viewBox="0 0 {INTERVAL_WIDTH} 16">{numbers}</svg>'


def share_bar(share: float) -> str:
    """Return a share, 0 to 1, as a bar."""
    width = round(BAR_WIDTH * min(1.0, max(0.0, share)), 1)
    return (
        f'<svg class="bar" viewBox="0 0 {BAR_WIDTH} 8"><rect class="whole" width="{BAR_WIDTH}" height="8" '
        f'rx="3"/><rect class="part" width="{width}" height="8" rx="3"/></svg>'
    )


def _place(share: float) -> float:
    inner = INTERVAL_WIDTH - 2 * INTERVAL_MARGIN
    return round(INTERVAL_MARGIN + inner * min(1.0, max(0.0, share)), 1)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return up to about ``most`` round numbers that enclose ``low`` and ``high``, at least two."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def number_label(value: float) -> str:
    """Return a number in at most about six characters: ``12k``, ``0.25``, ``3e-5``."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.2g}".replace("e-0", "e-")


def percent_label(value: float) -> str:
    """Return a share as a percentage: ``40%``, ``0.5%``."""
    return f"{100 * value:.3g}%"


def moving_average(points: Sequence[Point], share: float) -> list[Point]:
    """Return the exponential moving average of a line, with bias correction."""
    smoothed, total, weight = [], 0.0, 0.0
    for x, y in points:
        total, weight = share * total + y, share * weight + 1.0
        smoothed.append((x, total / weight))
    return smoothed


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most ``most`` points: means of equally long parts of a line."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Transforms values to drawing coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x_low) / span, 1)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low or 1.0
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y_low) / span, 1)


def _y_axis(ticks: Sequence[float], frame: _Frame, label: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{frame.y(tick)}" y2="{frame.y(tick)}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{frame.y(tick) + 3.5}" text-anchor="end">'
        f"{escape(label(tick))}</text>"
        for tick in ticks
    )


def _x_axis(frame: _Frame, name: str) -> str:
    inside = [
        tick
        for tick in nice_ticks(frame.x_low, frame.x_high, most=6)
        if frame.x_low <= tick <= frame.x_high and tick == int(tick)
    ]
    end = f"{name} {int(frame.x_high)}"
    # The name of the axis is at the right end. Numbers that would overlap it are omitted.
    room = WIDTH - RIGHT - 8 - 7 * len(end)
    inside = [tick for tick in inside if frame.x(tick) + 3.5 * len(f"{tick:.0f}") < room]
    numbers = "".join(
        f'<text class="tick" x="{frame.x(tick)}" y="{HEIGHT - 8}" text-anchor="middle">{int(tick)}</text>'
        for tick in inside
    )
    return (
        f'{numbers}<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">'
        f"{escape(end)}</text>"
    )


def _line(one: Series, frame: _Frame, label: Callable[[float], str], x_name: str) -> str:
    raw = thin(one.points)
    shown = thin(moving_average(one.points, one.smooth)) if one.smooth else raw
    parts = [_path(raw, frame, "raw")] if one.smooth and len(raw) > 1 else []
    parts.append(_path(shown, frame, "line") if len(shown) > 1 else _dots(shown, frame))
    parts += [
        f'<circle class="ring" cx="{frame.x(x)}" cy="{frame.y(y)}" r="4"><title>'
        f"{escape(f'{one.name}, held-out after {x:g}: {label(y)}')}</title></circle>"
        for x, y in _evenly(one.marks, MAX_MARKS)
    ]
    parts += [
        f'<circle class="hover" cx="{frame.x(x)}" cy="{frame.y(y)}" r="5"><title>'
        f"{escape(f'{one.name}, {x_name} {x:g}: {label(y)}')}</title></circle>"
        for x, y in _evenly(shown, MAX_TARGETS)
    ]
    kind = " dashed" if one.dashed else ""
    return f'<g class="c{one.colour % NUM_COLOURS}{kind}">{"".join(parts)}</g>'


def _evenly(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` evenly spaced points of a line, including the last."""
    step = max(1, math.ceil(len(points) / most))
    return points[(len(points) - 1) % step :: step]


def _band(one: Series, frame: _Frame) -> str:
    if len(one.band) < 2:
        return ""
    ends = [*((x, low) for x, low, _ in one.band), *((x, high) for x, _, high in reversed(one.band))]
    places = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in ends)
    return f'<g class="c{one.colour % NUM_COLOURS}"><polygon class="band" points="{places}"/></g>'


def _path(points: Sequence[Point], frame: _Frame, kind: str) -> str:
    places = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _dots(points: Sequence[Point], frame: _Frame) -> str:
    return "".join(f'<circle class="dot" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>' for x, y in points)
