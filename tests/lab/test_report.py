"""The report's numbers and words, worked out by hand, and what it does with bad runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loosestep.lab.report import make_report, words, write_report
from loosestep.lab.report.course import Point
from loosestep.lab.report.drawing import drawing, thinned, timeline
from loosestep.lab.report.facts import facts_of
from loosestep.lab.runs import NotARun, log_file, read_run
from tests.support.report_runs import (
    DDP,
    LOCAL,
    TWO_LEVELS,
    Made,
    edit_records,
    facts_and_verdict,
    val_loss,
    write_run,
)

pytestmark = pytest.mark.fast


def report_of(tmp_path: Path, *folders: Path) -> str:
    output = tmp_path / "report.html"
    write_report(folders, output)
    return output.read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id=data>(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


# ---- words ----


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),  # noqa: RUF001
        (0.0004, "0.4 ms"),
        (0.042, "42 ms"),
        (4.24, "4.2 s"),
        (21.4, "21 s"),
        (133.0, "133 s"),
        (725.0, "12 min 5 s"),
        (36_000.0, "10 h 0 min"),
    ],
)
def test_seconds(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (12e6, "12 MB"), (1.9e9, "1.9 GB"), (999_700, "1.0 MB")],
)
def test_sizes(value, text):
    assert words.size(value) == text


def test_changes_and_ratios():
    assert words.change(2.231, 2.224) == "+0.3 %"
    assert words.change(2.2240, 2.2241) == "the same to 0.1 %"
    assert words.change(-1.1, -1.0) == "-10.0 %"  # lower is better, of negative losses too
    assert [words.times(ratio) for ratio in (1.25, 6.3, 77.7)] == [
        "1.25 times",
        "6.3 times",
        "78 times",
    ]
    assert words.listed(["a", "b", "c"]) == "a, b and c"


# ---- facts ----


def test_facts_of_ddp(tmp_path):
    """Each of 200 steps takes 0.08 s, waits 0.58 s and 0.004 s for the slowest: 132.8 s."""
    (facts,), _ = facts_and_verdict(write_run(tmp_path / "ddp", DDP))
    assert facts.steps == 200
    assert facts.seconds == pytest.approx(200 * 0.664)
    assert facts.bytes_sent == 200 * 9_500_000
    assert facts.sent == {"gradients/world": 200 * 9_500_000}
    assert facts.waited == pytest.approx(0.584 / 0.664, abs=1e-3)
    assert facts.waited_for == ("gradients over world", 1.0)
    assert facts.final_loss == val_loss(DDP, 200)
    assert facts.trouble is None


def test_bytes_and_losses_are_means_of_all_workers(tmp_path):
    folder = write_run(tmp_path / "run", replace(DDP, steps=2, eval_every=1))
    for rank in range(4):

        def change(record, rank=rank):
            if record["event"] == "step":
                record |= {"loss": float(rank), "sent": {"gradients/world": 100 * rank}}
            return record

        edit_records(folder, rank, change)
    (facts,), _ = facts_and_verdict(folder)
    assert [point.loss for point in facts.course.train] == [1.5, 1.5]  # (0+1+2+3)/4
    assert facts.sent == {"gradients/world": 150.0}
    assert facts.course.evals[0].sent == 150.0


def test_what_was_waited_for_comes_from_spans_where_syncs_do_not_say(tmp_path):
    folder = write_run(tmp_path / "run", replace(DDP, steps=4))
    for rank in range(4):
        edit_records(folder, rank, lambda r: r if r["event"] != "sync" else None)
    (facts,), _ = facts_and_verdict(folder)
    assert facts.waited_for == ("world", 1.0)


def test_a_resumed_run_counts_its_own_steps(tmp_path):
    folder = write_run(tmp_path / "run", DDP)
    for rank in range(4):
        edit_records(folder, rank, lambda r: r if r.get("step", 0) > 150 else None)
    (facts,), _ = facts_and_verdict(folder)
    assert facts.steps == 50
    assert facts.last_step == 200


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name, replace(DDP, steps=2)) for name in ("a", "b")]
    facts, _ = facts_and_verdict(*folders)
    assert [run.label for run in facts] == ["torch-ddp (a)", "torch-ddp (b)"]


# ---- runs that went wrong ----


def test_a_run_killed_in_the_middle(tmp_path):
    """No end, and a last line of which half was written."""
    killed, whole = write_run(tmp_path / "killed", LOCAL), write_run(tmp_path / "whole", DDP)
    for rank in range(4):
        path = log_file(killed, rank)
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: len(text) // 2], encoding="utf-8")
    facts, found = facts_and_verdict(killed, whole)
    assert facts[0].trouble == "has no record of its end: it still runs, or was killed"
    assert facts[0].last_step < 120
    assert found.headline.startswith("No winner: fewer than two")
    assert found.notes[0].startswith(f"{LOCAL.name} has no record of its end")
    assert "still runs, or was killed" in report_of(tmp_path, killed, whole)


@pytest.mark.parametrize(
    ("reason", "trouble"),
    [
        ("interrupted", "was interrupted"),
        ("PeerLost: worker 2 is gone", "failed on worker 1: PeerLost: worker 2 is gone"),
    ],
)
def test_a_run_that_ended_badly(tmp_path, reason, trouble):
    folder = write_run(tmp_path / "run", replace(DDP, steps=3))
    edit_records(folder, 1, lambda r: r | {"reason": reason} if r["event"] == "end" else r)
    (facts,), _ = facts_and_verdict(folder)
    assert facts.trouble == trouble


def test_a_worker_that_left_nothing(tmp_path):
    folder = write_run(tmp_path / "run", replace(DDP, steps=3))
    log_file(folder, 2).unlink()
    (facts,), _ = facts_and_verdict(folder)
    assert facts.trouble == "has no record of worker 2's end: it still runs, or was killed"


def test_runs_without_evaluations(tmp_path):
    folders = [
        write_run(tmp_path / made.name, replace(made, eval_every=None)) for made in (DDP, LOCAL)
    ]
    _, found = facts_and_verdict(*folders)
    assert found.headline.startswith("No winner")
    assert "ended at a training loss of" in found.sentences[0]
    assert "torch-ddp recorded no validation loss." in found.notes
    assert data_of(report_of(tmp_path, *folders))["runs"][0]["evals"]["loss"] == []


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_losses_that_are_not_numbers(tmp_path, bad):
    """A loss that is null, NaN or infinite is a gap; at the end it is a run that diverged."""
    folder = write_run(tmp_path / "run", replace(DDP, steps=50))

    def change(record):
        lost = record["event"] in ("step", "eval") and record["step"] > 40
        return record | {"loss": bad} if lost else record

    edit_records(folder, 0, change)
    (facts,), found = facts_and_verdict(folder)
    assert facts.diverged
    assert found.headline.endswith("diverged: its last loss is not a number.")
    drawn = data_of(report_of(tmp_path, folder))["runs"][0]
    assert drawn["train"]["loss"][40:] == [None] * 10
    assert drawn["evals"]["loss"][-1] is None


# ---- what is drawn ----


def test_thinning_keeps_spikes_gaps_and_ends():
    losses: list[float | None] = [1.0] * 100_000
    losses[777], losses[50_001], losses[60_000] = 9.0, 0.1, None
    points = [Point(i, float(i), 0.0, loss) for i, loss in enumerate(losses)]
    kept = thinned(points, 1000)
    assert len(kept) <= 1003
    assert {0, 777, 50_001, 60_000, 99_999} <= {point.step for point in kept}
    assert [point.step for point in kept] == sorted({point.step for point in kept})


def test_timeline_of_a_run(tmp_path):
    found = timeline(read_run(write_run(tmp_path / "run", LOCAL)))
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]
    first = found["ranks"][0]
    assert first["kind"][:2] == [0, 0]
    assert len(first["kind"]) == 200 + 2 * 25  # every step computes, every sync sends and waits
    assert first["begin"] == sorted(first["begin"])
    assert found["levels"] == ["", "world"]
    assert [group["name"] for group in found["groups"]] == ["host 0", "host 1"]
    low, high = found["window"]
    # Syncs are 8 * 0.08 + 0.05 = 0.69 s apart, within a few milliseconds.
    assert high - low == pytest.approx(3.3 * 0.694e6, rel=0.01)


def test_a_long_timeline_keeps_start_middle_and_end(tmp_path):
    run = read_run(write_run(tmp_path / "run", DDP))
    found = timeline(run, limit=240)
    kept = found["kept"]
    assert len(kept) == 3
    assert sum(len(row["begin"]) for row in found["ranks"]) == pytest.approx(240, abs=16)
    assert kept[1][0] <= found["window"][0] <= found["window"][1] <= kept[1][1]


def test_drift_by_level(tmp_path):
    run = read_run(write_run(tmp_path / "run", TWO_LEVELS))
    drift = drawing(run, facts_of([run])[0])["drift"]
    assert set(drift) == {"host", "world"}
    assert drift["world"]["step"] == list(range(16, 201, 16))


# ---- the page ----

NASTY = "</script><script>alert(1)</script>&amp;'\"{{data}}<!--"


def test_strings_of_a_run_are_text(tmp_path):
    nasty = replace(LOCAL, name=NASTY, steps=8)
    folder = write_run(
        tmp_path / "run",
        nasty,
        config={NASTY: NASTY},
        command=[NASTY],
        environment={"machine": NASTY},
        data={"name": NASTY},
        topology={NASTY: [[0, 1], [2, 3]]},
    )
    for rank in range(4):
        edit_records(folder, rank, lambda r: r | {"level": NASTY} if "level" in r else r)
    page = report_of(tmp_path, folder)
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert data_of(page)["runs"][0]["label"] == NASTY


def test_the_page_is_whole_and_small(tmp_path):
    folders = [write_run(tmp_path / made.name, made) for made in (DDP, LOCAL, TWO_LEVELS)]
    page = report_of(tmp_path, *folders)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert not re.findall(r"\{\{\w+\}\}", page)
    assert len(page) < 250_000
    assert page == make_report([read_run(folder) for folder in folders])  # nothing else goes in
    for text in ("ab" * 32, "loosestep train --strategy torch-ddp", "x86_64, 2 cores", "3.8 GB"):
        assert text in page


def test_the_summary_marks_the_best(tmp_path):
    page = report_of(tmp_path, *(write_run(tmp_path / m.name, m) for m in (DDP, TWO_LEVELS)))
    rows = re.findall(r"<tr><th scope=row data-run=\d>.*?</tr>", page)
    cells = [re.findall(r"<td( class=best)?>(.*?)</td>", row) for row in rows]
    assert [text for _, text in cells[0]] == [
        "133 s",
        "100 s",
        "2.203",
        "1.9 GB",
        "88 %",
        "664 ms",
    ]
    assert [bool(best) for best, _ in cells[0]] == [False, False, True, False, False, False]
    assert cells[1][1] == ("", "never")


def marks_of(page: str) -> list[list[bool]]:
    """Return for every run which of its figures are marked as the best."""
    rows = re.findall(r"<tr><th scope=row data-run=\d>.*?</tr>", page)
    return [[bool(best) for best in re.findall(r"<td( class=best)?>", row)] for row in rows]


def test_the_best_of_different_lengths_is_marked_where_steps_do_not_count(tmp_path):
    """Time to the target, share of waiting and time a step; not the time, loss or bytes."""
    longer = replace(LOCAL, steps=250)
    runs = [read_run(write_run(tmp_path / made.name, made)) for made in (DDP, longer)]
    page = make_report(runs, target=2.5)
    assert marks_of(page) == [[False] * 6, [False, True, False, False, True, True]]


def test_a_run_that_shares_nothing_is_not_marked(tmp_path):
    alone = replace(DDP, name="floor", strategy="alone", wait=0.0, megabytes=0.0, floor=2.0)
    runs = [read_run(write_run(tmp_path / made.name, made)) for made in (DDP, alone, LOCAL)]
    assert marks_of(make_report(runs)) == [
        [False, False, True, False, False, False],
        [False] * 6,
        [True, True, False, True, True, True],
    ]


# ---- bad input ----


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(NotARun, match=r"no run\.json in it; give the folder of a run"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_records_without_their_numbers(tmp_path):
    folder = write_run(tmp_path / "run", Made(name="x", steps=3))
    edit_records(folder, 1, lambda r: r | {"at": "soon"} if r["event"] == "step" else r)
    rule = r"rank-1\.jsonl: 'at' of a 'step' record is 'soon', not a number"
    with pytest.raises(NotARun, match=rule):
        write_report([folder], tmp_path / "report.html")


def test_a_run_before_its_first_step(tmp_path):
    folder = write_run(tmp_path / "run", Made(name="x", steps=3))
    edit_records(folder, 0, lambda r: r if r["event"] == "span" else None)
    with pytest.raises(NotARun, match="worker 0 has not finished a step"):
        write_report([folder], tmp_path / "report.html")


def test_outputs_that_cannot_be(tmp_path):
    folder = write_run(tmp_path / "run", Made(name="x", steps=3))
    with pytest.raises(ValueError, match=r"there is no folder .*missing; make it first"):
        write_report([folder], tmp_path / "missing" / "report.html")
    with pytest.raises(ValueError, match="is a folder; give the name of a file in it"):
        write_report([folder], tmp_path)
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="given twice"):
        write_report([folder, folder], tmp_path / "report.html")
    with pytest.raises(TypeError, match="must be a list of folders"):
        write_report(str(folder), tmp_path / "report.html")


def test_an_older_report_is_replaced_at_once(tmp_path, monkeypatch):
    """What is there stays whole until the new one is; a failure leaves it and no draft."""
    folder = write_run(tmp_path / "run", Made(name="x", steps=3))
    output = tmp_path / "out" / "report.html"
    output.parent.mkdir()
    output.write_text("old", encoding="utf-8")

    def fail(source: Path, target: Path) -> None:
        assert Path(source).read_text(encoding="utf-8").endswith("</html>\n")
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no room"):
            write_report([folder], output)
    assert output.read_text(encoding="utf-8") == "old"
    write_report([folder], output)
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert os.listdir(output.parent) == ["report.html"]


def test_the_report_itself_needs_no_torch():
    """Its modules load beside an empty package of the library's name, without torch."""
    code = """
import sys, types, importlib.util
package = types.ModuleType("loosestep")
package.__path__ = importlib.util.find_spec("loosestep").submodule_search_locations
sys.modules["loosestep"] = package
import loosestep.lab.report
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
