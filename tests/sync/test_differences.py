"""Lossy reducers are given differences: from what, how they come back, and what must not travel."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    NotFinite,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    Strategy,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    hierarchical_sgd,
    zero,
)
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.comm.reducers.feedback import ErrorFeedback
from loosestep.comm.reducers.quantize import Int4
from loosestep.comm.reducers.reducer import NonFinite
from loosestep.reducers import Mean, Reducer
from loosestep.schedules import every
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool
from tests.support.oracle import average, equal, loss_of, make_net, sgd, snapshot


class Eighths(Mean):
    """The mean of values that are rounded to eighths, and a list of what was sent."""

    lossy = True
    on_nonfinite: NonFinite | None = None

    def __init__(self, on_nonfinite: NonFinite = NonFinite.RAISE) -> None:
        self.on_nonfinite = on_nonfinite
        self.sent: list[tuple[str, float]] = []

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        self.sent.append((place.name, float(buffer.abs().max())))
        buffer.mul_(8).round_().div_(8)
        return super().start(buffer, peers, state, place)

    def __repr__(self) -> str:
        return f"Eighths({self.on_nonfinite})"


def averager_with(reducer: Reducer, kept: Kept | None = None) -> Averager:
    peers = peers_of(Group.of(world_group()).twin())
    return Averager(peers, reducer=reducer, kept=kept, window_bytes=64)


def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def all_equal(net: torch.nn.Module) -> bool:
    first, *others = gathered(snapshot(net))
    return all(equal(first, other) for other in others)


def by_hand() -> list[Any]:
    value = torch.tensor([100.03 + 0.02 * dist.get_rank()])
    kept, reducer = Kept(), Eighths()
    averager = averager_with(reducer, kept)
    averager.average([("value", value)])
    seen: list[Any] = [float(value), list(reducer.sent)]
    value += 0.25 + 0.25 * dist.get_rank()
    averager.average([("value", value)])
    return [*seen, float(value), [round(size, 3) for _, size in reducer.sent], kept.nbytes]


def test_differences_by_hand(pool: RankPool) -> None:
    """The first average is exact; the second adds the mean of what was added, not of values."""
    # 100.03 and 100.05 become 100.04; then 0.25 and 0.5 travel, and their mean is 0.375.
    for rank, seen in enumerate(pool.run(2, by_hand)):
        assert seen[0] == pytest.approx(100.04, abs=1e-5)
        assert seen[1] == []
        assert seen[2] == pytest.approx(100.415, abs=1e-5)
        assert seen[3] == [0.25 + 0.25 * rank]
        assert seen[4] == 4
    one, other = pool.run(2, by_hand)
    assert one[2] == other[2]


def one_shot() -> float:
    value = torch.tensor([100.03])
    average_([value], reducer=Eighths())
    return float(value)


def test_a_single_call_compresses_values(pool: RankPool) -> None:
    """``average_`` has no memory, so the values themselves are rounded."""
    assert pool.run(2, one_shot) == [100.0, 100.0]


def cut() -> list[list[str]]:
    reducer = Eighths()
    averager = averager_with(reducer, Kept())
    long, short = torch.ones(100), torch.ones(3)
    named = [("long", long), ("a", short), ("b", short.clone())]
    for _ in range(3):
        averager.average(named)
    slots = [slot for slot, _ in reducer.sent]
    return [slots[: len(slots) // 2], slots[len(slots) // 2 :]]


def test_every_window_has_a_slot_of_its_own(pool: RankPool) -> None:
    """Slots are unique within a sync, and the same at the next one."""
    for second, third in pool.run(2, cut):
        assert second == third
        assert len(set(second)) == len(second) == 7  # six of 16 values, and one of the rests
        assert {f"{index} long" for index in range(6)} < set(second)


def rebind() -> list[int]:
    """Count what is sent lossily by syncs of two tensors, of one, and of two again."""
    reducer, kept = Eighths(), Kept()
    averager = averager_with(reducer, kept)
    both = [("a", torch.zeros(20)), ("b", torch.zeros(20))]
    counts = []
    for named in (both, both, both[:1], both[:1], both):
        averager.average(named)
        counts.append(len(reducer.sent))
        reducer.sent.clear()
    return [*counts, kept.nbytes]


def test_other_tensors_start_afresh(pool: RankPool) -> None:
    """When other tensors take part than before, the next average is exact, on all ranks."""
    # 20 values of 4 bytes are two windows of 64 bytes, the rests of both sharing one.
    for first, again, fewer, then, more, nbytes in pool.run(2, rebind):
        assert (first, fewer, more) == (0, 0, 0)
        assert again > 0
        assert then > 0
        assert nbytes == 160


def at_start(initial: str) -> tuple[int, bool]:
    net, reducer = make_net(), Eighths()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    strategy = Strategy(schedule=every(1), initial=initial, reducer=reducer)
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, 1)
        return len(reducer.sent), all_equal(net)


def test_replicas_that_start_equal_need_no_exact_average(pool: RankPool) -> None:
    """After a broadcast or a comparison differences travel from the first sync on."""
    for initial, expected in (("broadcast", 1), ("refuse", 1), ("ignore", 0)):
        assert pool.run(2, at_start, initial) == [(expected, True)] * 2, initial


def levelled(kind: str) -> tuple[bool, float]:
    """Train with few bits on two levels; return whether all are equal, and how good it is."""
    torch.manual_seed(0)
    net = make_net()
    reducers: dict[str, Reducer] = {"int4": Int4(), "feedback": ErrorFeedback(Int4())}
    ranks = list(range(dist.get_world_size()))
    topology = Topology({"pair": [[0, 1], *([ranks[2:]] if ranks[2:] else [])], "world": [ranks]})
    strategy = hierarchical_sgd({"pair": 2, "world": 4}, reducer=reducers[kind], topology=topology)
    optimizer = sgd(net)
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, 12)
        same = all_equal(net)
    exact = make_net()
    optimizer = sgd(exact)
    strategy = hierarchical_sgd({"pair": 2, "world": 4}, topology=topology)
    with attach(exact, optimizer, strategy):
        go(exact, optimizer, 0, 12)
    pairs = zip(net.parameters(), exact.parameters(), strict=True)
    return same, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["int4", "feedback"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_few_bits_leave_replicas_equal_and_near_the_exact_ones(
    pool: RankPool, kind: str, world: int
) -> None:
    """Four bits a difference: bit-equal ranks, close to what exact averages train to."""
    for same, distance in pool.run(world, levelled, kind):
        assert same
        assert distance < 0.1


def alone() -> bool:
    net, other = make_net(), make_net()
    for model, reducer in ((net, Eighths()), (other, Mean())):
        optimizer = sgd(model)
        with attach(model, optimizer, Strategy(schedule=every(2), reducer=reducer)):
            go(model, optimizer, 0, 5)
    return equal(snapshot(net), snapshot(other))


def test_a_world_of_one_loses_nothing(pool: RankPool) -> None:
    """Where there is nobody to send to, nothing is rounded."""
    assert pool.run(1, alone) == [True]


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(overlap_steps: int, stop: int) -> bool:
    def start() -> tuple[Any, Any, Strategy]:
        net, reducer = make_net(), ErrorFeedback(Int4())
        strategy = Strategy(schedule=every(3), reducer=reducer, overlap_steps=overlap_steps)
        return net, sgd(net), strategy

    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, 10)
    whole = snapshot(net)
    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, 0, stop)
        states = {"net": net, "optimizer": optimizer, "run": run}
        state = saved({name: part.state_dict() for name, part in states.items()})
    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy) as run:
        for name, part in {"net": net, "optimizer": optimizer, "run": run}.items():
            part.load_state_dict(state[name])
        go(net, optimizer, stop, 10)
    return equal(whole, snapshot(net))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_resuming_with_few_bits_continues_to_the_bit(pool: RankPool, overlap_steps: int) -> None:
    """References and residuals are in the checkpoint, under attach."""
    for stop in range(1, 8):
        assert pool.run(2, resumed, overlap_steps, stop) == [True, True], stop


def resumed_drop_in(overlap_steps: int, stop: int) -> bool:
    def start() -> tuple[Any, PostLocalSGDOptimizer]:
        net, reducer = make_net(), ErrorFeedback(Int4())
        averager = PeriodicModelAverager(
            3, module=net, reducer=reducer, overlap_steps=overlap_steps
        )
        return net, PostLocalSGDOptimizer(sgd(net), averager)

    net, optimizer = start()
    go(net, optimizer, 0, 10)
    whole = snapshot(net)
    net, optimizer = start()
    go(net, optimizer, 0, stop)
    state = saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    net, optimizer = start()
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    go(net, optimizer, stop, 10)
    return equal(whole, snapshot(net))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_drop_in_averagers_resume_with_few_bits(pool: RankPool, overlap_steps: int) -> None:
    """So they are under the drop-in names."""
    for stop in range(1, 7):
        assert pool.run(2, resumed_drop_in, overlap_steps, stop) == [True, True], stop


def overlapped() -> list[float]:
    """Move by 0.3 times the rank at every step; launch at every second, apply a step later."""
    weight, reducer = torch.nn.Parameter(torch.zeros(1)), Eighths()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    strategy = Strategy(schedule=every(2), overlap_steps=1, reducer=reducer)
    seen = []
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy):
        for _ in range(5):
            weight.grad = torch.full((1,), -0.3 * dist.get_rank())
            optimizer.step()
            seen.append(round(float(weight), 4))
    return seen


def test_overlapped_differences_by_hand(pool: RankPool) -> None:
    """The reference of an overlapped average is the last mean, which no rank may hold by then."""
    # Rank 1: 0.3, 0.6 -> 0.625 in eighths, mean 0.3125; 0.9 + (0.3125 - 0.6) = 0.6125.
    # Then 0.9125, which is 0.6 from 0.3125: mean 0.3125 + 0.3125 (rank 0: 0 from it).
    one, other = pool.run(2, overlapped)
    assert one == [0, 0, 0.3125, 0.3125, 0.625]
    assert other == [0.3, 0.6, 0.6125, 0.9125, pytest.approx(1.2125 + 0.625 - 0.9125, abs=1e-3)]


def looked_at() -> tuple[bool, bool]:
    net, twin = make_net(), make_net()
    for model in (net, twin):
        optimizer = sgd(model)
        strategy = Strategy(schedule=every(3), reducer=ErrorFeedback(Int4()))
        with attach(model, optimizer, strategy) as run:
            go(model, optimizer, 0, 4)
            if model is net:
                mean = gathered(net)
                average(mean)
                with run.averaged():
                    shown = equal(snapshot(net), snapshot(mean[0]))
            go(model, optimizer, 4, 8)
    return shown, equal(snapshot(net), snapshot(twin))


def test_looking_at_the_average_is_exact_and_leaves_no_trace(pool: RankPool) -> None:
    """``averaged()`` shows the exact mean, and training goes on as if nobody had looked."""
    assert pool.run(2, looked_at) == [(True, True)] * 2


class Broken(Eighths):
    """Fails at its second use."""

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        handle = super().start(buffer, peers, state, place)
        if len(self.sent) == 2:
            raise ZeroDivisionError
        return handle


def failed() -> bool:
    values = [torch.full((16,), 1.5 + dist.get_rank()), torch.full((16,), 2.5)]
    averager = averager_with(Broken(), Kept())
    named = [("a", values[0]), ("b", values[1])]
    averager.average(named)
    values[0] += dist.get_rank()
    before = [value.clone() for value in values]
    try:
        averager.average(named)
    except ZeroDivisionError:
        return all(torch.equal(a, b) for a, b in zip(before, values, strict=True))
    return False


def test_a_failure_leaves_values_alone(pool: RankPool) -> None:
    """What is sent is a copy: parameters hold what the user put there until the mean is there."""
    assert pool.run(2, failed) == [True, True]


# What is not finite.


def infinite(policy: NonFinite, bad: list[int], way: str) -> tuple[str, Any, list[float]]:
    weights = [torch.nn.Parameter(torch.full((4,), float(dist.get_rank()))) for _ in range(3)]
    reducer, net = Eighths(policy), torch.nn.ParameterList(weights)
    if dist.get_rank() in bad:
        with torch.no_grad():
            weights[1][2] = float("inf") if dist.get_rank() else float("nan")
            weights[2][0] = float("nan")
    try:
        if way == "averager":
            PeriodicModelAverager(2, module=net, reducer=reducer).average_parameters(weights)
        elif way == "once":
            average_(list(net.named_parameters()), reducer=reducer)
        else:
            averager = PeriodicModelAverager(2, module=net, reducer=reducer, overlap_steps=1)
            averager.average_parameters(weights)
            averager.average_parameters(weights)
    except NotFinite as error:
        return str(error), (error.ranks, error.tensor), weights[0].tolist()
    return "", (), [float(weight[2]) for weight in weights]


@pytest.mark.parametrize("way", ["averager", "once", "overlapped"])
def test_what_is_not_finite_is_refused_by_name(pool: RankPool, way: str) -> None:
    """All ranks are told which rank and which tensor, and nothing is changed."""
    for rank, seen in enumerate(pool.run(3, infinite, NonFinite.RAISE, [1], way)):
        text, where, values = seen
        assert text.startswith(f"rank {rank}: ")
        assert "rank 1 in '1'" in text
        assert where == ((1,), "1")
        assert values == [float(rank)] * 4


def test_several_ranks_that_are_not_finite_are_all_named(pool: RankPool) -> None:
    """So are several ranks; where all are, skipping them is refused too."""
    for text, where, _ in pool.run(3, infinite, NonFinite.RAISE, [0, 2], "averager"):
        assert "rank 0 in '1', rank 2 in '1'" in text
        assert where == ((0, 2), "1")
    for text, where, _ in pool.run(2, infinite, NonFinite.SKIP, [0, 1], "averager"):
        assert "as long as one is left" in text
        assert where == ((0, 1), "1")


@pytest.mark.parametrize("way", ["averager", "once"])
def test_what_is_not_finite_can_be_skipped(pool: RankPool, way: str) -> None:
    """The mean is that of the others, for all tensors, and the rank left out gets it too."""
    for _, _, values in pool.run(3, infinite, NonFinite.SKIP, [1], way):
        assert values == [1.0, 1.0, 1.0]  # of 0 and 2
    for _, _, values in pool.run(3, infinite, NonFinite.SKIP, [0], way):
        assert values == [1.5, 1.5, 1.5]  # of 1 and 2


def masked() -> tuple[list[float], list[str]]:
    net: Any = torch.nn.Linear(2, 2)
    net.register_buffer("mask", torch.tensor([float("-inf"), 1.0 + dist.get_rank()]))
    reducer = Eighths()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with attach(net, optimizer, Strategy(schedule=every(1), reducer=reducer, initial="ignore")):
        for _ in range(2):
            net.mask[1] = 1.03 + dist.get_rank()
            optimizer.step()
    return net.mask.tolist(), [slot for slot, _ in reducer.sent]


def test_buffers_are_averaged_exactly(pool: RankPool) -> None:
    """Masks may be infinite and statistics are few: they are never compressed."""
    for values, slots in pool.run(2, masked):
        assert values == [float("-inf"), pytest.approx(1.53)]
        assert len(slots) == 1
        assert "mask" not in slots[0]


def recover() -> tuple[bool, bool]:
    """Let a rank diverge between syncs; return whether all is well after the next."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    reducer = ErrorFeedback(Int4(on_nonfinite="skip"))
    with attach(net, optimizer, Strategy(schedule=every(2), reducer=reducer)):
        go(net, optimizer, 0, 3)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net.gain.fill_(float("nan"))
        net.last.weight.data += dist.get_rank() == 1  # finite, and without a say all the same
        go(net, optimizer, 3, 4)
        finite = all(bool(t.isfinite().all()) for t in net.state_dict().values())
        return finite and float(net.last.weight.detach().abs().max()) < 0.9, all_equal(net)


def test_a_diverged_rank_is_healed_by_the_others(pool: RankPool) -> None:
    """With few bits and ``skip`` a rank full of NaN takes the mean of those that are not."""
    assert pool.run(3, recover) == [(True, True)] * 3


def sharded() -> bool:
    net, world = make_net(), dist.get_world_size()
    topology = Topology.from_sizes({"pair": 2, "world": world}, timeout=20)
    group = topology.process_group("pair")
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9
    )
    strategy = zero(3, gradients="pair", topology=topology, reducer=Int4())
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, 6)
        return all_equal(net)


def test_sharded_optimizers_send_few_bits_too(pool: RankPool) -> None:
    """Shards have references of their own, and all ranks end equal."""
    assert pool.run(4, sharded) == [True] * 4
