"""What the benchmark ``family`` has found: a table, what it says of the papers' claims, a picture.

``python -m benchmarks.family_page`` shows what the newest file of runs has, whole or not, as the
Markdown of the page of benchmarks, and draws ``results/family.svg``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.family_picture import Point, picture
from benchmarks.family_training import LONG, SHORT, contenders
from benchmarks.report import RESULTS, Row

TUNING_SEED = 0  # is not reported
FILES = "*-family_runs-*.json"  # when begun, and a digest of the settings
BASELINE = "DDP"
FREE = 0.005  # of a loss: what may be called nothing
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 95 %, by how many seeds


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is finished."""

    contender: str
    strategy: str
    seed: int
    rate: float
    steps: int
    loss: float  # nats on held-out text; infinite: diverged
    bytes_sent: int  # by a worker
    seconds: float


@dataclass(frozen=True)
class Direction:
    """A claim: that one contender ends below another, or not above it by more than a margin."""

    text: str
    better: str
    than: str
    margin: float = 0.0  # of the other's loss
    share: float = math.inf  # of the other's bytes, at most


_PLAIN, _DENSE, _MUON = f"local SGD, H={SHORT}", f"DiLoCo, H={SHORT}", "MuLoCo, 2 bits"
_BEATS, _FREE = "outer Nesterov beats plain averaging", "(at most 0.5 % above)"
_SPARSE = f"SparseLoCo is at or below dense DiLoCo {_FREE}, by a tenth of its bytes"
DIRECTIONS = (
    Direction(f"{_BEATS}, H={SHORT}", _DENSE, _PLAIN),
    Direction(f"{_BEATS}, H={LONG}", f"DiLoCo, H={LONG}", f"local SGD, H={LONG}"),
    Direction(f"4 bits are free {_FREE}", "streaming, 4 bits", "streaming", FREE),
    Direction(_SPARSE, "SparseLoCo", _DENSE, FREE, 0.1),
    Direction("Muon inside beats AdamW inside, 2 bits both", _MUON, "DiLoCo, 2 bits"),
    Direction("Muon inside by 2 bits beats AdamW inside, exact", _MUON, _DENSE),
    Direction("SNOO beats one plain worker", "SNOO, one worker", "one worker"),
)


@dataclass(frozen=True)
class Found:
    """A contender's runs by seed."""

    name: str
    by_seed: Mapping[int, Run]

    @property
    def losses(self) -> list[float]:
        """Return the losses, in the order of the seeds."""
        return [self.by_seed[seed].loss for seed in sorted(self.by_seed)]

    @property
    def loss(self) -> float:
        """Return the mean loss."""
        return statistics.fmean(self.losses)

    @property
    def bytes_sent(self) -> float:
        """Return the mean of what a worker sent."""
        return statistics.fmean(run.bytes_sent for run in self.by_seed.values())

    @property
    def rate(self) -> float:
        """Return the inner learning rate."""
        return next(iter(self.by_seed.values())).rate


def read(path: Path) -> list[Run]:
    """Return the runs of a file."""
    return [Run(**run) for run in json.loads(path.read_text())["runs"]]


def newest(folder: Path = RESULTS) -> Path:
    """Return the file of runs that was begun last."""
    found = sorted(folder.glob(FILES), key=lambda path: (path.name[:10], path.stat().st_mtime))
    if not found:
        raise SystemExit(f"no runs in {folder}; first: python -m benchmarks family")
    return found[-1]


def reported(runs: Iterable[Run]) -> dict[str, Found]:
    """Return what was found, in the order of the contenders; of the same seed the last counts."""
    by_name: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run.seed != TUNING_SEED:
            by_name.setdefault(run.contender, {})[run.seed] = run
    return {name: Found(name, by_name[name]) for name in contenders() if name in by_name}


def standard_error(values: Sequence[float]) -> float:
    """Return that of the mean; not a number where there is one value or an infinite one.

    >>> standard_error([1.0, 3.0])
    1.0
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def above(mine: Found, other: Found, margin: float = 0.0) -> list[float]:
    """Return by how many nats one ends above another's loss and a margin, seed by seed."""
    seeds = sorted(mine.by_seed.keys() & other.by_seed.keys())
    return [mine.by_seed[s].loss - (1.0 + margin) * other.by_seed[s].loss for s in seeds]


