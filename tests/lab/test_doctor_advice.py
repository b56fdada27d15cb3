"""What the doctor makes of measured links, by numbers small enough to check by hand."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as parse_torchrun

from loosestep.lab.cli.arguments import parse
from loosestep.lab.doctor import (
    Finding,
    Level,
    Links,
    Pair,
    Rate,
    cost_of_recipes,
    inspect_links,
    recommend,
    show,
)
from loosestep.lab.doctor.advice import LADDER, REDUCERS, Job, Plan
from loosestep.lab.doctor.measuring import pairs_of
from loosestep.lab.doctor.rates import affordable
from loosestep.lab.trainer.specs import parse_spec
from loosestep.strategy.recipes import RECIPES

pytestmark = pytest.mark.fast


def links_of(world: float, inside: float, *, average: float, own: float, hosts: int = 2) -> Links:
    """Return links on which 1 MB takes so many seconds, on hosts of two ranks."""
    ranks = tuple((2 * host, 2 * host + 1) for host in range(hosts))
    everyone = tuple(range(2 * hosts))
    groups: list[tuple[str, tuple[int, ...], float, float]]
    groups = [("host", host, inside, own) for host in ranks]
    groups += [("world", everyone, world, average)] if hosts > 1 else []
    rates = [
        Rate(level=level, method=method, ranks=group, num_bytes=1_000_000, seconds=seconds)
        for level, group, reduced, averaged in groups
        for method, seconds in (("all_reduce", reduced), ("average", averaged))
    ]
    pairs = [
        Pair(
            first=first,
            second=second,
            same_host=first // 2 == second // 2,
            round_trip_seconds=0.0001 if first // 2 == second // 2 else 0.001,
            forth_bytes_per_second=1e9 if first // 2 == second // 2 else 12.5e6,
            back_bytes_per_second=1e9 if first // 2 == second // 2 else 12.5e6,
            clock_offset_seconds=0.0,
        )
        for first in everyone
        for second in everyone
        if first < second
    ]
    names = tuple(f"host-{host}" for host in range(hosts))
    return Links(
        backend="gloo", hosts=ranks, host_names=names, pairs=tuple(pairs), rates=tuple(rates)
    )


def test_a_fast_network_takes_ddp() -> None:
    """1 M parameters are 4 MB: 4 * 0.01 = 0.04 s beside 1 s, 0.04 / 1.04 = 3.8 % of the time."""
    links = links_of(0.01, 0.001, average=0.01, own=0.001)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.strategy == "ddp"
    (cost,) = advice.costs
    assert cost.seconds_waited == pytest.approx(0.04)
    assert cost.share_waited == pytest.approx(0.04 / 1.04)
    assert cost.bytes_per_host == pytest.approx(1.5 * 4e6)  # 2 * 3 / 4
    assert "fast enough" in advice.reasons[0]


def test_a_period_is_enough() -> None:
    """4 MB: ddp waits 0.4 s beside 1 s, 29 %; averages take 0.32 s, every fourth step 0.08.

    With 0.004 s for gradients inside hosts that is 0.084 / 1.084 = 7.7 %.
    """
    links = links_of(0.1, 0.001, average=0.08, own=0.001)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.strategy == "post_local_sgd:period=4"
    plain, best = advice.costs
    assert plain.share_waited == pytest.approx(0.4 / 1.4)
    assert best.seconds_waited == pytest.approx(0.084)
    assert best.bytes_per_host == pytest.approx(1e6)  # one copy of 4 MB in four steps


def test_an_overlap_hides_the_rest() -> None:
    """4 MB: an average takes 1.6 s, which two steps of 1.004 s hide; every fourth step it fits."""
    links = links_of(0.5, 0.001, average=0.4, own=0.001)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.strategy == "post_local_sgd:period=4,overlap_steps=2"
    assert advice.costs[-1].seconds_waited == pytest.approx(0.004)


def test_a_slow_network_takes_few_bits() -> None:
    """40 MB at 1 s a MB, beside steps of 0.5 s.

    Sharing gradients inside hosts takes 0.04 s, 7.4 % of the time: more than 5 %, so it is left
    out. An average takes 40 s; bf16: 0.04 + 0.5 * 39.96 = 20 s; int8: 0.04 + 0.254 * 39.96 = 10.2;
    int4: 0.04 + 0.129 * 39.96 = 5.195. Every 8 steps, of which 5 hide 2.5 s, that waits for
    2.695 / 8 = 0.34 s a step; every 16, of which 8 hide 4 s, for 1.195 / 16 = 0.075 s, 13 % of the
    time; every 32 for 0.037 s, 7 %.
    """
    links = links_of(1.5, 0.001, average=1.0, own=0.001)
    advice = recommend([], links, num_parameters=10_000_000, step_seconds=0.5)
    assert (
        advice.strategy == "post_local_sgd:period=32,reducer=int4+ef,overlap_steps=8,gradients=none"
    )
    assert advice.costs[-1].seconds_waited == pytest.approx((5.195 - 4) / 32, rel=0.01)
    assert any("12.9 %" in reason for reason in advice.reasons)
    # A step of ddp takes 40 * 1.5 + 0.5 s, a hundred of them 6050 s.
    assert "gradients as ddp does, which takes 101 min" in advice.reasons[-2]


def test_the_command_starts_what_was_measured_on_one_host() -> None:
    """The number of workers is not left to what ``train`` would take."""
    links = replace(links_of(0.0, 0.1, average=0.0, own=0.02, hosts=1), hosts=((0, 1, 2, 3),))
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    strategy = "post_local_sgd:period=4,gradients=none"
    assert advice.command == f"loosestep train --workers 4 --strategy {strategy}"
    found = parse(shlex.split(advice.command)[1:])
    assert (found.workers, found.strategy) == (4, strategy)
    assert not any("DIR" in reason for reason in advice.reasons)


def test_the_command_starts_what_was_measured_on_several_hosts() -> None:
    """As torchrun reads it; --out is what ``train`` demands of workers that others started."""
    links = links_of(0.01, 0.001, average=0.01, own=0.001, hosts=3)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.command == (
        "torchrun --nnodes 3 --nproc-per-node 2 --rdzv-backend c10d "
        "--rdzv-endpoint host-0:29500 -m loosestep train --out DIR --strategy ddp"
    )
    found = parse_torchrun(shlex.split(advice.command)[1:])
    assert (found.nnodes, found.nproc_per_node, found.module) == ("3", "2", True)
    assert found.training_script == "loosestep"
    assert parse(found.training_script_args).out == "DIR"
    assert "every host, with the same DIR, a folder that all of them share." in advice.reasons[-1]


def test_uneven_hosts_have_numbers_of_their_own() -> None:
    links = replace(links_of(0.01, 0.001, average=0.01, own=0.001), hosts=((0, 1, 2), (3,)))
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert "--nnodes 2 --nproc-per-node N " in advice.command
    assert advice.reasons[-1].endswith("N is a host's own: 3 on host-0, 1 on host-1.")


def test_steps_of_next_to_no_time() -> None:
    links = links_of(1.5, 0.001, average=1.0, own=0.001)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=5e-324)
    assert advice.strategy.startswith("post_local_sgd:period=64,")


def test_a_hopeless_network_is_said_to_be_one() -> None:
    links = links_of(150, 0.001, average=100, own=0.001)
    advice = recommend([], links, num_parameters=10_000_000, step_seconds=0.5)
    assert advice.strategy.startswith("post_local_sgd:period=64,reducer=int4+ef")
    assert any("faster link" in reason for reason in advice.reasons)


def test_one_host_keeps_gradients_at_home() -> None:
    """Sharing them inside the host is what takes long here: 4 * 0.1 = 0.4 s beside 1 s.

    Our own average takes 4 * 0.02 = 0.08 s, every fourth step 0.02 s.
    """
    links = links_of(0.0, 0.1, average=0.0, own=0.02, hosts=1)
    advice = recommend([], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.strategy == "post_local_sgd:period=4,gradients=none"
    assert advice.costs[-1].seconds_waited == pytest.approx(0.02)
    assert advice.costs[-1].bytes_per_host == 0.0


def test_problems_come_first() -> None:
    problem = Finding("backends", "none", Level.PROBLEM, "install a torch")
    links = links_of(0.01, 0.001, average=0.01, own=0.001)
    advice = recommend([problem], links, num_parameters=1_000_000, step_seconds=1.0)
    assert advice.reasons[-1] == "See to the problems first: backends."


@pytest.mark.parametrize("reducer", REDUCERS)
def test_every_rung_is_a_strategy(reducer: str) -> None:
    """What is recommended can be given on the command line."""
    for period, _ in LADDER:
        for overlap in (0, min(8, period * 5 // 8)):
            for gradients in (True, False):
                text = str(Plan(period, reducer, overlap, gradients))
                assert parse_spec(text).strategy().overlap_steps == overlap


def test_a_warmup_is_offered_and_not_taken_for_granted() -> None:
    """Recipes have none unless they are told, and neither has the command that is recommended."""
    arguments = [inspect.signature(recipe).parameters for recipe in RECIPES.values()]
    defaults = [given["warmup_steps"].default for given in arguments if "warmup_steps" in given]
    assert len(defaults) > 2
    assert set(defaults) == {0}


def test_every_recipe_has_its_price() -> None:
    """What the recommendation's model says of a plan, and of a recipe that is the same one."""
    links = links_of(1.0, 0.01, average=0.5, own=0.02)
    size, step = 10_000_000, 0.2
    costs = {cost.strategy: cost for cost in cost_of_recipes(links, size, step)}
    assert [text.partition(":")[0] for text in costs] == list(RECIPES)
    job = Job.of(links, size, step)
    assert costs["ddp"] == job.ddp()
    dense, parts = costs["diloco:period=100"], costs["streaming_diloco:period=100"]
    plain = job.cost(Plan(100, gradients=False))
    assert dense.seconds_waited == pytest.approx(plain.seconds_waited)
    assert dense.bytes_per_host == pytest.approx(plain.bytes_per_host)
    assert parts.bytes_per_host == pytest.approx(dense.bytes_per_host)
    hidden = 4 * step / 100  # one step of each of four parts
    assert parts.seconds_waited == pytest.approx(dense.seconds_waited - hidden)
    sparse = next(cost for text, cost in costs.items() if text.startswith("sparseloco"))
    assert sparse.bytes_per_host < dense.bytes_per_host / 5
    assert cost_of_recipes(replace(links, hosts=((0,),)), size, step) == ()


