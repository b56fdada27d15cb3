"""A dated file for every claim: command, machine, numbers."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One contender under one condition."""

    condition: str
    contender: str
    median: float  # over the rounds, of the slowest rank
    spread: tuple[float, float]  # first and third quartile
    ratios: dict[str, float]  # how many times as fast (as small) as the named contender
    unit: str = "ms"


def write(name: str, rows: list[Row]) -> None:
    """Print a table and keep it as ``results/<date>-<name>.json``."""
    if not rows:  # today's file may be there, of a time when there was something to measure
        print(f"{name}: nothing was measured, so nothing is written")
        return
    for row in rows:
        ratios = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in row.ratios.items())
        low, high = row.spread
        print(
            f"{row.condition:30} {row.contender:24} {row.median:9.4g} {row.unit} "
            f"({low:.4g} to {high:.4g})  {ratios}"
        )
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    content = {
        "command": f"python -m benchmarks {name}",
        "date": today,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    path = RESULTS / f"{today}-{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path.relative_to(RESULTS.parent.parent)}")


def machine() -> dict[str, str]:
    """Return on what numbers were measured."""
    return {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads a rank": "1",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
