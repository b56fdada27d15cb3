"""Runs that are interrupted or killed, and go on as if they had not been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from loosestep.lab.runs import read_run
from loosestep.lab.trainer import checkpoint
from loosestep.lab.trainer.part_files import read_part
from loosestep.lab.trainer.settings import Settings
from tests.support.commands import (
    TINY,
    alive,
    begun,
    call,
    final_loss,
    losses,
    reasons,
    steps_in,
    until,
    workers_of,
)

# Averages begin after steps 8, 16, ... and arrive three steps later: at 50 one is on its way.
STRATEGY = "post_local_sgd:period=8,warmup_steps=0,reducer=int4,overlap_steps=3,gradients=none"
STEPS, IN_FLIGHT = 200, 50
ARGUMENTS = (
    *("train", *TINY, "--strategy", STRATEGY, "--steps", str(STEPS)),
    *("--eval-every", "100", "--save-every", str(IN_FLIGHT), "--keep", "99"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert call(*ARGUMENTS, "--out", folder).code == 0
    return folder


def test_a_run_goes_on_from_an_average_that_was_on_its_way(whole: Path, tmp_path: Path):
    start = whole / f"checkpoints/step-{IN_FLIGHT:08d}"
    state = read_part(start, checkpoint.read_manifest(start), 0)
    assert state["sharing"]["flights"]["0"]["step"] == 48
    done = call("train", "--resume", start, "--out", tmp_path / "again")
    assert (done.code, done.err) == (0, "")
    for rank in (0, 1):
        assert len(losses(whole, rank)) == STEPS
        assert losses(tmp_path / "again", rank) == losses(whole, rank)
    assert final_loss(tmp_path / "again") == final_loss(whole)


def test_another_strategy_starts_from_the_mean(whole: Path, tmp_path: Path):
    """Replicas that differ are made equal where the new strategy would never do so."""
    start, folder = whole / f"checkpoints/step-{IN_FLIGHT:08d}", tmp_path / "again"
    short = ("--steps", str(IN_FLIGHT + 2), "--save-every", str(IN_FLIGHT + 2))
    done = call("train", "--resume", start, "--out", folder, "--strategy", "ddp", *short)
    assert (done.code, done.err) == (0, "")
    last = checkpoint.find(str(folder))
    manifest = checkpoint.read_manifest(last)
    one, other = (read_part(last, manifest, rank)["model"] for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_hosts_start_from_the_mean(whole: Path, tmp_path: Path):
    """Workers that are of one host now may have to be equal, and were not."""
    start, folder = whole / f"checkpoints/step-{IN_FLIGHT:08d}", tmp_path / "again"
    done = call(
        *("train", "--resume", start, "--out", folder, "--hosts", "2"),
        *("--steps", str(IN_FLIGHT + 2)),
    )
    assert (done.code, done.err) == (0, "")
    ours, theirs = losses(folder, 0), losses(whole, 0)
    assert ours[IN_FLIGHT] == theirs[IN_FLIGHT]
    assert ours[IN_FLIGHT + 1] != theirs[IN_FLIGHT + 1]


def test_an_interrupted_run_saves_and_goes_on_to_the_same_losses(whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    with begun(*ARGUMENTS, "--save-every", "0", "--out", folder) as process:
        until(lambda: steps_in(folder) > 20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert f"stopped: loosestep train --resume {folder} goes on" in out
    assert reasons(folder) == ["interrupted", "interrupted"]
    stopped = [max(losses(folder, rank)) for rank in (0, 1)]
    assert stopped[0] == stopped[1] < STEPS
    assert checkpoint.read_manifest(checkpoint.find(str(folder))).step == stopped[0]
    done = call("train", "--resume", folder, "--out", tmp_path / "again")
    assert (done.code, done.err) == (0, "")
    for rank in (0, 1):
        assert losses(tmp_path / "again", rank) == losses(whole, rank)
    times = [record["at"] for record in read_run(tmp_path / "again").of("step")]
    assert times == sorted(times)


def test_a_killed_run_leaves_no_worker_and_goes_on_with_more_workers(whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    # Far more steps than there may be until it is killed, on a busy machine too.
    with begun(*ARGUMENTS, "--steps", str(10 * STEPS), "--out", folder) as process:
        until(lambda: checkpoint.has_checkpoint(folder))
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.kill()
        until(lambda: not any(alive(worker) for worker in workers), seconds=10)
    assert max(losses(folder)) < 10 * STEPS
    start, to_go = folder / f"checkpoints/step-{IN_FLIGHT:08d}", ("--steps", str(STEPS))
    done = call("train", "--resume", start, "--workers", "3", "--out", tmp_path / "again", *to_go)
    assert (done.code, done.err) == (0, "")
    run = read_run(tmp_path / "again")
    assert sorted(run.records) == [0, 1, 2]
    assert [record["step"] for record in run.of("step")] == list(range(1, STEPS + 1))
    tokens = [record["tokens"] for record in run.of("step")]
    assert tokens[-1] - tokens[-2] == 3 * 2 * 32
    assert final_loss(tmp_path / "again") == pytest.approx(final_loss(whole), abs=0.15)


# A number of tokens, of which workers come and go

TOKENS = 40 * 128 + 100  # two workers see 128 in a step
IN_TOKENS = (*TINY, "--tokens", str(TOKENS), "--lr-warmup", "5", "--save-every", "20")


@pytest.fixture(scope="module")
def in_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "run"
    assert call("train", *IN_TOKENS, "--keep", "9", "--out", folder).code == 0
    return folder


def resumed(start: Path, workers: int, folder: Path) -> Path:
    """Resume a run after its step 20 or 40, on so many workers; return where."""
    done = call("train", "--resume", start, "--workers", str(workers), "--out", folder)
    assert (done.code, done.err) == (0, "")
    assert set(reasons(folder)) == {"finished"}
    return folder


def rates(folder: Path) -> dict[int, float]:
    """Return the learning rate of every step, by the tokens that were seen when it began."""
    steps = read_run(folder).of("step")
    began = [0, *(record["tokens"] for record in steps)]
    return {tokens: record["lr"] for tokens, record in zip(began, steps, strict=False)}


def test_tokens_go_on_to_the_bit_with_the_same_workers(in_tokens: Path, tmp_path: Path):
    again = resumed(in_tokens / "checkpoints/step-00000020", 2, tmp_path / "again")
    assert max(losses(again)) == read_run(again).info.steps == 40
    assert rates(again) == rates(in_tokens)
    for rank in (0, 1):
        assert losses(again, rank) == losses(in_tokens, rank)


def test_other_workers_see_as_many_tokens_at_the_same_rates(in_tokens: Path, tmp_path: Path):
    """Two workers, then one, then two: steps are smaller in between, so there are more."""
    one = resumed(in_tokens / "checkpoints/step-00000020", 1, tmp_path / "one")
    two = resumed(one / "checkpoints/step-00000040", 2, tmp_path / "two")
    for folder, steps, per_step in ((in_tokens, 40, 128), (one, 61, 64), (two, 50, 128)):
        run = read_run(folder)
        assert run.of("step")[-1]["step"] == run.info.steps == steps
        assert TOKENS - per_step < run.of("step")[-1]["tokens"] <= TOKENS
        found, expected = rates(folder), rates(in_tokens)
        shared = sorted(found.keys() & expected.keys())
        assert len(shared) == 40
        # They differ by what the last step may end sooner or later; the highest rate is 2e-3.
        assert [found[t] for t in shared] == pytest.approx([expected[t] for t in shared], abs=3e-5)


def test_steps_follow_from_the_tokens_that_are_left():
    settings = Settings(tokens=1000)
    assert settings.num_steps(10, done=40, seen=400) == settings.num_steps(10) == 100
    assert settings.num_steps(25, done=40, seen=400) == 64
    assert settings.num_steps(25, done=40, seen=1010) == 40
