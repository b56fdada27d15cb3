"""What is proved for every recipe, on real ranks, against replicas trained in one process."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    Sharding,
    Strategy,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    desloc,
    diloco,
    hierarchical_sgd,
    muloco,
    noloco,
    post_local_sgd,
    slowmo,
    snoo,
    sparseloco,
    streaming_diloco,
    zero,
)
from loosestep.outer import Delta, Eager, Gate, Gossip, InverseNorm, Mix, nesterov
from loosestep.reducers import Mean
from loosestep.schedules import every
from loosestep.strategy import recipes
from loosestep.testing import RankPool
from tests.support.oracle import (
    Experts,
    average,
    close,
    ddp_with_local_buffers,
    equal,
    loss_of,
    make_net,
    sgd,
    snapshot,
    train_replicas,
)
from tests.support.pairs import in_pairs

STEPS = 11

Make = Callable[[Topology], Strategy]


def make_ddp(topology: Topology) -> Strategy:
    return ddp(topology=topology)


def make_post_local(topology: Topology) -> Strategy:
    return post_local_sgd(3, warmup_steps=2, gradients="pair", topology=topology)


def make_local(topology: Topology) -> Strategy:
    return post_local_sgd(4, warmup_steps=0, gradients=None, topology=topology)


def make_hierarchical(topology: Topology) -> Strategy:
    return hierarchical_sgd({"pair": 2, "world": 6}, topology=topology)


def make_post_local_overlapped(topology: Topology) -> Strategy:
    return post_local_sgd(3, warmup_steps=2, gradients="pair", topology=topology, overlap_steps=2)


def make_local_overlapped(topology: Topology) -> Strategy:
    return post_local_sgd(4, warmup_steps=0, gradients=None, topology=topology, overlap_steps=3)


def make_hierarchical_overlapped(topology: Topology) -> Strategy:
    return hierarchical_sgd({"pair": 2, "world": 6}, topology=topology, overlap_steps=2)


def make_zero(topology: Topology) -> Strategy:
    return zero(topology=topology)


def make_zero_periodic(topology: Topology) -> Strategy:
    return zero(3, gradients="pair", topology=topology)


def make_zero_hierarchical(topology: Topology) -> Strategy:
    return hierarchical_sgd({"pair": 2, "world": 6}, gradients="pair", topology=topology)


def make_diloco(topology: Topology) -> Strategy:
    return diloco(4, topology=topology)


def make_diloco_overlapped(topology: Topology) -> Strategy:
    return diloco(4, topology=topology, overlap_steps=2)


def make_diloco_warmed_up(topology: Topology) -> Strategy:
    return diloco(3, warmup_steps=2, topology=topology)


def make_noloco_warmed_up(topology: Topology) -> Strategy:
    return noloco(2, warmup_steps=3, topology=topology)


def make_streaming_warmed_up(topology: Topology) -> Strategy:
    return streaming_diloco(4, 2, warmup_steps=3, topology=topology, overlap_steps=1)


def make_diloco_of_levels(topology: Topology) -> Strategy:
    return dataclasses.replace(make_hierarchical(topology), outer=nesterov())


def make_slowmo(topology: Topology) -> Strategy:
    return slowmo(3, gradients="pair", topology=topology)


def make_snoo(topology: Topology) -> Strategy:
    return snoo(3, topology=topology)


def make_muloco(topology: Topology) -> Strategy:
    """Return it with an exact reducer; its own is proved with the reducers."""
    return muloco(4, topology=topology, reducer=Mean())


def make_sparseloco(topology: Topology) -> Strategy:
    """Return it with an exact reducer; its own is proved with the reducers."""
    return sparseloco(4, topology=topology, reducer=Mean())


def make_desloc(topology: Topology) -> Strategy:
    return desloc(2, optimizer_state={"momentum_buffer": 2}, topology=topology)


def make_streaming(topology: Topology) -> Strategy:
    return streaming_diloco(6, 3, topology=topology, overlap_steps=0)


def make_streaming_late(topology: Topology) -> Strategy:
    """Return it with several parts under way at once."""
    return streaming_diloco(6, 3, topology=topology, overlap_steps=5)


def make_streaming_mixed(topology: Topology) -> Strategy:
    return streaming_diloco(4, 2, topology=topology, overlap_steps=1, arrival=Mix(0.25))


def make_streaming_eager(topology: Topology) -> Strategy:
    return streaming_diloco(4, 2, topology=topology, overlap_steps=3, arrival=Eager())


def make_streaming_plain(topology: Topology) -> Strategy:
    """Return local SGD in parts: without an outer optimizer."""
    late = streaming_diloco(4, 2, topology=topology, overlap_steps=3)
    return dataclasses.replace(late, outer=None, arrival=Delta())


def make_zero_streaming(topology: Topology) -> Strategy:
    late = streaming_diloco(6, 3, gradients="pair", topology=topology, overlap_steps=3)
    return dataclasses.replace(late, sharding=Sharding())


def make_zero_overlapped(topology: Topology) -> Strategy:
    late = post_local_sgd(3, gradients="pair", topology=topology, overlap_steps=2)
    return dataclasses.replace(late, sharding=Sharding())


def make_zero_diloco(topology: Topology) -> Strategy:
    return dataclasses.replace(make_zero_periodic(topology), outer=nesterov())


def make_gated(topology: Topology) -> Strategy:
    """Return one that leaves out, clips and weighs: after 10 syncs, so syncs are frequent."""
    gate = Gate(z=0.1, clip=0.1, weigh=InverseNorm())
    return dataclasses.replace(diloco(1, topology=topology, gate=gate), optimizer_state="average")


def make_gated_late(topology: Topology) -> Strategy:
    late = streaming_diloco(4, 2, topology=topology, overlap_steps=1)
    return dataclasses.replace(late, gate=Gate(z=None, clip=0.05, weigh=InverseNorm()))


def make_noloco(topology: Topology) -> Strategy:
    return noloco(2, topology=topology)


def make_gossip(topology: Topology) -> Strategy:
    return Strategy(
        schedule=every(3), topology=topology, gossip=Gossip(), optimizer_state="average"
    )


RECIPES: dict[str, Make] = {
    "ddp": make_ddp,
    "post_local_sgd": make_post_local,
    "local_sgd": make_local,
    "hierarchical_sgd": make_hierarchical,
    "post_local_sgd, overlapped": make_post_local_overlapped,
    "local_sgd, overlapped": make_local_overlapped,
    "hierarchical_sgd, overlapped": make_hierarchical_overlapped,
    "zero": make_zero,
    "zero, periodic": make_zero_periodic,
    "zero, hierarchical": make_zero_hierarchical,
    "zero, post-local": make_post_local,
    "zero, diloco": make_zero_diloco,
    "zero, overlapped": make_zero_overlapped,
    "zero, streaming_diloco": make_zero_streaming,
    "diloco": make_diloco,
    "diloco, overlapped": make_diloco_overlapped,
    "diloco, warmed up": make_diloco_warmed_up,
    "diloco of levels": make_diloco_of_levels,
    "streaming_diloco": make_streaming,
    "streaming_diloco, late": make_streaming_late,
    "streaming_diloco, mixed": make_streaming_mixed,
    "streaming_diloco, eager": make_streaming_eager,
    "local sgd in parts": make_streaming_plain,
    "slowmo": make_slowmo,
    "streaming_diloco, warmed up": make_streaming_warmed_up,
    "snoo": make_snoo,
    "muloco": make_muloco,
    "sparseloco": make_sparseloco,
    "desloc": make_desloc,
    "noloco": make_noloco,
    "noloco, warmed up": make_noloco_warmed_up,
    "gossip": make_gossip,
    "diloco, gated": make_gated,
    "streaming_diloco, gated": make_gated_late,
}


def optimizer_for(
    recipe: str, net: torch.nn.Module, topology: Topology, kind: Any = torch.optim.SGD
) -> torch.optim.Optimizer:
    """Return the optimizer, sharded over pairs where the recipe is one of ZeRO's."""
    settings: dict[str, Any] = (
        {"lr": 0.05, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
    )
    if not recipe.startswith("zero"):
        made: torch.optim.Optimizer = kind(net.parameters(), **settings)
        return made
    group = topology.process_group("pair")
    return ZeroRedundancyOptimizer(net.parameters(), kind, process_group=group, **settings)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, collected on every rank in turn where it is sharded."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    states: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank(optimizer.process_group):
            states = optimizer.state_dict()
    return states


def test_every_recipe_is_proved() -> None:
    """A recipe that is added must be added here."""
    assert set(recipes.RECIPES) <= set(RECIPES)


def pairs(ranks: list[int], recipe: str = "") -> Topology:
    """Return pairs of ranks (the last may be alone) inside one world.

    Shards need groups of one size, so an odd number of ranks are one group there.
    """
    blocks = [ranks[i : i + 2] for i in range(0, len(ranks), 2)]
    if recipe.startswith("zero") and len(ranks) % 2:
        blocks = [ranks]
    return Topology({"pair": blocks, "world": [ranks]}, timeout=20)


def train(recipe: str, ranks: list[int], kind: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Train this rank's replica and return it."""
    if dist.get_rank() not in ranks:
        return {}
    net: torch.nn.Module = make_net()
    if kind == "ddp":
        net = DistributedDataParallel(net)
    topology = pairs(ranks, recipe)
    optimizer = optimizer_for(recipe, net, topology)
    with attach(net, optimizer, RECIPES[recipe](topology)):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
    return snapshot(getattr(net, "module", net))


@pytest.mark.parametrize(("recipe", "world"), in_pairs(RECIPES, [2, 3, 1, 4]))
def test_ranks_equal_the_replicas_of_one_process(pool: RankPool, recipe: str, world: int) -> None:
    """K ranks train to what K replicas in one process train to, in worlds of 1 to 4."""
    ranks = list(range(world))
    results = pool.run(world, train, recipe, ranks, "plain")
    topology = pairs(ranks, recipe)
    strategy = RECIPES[recipe](topology)
    nets = train_replicas(strategy, topology, STEPS)
    widest = max(
        len(topology.members(n, 0)) for n in strategy.schedule.gradient_levels() or ["pair"]
    )
    exact = widest <= 2 or not strategy.schedule.gradient_levels()
    for rank in ranks:
        same = equal if exact else close  # the order of Gloo's sum of 3 or 4 gradients is its own
        assert same(results[rank], snapshot(nets[rank])), (recipe, world, rank)


@pytest.mark.parametrize(("recipe", "ranks"), in_pairs(RECIPES, [[2, 3], [1, 2, 3]], each=1))
def test_a_subgroup_works_like_the_world(pool: RankPool, recipe: str, ranks: list[int]) -> None:
    """Ranks {2, 3} alone train as {2, 3} do in one process; the others do nothing."""
    results = pool.run(4, train, recipe, ranks, "plain")
    topology = pairs(ranks, recipe)
    nets = train_replicas(RECIPES[recipe](topology), topology, STEPS)
    for rank in ranks:
        same = equal if len(ranks) == 2 else close
        assert same(results[rank], snapshot(nets[rank])), (recipe, rank)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_ddp_module_trains_like_a_plain_one(pool: RankPool, recipe: str) -> None:
    """The DDP adapter and our own buckets give the same parameters, and buffers once averaged."""
    plain = pool.run(2, train, recipe, [0, 1], "plain", 13)
    wrapped = pool.run(2, train, recipe, [0, 1], "ddp", 13)
    for one, other in zip(plain, wrapped, strict=True):
        names = [n for n in one if "running" not in n and "num_batches" not in n]
        assert all(torch.allclose(one[n], other[n], rtol=1e-4, atol=1e-6) for n in names)


def train_both_ways() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    theirs = ddp_with_local_buffers(make_net())
    ours = make_net()
    their_sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    our_sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    with attach(ours, our_sgd, Strategy(schedule=every(1))):
        for step in range(8):
            for net, optimizer in ((theirs, their_sgd), (ours, our_sgd)):
                optimizer.zero_grad()
                loss_of(net, rank, step).backward()
                optimizer.step()
    return dict(theirs.module.named_parameters()), dict(ours.named_parameters())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_period_one_with_plain_sgd_equals_ddp(pool: RankPool, world: int) -> None:
    """Averaging parameters after every plain SGD step is averaging gradients before it."""
    for theirs, ours in pool.run(world, train_both_ways):
        assert close(theirs, ours)


def ddp_bit_for_bit() -> bool:
    rank = dist.get_rank()
    theirs, ours = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    their_sgd, our_sgd = sgd(theirs), sgd(ours)
    with attach(ours, our_sgd, ddp()):
        for step in range(6):
            for net, optimizer in ((theirs, their_sgd), (ours, our_sgd)):
                optimizer.zero_grad()
                loss_of(net, rank, step).backward()
                optimizer.step()
        return equal(snapshot(theirs), snapshot(ours))


def test_the_ddp_recipe_is_ddp_to_the_bit(pool: RankPool) -> None:
    """Attaching ``ddp()`` changes nothing at all, buffers included."""
    assert pool.run(4, ddp_bit_for_bit) == [True] * 4


def interrupted(recipe: str, stops: list[int], kind: str) -> list[int]:
    """Return the steps after which stopping and resuming does not equal going on."""
    rank, world = dist.get_rank(), list(range(dist.get_world_size()))

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer, Strategy]:
        net: torch.nn.Module = make_net()
        net = DistributedDataParallel(net) if kind == "ddp" else net
        topology = pairs(world, recipe)
        return net, optimizer_for(recipe, net, topology), RECIPES[recipe](topology)

    def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
        for step in range(first, end):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()

    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, STEPS)
    whole, wrong, files = snapshot(net), [], {}

    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy) as run:
        for step in range(STEPS):
            if step in stops:
                files[step] = io.BytesIO()
                saved = {"net": net.state_dict(), "optimizer": whole_state(optimizer)}
                torch.save({**saved, "run": run.state_dict()}, files[step])
            go(net, optimizer, step, step + 1)
    if not equal(whole, snapshot(net)):
        wrong.append(-1)  # saving alone has changed something

    for stop, file in files.items():
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net, optimizer, strategy = start()
        with attach(net, optimizer, strategy) as run:
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            run.load_state_dict(saved["run"])
            go(net, optimizer, stop, STEPS)
        if not equal(whole, snapshot(net)):
            wrong.append(stop)
    return wrong


