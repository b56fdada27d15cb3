"""What the page's script draws: curves, timelines, bars and drift, thinned to what can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loosestep.lab.report.course import Point, needed, number
from loosestep.lab.report.facts import Facts
from loosestep.lab.runs import Run

MAX_POINTS = 4000  # of a curve: more than a wide screen has pixels
MAX_SPANS = 24_000  # of a run's timeline: beyond, its start, middle and end are kept
MAX_ROWS = 32  # of a timeline

Json = dict[str, Any]


def drawing(run: Run, facts: Facts) -> Json:
    """Return everything that is drawn of one run."""
    return {
        "label": facts.label,
        "seconds": round(facts.seconds, 4),
        "train": _columns(thinned(facts.course.train)),
        "points": len(facts.course.train),
        "evals": _columns(facts.course.evals),
        "sent": facts.sent,
        "copied": facts.copied,
        "drift": _drift(run),
        "timeline": timeline(run),
    }


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Keep the smallest and the largest loss of every stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    stretches = limit // 2
    kept = {0, len(points) - 1}
    for k in range(stretches):
        span = range(k * len(points) // stretches, (k + 1) * len(points) // stretches)
        finite = [(loss, i) for i in span if (loss := points[i].loss) is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        # A gap must stay one: no line is drawn through it.
        kept |= set([i for i in span if points[i].loss is None][:1])
    return [points[i] for i in sorted(kept)]


def _columns(points: Sequence[Point]) -> Json:
    return {
        "step": [point.step for point in points],
        "seconds": [round(point.seconds, 4) for point in points],
        "sent": [None if point.sent is None else round(point.sent) for point in points],
        "loss": [_rounded(point.loss) for point in points],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _drift(run: Run) -> dict[str, Json]:
    """Return drift over steps by level, as worker 0 saw it."""
    levels: dict[str, Json] = {}
    for record in run.of("sync"):
        drift = number(record, "drift")
        if drift is not None:
            level = levels.setdefault(str(record.get("level")), {"step": [], "drift": []})
            level["step"].append(int(needed(run, 0, record, "step")))
            level["drift"].append(_rounded(drift))
    return {name: _every(level) for name, level in levels.items()}


def _every(level: Json) -> Json:
    stride = -(-len(level["step"]) // MAX_POINTS) or 1
    return {key: values[::stride] for key, values in level.items()}


def timeline(run: Run, limit: int = MAX_SPANS) -> Json:
    """Return who computed, sent and waited: one row a worker, times in microseconds.

    A span is (kind, begin, length, level, step); kinds and levels are numbers into lists.
    """
    ranks = sorted(run.records)[:MAX_ROWS]
    spans = {rank: _spans(run, rank) for rank in ranks}
    end = max((span[2] for row in spans.values() for span in row), default=0.0)
    kept = _stretches(spans, limit)
    levels = sorted({span[3] for row in spans.values() for span in row})
    return {
        "ranks": [_row(rank, spans[rank], levels, kept) for rank in ranks],
        "hidden": len(run.records) - len(ranks),
        "groups": _groups(run, ranks),
        "levels": levels,
        "end": _micro(end),
        "kept": [[_micro(begin), _micro(min(stop, end))] for begin, stop in kept],
        "window": [_micro(edge) for edge in _window(run, end, kept)],
    }


KINDS = ("compute", "send", "wait")
_Span = tuple[str, float, float, str, int]  # kind, begin, end, level, step


def _spans(run: Run, rank: int) -> list[_Span]:
    spans = [
        (
            str(record.get("kind")),
            needed(run, rank, record, "begin"),
            needed(run, rank, record, "end"),
            str(record.get("level") or ""),
            int(number(record, "step") or 0),
        )
        for record in run.of("span", rank)
    ]
    return sorted((span for span in spans if span[0] in KINDS), key=lambda span: span[1])


def _stretches(spans: dict[int, list[_Span]], limit: int) -> list[tuple[float, float]]:
    """Return the times whose spans are kept: all, or the start, the middle and the end."""
    rows = list(spans.values())
    if sum(len(row) for row in rows) <= limit:
        return [(0.0, float("inf"))]
    longest = max(rows, key=len)
    part = max(1, limit // len(rows) // 3)
    middle = (len(longest) - part) // 2
    starts = [0, middle, len(longest) - part]
    stops = [longest[part][1], longest[middle + part][1], float("inf")]
    return [(longest[i][1], stop) for i, stop in zip(starts, stops, strict=True)]


def _row(rank: int, spans: list[_Span], levels: list[str], kept: list[tuple[float, float]]) -> Json:
    shown = [span for span in spans if any(a <= span[1] < b for a, b in kept)]
    return {
        "rank": rank,
        "kind": [KINDS.index(span[0]) for span in shown],
        "begin": [_micro(span[1]) for span in shown],
        "length": [max(0, _micro(span[2]) - _micro(span[1])) for span in shown],
        "level": [levels.index(span[3]) for span in shown],
        "step": [span[4] for span in shown],
    }


def _groups(run: Run, ranks: list[int]) -> list[Json]:
    """Return the groups of the narrowest level, where there is more than one."""
    level, groups = next(iter(run.info.topology.items()), ("", []))
    if len(groups) < 2:
        return []
    named = [{"name": f"{level} {i}", "ranks": group} for i, group in enumerate(groups)]
    return [group for group in named if set(group["ranks"]) & set(ranks)]


def _window(run: Run, end: float, kept: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the stretch to show first: about three of the rarest syncs, but 6 to 40 steps."""
    low, high = kept[len(kept) // 2]
    middle = (low + min(high, end)) / 2
    steps = run.of("step")
    step = needed(run, 0, steps[-1], "at") / len(steps)
    syncs: dict[str, list[float]] = {}
    for record in run.of("sync"):
        syncs.setdefault(str(record.get("level")), []).append(needed(run, 0, record, "at"))
    rarest = min(syncs.values(), key=len, default=[])
    apart = (rarest[-1] - rarest[0]) / (len(rarest) - 1) if len(rarest) > 1 else 0.0
    width = min(max(3.3 * apart, 6 * step), 40 * step, end)
    centre = min(rarest, key=lambda at: abs(at - middle), default=middle)
    begin = max(0.0, min(centre - width / 2, end - width))
    return begin, begin + width


def _micro(value: float) -> int:
    return round(value * 1e6)
