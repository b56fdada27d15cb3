"""Averages that travel while training goes on: what they give, when, and what can go wrong."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    HierarchicalModelAverager,
    ModelAverager,
    NotAttachable,
    PeerLost,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    RankMismatch,
    Strategy,
    Topology,
    attach,
    hierarchical_sgd,
    post_local_sgd,
)
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.reducers import Mean, TwoLevel
from loosestep.schedules import Due, Schedule, after, every, levels
from loosestep.sync.averager import Averager
from loosestep.sync.flight import Copies
from loosestep.sync.overlap import Overlap, add_, differ_
from loosestep.sync.parts import Parts
from loosestep.testing import RankPool, run_ranks
from tests.support.oracle import (
    Net,
    average,
    equal,
    loss_of,
    make_net,
    sgd,
    snapshot,
    train_replicas,
)

STEPS = 11


def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def local(period: int, overlap_steps: int, **rest: Any) -> Strategy:
    return Strategy(schedule=every(period), overlap_steps=overlap_steps, **rest)


# By hand.


def test_differences_by_hand() -> None:
    """Numbers are subtracted and added, truths flipped, and equal infinities differ by nothing."""
    inf = float("inf")
    snapshots = [torch.tensor([1.0, -inf, inf]), torch.tensor([3]), torch.tensor([True, False])]
    means = [torch.tensor([1.5, -inf, 0.0]), torch.tensor([7]), torch.tensor([True, True])]
    differ_(means, snapshots)
    assert means[0].tolist() == [0.5, 0.0, -inf]
    assert (means[1].tolist(), means[2].tolist()) == ([4], [False, True])
    now = [torch.tensor([2.0, -inf, 1.0]), torch.tensor([4]), torch.tensor([False, False])]
    add_(now, means)
    assert now[0].tolist() == [2.5, -inf, -inf]
    assert (now[1].tolist(), now[2].tolist()) == ([8], [False, True])


def test_memory_for_copies_is_taken_once() -> None:
    """A tensor gets the same memory again unless its layout changes."""
    copies, weight = Copies(), torch.nn.Parameter(torch.zeros(3, 4))
    first = copies.of([("w", weight)])[0][1]
    assert copies.of([("w", weight)])[0][1] is first
    assert copies.nbytes == 48
    assert copies.of([("w", weight.t())])[0][1].stride() == (1, 4)


def by_hand() -> list[float]:
    """Move by the rank at every step, averaging at step 2 and applying at step 4."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen = []
    with attach(torch.nn.ParameterList([weight]), optimizer, local(2, 2)):
        for _ in range(5):
            weight.grad = torch.full((1,), -float(dist.get_rank()))
            optimizer.step()
            seen.append(float(weight))
    return seen


def test_an_average_by_hand(pool: RankPool) -> None:
    """Two ranks at 0 and 2 after two steps have the mean 1; two steps later it is applied."""
    # Rank 0 stands still: 0 + (1 - 0) at step 4. Rank 1: 4 + (1 - 2) = 3 at step 4.
    assert pool.run(2, by_hand) == [[0, 0, 0, 1, 1], [1, 2, 3, 3, 4]]


# Parity of the drop-in names, as torch counts: the first call is number 0.

AVERAGERS: dict[str, Callable[..., ModelAverager]] = {
    "periodic": lambda net, tau: PeriodicModelAverager(3, 2, module=net, overlap_steps=tau),
    "hierarchical": lambda net, tau: HierarchicalModelAverager(
        {2: 2, 4: 4}, 1, module=net, overlap_steps=tau
    ),
}


def due(kind: str, call: int) -> int:
    """Return how many ranks average at a call."""
    if kind == "periodic":
        return 4 if call >= 2 and (call - 2) % 3 == 0 else 0
    return 0 if call < 1 or call % 2 else 4 if call % 4 == 0 else 2


def drop_in(kind: str, tau: int, steps: int, finalize: bool) -> dict[str, torch.Tensor]:
    net = make_net()
    averager = AVERAGERS[kind](net, tau)
    optimizer = PostLocalSGDOptimizer(sgd(net), averager)
    go(net, optimizer, 0, steps)
    if finalize:
        optimizer.finalize()
    averager.close()
    return snapshot(net)