@pytest.mark.parametrize(
    ("recipe", "kind", "stops"),
    [
        *((recipe, "plain", [(1, 4, 5)[n % 3]]) for n, recipe in enumerate(RECIPES)),
        *(pytest.param(r, "plain", list(range(8)), marks=pytest.mark.long) for r in RECIPES),
        *(
            pytest.param(recipe, "ddp", [5], marks=() if number % 3 == 0 else pytest.mark.long)
            for number, recipe in enumerate(RECIPES)
        ),
    ],
)
def test_resuming_at_any_step_continues_to_the_bit(
    pool: RankPool, recipe: str, kind: str, stops: list[int]
) -> None:
    """Stopping after every step of more than a period and resuming equals going on."""
    assert pool.run(2, interrupted, recipe, stops, kind) == [[], []]


def train_experts(recipe: str) -> dict[str, torch.Tensor]:
    net = Experts()
    rank, topology = dist.get_rank(), pairs([0, 1])
    optimizer = optimizer_for(recipe, net, topology, torch.optim.AdamW)
    with attach(net, optimizer, RECIPES[recipe](topology)) as run:
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            net(torch.randn(3, 4), rank).square().sum().backward()
            optimizer.step()
        run.finalize()
    return snapshot(net)


@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_without_a_gradient_take_part(pool: RankPool, recipe: str) -> None:
    """Ranks that use different experts end with the same model, and what none used is untouched."""
    one, other = pool.run(2, train_experts, recipe)
    assert equal(one, other)
    fresh = snapshot(Experts())
    assert torch.equal(one["unused.weight"], fresh["unused.weight"])
    assert not torch.equal(one["experts.0.weight"], fresh["experts.0.weight"])


