"""The trainer's parts by themselves: specs, settings, who a worker is, what it writes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loosestep.comm.reducers import (
    ErrorFeedback,
    Int2,
    Mean,
    RandomMask,
    Reducer,
    ReplicaFeedback,
    SharedMemoryMean,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.lab.cli.arguments import parse
from loosestep.lab.cli.given import settings_of
from loosestep.lab.runs import log_file
from loosestep.lab.trainer import contenders
from loosestep.lab.trainer.connecting import divided
from loosestep.lab.trainer.display import Display, Tail
from loosestep.lab.trainer.journal import Journal, chrome_trace
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.named_reducers import gradient_reducer, parameter_reducer, plain_reducer
from loosestep.lab.trainer.ranks import rank_from
from loosestep.lab.trainer.reducer_names import NAMES, parse_gradient_reducer, parse_reducer
from loosestep.lab.trainer.settings import Settings, read_toml
from loosestep.lab.trainer.specs import Spec, parse_periods, parse_spec
from loosestep.lab.trainer.torch_plans import CONTENDERS
from loosestep.strategy.recipes import RECIPES
from loosestep.strategy.topology import Topology
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

# Specs and reducers


@pytest.mark.parametrize(
    "text",
    [
        "ddp",
        "post_local_sgd:period=8,reducer=int4,overlap_steps=3,gradients=none",
        "hierarchical_sgd:host=4,world=32,warmup_steps=100",
        "ddp:gradient_reducer=top0.5%",
        "zero:period=8,stage=2",
    ],
)
def test_a_spec_is_written_as_it_is_read(text: str):
    assert str(parse_spec(text)) == text


def test_values_of_a_spec_have_types():
    spec = parse_spec("some:a=1,b=0.5,c=none,d=true,e=int4, f-g = 2 ")
    assert spec.options == {"a": 1, "b": 0.5, "c": None, "d": True, "e": "int4", "f_g": 2}


def test_options_beside_a_spec_are_added_and_none_changes_nothing():
    spec = parse_spec("hierarchical_sgd").having(periods={"host": 2, "world": 8}, reducer=None)
    assert str(spec) == "hierarchical_sgd:host=2,world=8"
    assert spec == parse_spec("hierarchical_sgd").having(periods={"host": 2, "world": 8})


def test_names_are_those_of_the_recipes_arguments():
    short = parse_spec(
        "post_local_sgd:warmup_steps=3,overlap_steps=2,reducer=int4,period=4,gradients=none"
    )
    made = short.strategy()
    assert made.overlap_steps == 2
    assert "Int4" in repr(made.reducer)
    assert made.schedule(2).gradients == "world"
    assert made.schedule(3).gradients is None


@pytest.mark.parametrize("name", sorted({*contenders.names(), *RECIPES, *CONTENDERS}))
def test_every_contender_can_be_made_by_default(name: str):
    spec = next(spec for spec in contenders.defaults() if spec.name == name)
    contenders.check_spec(spec)
    contenders.check_spec(parse_spec(str(spec)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("post_local_sdg", "did you mean 'post_local_sgd'"),
        ("torch-dpd", "did you mean 'torch-ddp'"),
        ("ddp:period=8", "has no option 'period'"),
        ("post_local_sgd:perod=8", "did you mean 'period'"),
        ("post_local_sgd:period", "must be key=value"),
        ("post_local_sgd:period=often", "must be of type int, got 'often'"),
        ("post_local_sgd:period=true", "must be of type int, got True"),
        ("post_local_sgd:period=0", "got 0"),
        ("post_local_sgd:gradients=hots", "did you mean 'host'"),
        ("post_local_sgd:reducer=int5", "did you mean 'int"),
        ("hierarchical_sgd", "needs periods: give hierarchical_sgd:host=4,world=32"),
        ("hierarchical_sgd:host=4,wrld=8", "did you mean 'world'"),
        ("hierarchical_sgd:host=0,world=6", "got 0"),
        ("torch-post-local:period=0", "at least 1"),
        ("torch-hierarchical:host=8,world=4", "must grow"),
        ("torch-hierarchical:host=4", "up to that of world"),
    ],
)
def test_a_contender_that_cannot_be_is_refused(text: str, said: str):
    with pytest.raises(BadInput) as caught:
        contenders.check_spec(parse_spec(text))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "host", "host=", "=4", "host=4;world=8", "host=-1"])
def test_periods_that_are_none_are_refused(text: str):
    with pytest.raises(BadInput, match="periods must be like host=4,world=32, got"):
        parse_periods(text)


def reducer(text: str) -> Reducer:
    return plain_reducer(parse_reducer(text))


def of_gradients(text: str) -> Reducer:
    return gradient_reducer(parse_gradient_reducer(text))


def test_reducers_by_name():
    assert isinstance(reducer("mean"), Mean)
    assert repr(reducer("top0.5%")) == repr(TopK(0.005))
    assert repr(reducer("int2+ef")) == repr(ErrorFeedback(Int2()))
    assert repr(reducer("top1.5%2bit+ef")) == repr(ErrorFeedback(TopK(0.015, bits=2)))
    masked = TwoLevel(RandomMask(0.005), ranks_of_host="equal")
    assert repr(parameter_reducer(parse_reducer("mask0.5%"))) == repr(masked)
    assert repr(parameter_reducer(parse_reducer("int2"))) == repr(TwoLevel(Int2()))
    assert repr(of_gradients("ternary")) == repr(TwoLevel(Ternary()))
    assert repr(of_gradients("shared")) == "SharedMemoryMean()"
    living = of_gradients("shared+ternary")
    assert repr(living) == repr(TwoLevel(Ternary(), inside=SharedMemoryMean()))


@pytest.mark.parametrize("name", NAMES)
def test_every_reducer_can_be_made(name: str):
    assert isinstance(reducer(name), Reducer)
    assert isinstance(parameter_reducer(parse_reducer(name)), Reducer)


@pytest.mark.parametrize("text", ["shared+mean", "shared+shared", "shared+", "shared+x"])
def test_a_reducer_of_gradients_that_there_is_not_is_refused(text: str):
    with pytest.raises(BadInput, match=r"inside=SharedMemoryMean|there is no reducer"):
        of_gradients(text)


@pytest.mark.parametrize(
    "text",
    [
        "int3",
        "top0%",
        "top200%",
        "",
        "bf16+ef",
        "+ef",
        "ternary+sc",
        "mask0%",
        "mask1%2bit",
        "mask1%+rf",
        "int22bit",
    ],
)
def test_a_reducer_that_there_is_not_is_refused(text: str):
    with pytest.raises(BadInput, match=r"reducer|give Ternary"):
        reducer(text)


# Settings


def settings_for(*arguments: str) -> Settings:
    return settings_of(parse(["train", *arguments]))


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\nbatch = 3\ndata-bytes = 9\nclip = 1\nbf16 = true\ndata = 'a'\n")
    found = settings_for("--config", str(file), "--batch", "5", "--no-bf16")
    assert (found.steps, found.batch, found.data_bytes) == (7, 5, 9)
    assert (found.clip, found.bf16, found.data, found.width) == (1, False, ("a",), 128)


def test_a_strategy_may_be_a_table(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[strategy]\nname = 'post_local_sgd'\nperiod = 8\nreducer = 'int4'\n")
    spec = Spec("post_local_sgd", {"period": 8, "reducer": "int4"})
    assert settings_for("--config", str(file)).spec == spec
    file.write_text("strategy = 'hierarchical_sgd'\n[periods]\nhost = 2\nworld = 4\n")
    spec = settings_for("--config", str(file)).spec
    assert str(spec) == "hierarchical_sgd:host=2,world=4"


def test_another_strategy_leaves_the_options_of_the_one_before(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("strategy = 'post_local_sgd'\nperiod = 8\nsteps = 5\n")
    assert str(settings_for("--config", str(file), "--strategy", "ddp").spec) == "ddp"
    assert settings_for("--config", str(file), "--period", "4").spec.options == {"period": 4}
    ended = settings_for("--config", str(file), "--tokens", "100")
    assert (ended.steps, ended.tokens) == (None, 100)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stesp = 3", "did you mean 'steps'"),
        ("steps = 'many'", "steps must be of type int, got 'many'"),
        ("steps = 1.5", "must be of type int"),
        ("steps = true", "must be of type int"),
        ("bf16 = 1", "must be of type bool"),
        ("strategy = 5", "must be of type str"),
        ("data = 5", "must be a name or a list of names"),
        ("data = [1]", "must be a name or a list of names"),
        ("[strategy]\nperiod = 8", "[strategy] needs a name"),
        ("steps = ", "no TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_its_name(tmp_path: Path, content: str, said: str):
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(BadInput) as caught:
        read_toml(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch": 0}, "--batch must be more than 0, got 0"),
        ({"lr": math.nan}, "--lr must be more than 0, got nan"),
        ({"timeout": math.inf}, "--timeout"),
        ({"clip": -1.0}, "--clip must not be less than 0"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"task": "txt"}, "did you mean 'text'"),
        ({"steps": 5, "tokens": 9}, "not both"),
        ({"workers": 3, "hosts": 2}, "3 is none of 2"),
    ],
)
def test_settings_that_make_no_run_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(BadInput) as caught:
        Settings(**settings)
    assert said in str(caught.value)


def test_how_many_steps_there_are():
    assert Settings().num_steps(10) == 200
    assert Settings(tokens=95).num_steps(10) == 9
    assert Settings(tokens=5).num_steps(10) == 1
    assert Settings(seconds=3).num_steps(10) is None


# Who a worker is

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "41000"}


def test_torchrun_says_who_a_worker_is():
    said = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    rank = rank_from({**said, "LOCAL_RANK": "1"})
    assert rank is not None
    assert (rank.rank, rank.num_workers, rank.address, rank.port, rank.local_rank) == (
        *(1, 4, "a", 7),
        1,
    )
    assert rank_from(rank.environment()) == rank
    assert rank_from({}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],big1", "gpu07"), ("n1", "n1"), ("a-1,a-2", "a-1"), ("r[1-2]n[3,4]", "r1n3")],
)
def test_slurm_says_who_a_worker_is(nodes: str, first: str):
    rank = rank_from({**SLURM, "SLURM_STEP_NODELIST": nodes, "SLURM_LOCALID": "2"})
    assert rank is not None
    assert (rank.rank, rank.num_workers, rank.local_rank) == (3, 8, 2)
    assert (rank.address, rank.port) == (first, 20_000 + 41_000 % 20_000)


def test_a_batch_script_of_slurm_is_no_worker():
    for step in ("4294967291", "batch", ""):
        assert rank_from({**SLURM, "SLURM_STEP_ID": step}) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "got 'x'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a", "SLURM_LOCALID": "-"}, "SLURM_LOCALID"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a", "MASTER_PORT": "p"}, "MASTER_PORT"),
        (SLURM, "set MASTER_ADDR"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str], said: str):
    with pytest.raises(BadInput, match=said):
        rank_from(environment)


# What is written and shown


def sync(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "level": "world",
        "kind": "parameters",
        "seconds": 0.5,
        "bytes_sent": 10,
        "bytes_copied": 2,
        "drift": None,
        "seconds_waited": 0.25,
        **values,
    }


def step_of(journal: Journal, step: int) -> None:
    journal.write(sync(step - 1))
    waited, sent, copied = journal.seconds_waited, journal.sent, journal.copied
    journal.event(
        "step", step=step, seconds_waited=waited, drift=journal.drift, sent=sent, copied=copied
    )


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_file(folder, rank).read_text().splitlines()]


def test_the_clock_stands_still_while_paused(tmp_path: Path):
    journal = Journal(tmp_path, 0)
    journal.begin()
    with journal.paused():
        time.sleep(0.3)
    assert journal.now < 0.2
    time.sleep(0.05)
    assert journal.now >= 0.05


def test_a_resumed_journal_begins_with_the_records_up_to_its_step(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    journal = Journal(one, 0)
    for step in (1, 2, 3):
        step_of(journal, step)
        journal.event("save", step=step, path="x")
    journal.event("end", step=3, reason="finished")
    journal.close()
    with open(log_file(one, 0), "a") as file:
        file.write('{"event": "st')  # killed while it wrote
    resumed = Journal(other, 0)
    resumed.inherit(one, 2, seconds=100.0)
    resumed.close()
    assert [r["step"] for r in lines_of(other) if r["event"] == "step"] == [1, 2]
    assert [r["step"] for r in lines_of(other) if r["event"] == "sync"] == [0, 1]
    assert {r["event"] for r in lines_of(other)} == {"step", "sync", "span"}
    assert resumed.sent == {"parameters/world": 20}
    assert (resumed.seconds_waited, resumed.now > 100) == (0.5, True)


def test_a_trace_has_a_lane_for_training_and_one_for_the_network(tmp_path: Path):
    journal = Journal(tmp_path, 3, tracing=True)
    journal.step_begins()
    journal.write(sync(0))
    journal.step_ends(1)
    journal.close()
    found = json.loads((tmp_path / "trace-3.json").read_text())
    events = {e["name"]: e for e in found["traceEvents"] if e["ph"] == "X"}
    assert events.keys() == {"compute", "send parameters/world", "wait parameters/world"}
    assert events["send parameters/world"]["tid"] != events["compute"]["tid"]
    assert events["wait parameters/world"]["dur"] == pytest.approx(0.25e6, rel=0.01)
    assert {event["pid"] for event in found["traceEvents"]} == {3}
    assert chrome_trace([], 0)["traceEvents"]  # the names of the lanes


def record(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "event": "step",
        "at": float(step),
        "step": step,
        "loss": loss,
        "tokens": 100 * step,
        "seconds_waited": 0.5,
        "next_sync": 8,
        "drift": 0.01,
        "sent": {"parameters/world": 2_000_000},
        "copied": {},
    }


def test_a_loss_that_is_no_number_is_shown_as_such():
    console = Console(record=True, width=200, force_terminal=True)
    with Display(console, "odd [name]", "images") as display:
        display.take(record(1, 2.5), 10)
        display.take({"event": "eval", "at": 1.0, "step": 1, "loss": None}, 10)
        display.take(record(2, None), 10)
        console.print(display._picture())
    text = console.export_text()
    assert "loss not a number" in text
    assert "held out not a number (1)" in text
    assert "images/s 100" in text
    assert "sent, parameters/world 2.0 MB" in text
    assert "waiting 25% of the time" in text
    assert "drift 1.00%" in text
    assert "next average at 8" in text
    assert "odd [name]" in text


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.records() == []
    path.write_text('{"event": "a"}\n{"event": "b"\n{"event": "c"}\n{"ev')
    assert [r["event"] for r in tail.records()] == ["a", "c"]
    with open(path, "a") as file:
        file.write('ent": "d"}\n')
    assert [r["event"] for r in tail.records()] == ["d"]
    tail.close()


def refused_on(gradients: str, played: int, real: int) -> str:
    """Return what is said where workers play hosts of a size on machines of another."""
    spec = parse_spec(f"post_local_sgd:reducer=int2+rf,gradients={gradients}")
    hosts = [Topology.from_sizes({"host": size, "world": 4}) for size in (played, real)]
    try:
        divided(spec.strategy(hosts[0]), *hosts)
    except BadInput as error:
        return str(error)
    return ""


def test_the_commands_refuse_machines_with_several_replicas(pool: RankPool) -> None:
    """Whether workers share no gradients, or with others than those of their machine."""
    for refused in (("none", 2, 2), ("host", 1, 2)):
        assert all("+ef in place of +rf" in said for said in pool.run(4, refused_on, *refused))
    for taken in (("host", 2, 2), ("host", 2, 4), ("none", 1, 1)):
        assert pool.run(4, refused_on, *taken) == [""] * 4


def test_replica_feedback_by_name() -> None:
    """``+rf`` is for parameters, on hosts that are one replica each."""
    made = parameter_reducer(parse_reducer("int2+rf"))
    assert repr(made) == repr(TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal"))
    with pytest.raises(BadInput, match=r"such as int2\+rf"):
        parse_reducer("bf16+rf")
    with pytest.raises(BadInput, match=r"int4\+rf"):
        parse_reducer("int4+fr")
