"""``loosestep compare``, ``report`` and ``doctor`` as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loosestep import Strategy, Topology, post_local_sgd
from loosestep.lab.emulation import missing
from loosestep.lab.runs import read_run
from loosestep.lab.trainer import contenders
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.specs import OURS as OURS_BY_NAME
from loosestep.lab.trainer.specs import parse_spec
from loosestep.testing import RankPool
from tests.support.commands import (
    MODULE,
    TINY,
    Done,
    begun,
    call,
    call_as_worker,
    command,
    free_port,
    read_json,
    steps_in,
    until,
    workers_of,
)

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())
OURS = "post_local_sgd:period=4,warmup_steps=0,reducer=int8,gradients=none"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """Two contenders on two hosts that are one machine, with a worker each."""
    folder = tmp_path_factory.mktemp("compare")
    files = ("--json", folder / "table.json", "--report", folder / "page.html")
    tokens = 24 * 2 * 2 * 32  # steps, workers, samples, bytes
    ends = ("--tokens", str(tokens), "--eval-every", "6", "--target", "5.5")
    options = ("--workers-per-host", "1", *ends, "--out", folder / "runs")
    return call("compare", OURS, "torch-ddp", *TINY, *options, *files), folder


def test_a_comparison_shows_a_row_for_every_contender(compared: tuple[Done, Path]):
    done, folder = compared
    assert (done.code, done.err) == (0, "")
    assert "the loopback between them" in done.out
    ours, theirs = read_json(folder / "table.json")
    assert (ours["strategy"], theirs["strategy"]) == (OURS, "torch-ddp")
    assert ours["steps"] == theirs["steps"] == 24
    assert ours["bytes_that_left_a_host"] is None
    assert 0 <= ours["share_of_time_waiting"] <= 1
    assert ours["final_loss"] == pytest.approx(theirs["final_loss"], abs=0.3)
    assert f"{theirs['final_loss']:.3f}" in done.out
    for row in (ours, theirs):
        assert 0 < row["seconds_to_target"] <= row["seconds"]


def test_contenders_send_what_their_strategy_says(compared: tuple[Done, Path]):
    ours, theirs = read_json(compared[1] / "table.json")
    parameters = read_run(compared[1] / "runs" / "02-torch-ddp").info.num_parameters
    # DDP sends 4 bytes a parameter and step: 2 (n - 1) / n of them with n = 2 workers.
    assert theirs["bytes_sent_per_worker"] == pytest.approx(4 * parameters * 24, rel=0.02)
    # Ours a byte and its scale, at every fourth step.
    assert ours["bytes_sent_per_worker"] < theirs["bytes_sent_per_worker"] / 12


def test_contenders_start_from_the_same_model_and_data(compared: tuple[Done, Path]):
    runs = [read_run(run) for run in sorted((compared[1] / "runs").iterdir()) if run.is_dir()]
    first = [[run.of("step", rank)[0]["loss"] for rank in (0, 1)] for run in runs]
    assert first[0] == first[1]
    assert runs[0].info.data == runs[1].info.data
    assert runs[0].info.topology == {"host": [[0], [1]], "world": [[0, 1]]}


def test_a_comparison_writes_a_report_and_another_can_be_made(compared: tuple[Done, Path]):
    folder = compared[1]
    page = (folder / "page.html").read_text()
    assert OURS in page
    assert "torch-ddp" in page
    done = call("report", folder / "runs", "--output", folder / "again.html")
    assert (done.code, done.err) == (0, "")
    assert "torch-ddp" in (folder / "again.html").read_text()


def test_a_comparison_is_not_for_workers(monkeypatch: pytest.MonkeyPatch):
    """Each of them would start all workers again."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "run it without torchrun or srun" in call("compare", "ddp", *TINY).refused()


def test_a_file_of_settings_is_used_or_refused(tmp_path: Path, compared: tuple[Done, Path]):
    settings = tmp_path / "run.toml"
    settings.write_text("workers = 4\n")
    assert "'workers' is for loosestep train" in call("compare", "--config", settings).refused()
    settings.write_text(f'out = "{compared[1] / "runs"}"\n')
    assert "there is a run in it already" in call("compare", "--config", settings).refused()


def test_one_warm_up_is_for_all_contenders(tmp_path: Path):
    """Who has none gets it, who was given one keeps it, and a run that never leaves it says so."""
    specs = (
        "post_local_sgd:period=2,gradients=none",
        "torch-post-local:period=2,warmup_steps=1",
        "ddp",
    )
    ends = ("--steps", "4", "--warmup-steps", "4", "--workers-per-host", "1")
    done = call(
        "compare", *specs, *TINY, *ends, "--json", tmp_path / "t.json", "--out", tmp_path / "o"
    )
    assert (done.code, done.err) == (0, "")
    rows = {row["strategy"]: row["still_in_its_warm_up"] for row in read_json(tmp_path / "t.json")}
    ours = "post_local_sgd:period=2,gradients=none"
    assert rows == {ours: True, "torch-post-local:period=2,warmup_steps=1": False, "ddp": False}
    assert "still in its warm-up" in " ".join(done.out.split())
    assert "is still in its warm-up" in (tmp_path / "o" / "report.html").read_text()


