"""What is proved for every reducer, on real ranks, against replicas trained in one process."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import loosestep.comm.reducers
from loosestep import NotFinite, PeerLost, Strategy, Topology, attach
from loosestep.comm.codecs.rounding import draw_of, key_of, uniform
from loosestep.comm.group import Group, peers_of
from loosestep.comm.reducers import mean_into
from loosestep.reducers import (
    AllReduce,
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    RandomMask,
    Reducer,
    ReplicaFeedback,
    SharedMemoryMean,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.schedules import every
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool
from tests.support.compressed import GATHERED, LOSSES, of_tensors
from tests.support.compressed import oracle as compressed_mean
from tests.support.optimizers import VARIANTS, build
from tests.support.oracle import (
    Experts,
    Net,
    close,
    ddp_with_local_buffers,
    equal,
    exact_mean,
    loss_of,
    make_net,
    sgd,
    snapshot,
)
from tests.support.pairs import in_pairs

STEPS, PERIOD = 10, 3
SIZES = [parameter.numel() for parameter in make_net().parameters()]

REDUCERS: dict[str, Callable[[], Reducer]] = {
    "mean": Mean,
    "native": AllReduce,
    "resident": SharedMemoryMean,
    "two levels": lambda: TwoLevel(ranks_per_host=1),
    "cast": lambda: Cast(torch.bfloat16),
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "ternary": Ternary,
    "topk": lambda: TopK(0.1),
    "feedback int4": lambda: ErrorFeedback(Int4()),
    "feedback int2": lambda: ErrorFeedback(Int2()),
    "feedback topk": lambda: ErrorFeedback(TopK(0.1)),
    "feedback topk back": lambda: ErrorFeedback(TopK(0.1, gather=False)),
    "sparseloco": lambda: TwoLevel(
        ErrorFeedback(TopK(64 / 4096, bits=2), decay=0.95), ranks_per_host=1
    ),
    "two levels, feedback": lambda: TwoLevel(ErrorFeedback(Int4()), ranks_per_host=1),
    "mask": lambda: RandomMask(0.1),
    "two levels, mask": lambda: TwoLevel(RandomMask(0.1), ranks_of_host="equal", ranks_per_host=1),
    "replica int4": lambda: ReplicaFeedback(Int4()),
    "replica int2": lambda: ReplicaFeedback(Int2()),
    "replica topk": lambda: ReplicaFeedback(TopK(0.1)),
    "two levels, replica": lambda: TwoLevel(
        ReplicaFeedback(Int4()), ranks_of_host="equal", ranks_per_host=1
    ),
}
MASKED = {name for name in REDUCERS if "mask" in name}
APART = {name for name in REDUCERS if "replica" in name} | MASKED  # replicas differ after a sync
EXACT = {"mean", "native", "resident", "two levels"}
OVERLAPPING = [name for name in REDUCERS if name != "resident"]  # which is refused


def test_every_reducer_is_proved() -> None:
    """A reducer that is added must be added here."""
    names = {
        name
        for name in loosestep.comm.reducers.__all__
        if isinstance(kind := getattr(loosestep.comm.reducers, name), type)
        and hasattr(kind, "bytes_on_wire")
        and name != "Reducer"
    }
    assert names == {type(make()).__name__ for make in REDUCERS.values()}


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_is_a_value(name: str) -> None:
    """Equal to another with the same settings, also after a pickle, and not to be changed."""
    one, other = REDUCERS[name](), REDUCERS[name]()
    assert one == other == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert one != ErrorFeedback(Int4(7))
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, None)


def strategy_of(name: str, ranks: list[int], **options: Any) -> Strategy:
    topology = Topology({"world": [ranks]}, timeout=20)
    options = {"schedule": every(PERIOD), **options}
    return Strategy(topology=topology, reducer=REDUCERS[name](), **options)


def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def train(name: str, ranks: list[int]) -> dict[str, torch.Tensor]:
    if dist.get_rank() not in ranks:
        return {}
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, strategy_of(name, ranks)):
        go(net, optimizer, 0, STEPS)
    return snapshot(net)


# Replicas in one process.


class Feedback:
    """Error feedback written out: memories of every rank's values, and of the mean.

    Between two ranks, and of what is gathered, the mean of what arrives is the result, and nothing
    is left of it. With ``apart`` what was not sent is no memory but ``left``, to go on with.
    """

    def __init__(self, name: str, *, apart: bool = False, decay: float = 1.0) -> None:
        self._loss, self._apart = of_tensors(LOSSES[name], SIZES), apart
        self._decay, self._gathered = torch.tensor(decay), name in GATHERED
        self._sent = [torch.zeros(sum(SIZES))] * 4
        self.left: list[torch.Tensor] = []
        self._mean = torch.zeros(sum(SIZES))

    def __call__(self, replicas: list[torch.Tensor]) -> torch.Tensor:
        size, total = len(replicas), torch.zeros(sum(SIZES))
        for rank, replica in enumerate(replicas):
            wanted = replica if self._apart else replica + self._decay * self._sent[rank]
            arrived = self._loss(wanted)
            self._sent[rank] = wanted - arrived
            total = total + torch.tensor(1 / size) * arrived
        self.left = self._sent[:size] if self._apart else []
        wanted = total + self._mean
        result = wanted if size == 2 or self._gathered else self._loss(wanted)
        self._mean = wanted - result
        return result


class Masked:
    """The mean of what is drawn anew at every sync, written out; the rest is each replica's own."""

    def __init__(self) -> None:
        self._num_syncs = 0

    def __call__(self, nets: list[Net]) -> None:
        for name, parameter in nets[0].named_parameters():
            draw = draw_of(0, "world", name, self._num_syncs, "mask")
            chance = uniform(parameter.numel(), key_of(draw, torch.device("cpu")))
            order = chance.sort(descending=True, stable=True).indices
            drawn = order[: math.ceil(0.1 * parameter.numel() - 1e-9)]
            flats = [net.get_parameter(name).data.view(-1) for net in nets]
            mean = exact_mean([values[drawn] for values in flats])
            for values in flats:
                values[drawn] = mean
        self._num_syncs += 1


