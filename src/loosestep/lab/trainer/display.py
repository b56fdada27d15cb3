"""What is seen while workers train: fed by the records of worker 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from loosestep.lab.runs import NotARun, log_file, read_info

QUIET_SECONDS = 5.0  # between lines where there is no terminal


class Tail:
    """Reads the records that another process appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0
        self._file: IO[str] | None = None
        self._rest = ""

    def records(self) -> list[dict[str, Any]]:
        """Return what has come since the last call."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = open(self._path, encoding="utf-8")  # noqa: SIM115  (closed by close)
            self._file.seek(self._start)
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [record for line in lines if (record := _parsed(line)) is not None]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # cut short by a full disk
        return None
    return record if isinstance(record, dict) else None


class Display:
    """A bar, and what is happening: loss, speed, bytes, waiting, drift, the next average."""

    def __init__(self, console: Console, name: str, unit: str = "tokens") -> None:
        self._console, self._name, self._unit = console, name, unit
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, expand=True)
        self._task = self._bar.add_task(escape(name), total=None)
        self._live: Live | None = None
        self._last: dict[str, Any] = {}
        self._eval: dict[str, Any] = {}
        self._first: tuple[float, int] | None = None
        self._said = time.monotonic()

    def __enter__(self) -> Display:
        """Begin to draw, where there is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the last picture."""
        if self._live is not None:
            self._live.update(self._picture())
            self._live.__exit__(None, None, None)

    def take(self, record: dict[str, Any], total: int | None) -> None:
        """Show one record of worker 0."""
        if record["event"] == "step":
            self._last = record
            self._first = self._first or (record["at"], record["tokens"])
            self._bar.update(self._task, completed=record["step"], total=total)
        elif record["event"] == "eval":
            self._eval = record
        elif record["event"] == "save":
            self._say(f"saved {record['path']}")
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._picture())
        elif self._last and time.monotonic() - self._said > QUIET_SECONDS:
            self._said = time.monotonic()
            line = "  ".join(f"{name} {value}" for name, value in self._facts())
            self._say(f"{self._name}  {line}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _facts(self) -> list[tuple[str, str]]:
        last = self._last
        if not last:
            return [("workers", "starting")]
        facts = [("step", str(last["step"])), ("loss", loss_text(last["loss"]))]
        if self._eval:
            seen = f"{loss_text(self._eval['loss'])} ({self._eval['step']})"
            facts.append(("held out", seen))
        facts.append((f"{self._unit}/s", f"{self._speed():,.0f}"))
        waited = last["seconds_waited"] / max(last["at"], 1e-9)
        facts.append(("waiting", f"{waited:.0%} of the time"))
        facts += [(f"sent, {level}", size(count)) for level, count in moved(last).items()]
        if last.get("drift") is not None:
            facts.append(("drift", f"{last['drift']:.2%}"))
        if last["next_sync"] is not None:
            facts.append(("next average", f"at {last['next_sync']}"))
        return facts

    def _speed(self) -> float:
        assert self._first is not None
        seconds = self._last["at"] - self._first[0]
        return (self._last["tokens"] - self._first[1]) / seconds if seconds > 0 else 0.0

    def _picture(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        facts = self._facts()
        for row in (facts[i : i + 4] for i in range(0, len(facts), 4)):
            table.add_row(*(Text.assemble((name, "dim"), " ", value) for name, value in row))
        return Group(self._bar, table)


def loss_text(loss: float | None) -> str:
    """Return a loss as it is shown; logs hold null for what is no number.

    >>> loss_text(2.34567), loss_text(None)
    ('2.346', 'not a number')
    """
    return "not a number" if loss is None else f"{loss:.3f}"


def moved(record: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a worker has handed to others so far, by ``kind/level``."""
    names = {*record["sent"], *record["copied"]}
    return {n: record["sent"].get(n, 0) + record["copied"].get(n, 0) for n in sorted(names)}


def size(count: float) -> str:
    """Return a number of bytes as people read it.

    >>> size(1234567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def watcher(display: Display, folder: Path) -> Callable[[], None]:
    """Return what hands new records of worker 0 to a display."""
    tail = Tail(log_file(folder, 0))

    def watch() -> None:
        records = tail.records()
        total = steps_of(folder) if records else None
        for record in records:
            display.take(record, total)

    return watch


def steps_of(folder: Path) -> int | None:
    """Return how many steps a run is to have; None: not known."""
    try:
        return read_info(folder).steps
    except NotARun:
        return None
