"""A comparison on a machine that cannot emulate links says so wherever its figures go."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loosestep.lab.cli import comparison_hosts as hosts
from loosestep.lab.cli.table import rows
from loosestep.lab.report.facts import facts_of
from loosestep.lab.runs import read_run
from tests.support.commands import TINY, call, read_json
from tests.support.report_runs import DDP, write_run


def test_a_comparison_without_its_link_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "missing", lambda: "nothing is allowed here")
    options = ("--link", "100mbit", "--or-loopback", "--workers-per-host", "1", "--steps", "2")
    files = ("--json", "table.json", "--report", "page.html", "--out", "runs")
    given = ("compare", "ddp", "torch-ddp", *TINY, *options, *files)
    monkeypatch.setattr(sys, "argv", ["loosestep", *given])  # as it is written down
    monkeypatch.chdir(tmp_path)
    done = call(*given)
    assert (done.code, done.err) == (0, "")
    assert [row["link"] for row in read_json(tmp_path / "table.json")] == [None, None]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "no link between the 2 hosts was emulated, so none was slow." in page


def test_a_row_names_its_link(tmp_path: Path):
    short, link = replace(DDP, steps=2), {"rate": "100mbit", "hosts": 2, "workers_per_host": 1}
    runs = [read_run(write_run(tmp_path / name, short, link=link)) for name in ("a", "b")]
    assert [row["link"] for row in rows(facts_of(runs), None)] == ["100mbit", "100mbit"]