def narrow_mean(replicas: list[torch.Tensor]) -> torch.Tensor:
    narrow = [replica.bfloat16() for replica in replicas]
    mean_into(result := torch.empty_like(narrow[0]), narrow)
    return result.float()


ORACLES: dict[str, Callable[[], Callable[[list[torch.Tensor]], torch.Tensor]]] = {
    "cast": lambda: narrow_mean,
    "feedback int4": lambda: Feedback("int4"),
    "feedback int2": lambda: Feedback("int2"),
    "feedback topk": lambda: Feedback("topk"),
    "feedback topk back": lambda: Feedback("topk back"),
    "sparseloco": lambda: Feedback("sparseloco", decay=0.95),
    "two levels, feedback": lambda: Feedback("int4"),
    "two levels, replica": lambda: Feedback("int4", apart=True),
    **{
        f"replica {name}": lambda name=name: Feedback(name, apart=True)  # type: ignore[misc]
        for name in ("int4", "int2", "topk")
    },
    **{
        name: lambda name=name: lambda replicas: compressed_mean(replicas, name, sizes=SIZES)  # type: ignore[misc]
        for name in ("int8", "int4", "int2", "ternary", "topk")
    },
}


def flat(net: Net) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@torch.no_grad()
def put(net: Net, values: torch.Tensor) -> None:
    parameters = list(net.parameters())
    pieces = values.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.copy_(piece.view(parameter.shape))


@torch.no_grad()
def follow_buffers(nets: list[Net]) -> None:
    for same in zip(*(net.buffers() for net in nets), strict=True):
        whole = exact_mean(same) if same[0].is_floating_point() else torch.stack(same).max()
        for buffer in same:
            buffer.copy_(whole)


