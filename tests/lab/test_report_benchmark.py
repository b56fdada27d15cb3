"""The report of the training benchmark, and what benchmarks write where they can do nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, training
from loosestep.lab.report.facts import Facts, facts_of
from loosestep.lab.runs import read_run
from tests.support.report_runs import Made, write_run

LINK = {"rate": "100mbit", "hosts": 2, "workers_per_host": 2}


def made_up(contender: training.Contender, seed: int, folder: Path, *_: Any) -> Facts:
    """Stand in for a training: DDP waits for long, others hardly, computing alone not at all."""
    own = training.run_folder(folder, contender.name, seed)
    made = Made(
        name=contender.name,
        strategy=contender.spec,
        steps=contender.steps,
        wait={"DDP": 4.0, "compute alone": 0.0}.get(contender.name, 0.1),
        floor=2.0 if contender.name == "compute alone" else 2.2,
        eval_every=training.EVERY,
    )
    return facts_of([read_run(write_run(own, made, link=LINK))])[0]


def test_the_training_report_names_who_came_to_ddps_loss_first(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "missing", lambda: "")
    monkeypatch.setattr(training, "train", made_up)
    monkeypatch.setattr(training, "RESULTS", tmp_path / "results")
    training.run(1)
    page = (tmp_path / "results" / "training.html").read_text(encoding="utf-8")
    (headline,) = re.findall(r"<p class=headline>(.*?)</p>", page)
    assert re.match(r"No clear winner|(loosestep|in-tree), period \d+ was first at a", headline)
    assert "3.365" in headline  # 2.2 + 3.4 exp(-30 / 28), of DDP after 30 steps
    assert "compute alone shares nothing and is not ranked" in page


def test_a_training_says_how_it_was_started():
    assert training.COMMAND == ["python", "-m", "benchmarks", "training"]


def test_no_rows_leave_the_figures_of_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    report.write("speed", [report.Row("all", "us", 1.0, (0.9, 1.1), {})])
    (path,) = (tmp_path / "results").iterdir()
    before = path.read_text()
    capsys.readouterr()
    report.write("speed", [])
    assert capsys.readouterr().out == "speed: nothing was measured, so nothing is written\n"
    assert path.read_text() == before
    assert '"contender": "us"' in before