def replicas(kind: str, tau: int, steps: int) -> list[Net]:
    """Train four replicas in one process by the rule p += mean - snapshot."""
    nets = [copy.deepcopy(make_net()) for _ in range(4)]
    optimizers = [sgd(net) for net in nets]
    flying: tuple[int, list[Net], list[Net]] | None = None
    for call in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(net, rank, call).backward()
            optimizer.step()
        size = due(kind, call)
        if flying is not None and (size or call == flying[0] + tau):
            apply(nets, *flying[1:])
            flying = None
        if size:
            before, means = copy.deepcopy(nets), copy.deepcopy(nets)
            for first in range(0, 4, size):
                average(means[first : first + size])
            flying = (call, before, means)
    return nets


@torch.no_grad()
def apply(nets: list[Net], before: list[Net], means: list[Net]) -> None:
    for trio in zip(nets, before, means, strict=True):
        tensors = ([*net.parameters(), *net.buffers()] for net in trio)
        for now, then, mean in zip(*tensors, strict=True):
            now.add_(mean - then)


# By 3 calls, the averages of 2 of 4 ranks land early: all 4 average 2 calls later.
OVERLAPS = [("periodic", 1), ("periodic", 3), ("hierarchical", 2), ("hierarchical", 3)]


@pytest.mark.parametrize(("kind", "tau"), OVERLAPS)
def test_drop_in_averagers_equal_replicas_of_one_process(
    pool: RankPool, kind: str, tau: int
) -> None:
    """Four ranks train to what four replicas in one process train to, to the bit."""
    nets = replicas(kind, tau, STEPS)
    for result, net in zip(pool.run(4, drop_in, kind, tau, STEPS, False), nets, strict=True):
        assert equal(result, snapshot(net))


@pytest.mark.parametrize("kind", AVERAGERS)
def test_finalize_applies_and_averages(pool: RankPool, kind: str) -> None:
    """``finalize`` applies what is under way, and all end with the mean of where they are."""
    nets = replicas(kind, 2, 9)  # the last call, number 8, has launched one
    means = copy.deepcopy(nets)
    average(means)
    apply(nets, copy.deepcopy(nets), means)
    average(nets)
    for result in pool.run(4, drop_in, kind, 2, 9, True):
        assert equal(result, snapshot(nets[0]))


def no_overlap() -> bool:
    results = []
    for options in ({}, {"overlap_steps": 0}):
        net = make_net()
        averager = PeriodicModelAverager(3, module=net, **options)  # type: ignore[arg-type]
        go(net, PostLocalSGDOptimizer(sgd(net), averager), 0, 7)
        results.append(snapshot(net))
    for strategy in (Strategy(schedule=every(3)), local(3, 0)):
        net = make_net()
        optimizer = sgd(net)
        with attach(net, optimizer, strategy):
            go(net, optimizer, 0, 7)
        results.append(snapshot(net))
    assert [t.name for t in threading.enumerate() if "overlap" in t.name] == []
    return equal(results[0], results[1]) and equal(results[2], results[3])


def test_no_overlap_is_blocking_to_the_bit(pool: RankPool) -> None:
    """``overlap_steps=0`` is what it was without, and starts no thread."""
    assert pool.run(2, no_overlap) == [True, True]


# Stop and resume.