def train_replicas(name: str, ranks: list[int]) -> dict[int, Net]:
    """Train one replica a rank; a sync moves the last common values by the mean difference."""
    nets = {rank: copy.deepcopy(make_net()) for rank in ranks}
    optimizers = {rank: sgd(net) for rank, net in nets.items()}
    reference = flat(nets[ranks[0]])
    masked = Masked()
    mean = exact_mean if name in EXACT | MASKED or len(ranks) == 1 else ORACLES[name]()
    for step in range(STEPS):
        for rank, net in nets.items():
            optimizers[rank].zero_grad()
            loss_of(net, rank, step).backward()
            optimizers[rank].step()
        if (step + 1) % PERIOD == 0 and name in MASKED:
            masked(list(nets.values()))
            follow_buffers(list(nets.values()))
        elif (step + 1) % PERIOD == 0:
            if name in EXACT or len(ranks) == 1:
                reference = mean([flat(net) for net in nets.values()])
            else:
                reference = reference + mean([flat(net) - reference for net in nets.values()])
            left = getattr(mean, "left", None) or [torch.zeros(())] * len(nets)
            for net, own in zip(nets.values(), left, strict=True):
                put(net, reference + own)
            follow_buffers(list(nets.values()))
    return nets


def compare(results: list[dict[str, torch.Tensor]], name: str, ranks: list[int]) -> None:
    nets = train_replicas(name, ranks)
    for rank in ranks:
        same = close if name == "native" else equal  # whose order of sums is the backend's
        assert same(results[rank], snapshot(nets[rank])), (name, rank)


@pytest.mark.parametrize(("name", "world"), in_pairs(REDUCERS, [2, 4, 3, 1], each=1))
def test_ranks_equal_the_replicas_of_one_process(pool: RankPool, name: str, world: int) -> None:
    """K ranks train to what K replicas in one process train to, to the bit."""
    ranks = list(range(world))
    compare(pool.run(world, train, name, ranks), name, ranks)


@pytest.mark.parametrize(("name", "ranks"), in_pairs(REDUCERS, [[2, 3], [1, 2, 3]], each=1))
def test_a_subgroup_works_like_the_world(pool: RankPool, name: str, ranks: list[int]) -> None:
    """Ranks that do not start at 0 train alone as they do in one process."""
    compare(pool.run(4, train, name, ranks), name, ranks)


# How far an average by so few bits may lead from DDP's parameters, in units of the way gone.
CLOSE_TO_DDP = {"cast": 0.01, "int8": 0.06, "feedback int4": 0.3, "replica int4": 0.3}


def period_one(name: str) -> float:
    """Train with plain SGD by DDP and by averaging every step; return how far they are apart."""
    theirs, ours = ddp_with_local_buffers(make_net()), make_net()
    start = flat(ours)
    their_sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    our_sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    ranks = list(range(dist.get_world_size()))
    with attach(ours, our_sgd, strategy_of(name, ranks, schedule=every(1))):
        go(theirs, their_sgd, 0, 8)
        go(ours, our_sgd, 0, 8)
    end = flat(theirs.module)
    return float((flat(ours) - end).norm() / (end - start).norm())


@pytest.mark.parametrize("name", [*sorted(EXACT), *CLOSE_TO_DDP])
def test_period_one_with_plain_sgd_is_ddp(pool: RankPool, name: str) -> None:
    """Averaging after every plain SGD step is sharing gradients, as exactly as the bits allow."""
    assert max(pool.run(2, period_one, name)) < CLOSE_TO_DDP.get(name, 1e-5)


# More than a period, with and without an average under way.
BRIEFLY_AND_ALL = [[4], pytest.param([2, 3, 4, 5, 6], marks=pytest.mark.long)]


def interrupted(name: str, overlap_steps: int, stops: list[int]) -> list[int]:
    """Return the steps after which stopping and resuming does not equal going on."""
    ranks = list(range(dist.get_world_size()))

    def start() -> tuple[Net, torch.optim.Optimizer, Strategy]:
        net = make_net()
        return net, sgd(net), strategy_of(name, ranks, overlap_steps=overlap_steps)

    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy):
        go(net, optimizer, 0, STEPS)
    whole, wrong, files = snapshot(net), [], {}
    net, optimizer, strategy = start()
    with attach(net, optimizer, strategy) as run:
        for step in range(STEPS):
            go(net, optimizer, step, step + 1)
            files[step + 1] = file = io.BytesIO()
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "run": run.state_dict()}, file)
    if not equal(whole, snapshot(net)):
        wrong.append(-1)  # saving alone has changed something
    for stop in stops:
        file = files[stop]
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
    ("name", "overlap_steps"),
    [pytest.param("resident", 0), *in_pairs(OVERLAPPING, [0, 2], each=1)],
)
@pytest.mark.parametrize("stops", BRIEFLY_AND_ALL, ids=["", "every step"])
def test_resuming_at_any_step_continues_to_the_bit(
    pool: RankPool, name: str, overlap_steps: int, stops: list[int]
) -> None:
    """Stopping after every step of more than a period, also with an average under way."""
    assert pool.run(2, interrupted, name, overlap_steps, stops) == [[], []]