def verdict(one: Direction, found: Mapping[str, Found]) -> str:
    """Say whether a claim is reproduced: 95 % of Student's t, pairs of the same seed."""
    if not {one.better, one.than} <= found.keys():
        return "not run"
    better, than = found[one.better], found[one.than]
    gaps = above(better, than, one.margin)
    error = standard_error(gaps)
    if math.isnan(error):
        return "too few seeds" if len(gaps) < 2 else "diverged"
    if better.bytes_sent > one.share * than.bytes_sent:
        return "not reproduced: sends too much"
    mean, needed = statistics.fmean(gaps), STUDENT[len(gaps)] * error
    if abs(mean) <= needed:
        return "not told apart"
    return "reproduced" if mean < 0 else "not reproduced"


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Return losses and bytes; the spread of a loss is a standard error to both sides."""
    found = reported(runs)
    ddp, rows = found.get(BASELINE), []
    for name, one in found.items():
        error = standard_error(one.losses)
        spread = (one.loss, one.loss) if math.isnan(error) else (one.loss - error, one.loss + error)
        condition = f"loss, {len(one.losses)} seeds, rate {one.rate:g}"
        ratios = {} if ddp is None else {f"{BASELINE}'s loss": one.loss / ddp.loss}
        rows.append(Row(condition, name, one.loss, spread, ratios, "nats"))
        sent = one.bytes_sent / 1e6
        smaller = {BASELINE: ddp.bytes_sent / one.bytes_sent} if ddp and sent else {}
        rows.append(Row("sent by a worker", name, sent, (sent, sent), smaller, "MB"))
    return rows


def markdown(runs: Iterable[Run]) -> str:
    """Return both tables."""
    found = reported(runs)
    names = ("Contender", "Inner rate", "Seeds", "Loss", "above DDP", "MB sent", "of DDP's 1 in")
    head = (f"| {' | '.join(names)} |", "| --- " * len(names) + "|")
    claims = ("| Claim | Gap, seed by seed | |", "| --- | --- | --- |")
    lines = [*head, *(_line(one, found.get(BASELINE)) for one in found.values()), "", *claims]
    return "\n".join([*lines, *(_claim(one, found) for one in DIRECTIONS)])


def _line(one: Found, ddp: Found | None) -> str:
    loss = _with_error(one.losses, "{:.4f}")
    gap = smaller = ""
    if ddp is not None and one.name != BASELINE:
        gap = _with_error(above(one, ddp), "{:+.4f}")
        smaller = f"{ddp.bytes_sent / one.bytes_sent:.4g}" if one.bytes_sent else ""
    sent = f"{one.bytes_sent / 1e6:.4g}"
    cells = (one.name, f"{one.rate:g}", str(len(one.losses)), loss, gap, sent, smaller)
    return f"| {' | '.join(cells)} |"


def _claim(one: Direction, found: Mapping[str, Found]) -> str:
    gap = ""
    if {one.better, one.than} <= found.keys():
        gap = _with_error(above(found[one.better], found[one.than]), "{:+.4f}")
    return f"| {one.text} | {gap} | {verdict(one, found)} |"


def _with_error(values: Sequence[float], style: str) -> str:
    if not values:
        return ""
    error = standard_error(values)
    mean = style.format(statistics.fmean(values))
    return mean if math.isnan(error) else f"{mean} ± {error:.4f}"


def points(runs: Iterable[Run]) -> list[Point]:
    """Return what is drawn: all that send something and have learnt."""
    return [
        Point(one.name, contenders()[name].family, one.bytes_sent, one.loss, error)
        for name, one in reported(runs).items()
        if one.bytes_sent and math.isfinite(one.loss)
        for error in [standard_error(one.losses)]
    ]


def show(path: Path, drawn: Path) -> None:
    """Print both tables and draw the picture."""
    runs = read(path)
    print(markdown(runs))
    if marks := points(runs):
        drawn.write_text(picture(marks), encoding="utf-8")
        print(f"drawn as {drawn}")


if __name__ == "__main__":
    show(newest(), RESULTS / "family.svg")