def test_bad_numbers_are_refused() -> None:
    links = links_of(0.01, 0.001, average=0.01, own=0.001)
    with pytest.raises(ValueError, match="num_parameters must be >= 1, got 0"):
        recommend([], links, num_parameters=0, step_seconds=1.0)
    with pytest.raises(ValueError, match="step_seconds must be > 0, got 0"):
        recommend([], links, num_parameters=1, step_seconds=0)


def test_time_grows_with_bytes_and_has_a_floor() -> None:
    """The largest size gives the rate, 16 MB/s; the smallest what anything takes at least."""
    ranks = (0, 1)
    rates = tuple(
        Rate(level="host", method="average", ranks=ranks, num_bytes=size, seconds=seconds)
        for size, seconds in ((64_000, 0.01), (16_000_000, 1.0))
    )
    links = replace(links_of(1, 1, average=1, own=1, hosts=1), rates=rates)
    assert links.seconds_for("host", "average", 32_000_000) == pytest.approx(2.0)
    assert links.seconds_for("host", "average", 100) == pytest.approx(0.01)
    assert links.seconds_for("world", "average", 100) == 0


def test_sizes_shrink_to_what_there_is_time_for() -> None:
    """4 kB in 1 ms is 4 MB/s: in 2 s there is time for 8 MB."""
    assert affordable(1_000_000, last=4_000, took=0.001, seconds=2.0) == 1_000_000
    assert affordable(16_000_000, last=4_000, took=0.001, seconds=2.0) == 8_000_000
    assert affordable(64_000, last=4_000, took=1e9, seconds=2.0) == 4