def saved(state: Any) -> Any:
    """Return what a file with ``state`` holds."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(kind: str, tau: int, stop: int) -> bool:
    """Stop after ``stop`` steps, resume twice over, and say whether it is as if nothing was."""

    def start() -> tuple[Net, PostLocalSGDOptimizer]:
        net = make_net()
        return net, PostLocalSGDOptimizer(sgd(net), AVERAGERS[kind](net, tau))

    net, optimizer = start()
    go(net, optimizer, 0, STEPS)
    whole = snapshot(net)
    net, optimizer = start()
    go(net, optimizer, 0, stop)
    for _ in range(2):
        state = saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        go(net, optimizer, stop, stop + 1)  # what is saved is saved
        net, optimizer = start()
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    go(net, optimizer, stop, STEPS)
    return equal(whole, snapshot(net))


@pytest.mark.parametrize(("kind", "tau"), [("periodic", 2), ("hierarchical", 3)])
def test_drop_in_averagers_resume_at_any_step(pool: RankPool, kind: str, tau: int) -> None:
    """Stopping at any step, with an average under way or not, and resuming equals going on."""
    world = 4 if kind == "hierarchical" else 2
    for stop in range(1, 8):
        assert pool.run(world, resumed, kind, tau, stop) == [True] * world, stop


def attached_again(optimizer_state: str) -> bool:
    """Save in flight, go on, and load into the same run: what is under way then is dropped."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    strategy = local(4, 3, optimizer_state=optimizer_state)
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, 0, 5)
        state = saved(
            {"net": net.state_dict(), "opt": optimizer.state_dict(), "run": run.state_dict()}
        )
        assert state["run"]["flights"]["0"]["step"] == 4
        go(net, optimizer, 5, STEPS)
        whole = snapshot(net)
        go(net, optimizer, STEPS, 13)  # one is under way now, launched at 12
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["opt"])
        run.load_state_dict(state["run"])
        go(net, optimizer, 5, STEPS)
        return equal(whole, snapshot(net))


@pytest.mark.parametrize("optimizer_state", ["keep", "reset"])
def test_a_run_can_be_set_back_in_flight(pool: RankPool, optimizer_state: str) -> None:
    """Loading drops the average under way, takes up the saved one, and continues to the bit."""
    assert pool.run(2, attached_again, optimizer_state) == [True, True]


def half_a_checkpoint() -> str:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, local(2, 2)) as run:
        go(net, optimizer, 0, 3)
        state = run.state_dict()
        state["flights"]["0"]["differences"] = {}
        try:
            run.load_state_dict(state)
        except ValueError as error:
            return str(error)
    return ""


def test_a_checkpoint_without_what_was_under_way_is_refused(pool: RankPool) -> None:
    """A loader that drops tensors it does not know must not lose an average silently."""
    assert all("under way and holds 0 of them" in text for text in pool.run(2, half_a_checkpoint))


# What is refused.


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_overlap_steps_must_be_a_number_of_steps(value: Any) -> None:
    """What is no whole number >= 0 is refused, with the value."""
    with pytest.raises(ValueError, match=f"overlap_steps must be.*{value!r}"):
        Strategy(schedule=every(4), overlap_steps=value)


def test_averages_closer_than_the_overlap_are_refused() -> None:
    """The error has the two steps and the longest overlap that fits.

    Of several levels, those that average more often than that land early.
    """
    with pytest.raises(ValueError, match=r"at steps 4 and 8; give overlap_steps <= 4"):
        post_local_sgd(4, warmup_steps=0, overlap_steps=5)
    with pytest.raises(ValueError, match=r"at steps 6 and 12; give overlap_steps <= 6"):
        hierarchical_sgd({"host": 2, "world": 6}, overlap_steps=7)
    assert hierarchical_sgd({"host": 4, "world": 32}, overlap_steps=5).overlap_steps == 5
    with pytest.raises(ValueError, match=r"at steps 9004 and 9008"):
        Strategy(schedule=after(9000, every(4)), overlap_steps=5)
    assert post_local_sgd(4, overlap_steps=4).overlap_steps == 4
    assert Strategy(schedule=levels({"host": 2, "world": 4}), overlap_steps=2).overlap_steps == 2


def refuse() -> list[str]:
    made: list[Callable[[], object]] = [
        lambda: PeriodicModelAverager(3, overlap_steps=4),
        lambda: HierarchicalModelAverager({3: 1, 4: 2}, overlap_steps=5),
        lambda: PeriodicModelAverager(3, overlap_steps=-1),
    ]
    texts = []
    for make in made:
        try:
            make()
        except (ValueError, NotAttachable) as error:
            texts.append(str(error))
    return texts


