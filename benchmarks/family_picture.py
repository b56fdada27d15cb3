"""A picture of losses against bytes, as SVG: points, standard errors and labels that keep apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 60, 40, 60  # margins
COLOURS = {"gradients": "#444444", "averaging": "#c0571a", "outer": "#1f6fb2", "muon": "#8a2d8a"}
LETTER, LINE, GAP = 6.9, 14.0, 9.0  # pixels: a letter's width, a label's height, to its point
UNITS = {0: "B", 3: "kB", 6: "MB", 9: "GB", 12: "TB"}


@dataclass(frozen=True)
class Point:
    """A contender."""

    name: str
    family: str
    bytes_sent: float
    loss: float
    error: float  # standard error; not a number: unknown


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        """Say whether both have a place in common."""
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height


@dataclass(frozen=True)
class Scale:
    """Where values are drawn: bytes by powers of ten, losses evenly."""

    exponents: tuple[int, int]
    losses: tuple[float, float]
    step: float  # of losses, between lines

    def x(self, sent: float) -> float:
        """Return the place of bytes."""
        first, last = self.exponents
        return LEFT + (math.log10(sent) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        """Return the place of a loss."""
        low, high = self.losses
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def scale_of(points: Sequence[Point]) -> Scale:
    """Return a scale with room for all points and their errors."""
    powers = [math.log10(point.bytes_sent) for point in points]
    ends = [point.loss + sign * _error(point) for point in points for sign in (-1, 1)]
    step = tick_of(max(ends) - min(ends))
    low, high = math.floor(min(ends) / step) * step, math.ceil(max(ends) / step) * step
    first = math.floor(min(powers))
    last = max(first + 1, math.ceil(max(powers)))
    return Scale((first, last), (low, max(high, low + step)), step)


def tick_of(span: float) -> float:
    """Return a round distance, so that some five of it make the span.

    >>> round(tick_of(0.23), 6), tick_of(0.0)
    (0.05, 0.01)
    """
    if span <= 0.0:
        return 0.01
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= span * 0.999)


def picture(points: Sequence[Point]) -> str:
    """Return the whole picture."""
    scale = scale_of(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">',
        "<title>Held-out loss against bytes that a worker sent</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_axes(scale),
        *_legend(points),
        *(mark for point in points for mark in _mark(point, scale)),
        *_labels(points, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(scale: Scale) -> Iterator[str]:
    (low, high), step = scale.losses, scale.step
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    for number in range(round((high - low) / step) + 1):
        y = scale.y(low + number * step)
        yield _line(LEFT, y, end, y, "#ddd")
        yield _text(LEFT - 8, y + 4, f"{low + number * step:.{_decimals(step)}f}", "end")
    for power in range(scale.exponents[0], scale.exponents[1] + 1):
        x = scale.x(10.0**power)
        yield _line(x, TOP, x, bottom, "#ddd")
        yield _text(x, bottom + 18, f"{10 ** (power % 3)} {UNITS[power - power % 3]}", "middle")
    yield _text((LEFT + end) / 2, HEIGHT - 14, "sent by a worker", "middle")
    yield _text(LEFT - 50, TOP - 16, "held-out loss, nats a byte, ± standard error", "start")


def _legend(points: Sequence[Point]) -> Iterator[str]:
    shown = [family for family in COLOURS if any(point.family == family for point in points)]
    x = WIDTH / 2
    for family in shown:
        yield f'<circle cx="{x:.1f}" cy="{TOP - 20}" r="5" fill="{COLOURS[family]}"/>'
        yield _text(x + 9, TOP - 16, family, "start")
        x += 30 + LETTER * len(family)


def _mark(point: Point, scale: Scale) -> Iterator[str]:
    x, y, error = scale.x(point.bytes_sent), scale.y(point.loss), _error(point)
    colour = COLOURS[point.family]
    top, bottom = scale.y(point.loss + error), scale.y(point.loss - error)
    for ends in ((x, top, x, bottom), (x - 4, top, x + 4, top), (x - 4, bottom, x + 4, bottom)):
        yield _line(*ends, colour)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def _labels(points: Sequence[Point], scale: Scale) -> Iterator[str]:
    at = [(scale.x(point.bytes_sent), scale.y(point.loss)) for point in points]
    taken = [Box(x - 6, y - 6, 12, 12) for x, y in at]
    taken += [_bar(point, scale) for point in points]
    for point, (x, y) in zip(points, at, strict=True):
        box = _free(x, y, LETTER * len(point.name), taken)
        taken.append(box)
        near = min(max(x, box.x), box.x + box.width)
        middle = box.y + box.height / 2
        if math.hypot(near - x, middle - y) > 2.5 * GAP:
            yield _line(x, y, near, middle, "#999")
        yield _text(box.x, box.y + LINE - 3, point.name, "start", COLOURS[point.family])


def _bar(point: Point, scale: Scale) -> Box:
    top, bottom = (scale.y(point.loss + sign * _error(point)) for sign in (1, -1))
    return Box(scale.x(point.bytes_sent) - 4, top, 8, bottom - top)


def _free(x: float, y: float, width: float, taken: Sequence[Box]) -> Box:
    """Return the nearest place for a label that meets nothing, right of its point if it can be."""
    places = [
        Box(x + GAP if side > 0 else x - GAP - width, y + LINE / 2 * (shift - 1), width, LINE)
        for distance in range(60)
        for shift in (-distance, distance)
        for side in (1, -1)
    ]
    free = (box for box in places if _inside(box) and not any(map(box.meets, taken)))
    return next(free, places[0])


def _inside(box: Box) -> bool:
    across = box.x >= LEFT and box.x + box.width <= WIDTH
    return across and box.y >= TOP and box.y + box.height <= HEIGHT - BOTTOM


def _error(point: Point) -> float:
    return 0.0 if math.isnan(point.error) else point.error


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}">{escape(text)}</text>'
