"""``loosestep train`` as a user runs it, with real workers."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

from loosestep.lab.runs import read_run
from loosestep.lab.trainer.checkpoint import has_checkpoint
from tests.support.commands import (
    MODULE,
    TINY,
    Done,
    alive,
    begun,
    call,
    command,
    free_port,
    losses,
    read_json,
    reasons,
    steps_in,
    until,
    workers_of,
)

# One run with every option that only adds to what is written


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    folder = tmp_path_factory.mktemp("train") / "run"
    options = ("--accumulate", "2", "--bf16", "--tensorboard", "--trace", "--eval-every", "5")
    strategy = ("--strategy", "post_local_sgd:period=4,warmup_steps=2", "--reducer", "int8")
    done = call("train", *TINY, *strategy, *options, "--steps", "14", "--out", folder)
    return done, folder


def assert_only_warned_that_nothing_is_saved(done: Done) -> None:
    """On one machine gradients of ``post_local_sgd`` go to everybody at every step."""
    assert [line[:47] for line in done.err.splitlines()] == [
        "loosestep: warning: nothing is saved by this st"
    ]


def test_training_ends_well_and_says_what_to_do_next(everything: tuple[Done, Path]):
    done, folder = everything
    assert done.code == 0
    assert_only_warned_that_nothing_is_saved(done)
    assert f"done: loosestep report {folder}" in done.out


def test_a_run_can_be_read_back(everything: tuple[Done, Path]):
    run = read_run(everything[1])
    assert run.info.strategy == "post_local_sgd:period=4,warmup_steps=2,reducer=int8"
    assert run.info.num_workers == 2
    assert run.info.steps == 14
    assert run.info.tokens_per_step == 2 * 2 * 2 * 32  # workers, micro-batches, samples, bytes
    assert run.info.data["name"] == "Python standard library"
    assert run.info.data["bytes"] == 60_000
    for rank in (0, 1):
        steps = run.of("step", rank)
        assert [record["step"] for record in steps] == list(range(1, 15))
        assert steps[-1]["tokens"] == 14 * 256
        assert run.of("end", rank)[-1]["reason"] == "finished"
    assert [record["step"] for record in run.of("eval")] == [5, 10, 14]
    assert run.of("eval")[-1]["loss"] < run.of("eval")[0]["loss"] < math.log(256) + 0.2


def test_the_rate_that_is_written_is_that_of_the_step(everything: tuple[Done, Path]):
    rates = [record["lr"] for record in read_run(everything[1]).of("step")]
    assert rates == pytest.approx([2e-3 * step / 20 for step in range(1, 15)])  # still growing


def test_gradients_are_shared_during_the_warm_up_and_parameters_after_it(
    everything: tuple[Done, Path],
):
    syncs = [(r["step"], r["kind"], r["level"]) for r in read_run(everything[1]).of("sync")]
    assert [s for s in syncs if s[1:] == ("gradients", "world")] == [
        (step, "gradients", "world") for step in (0, 1)
    ]
    assert [s[0] for s in syncs if s[1] == "parameters"] == [6, 10, 14]


def test_a_trace_shows_computing_sending_and_waiting_of_every_worker(
    everything: tuple[Done, Path],
):
    for rank in (0, 1):
        events = read_json(everything[1] / f"trace-{rank}.json")["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {span["name"].split()[0] for span in spans} == {"compute", "send", "wait"}
        assert {event["pid"] for event in events} == {rank}
        assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)


def test_tensorboard_gets_losses_and_traffic(everything: tuple[Done, Path]):
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    board = EventAccumulator(str(everything[1] / "tensorboard-0"))
    board.Reload()
    assert len(board.Scalars("loss/training")) == 14
    assert [scalar.step for scalar in board.Scalars("loss/held out")] == [5, 10, 14]
    assert "parameters/world/bytes_sent" in board.Tags()["scalars"]


# Other tasks and starters


def test_digits_are_learnt(tmp_path: Path):
    sizes = ("--width", "32", "--batch", "32", "--steps", "60", "--lr", "0.01")
    done = call("train", "--task", "images", *sizes, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    run = read_run(tmp_path / "run")
    assert run.info.data["name"] == "scikit-learn digits"
    assert run.of("step")[-1]["tokens"] == 60 * 2 * 32
    assert run.of("eval")[-1]["loss"] < 0.5 * math.log(10)


@pytest.mark.long  # a minute of compiling; test_zero_hooks.py has compiled models too
@pytest.mark.timeout(400)
def test_a_compiled_model_trains_like_a_plain_one(tmp_path: Path):
    for folder, flag in (("plain", "--no-compile"), ("compiled", "--compile")):
        options = ("--workers", "1", "--steps", "3", "--out", tmp_path / folder)
        done = call("train", *TINY, flag, *options)
        assert (done.code, done.err) == (0, "")
    plain, compiled = losses(tmp_path / "plain"), losses(tmp_path / "compiled")
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_levels_take_turns_and_the_wide_one_lands_when_the_next_is_due(tmp_path: Path):
    """Every 4 steps a host averages, every 32 the world; an average travels until the next."""
    strategy = ("--strategy", "hierarchical_sgd", "--periods", "host=4,world=32")
    options = ("--reducer", "int4", "--overlap-steps", "5", "--workers", "4", "--hosts", "2")
    done = call("train", *TINY, *strategy, *options, "--steps", "38", "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    run = read_run(tmp_path / "run")
    assert run.info.topology == {"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}
    syncs = [(record["step"], record["level"]) for record in run.of("sync")]
    hosts = [(step, "host") for step in (4, 8, 12, 16, 20, 24, 28, 36)]
    assert sorted(syncs)[:9] == sorted([*hosts, (32, "world")])
    assert {level for _, level in sorted(syncs)[9:]} == {"world"}  # the end


def test_a_file_of_settings_and_a_folder_of_images(tmp_path: Path):
    """What is in the file is used, and training ends when the time is up."""
    settings = tmp_path / "run.toml"
    settings.write_text(
        f'task = "images"\ndata = "{tmp_path / "photos"}"\nimage_size = 8\nbatch = 2\n'
        'seconds = 1.5\nworkers = 2\n\n[strategy]\nname = "post_local_sgd"\nperiod = 2\n'
    )
    for kind, shade in (("cats", 40), ("dogs", 200)):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(12):
            picture = Image.new("L", (10, 12), shade + number)
            picture.save(tmp_path / "photos" / kind / f"{number}.png")
    done = call("train", "--config", settings, "--width", "16", "--out", tmp_path / "run")
    assert done.code == 0
    assert_only_warned_that_nothing_is_saved(done)
    run = read_run(tmp_path / "run")
    assert run.info.strategy == "post_local_sgd:period=2"
    assert run.info.num_workers == 2
    assert reasons(tmp_path / "run") == ["finished"] * 2
    assert run.of("step")[-1]["at"] > 1
    assert run.of("eval")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero") / "run"
    options = ("--strategy", "zero", "--workers", "2", "--steps", "20", "--save-every", "12")
    assert call("train", *TINY, *options, "--out", folder).code == 0
    return folder


def test_a_sharded_optimizer_resumes_exactly_under_torchrun(sharded: Path, tmp_path: Path):
    launcher = (sys.executable, "-m", "torch.distributed.run")
    options = ("--standalone", "--nproc-per-node", "2", *MODULE[1:])
    again = ("--resume", sharded / "checkpoints/step-00000012", "--out", tmp_path / "again")
    done = command(*options, "train", *again, start=launcher)
    assert done.code == 0, done.err
    assert len(losses(sharded)) == 20
    for rank in (0, 1):
        assert losses(tmp_path / "again", rank) == losses(sharded, rank)


def test_agents_of_two_nodes_train_together(tmp_path: Path):
    """torchrun, once a node: the second one's worker is a rank of the same run."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "7", *meet)
    launcher = (sys.executable, "-m", "torch.distributed.run", *nodes, *MODULE[1:])
    order = ("train", *TINY, "--steps", "4", "--out", tmp_path / "run")
    here = {"GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as held:
        agents = [
            held.enter_context(begun(*order, start=launcher, environment=here)) for _ in range(2)
        ]
        said = [agent.communicate(timeout=120) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
    run = read_run(tmp_path / "run")
    assert run.info.num_workers == 2
    assert [len(run.of("step", rank)) for rank in (0, 1)] == [4, 4]
    assert sum("done: loosestep report" in out for out, _ in said) == 1


def as_slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_tasks_of_slurm_are_workers_and_one_that_is_told_to_end_tells_the_others(tmp_path: Path):
    folder, port = tmp_path / "run", free_port()
    arguments = ("train", *TINY, "--steps", "1000000", "--out", folder)
    with (
        begun(*arguments, environment=as_slurm(0, port)) as one,
        begun(*arguments, environment=as_slurm(1, port)) as other,
    ):
        until(lambda: steps_in(folder) > 5)
        other.terminate()
        ended = [process.communicate(timeout=60) for process in (one, other)]
    assert [err for _, err in ended] == ["", ""]
    assert (one.returncode, other.returncode) == (130, 130)
    assert reasons(folder) == ["interrupted", "interrupted"]
    assert max(losses(folder, 0)) == max(losses(folder, 1))
    assert has_checkpoint(folder)


# Workers that are lost


def test_a_worker_that_is_killed_is_named_and_the_others_end(tmp_path: Path):
    folder = tmp_path / "run"
    arguments = ("train", *TINY, "--steps", "1000000", "--timeout", "20", "--out", folder)
    with begun(*arguments) as process:
        until(lambda: steps_in(folder) > 5)
        workers = workers_of(process.pid)
        os.kill(workers[1], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    assert Done(process.returncode, out, err).refused() == "loosestep: worker 1 ended by SIGKILL"
    assert process.returncode == 1
    assert not any(alive(worker) for worker in workers)
    assert reasons_of_survivor(folder) != "finished"


def reasons_of_survivor(folder: Path) -> str:
    ends = read_run(folder).of("end", 0)
    return str(ends[-1]["reason"]) if ends else "none"


def test_a_second_interrupt_ends_at_once(tmp_path: Path):
    folder = tmp_path / "run"
    with begun("train", *TINY, "--steps", "1000000", "--out", folder) as process:
        until(lambda: steps_in(folder) > 5)
        workers = workers_of(process.pid)
        os.kill(workers[1], signal.SIGSTOP)  # so that nothing can be saved
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)  # the time-out of a wait is 60
    assert Done(process.returncode, out, err).refused().startswith("loosestep: ended at once")
    assert process.returncode == 130
    assert not any(alive(worker) for worker in workers)