def overlapped(name: str) -> tuple[float, bool]:
    """Launch an average, stand still until it is applied, and compare with the blocking one."""
    ranks, ends = list(range(dist.get_world_size())), []
    for overlap_steps in (0, 2):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with attach(net, optimizer, strategy_of(name, ranks, overlap_steps=overlap_steps)) as run:
            go(net, optimizer, 0, PERIOD)
            optimizer.param_groups[0]["lr"] = 0.0
            go(net, optimizer, 0, 2)
            ends.append(flat(net))
            run.finalize()
    apart = float((ends[0] - ends[1]).abs().max())
    return apart, bool(torch.isfinite(flat(net)).all())


@pytest.mark.parametrize("name", OVERLAPPING)
def test_an_overlapped_average_is_the_blocking_one(pool: RankPool, name: str) -> None:
    """Where nothing moves meanwhile, it ends where the blocking one does."""
    for apart, finite in pool.run(3, overlapped, name):
        assert apart < 1e-6
        assert finite


def experts(name: str) -> dict[str, torch.Tensor]:
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attach(net, optimizer, strategy_of(name, [0, 1])) as run:
        for step in range(STEPS):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4), dist.get_rank()).square().sum().backward()
            optimizer.step()
        run.finalize()
    return snapshot(net)


@pytest.mark.parametrize("name", REDUCERS)
def test_parameters_without_a_gradient_take_part(pool: RankPool, name: str) -> None:
    """Ranks that use different experts end with the same model."""
    one, other = pool.run(2, experts, name)
    assert equal(one, other)
    if name in EXACT:
        assert torch.equal(one["unused.weight"], snapshot(Experts())["unused.weight"])


def infinite(name: str, policy: str) -> str:
    net = make_net()
    optimizer = sgd(net)
    strategy = strategy_of(name, [0, 1, 2], schedule=every(1), on_nonfinite=policy)
    with attach(net, optimizer, strategy):
        before = flat(net)
        with torch.no_grad():
            if dist.get_rank() == 1:
                net.last.weight[0, 0] = float("inf")
        try:
            optimizer.step()
        except NotFinite as error:
            kept = flat(net)[:40].eq(before[:40]).all() and "last.weight" in str(error)
            return f"rank {error.ranks}" if kept else "changed"
        return "inf" if net.last.weight[0, 0] == float("inf") else "lost"


@pytest.mark.parametrize("name", REDUCERS)
def test_an_infinity_is_the_mean_or_an_error_on_every_rank(pool: RankPool, name: str) -> None:
    """Refused before anything is overwritten; exact means pass it on where that is wanted."""
    assert pool.run(3, infinite, name, "raise") == ["rank (1,)"] * 3
    if name in EXACT or name == "cast":
        assert pool.run(3, infinite, name, "pass") == ["inf"] * 3


def run_out(name: str, batches: list[int]) -> dict[str, torch.Tensor]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, strategy_of(name, [0, 1, 2])) as run:
        go(net, optimizer, 0, batches[dist.get_rank()])
        run.finalize()
    return snapshot(net)


@pytest.mark.parametrize("name", REDUCERS)
def test_ranks_may_run_out_of_batches(pool: RankPool, name: str) -> None:
    """All end with one model."""
    first, *others = pool.run(3, run_out, name, [7, 11, 2])
    assert all(equal(first, other) for other in others)