def test_a_recipe_that_nobody_can_guess_options_for_is_named_and_not_run(
    monkeypatch: pytest.MonkeyPatch,
):
    def rare(period: int, *, topology: Topology | None = None) -> Strategy:
        return post_local_sgd(period, topology=topology)

    monkeypatch.setitem(OURS_BY_NAME, "rare", rare)
    assert "rare" in contenders.names()
    assert "rare" not in [spec.name for spec in contenders.defaults()]
    contenders.check_spec(parse_spec("rare:period=3"))
    with pytest.raises(BadInput, match="needs period: give rare:period="):
        contenders.check_spec(parse_spec("rare"))


def namespaces() -> set[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in found.stdout.splitlines() if line.strip()}


def processes_about(text: str) -> list[str]:
    """Return the processes that have a text in their command or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                about = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if text.encode() in about:
                found.append(entry.name)
    return found


@needs_namespaces
def test_emulated_hosts_count_what_leaves_them_and_leave_nothing(tmp_path: Path):
    """Two hosts with two workers each: ours send a copy a host, PyTorch's a copy a worker."""
    before, workers = namespaces(), {*workers_of(os.getpid())}
    ours, theirs = "post_local_sgd:period=4,warmup_steps=0", "torch-post-local:period=4"
    options = ("--link", "100mbit", "--hosts", "2", "--workers-per-host", "2", "--steps", "24")
    files = ("--json", tmp_path / "table.json", "--out", tmp_path / "runs")
    done = call("compare", ours, theirs, *TINY, *options, *files)
    assert (done.code, done.err) == (0, "")
    assert "uplinks of 100mbit" in done.out
    runs = [read_run(run) for run in sorted((tmp_path / "runs").iterdir()) if run.is_dir()]
    for run in runs:
        assert run.info.link == {"rate": "100mbit", "hosts": 2, "workers_per_host": 2}
        assert run.info.topology == {"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}
    copy = 4 * runs[0].info.num_parameters
    left = [row["bytes_that_left_a_host"] for row in read_json(tmp_path / "table.json")]
    # Six averages each; PyTorch's first is at the first step, and a ring of four sends 1.5 copies.
    # The kernel counts headers and acknowledgements too.
    assert 6 * copy < left[0] < 1.4 * 6 * copy
    assert 6 * 1.5 * copy < left[1] < 1.4 * 7 * 1.5 * copy
    assert namespaces() <= before
    assert {*workers_of(os.getpid())} <= workers


@needs_namespaces
def test_a_comparison_that_is_killed_leaves_nothing(tmp_path: Path):
    """Its workers and their hosts end with it."""
    mark = {"LOOSESTEP_TEST_MARK": str(tmp_path)}
    options = ("--link", "100mbit", "--steps", "100000", "--out", tmp_path / "runs")
    with begun("compare", "torch-ddp", *TINY, *options, environment=mark) as process:
        until(lambda: steps_in(tmp_path / "runs" / "01-torch-ddp") > 2)
        assert len(processes_about(str(tmp_path))) > 4
        process.kill()
        process.wait()
        until(lambda: processes_about(str(tmp_path)) == [], seconds=20)


def test_the_doctor_measures_between_workers(pool: RankPool, tmp_path: Path):
    """One of them tells, whoever has started them."""
    arguments = ("doctor", "--json", tmp_path / "found.json")
    said = pool.run(2, call_as_worker, free_port(), *arguments)
    assert [done.code for done in said] == [0, 0], said
    assert read_json(tmp_path / "found.json")["links"]["hosts"] == [[0, 1]]
    assert [done.out.count("loosestep train") for done in said] == [1, 0]


@pytest.mark.long
def test_the_doctor_measures_between_the_workers_of_torchrun(tmp_path: Path):
    """One of them tells."""
    options = ("--standalone", "--nproc-per-node", "2", *MODULE[1:])
    launcher = (sys.executable, "-m", "torch.distributed.run", *options)
    done = command("doctor", "--json", tmp_path / "found.json", start=launcher)
    assert done.code == 0, done.err
    assert read_json(tmp_path / "found.json")["links"]["hosts"] == [[0, 1]]
    assert done.out.count("loosestep train") == 1


def test_the_doctor_measures_and_recommends(tmp_path: Path):
    done = call("doctor", "--workers", "2", "--json", tmp_path / "found.json")
    assert (done.code, done.err) == (0, "")
    found = read_json(tmp_path / "found.json")
    assert found["machine"]
    assert found["links"]
    assert found["recommendation"]