def test_what_cannot_overlap_is_refused_on_every_rank(pool: RankPool) -> None:
    """Averagers refuse periods that are too short."""
    for periodic, hierarchical, negative in pool.run(2, refuse):
        assert "at steps 0 and 3; give overlap_steps <= 3" in periodic
        assert "at steps 4 and 8; give overlap_steps <= 4" in hierarchical
        assert "got -1" in negative


def disagree(way: str) -> str:
    net, rank = make_net(), dist.get_rank()
    try:
        if way == "attach":
            attach(net, sgd(net), local(4, rank), timeout=10)
        else:
            averager = PeriodicModelAverager(4, module=net, overlap_steps=rank, timeout=10)
            averager.average_parameters(net.parameters())
    except RankMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["attach", "averager"])
def test_ranks_with_different_overlaps_are_told(pool: RankPool, way: str) -> None:
    """Ranks that would apply averages at different steps hear so before the first."""
    for text in pool.run(2, disagree, way):
        assert "ranks disagree about what to average" in text


# Where averages come closer than was to be seen.


class Denser(Schedule):
    """Every third step for a long time, then at every step."""

    def __call__(self, step: int) -> Due:
        return Due(None, "world" if step > 0 and (step % 3 == 0 or step > 9000) else None)

    def gradient_levels(self) -> frozenset[str]:
        return frozenset()

    def parameter_levels(self) -> frozenset[str]:
        return frozenset({"world"})

    def __repr__(self) -> str:
        return "Denser()"


def crowd() -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(1))
    net = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen = []
    with attach(net, optimizer, Strategy(schedule=Denser(), overlap_steps=3)) as run:
        run.clock.step = 9000
        for _ in range(3):
            weight.grad = torch.full((1,), -2.0 * dist.get_rank())
            optimizer.step()
            seen.append(float(weight))
    return seen


def test_the_one_under_way_lands_before_the_next_is_launched(pool: RankPool) -> None:
    """Averages that come closer than the overlap are applied one after the other."""
    # Launched at 0 and 2 (mean 1) and applied a step later: 0 + 1 and 4 - 1. Then 1 and 3 (mean 2).
    assert pool.run(2, crowd) == [[0, 1, 2], [2, 3, 4]]


def two_under_way() -> tuple[list[int], list[float], int]:
    overlap, averager = Overlap(2, most=2), Averager(peers_of(world_group()))
    left, right = torch.zeros(3), torch.full((2,), float(dist.get_rank()))
    overlap.launch([(averager, Parts([("left", left)]))], 1, "world")
    overlap.launch([(averager, Parts([("right", right)]))], 2, "world")
    assert overlap.is_full
    assert not overlap.is_due(2)
    assert overlap.is_due(3)
    saved = overlap.state_dict()
    right += 1.0  # a step that must not be lost
    named = {"left": left, "right": right}
    landed = [overlap.land(lambda: named).step for _ in range(2)]
    again = Overlap(2, most=2)
    again.load_state_dict(saved)
    return landed, right.tolist(), len(again.flights)


def test_several_land_in_the_order_of_their_launches(pool: RankPool) -> None:
    """Two are under way at once, saved and loaded as two, and one thread carries both."""
    assert pool.run(2, two_under_way) == [([1, 2], [1.5, 1.5], 2)] * 2


# What else a sync changes.


class Odd(torch.nn.Module):
    """A weight and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([-float("inf"), 0.0]))
        self.register_buffer("seen", torch.tensor([False, True]))


def buffers(policy: str) -> tuple[list[float], list[bool]]:
    net: Any = Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    rank = dist.get_rank()
    with attach(net, optimizer, local(1, 1, buffers=policy)):
        net.mean += 1 + rank
        net.count += 4 + rank
        net.seen[0] = rank == 1
        net.weight.grad = torch.zeros(2)
        optimizer.step()
        net.mean = net.mean + 10  # a new tensor under the old name
        net.count += 1
        optimizer.step()
        return [float(net.mean), float(net.count), *net.mask.tolist()], net.seen.tolist()


def test_buffers_follow_their_policy(pool: RankPool) -> None:
    """Floats move to the mean, counters to the largest, or all to the first rank's; or none."""
    inf = float("inf")
    mean, other = pool.run(2, buffers, "mean")
    assert mean == ([11.5, 6, -inf, 0], [True, True])
    assert other == ([11.5, 6, -inf, 0], [True, True])
    first, other = pool.run(2, buffers, "broadcast")
    assert first == other == ([11, 5, -inf, 0], [False, True])
    first, other = pool.run(2, buffers, "local")
    assert first == ([11, 5, -inf, 0], [False, True])
    assert other == ([12, 6, -inf, 0], [True, True])


