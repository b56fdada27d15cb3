"""A file that says what a run of the suite came to, for `pytest --result-file`."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections import Counter
from pathlib import Path

import pytest
import torch


class ResultFile:
    """Counts outcomes as pytest reports them, and writes them down at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, list[dict[str, str]]] = {"failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        expected = report.skipped and hasattr(report, "wasxfail")
        outcome = "expected failures" if expected else report.outcome
        self._counts[outcome] += 1
        if outcome in self._reasons:
            entry = {"test": report.nodeid, "reason": _reason(report)}
            self._reasons[outcome].append(entry)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput"):  # of pytest-xdist: its controller writes
            return
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["pytest", *session.config.invocation_params.args]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "exit_status": int(exitstatus),
            "seconds": round(time.monotonic() - self._began, 1),
            **{name: self._counts[name] for name in ("passed", "failed", "skipped")},
            "expected_failures": self._counts["expected failures"],
            "failures": self._reasons["failed"],
            "skips": self._reasons["skipped"],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=2) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the one line that says why."""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return next(iter(text.splitlines()), "")
