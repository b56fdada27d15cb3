"""The result of a comparison: a table to look at, and the same for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from loosestep.lab.report import words
from loosestep.lab.report.facts import Facts
from loosestep.lab.runs import write_whole
from loosestep.lab.trainer.mistakes import BadInput

NAME_WIDTH = 18  # that a strategy's name has at least, if it needs it


def rows(facts: Sequence[Facts], target: float | None) -> list[dict[str, Any]]:
    """Return the table as plain data."""
    return [
        {
            "strategy": run.label,
            "link": (run.info.link or {}).get("rate"),  # null: none was emulated
            "seconds": run.seconds,
            "seconds_per_step": run.seconds_per_step,
            "steps": run.steps,
            "still_in_its_warm_up": run.warms_up,
            "seconds_to_target": run.seconds_to(target),
            "target_loss": target,
            "final_loss": run.final_loss,
            "bytes_sent_per_worker": run.bytes_sent,
            "bytes_that_left_a_host": run.uplink if run.info.link else None,
            "share_of_time_waiting": run.waited,
        }
        for run in facts
    ]


def table(facts: Sequence[Facts], target: float | None) -> Table:
    """Return the table as it is shown."""
    at = "loss" if target is None else words.loss(target)
    linked = all(run.info.link for run in facts)
    moved = "left a host" if linked else "sent by a worker"
    columns = ("time", f"to {at}", "final loss", moved, "waiting", "a step")
    wide = max(len(run.label) for run in facts)
    name = Column("strategy", min_width=min(wide, NAME_WIDTH), overflow="fold")
    result = Table(name, *(Column(text, overflow="fold") for text in columns), padding=(0, 0, 0, 1))
    for run in facts:
        result.add_row(
            run.label,
            words.seconds(run.seconds),
            words.seconds(run.seconds_to(target)),
            words.loss(run.final_loss),
            words.size(run.uplink if linked else run.bytes_sent),
            words.share(run.waited),
            words.seconds(run.seconds_per_step),
        )
    return result


def write_json(path: Path, facts: Sequence[Facts], target: float | None) -> None:
    """Write the table as JSON."""
    try:
        write_whole(path, json.dumps(rows(facts, target), indent=2) + "\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