def momentum(policy: str) -> float | None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    strategy = local(2, 1, optimizer_state=policy)
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy):
        for _ in range(3):
            weight.grad = torch.full((1,), float(dist.get_rank()))
            optimizer.step()
        state = optimizer.state[weight].get("momentum_buffer")
        return None if state is None else float(state)


def test_optimizer_state_follows_its_policy(pool: RankPool) -> None:
    """Momentum is kept, or dropped when the parameters move."""
    # Rank 1 has 1, 1.5, 1.75.
    assert pool.run(2, momentum, "keep") == [0.0, 1.75]
    assert pool.run(2, momentum, "reset") == [None, None]


def freeze() -> list[float]:
    one, two, three = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    net = torch.nn.ParameterList([one, two, three])
    three.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, local(1, 1)):
        for parameter in (one, two):
            parameter.grad = torch.full((1,), -2.0 * dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
        two.requires_grad_(False)
        three.requires_grad_(True)
        three.grad = torch.full((1,), -2.0 * dist.get_rank())
        optimizer.step()
        return [float(one), float(two), float(three)]


def test_only_what_was_launched_is_changed(pool: RankPool) -> None:
    """One frozen meanwhile still moves to the mean; one thawed meanwhile stays."""
    assert pool.run(2, freeze) == [[1, 1, 0], [1, 1, 2]]


def two_level() -> tuple[bool, bool]:
    """Average by hosts, of which there seem to be two, and count process groups meanwhile."""
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, local(3, 2, reducer=TwoLevel(ranks_per_host=2))) as run:
        groups = len(dist.distributed_c10d._world.pg_map)
        go(net, optimizer, 0, STEPS)
        run.finalize()
        first, *others = gather(net)
        none_made = groups == len(dist.distributed_c10d._world.pg_map)
        return all(equal(first, other) for other in others), none_made


def gather(net: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, snapshot(net))
    return everyone


def test_a_reducer_may_have_process_groups_of_its_own(pool: RankPool) -> None:
    """They are made at the start, and an average under way uses them like any other."""
    assert pool.run(4, two_level) == [(True, True)] * 4


def ties() -> bool:
    one, two = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    two.data = one.data
    net = torch.nn.ParameterList([one, two])
    optimizer = torch.optim.SGD([one], lr=1.0)
    pointer = one.data_ptr()
    with attach(net, optimizer, local(1, 1)):
        for _ in range(2):
            one.grad = torch.full((4,), -2.0 * dist.get_rank())
            optimizer.step()
    expected = 1.0 + 2.0 * dist.get_rank()
    return two.data_ptr() == one.data_ptr() == pointer and one.tolist() == [expected] * 4


def test_tied_memory_is_moved_once(pool: RankPool) -> None:
    """Two parameters over the same memory are moved to the mean once, where they are."""
    assert pool.run(2, ties) == [True, True]


def shards() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net: Any = torch.nn.Linear(2, 4, bias=False)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    schedule = every(1, "replicate", gradients="shard")
    strategy = Strategy(
        schedule=schedule, topology=Topology.from_mesh(mesh, timeout=20), overlap_steps=1
    )
    with attach(net, optimizer, strategy):
        here = net.weight.detach().to_local()
        here.fill_(dist.get_rank())
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            here.add_(10.0)
    return here.flatten().tolist()


def test_shards_meet_their_like() -> None:
    """Ranks 0 and 2 hold one half of the rows, 1 and 3 the other; ten are added meanwhile."""
    # 0 and 2 have the mean 1, 1 and 3 the mean 2; then 10 is added twice.
    zero, one, two, three = run_ranks(4, shards)
    assert zero == two == [21.0] * 4
    assert one == three == [22.0] * 4


