"""Made-up runs for the report: folders as ``lab.runs`` describes them, of known numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loosestep.lab.report.comparability import differences
from loosestep.lab.report.facts import Facts, facts_of
from loosestep.lab.report.verdict import Verdict, verdict
from loosestep.lab.runs import RunInfo, log_file, read_run

WORKERS = 4
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a made-up run goes. Every step computes for 80 ms."""

    name: str
    strategy: str | None = None  # None: the name
    steps: int = 200
    period: int = 1  # steps between syncs over the world
    host_period: int | None = None  # steps between syncs over a host; None: none
    kind: str = "parameters"
    wait: float = 0.5  # seconds that a worker stands still at a sync over the world
    send: float = 0.0  # seconds that a sync over the world is under way while work goes on
    megabytes: float = 10.0  # sent by each worker at every sync over the world
    floor: float = 2.2  # of the loss
    eval_every: int | None = 25
    seed: int = 1
    link: Record | None = None


DDP = Made(name="torch-ddp", kind="gradients", wait=0.58, megabytes=9.5, floor=2.2)
LOCAL = Made(
    name="post_local_sgd:period=8,reducer=int4",
    period=8,
    wait=0.05,
    send=0.3,
    megabytes=0.48,
    floor=2.207,
)
TWO_LEVELS = Made(
    name="hierarchical",
    strategy="hierarchical_sgd:host=4,world=16",
    period=16,
    host_period=4,
    wait=0.6,
    megabytes=9.5,
    floor=2.23,
)


def write_run(folder: Path, made: Made, **info: Any) -> Path:
    """Write a run's folder and return it; ``info`` replaces fields of ``RunInfo``."""
    folder.mkdir(parents=True)
    _info(made, **info).write(folder)
    for rank in range(WORKERS):
        write_records(folder, rank, worker_records(made, rank))
    return folder


def write_records(folder: Path, rank: int, records: list[Record]) -> None:
    """Write what one worker did."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    log_file(folder, rank).write_text(text, encoding="utf-8")


def _info(made: Made, **fields: Any) -> RunInfo:
    known: Record = {
        "name": made.name,
        "strategy": made.strategy or made.name,
        "started": "2026-11-16T09:00:00+00:00",
        "command": ["loosestep", "train", "--strategy", made.strategy or made.name],
        "num_workers": WORKERS,
        "topology": {"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]},
        "num_parameters": 3_200_000,
        "tokens_per_step": 8192,
        "steps": made.steps,
        "config": {"seed": made.seed, "lr": 0.003, "model": {"width": 256, "layers": 4}},
        "data": {"name": "help texts", "bytes": 5_000_000, "sha256": "ab" * 32},
        "environment": {"torch": "2.13.0+cpu", "machine": "x86_64, 2 cores"},
        "link": made.link,
    }
    return RunInfo(**(known | fields))


def worker_records(made: Made, rank: int) -> list[Record]:
    """Return the records of one worker, ordered by time as a worker writes them."""
    now, waited, sent, copied = 0.0, 0.0, {f"{made.kind}/world": 0}, {"parameters/host": 0}
    records: list[Record] = []
    for step in range(1, made.steps + 1):
        compute = 0.08 + 0.004 * math.sin(step + rank)
        records.append(_span("compute", now, now + compute, step))
        now += compute
        if made.host_period and step % made.host_period == 0:
            copied["parameters/host"] += 9_500_000
            near = 0.002 + 0.001 * math.sin(step)
            records.append(_sync(now, step, "host", 0.01, copied=9_500_000, drift=near))
        if step % made.period == 0:
            wait = made.wait + 0.084 - compute  # all are done at the same time
            records.append(_span("wait", now, now + wait, step, "world"))
            if made.send:
                records.append(_span("send", now, now + made.send, step, "world"))
            now, waited = now + wait, waited + wait
            sent[f"{made.kind}/world"] += round(made.megabytes * 1e6)
            drift = 0.01 * (1 - step / (2 * made.steps)) if made.kind == "parameters" else None
            records.append(_sync(now, step, "world", wait, made=made, drift=drift))
        records.append(_step(made, rank, step, now, waited, dict(sent), dict(copied)))
        if rank == 0 and made.eval_every and step % made.eval_every == 0:
            records.append({"event": "eval", "at": now, "step": step, "loss": val_loss(made, step)})
    uplink = sum(sent.values()) * 2
    end = {"event": "end", "at": now, "step": made.steps, "reason": "finished", "uplink": uplink}
    return [*records, end]


def val_loss(made: Made, step: int) -> float:
    """Return the held-out loss after a step."""
    return made.floor + 3.4 * math.exp(-step / 28)


def _step(
    made: Made, rank: int, step: int, at: float, waited: float, sent: Record, copied: Record
) -> Record:
    noise = 0.3 * (math.sin(12.9898 * step + 78.233 * rank) * 43758.5453 % 1 - 0.5)
    following = step - step % made.period + made.period
    return {
        "event": "step",
        "at": at,
        "step": step,
        "loss": val_loss(made, step) - 0.02 + noise,
        "lr": 0.003,
        "tokens": step * 8192,
        "seconds_waited": waited,
        "next_sync": following if following <= made.steps else None,
        "sent": sent,
        "copied": copied,
    }


def _span(kind: str, begin: float, end: float, step: int, level: str | None = None) -> Record:
    common = {"event": "span", "at": end, "kind": kind, "begin": begin, "end": end}
    return common | {"step": step, "level": level}


def _sync(
    at: float,
    step: int,
    level: str,
    seconds: float,
    *,
    drift: float | None,
    made: Made | None = None,
    copied: int = 0,
) -> Record:
    return {
        "event": "sync",
        "at": at,
        "step": step,
        "level": level,
        "kind": made.kind if made else "parameters",
        "seconds": seconds + (made.send if made else 0.0),
        "bytes_sent": round(made.megabytes * 1e6) if made else 0,
        "bytes_copied": copied,
        "drift": drift,
        "seconds_waited": seconds,
    }


def edit_records(folder: Path, rank: int, change: Callable[[Record], Record | None]) -> None:
    """Replace the records of one worker; None drops one."""
    path = log_file(folder, rank)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [change(record) for record in records]
    text = "".join(json.dumps(record) + "\n" for record in kept if record is not None)
    path.write_text(text, encoding="utf-8")


def facts_and_verdict(*folders: Path, target: float | None = None) -> tuple[list[Facts], Verdict]:
    """Return the figures of the runs in folders, and the verdict on them."""
    runs = [read_run(folder) for folder in folders]
    facts = facts_of(runs)
    return facts, verdict(facts, differences([run.info for run in runs]), target)