def test_many_ranks_are_sampled() -> None:
    """Up to 16 all pairs; then leaders with each other, and neighbours."""
    assert len(pairs_of([range(8), range(8, 16)])) == 120
    pairs = pairs_of([range(6), range(6, 12), range(12, 18)])
    neighbours = [(r, r + 1) for r in range(17) if r not in (5, 11)]
    assert pairs == sorted([*neighbours, (0, 6), (0, 12), (6, 12)])
    alone = pairs_of([[rank] for rank in range(40)])
    assert len(alone) == 39 + 38
    assert {rank for pair in alone for rank in pair} == set(range(40))


def test_odd_links_are_pointed_out() -> None:
    """A slow direction and a clock that is wrong, by rank; uneven hosts."""
    links = links_of(0.1, 0.001, average=0.1, own=0.001)
    assert {finding.level for finding in inspect_links(links)} == {Level.OK}
    slow = [
        replace(pair, back_bytes_per_second=1e6) if (pair.first, pair.second) == (0, 2) else pair
        for pair in links.pairs
    ]
    by_name = {f.name: f for f in inspect_links(replace(links, pairs=tuple(slow)))}
    assert by_name["between hosts"].level is Level.PROBLEM
    assert "rank 2 to rank 0 has 8 Mbit/s" in by_name["between hosts"].advice
    late = [replace(pair, clock_offset_seconds=-3.0) for pair in links.pairs]
    by_name = {f.name: f for f in inspect_links(replace(links, pairs=tuple(late)))}
    assert by_name["clocks"].level is Level.NOTE
    uneven = replace(links, hosts=((0, 1, 2), (3,)))
    assert inspect_links(uneven)[0].level is Level.NOTE


def test_all_of_it_is_shown(tmp_path: Path) -> None:
    """Tables with every mark, rate and the command, also where text looks like markup."""
    from rich.console import Console

    machine = [
        Finding("torch", "2.13.0"),
        Finding("one", "[bold]two", Level.NOTE, "three"),
        Finding("four", "five", Level.PROBLEM, "six"),
    ]
    links = links_of(1.5, 0.001, average=1.0, own=0.001)
    advice = recommend(machine, links, num_parameters=10_000_000, step_seconds=0.5)
    with (tmp_path / "out").open("w+") as file:
        show(machine, links, advice, console=Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    for part in ("ok", "note", "problem", "[bold]two", "100 Mbit/s", "8 Gbit/s", "1 ms", "100 us"):
        assert part in text
    assert advice.command in text
    assert "all_reduce" in text