def look() -> tuple[bool, bool, bool]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, local(4, 3, reducer=SlowMean())) as run:
        go(net, optimizer, 0, 5)
        before = snapshot(net)
        with run.averaged():  # while one is under way
            shown = snapshot(net)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, net)
        average(everyone)
        undisturbed = equal(before, snapshot(net))
        go(net, optimizer, 5, STEPS)
    other = make_net()
    optimizer = sgd(other)
    with attach(other, optimizer, local(4, 3)):
        go(other, optimizer, 0, STEPS)
    return equal(shown, snapshot(everyone[0])), undisturbed, equal(snapshot(net), snapshot(other))


def test_the_average_can_be_looked_at_in_flight(pool: RankPool) -> None:
    """``averaged()`` shows the mean of all replicas as they are, and changes nothing."""
    assert pool.run(3, look) == [(True, True, True)] * 3


def scale() -> tuple[int, bool]:
    net = make_net()
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=8.0)
    with attach(net, optimizer, local(3, 2), scaler=scaler) as run:
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(net, dist.get_rank(), step)
            scaler.scale(loss).backward()
            if step == 3 and dist.get_rank() == 1 and net.gain.grad is not None:
                net.gain.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        run.finalize()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, snapshot(net))
        return run.clock.step, equal(*everyone)


def test_steps_that_a_scaler_skips_count(pool: RankPool) -> None:
    """A step that is skipped on one rank ticks like the others, so averages meet."""
    assert pool.run(2, scale) == [(8, True)] * 2


# Training does not stand still, and telemetry says so.


class SlowMean(Mean):
    """The mean, a while later."""

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        time.sleep(0.3)
        return super().start(buffer, peers, state, place)

    def __repr__(self) -> str:
        return "SlowMean()"


def timed(ddp: bool) -> tuple[list[float], dict[str, Any]]:
    net: torch.nn.Module = make_net()
    net = DistributedDataParallel(net) if ddp else net
    optimizer = sgd(net)
    seconds = []
    with attach(net, optimizer, local(2, 2, reducer=SlowMean())) as run:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            if step == 2:
                time.sleep(0.4)
        return seconds, run.metrics()["parameters/world"]


@pytest.mark.parametrize("ddp", [False, True])
def test_training_goes_on_while_an_average_is_under_way(pool: RankPool, ddp: bool) -> None:
    """Launch and landing are short where the average is long; telemetry has both figures."""
    for seconds, metrics in pool.run(2, timed, ddp):
        assert max(seconds) < 0.2, seconds
        assert metrics["syncs"] == 1
        assert metrics["seconds"] > 0.3
        assert metrics["seconds_waited"] < 0.2
        assert metrics["bytes_copied"] + metrics["bytes_sent"] > 0
        assert metrics["last_drift"] > 0


def launch_alone() -> float:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, local(1, 1)):
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        began = time.perf_counter()
        go(net, optimizer, 0, 1)
        seconds = time.perf_counter() - began
        dist.barrier()
    return seconds


def test_a_launch_does_not_wait_for_slower_ranks(pool: RankPool) -> None:
    """The ranks agree beside training, too."""
    assert all(seconds < 0.25 for seconds in pool.run(2, launch_alone))


# The end.


def leave(how: str) -> tuple[int, int, float]:
    """Leave with an average under way; return what is left behind, and how long it took."""
    groups = len(dist.distributed_c10d._world.pg_map)
    began = time.perf_counter()
    try:
        net = make_net()
        optimizer = sgd(net)
        with attach(net, optimizer, local(2, 2, reducer=SlowMean())):
            go(net, optimizer, 0, 2)
            began = time.perf_counter()
            if how == "error" and dist.get_rank() == 0:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    seconds = time.perf_counter() - began
    threads = [t for t in threading.enumerate() if "overlap" in t.name]
    return len(threads), len(dist.distributed_c10d._world.pg_map) - groups, seconds


@pytest.mark.parametrize("how", ["detach", "error"])
def test_nothing_is_left_behind(pool: RankPool, how: str) -> None:
    """After ``detach`` or an error there is no thread and no group, and it took no time-out."""
    for threads, groups, seconds in pool.run(2, leave, how):
        assert (threads, groups) == (0, 0)
        assert seconds < 3


