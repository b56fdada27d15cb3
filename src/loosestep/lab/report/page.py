"""The page: what is text is made here, what is drawn is handed to the page's script as JSON.

Every string of a run goes through ``escape`` or ``embedded``: a run may be named ``<script>``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from loosestep.lab.report import words
from loosestep.lab.report.comparability import differences, flat
from loosestep.lab.report.drawing import drawing
from loosestep.lab.report.facts import Facts, facts_of
from loosestep.lab.report.verdict import Verdict, verdict
from loosestep.lab.runs import Run

_SCRIPTS = ("base.js", "chart.js", "curves.js", "timeline.js", "bars.js", "page.js")


def make_report(runs: Sequence[Run], *, target: float | None = None) -> str:
    """Return the report on runs as the text of an HTML file; ``target`` as in ``write_report``."""
    if not runs:
        raise ValueError("a report needs at least one run; give one")
    facts, differ = facts_of(runs), differences([run.info for run in runs])
    found = verdict(facts, differ, target)
    drawn = [drawing(run, its) for run, its in zip(runs, facts, strict=True)]
    script = "".join(_asset(name) for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    parts = {
        "title": escape(_title(facts)),
        "policy": _policy(script),
        "style": _asset("report.css"),
        "verdict": _verdict(found),
        "summary": _summary(_columns(facts, found), facts, _WHOLE if differ.length else set()),
        "details": "".join(_details(run, its) for run, its in zip(runs, facts, strict=True)),
        "data": embedded({"runs": drawn, "target": found.target}),
        "script": script,
    }
    # In one pass: what is put in is not searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def embedded(value: Any) -> str:
    """Return JSON that can neither close the script element that holds it nor open another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("loosestep.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return a policy under which the page loads nothing and runs its own script only."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _title(facts: Sequence[Facts]) -> str:
    labels = [run.label for run in facts]
    shown = labels if len(labels) <= 3 else [*labels[:2], f"{len(labels) - 2} more"]
    return words.listed(shown)


def _verdict(found: Verdict) -> str:
    text = f"<p class=headline>{escape(found.headline)}</p>\n"
    if found.sentences:
        text += f"<p>{' '.join(escape(sentence) for sentence in found.sentences)}</p>\n"
    items = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    return text + (f"<ul class=notes>{items}</ul>" if items else "")


_WHOLE = {"Time", "Final loss", "Sent", "Left the host"}  # of all steps, however many there were
_Column = tuple[str, str, Callable[[Facts], float | None], Callable[[float | None], str]]


def _columns(facts: Sequence[Facts], found: Verdict) -> list[_Column]:
    target = found.target
    left: list[_Column] = [
        ("Left the host", "bytes, by the kernel's count", lambda run: run.uplink, words.size)
    ]
    reach: list[_Column] = [
        (
            "Time to target",
            f"seconds until validation loss was {words.loss(target)} or less",
            lambda run: run.seconds_to(target),
            lambda value: "never" if value is None else words.seconds(value),
        )
    ]
    return [
        ("Time", "until the last step on every worker", lambda run: run.seconds, words.seconds),
        *(reach if target is not None else []),
        ("Final loss", "on held-out data", lambda run: run.final_loss, words.loss),
        ("Sent", "bytes per worker over the network", lambda run: run.bytes_sent, words.size),
        *(left if all(run.info.link and run.uplink is not None for run in facts) else []),
        ("Waiting", "share of the time, mean of workers", lambda run: run.waited, words.share),
        ("Per step", "mean over the run", lambda run: run.seconds_per_step, words.seconds),
    ]


def _summary(columns: list[_Column], facts: Sequence[Facts], moot: set[str]) -> str:
    """Return the table; columns that are moot have no mark at the best."""
    head = "".join(
        f"<th scope=col>{escape(name)}<small>{escape(what)}</small></th>"
        for name, what, _, _ in columns
    )
    # Lower is better in every column; the mark is left out where all are alike.
    best = [
        None if name in moot else _least([value(run) for run in facts if run.shares])
        for name, _, value, _ in columns
    ]
    rows = []
    for number, run in enumerate(facts):
        cells = "".join(
            f"<td{' class=best' if run.shares and low is not None and value(run) == low else ''}>"
            f"{escape(shown(value(run)))}</td>"
            for (_, _, value, shown), low in zip(columns, best, strict=True)
        )
        rows.append(f"<tr><th scope=row data-run={number}>{_named(run)}</th>{cells}</tr>")
    return (
        f"<table class=summary><thead><tr><th scope=col>Strategy</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _least(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if len(set(known)) > 1 else None


def _named(run: Facts) -> str:
    # A strategy has no spaces to break at.
    text = re.sub(r"([:,])", r"\1<wbr>", escape(run.label))
    if run.info.strategy not in run.label:
        text += f"<small><code>{escape(run.info.strategy)}</code></small>"
    if run.trouble:
        text += f"<small class=trouble>{escape(run.trouble)}</small>"
    return text


def _details(run: Run, facts: Facts) -> str:
    info = run.info
    run_rows = {
        "strategy": info.strategy,
        "started": info.started,
        "command": shlex.join(str(part) for part in info.command),
        "workers": info.num_workers,
        "parameters": f"{info.num_parameters:,}",
        "tokens per step, all workers": f"{info.tokens_per_step:,}",
        "steps": f"{facts.steps:,} of {'any number' if info.steps is None else f'{info.steps:,}'}",
        "end": facts.trouble or "finished",
        "left the host, by the kernel's count": words.size(facts.uplink),
    }
    tables = [
        ("Run", run_rows),
        ("Settings", flat(info.config)),
        ("Data", flat(info.data)),
        ("Emulated link", flat(info.link) if info.link else {"rate": "none emulated"}),
        ("Groups of workers", dict(info.topology)),
        ("Environment", flat(info.environment)),
    ]
    body = "".join(_table(name, rows) for name, rows in tables)
    return (
        f"<details><summary>{escape(facts.label)}</summary><div class=tables>{body}</div></details>"
    )


def _table(name: str, rows: dict[str, Any]) -> str:
    lines = "".join(
        f"<tr><th scope=row>{escape(str(key))}</th><td>{escape(_cell(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<table class=facts><caption>{escape(name)}</caption><tbody>{lines}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None or value in ([], ""):
        return words.NONE
    return value if isinstance(value, str) else json.dumps(value, default=str)