def average_with_inf() -> torch.Tensor:
    from loosestep import average_

    values = torch.ones(100)
    if dist.get_rank() == 1:
        values[7] = float("inf")
        values[8] = float("nan")
    average_([values])
    return values


def test_an_inf_on_one_rank_reaches_all_and_nothing_else(pool: RankPool) -> None:
    """An infinity in one replica makes the mean infinite there, on every rank, and only there."""
    for values in pool.run(3, average_with_inf):
        assert values[7] == float("inf")
        assert values[8].isnan()
        assert values[:7].eq(1).all()
        assert values[9:].eq(1).all()


def run_out_of_batches(recipe: str, batches: list[int]) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    net = make_net()
    optimizer = sgd(net)
    topology = pairs(list(range(dist.get_world_size())))
    with attach(net, optimizer, RECIPES[recipe](topology)) as run:
        for step in range(batches[rank]):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
        run.finalize()
    return snapshot(net)


@pytest.mark.parametrize(
    ("recipe", "batches"),
    in_pairs(
        [
            *("local_sgd", "hierarchical_sgd", "local_sgd, overlapped"),
            *("hierarchical_sgd, overlapped", "noloco", "gossip"),
        ],
        [[7, 12, 3], [1, 20, 20], [7, 7, 7]],
    ),
)
def test_ranks_may_run_out_of_batches(pool: RankPool, recipe: str, batches: list[int]) -> None:
    """``finalize`` answers the others' syncs until all are done; all end with one model."""
    first, *others = pool.run(3, run_out_of_batches, recipe, batches)
    assert all(equal(first, other) for other in others)


def test_finalize_averages_the_tail(pool: RankPool) -> None:
    """Ranks that stop at the same step end with the mean of where they were."""
    results = pool.run(3, run_out_of_batches, "local_sgd", [6, 6, 6])
    topology = pairs([0, 1, 2])
    strategy = make_local(topology)
    nets = train_replicas(strategy, topology, 6)
    expected = copy.deepcopy(nets[0])
    replicas = [expected, nets[1], nets[2]]
    average(replicas)
    assert all(equal(result, snapshot(expected)) for result in results)