def close_averager() -> tuple[int, int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    net = make_net()
    averager = PeriodicModelAverager(3, module=net, overlap_steps=2)
    averager.average_parameters(net.parameters())
    averager.close()
    averager.close()
    # The comparison at the first call has the process group that blocking averages have, for good.
    left = len(dist.distributed_c10d._world.pg_map) - groups - 1
    return len([t for t in threading.enumerate() if "overlap" in t.name]), left


def test_an_averager_can_be_closed(pool: RankPool) -> None:
    """``close`` ends what is under way and frees the groups that it needed."""
    assert pool.run(2, close_averager) == [(0, 0)] * 2


class DeadlyMean(Mean):
    """The mean, but a rank dies at its third use."""

    def __init__(self, victim: int) -> None:
        self.victim, self.uses = victim, 0

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        self.uses += 1
        if self.uses == 3 and dist.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(buffer, peers, state, place)

    def __repr__(self) -> str:
        return "DeadlyMean()"


def lose(victim: int, way: str) -> tuple[str, tuple[int, ...], float, bool]:
    """Take steps until one fails, and say how, and whether parameters were left alone."""
    net = torch.nn.Linear(4, 4)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    if way == "attach":
        attach(net, optimizer, local(2, 1, reducer=DeadlyMean(victim)), timeout=20)
    else:
        averager = PeriodicModelAverager(
            2, module=net, overlap_steps=1, reducer=DeadlyMean(victim), timeout=20
        )
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    for _ in range(12):
        before = snapshot(net)
        net(torch.ones(1, 4)).sum().backward()
        began = time.perf_counter()
        try:
            optimizer.step()
        except PeerLost as error:
            seconds = time.perf_counter() - began
            return str(error), error.ranks, seconds, equal(before, snapshot(net))
        time.sleep(0.05)
    return "nothing", (), 0.0, False


@pytest.mark.parametrize(("way", "victim"), [("attach", 2), ("attach", 0), ("averager", 1)])
def test_a_rank_that_dies_in_flight_is_named(pool: RankPool, way: str, victim: int) -> None:
    """Survivors hear who it was when the average is to land, and keep their parameters."""
    results = pool.run(3, lose, victim, way, allow_dead=[victim])
    for rank in set(range(3)) - {victim}:
        text, ranks, seconds, untouched = results[rank]
        assert ranks == (victim,), text
        assert f"lost rank {victim} while" in text
        assert seconds < 5
        assert untouched


def copied_in_flight() -> bool:
    """Deep-copy model and optimizer with an average under way, and train both."""
    net = make_net()
    optimizer = PostLocalSGDOptimizer(
        sgd(net), PeriodicModelAverager(4, module=net, overlap_steps=3)
    )
    go(net, optimizer, 0, 6)
    twin, other = copy.deepcopy((net, optimizer))
    for pair in ((net, optimizer), (twin, other)):
        go(*pair, 6, STEPS)
    return equal(snapshot(net), snapshot(twin))


def test_a_copy_takes_what_is_under_way_along(pool: RankPool) -> None:
    """A deep copy made in flight trains on like the original."""
    assert pool.run(2, copied_in_flight) == [True, True]


def test_an_overlap_as_long_as_the_period_equals_the_oracle(pool: RankPool) -> None:
    """One lands and the next is launched after the same step, on a subgroup too."""
    topology = Topology({"world": [[1, 2, 3]]}, timeout=20)
    nets = train_replicas(local(2, 2, topology=topology), topology, STEPS)
    for rank, result in enumerate(pool.run(4, on_three_ranks)):
        assert rank == 0 or equal(result, snapshot(nets[rank]))


def on_three_ranks() -> dict[str, torch.Tensor]:
    if dist.get_rank() == 0:
        return {}
    net = make_net()
    optimizer = sgd(net)
    topology = Topology({"world": [[1, 2, 3]]}, timeout=20)
    with attach(net, optimizer, local(2, 2, topology=topology)):
        go(net, optimizer, 0, STEPS)
    return snapshot(net)