def fuzz(name: str) -> list[str]:
    """Average odd shapes in windows of odd sizes twice; return where ranks are not equal."""
    wrong, rank = [], dist.get_rank()
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (1000,), (33, 65)]
    for window_bytes in (300, 4096, 1 << 20):
        peers = peers_of(Group.make(tuple(range(dist.get_world_size())), 20), timeout=20)
        kept = Kept()
        averager = Averager(peers, reducer=REDUCERS[name](), window_bytes=window_bytes, kept=kept)
        generator = torch.Generator().manual_seed(rank)
        tensors = [(str(s), torch.randn(s, generator=generator)) for s in shapes]
        for _ in range(2):
            averager.average(tensors)
            common = list(kept.references.state_dict()["values"].values())  # if anything is
            mine = torch.cat(
                [t.reshape(-1) for t in (common if name in APART else dict(tensors).values())]
            )
            if any(p != mine.numpy().tobytes() for p in peers.exchange(mine.numpy().tobytes())):
                wrong.append(f"{window_bytes}")
            for _, tensor in tensors:
                tensor.add_(torch.randn(tensor.shape, generator=generator))
    return wrong


@pytest.mark.parametrize("name", [n for n in REDUCERS if n not in MASKED | {"native"}])
def test_odd_shapes_and_windows(pool: RankPool, name: str) -> None:
    """Whatever the shapes and the size of windows, ranks end bit-equal, or their references do."""
    assert pool.run(3, fuzz, name) == [[]] * 3


def all_optimizers(name: str) -> list[str]:
    """Return the optimizers whose replicas are not equal after a sync."""
    wrong = []
    for kind, options in VARIANTS:
        net = make_net()
        optimizer = build(kind, options, net)
        with attach(net, optimizer, strategy_of(name, [0, 1], schedule=every(2))):
            go(net, optimizer, 0, 4)
            texts = peers_of(dist.group.WORLD).exchange(flat(net).numpy().tobytes())  # type: ignore[arg-type]
            if len(set(texts)) > 1 or not flat(net).isfinite().all():
                wrong.append(f"{kind} {options}")
    return wrong


@pytest.mark.parametrize("name", ["resident", "feedback int4"])
def test_every_optimizer_in_every_variant(pool: RankPool, name: str) -> None:
    """Replicas are equal after a sync, whoever took the steps in between."""
    assert pool.run(2, all_optimizers, name) == [[], []]


def storage(name: str) -> bool:
    """Say whether addresses, strides, dtypes and views survive averaging."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(300, 700)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )
    net[1].half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    ranks = list(range(dist.get_world_size()))
    with attach(net, optimizer, strategy_of(name, ranks, schedule=every(1))):
        views = [p.detach().view(p.shape) for p in net.parameters()]  # once bound
        before = [(p.data_ptr(), p.stride(), p.dtype) for p in net.parameters()]
        for _ in range(3):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(dist.get_rank() * 0.25)
            optimizer.step()
        after = [(p.data_ptr(), p.stride(), p.dtype) for p in net.parameters()]
    seen = zip(views, net.parameters(), strict=True)
    return before == after and all(torch.equal(view, p) for view, p in seen)


@pytest.mark.parametrize("name", REDUCERS)
def test_storage_strides_and_dtypes_stay(pool: RankPool, name: str) -> None:
    """In place means in place."""
    assert pool.run(2, storage, name) == [True, True]


def survive(name: str, victim: int) -> tuple[tuple[int, ...], str, float]:
    """Average until a rank is killed in the middle of a step; return what the survivor was told."""
    net = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    ranks = list(range(dist.get_world_size()))
    topology = Topology({"world": [ranks]}, timeout=15)
    strategy = Strategy(schedule=every(1), topology=topology, reducer=REDUCERS[name]())
    run = attach(net, optimizer, strategy)
    for step in range(50):
        if step == 4 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            optimizer.step()
        except PeerLost as error:
            return error.ranks, str(error), time.monotonic() - began
    run.detach()
    return (), "", 0.0


@pytest.mark.parametrize(
    "name",
    ["resident", "two levels", "cast", "feedback int4", "two levels, feedback", "replica int2"],
)
def test_a_killed_rank_is_named_in_time(pool: RankPool, name: str) -> None:
    """Every survivor hears who it was, long before the time-out."""
    results = pool.run(3, survive, name, 1, allow_dead=[1])
    for rank in (0, 2):
        ranks, text, seconds = results[rank]
        assert ranks == (1,), text
        assert "rank 1" in text
        assert seconds < 10
