"""Infinities and NaN in parameters: refused before anything moves, left out, or passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from loosestep import (
    HierarchicalModelAverager,
    NotFinite,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    Strategy,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    average_parameters,
    post_local_sgd,
    zero,
)
from loosestep.reducers import Cast, Int8, Mean, Reducer, SharedMemoryMean, TwoLevel
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.oracle import equal, exact_mean, snapshot

NAN = float("nan")


class Several(torch.nn.Module):
    """Large parameters that have windows of their own, small ones that share, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.large = torch.nn.Parameter(torch.randn(500, 300))
        self.larger = torch.nn.Parameter(torch.randn(400, 500))
        self.small = torch.nn.Parameter(torch.randn(30, 7))
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.tensor([-float("inf"), 0.0]))


def spoiled(bad: Sequence[int], name: str = "larger") -> Several:
    """Return a model with values of this rank's own, and a NaN in some ranks'."""
    net = Several()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(dist.get_rank())
        if dist.get_rank() in bad:
            net.get_parameter(name).view(-1)[-1] = NAN
    return net


def idle(net: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps change nothing."""
    return torch.optim.SGD(net.parameters(), lr=0.0)


def everyone(net: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, snapshot(net))
    return held


def kept(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Say whether two snapshots are equal, NaN included."""
    return equal(*({n: v.nan_to_num(nan=7e7) for n, v in one.items()} for one in (before, after)))


def caught(sync: Callable[[], object]) -> tuple[tuple[int, ...], str] | None:
    """Return whom and what the error names, if there is one."""
    try:
        sync()
    except NotFinite as error:
        told = str(error)
        helpful = told.startswith(f"rank {dist.get_rank()}: ") and "on_nonfinite" in told
        return (error.ranks, error.tensor) if helpful else ((), told)
    return None


def sync_of(net: Several, **options: Any) -> tuple[Any, Callable[[], object]]:
    """Return an attached run and what makes it average."""
    optimizer = idle(net)
    strategy = Strategy(schedule=every(1), initial="ignore", **options)
    return attach(net, optimizer, strategy), optimizer.step


REDUCERS: dict[str, Reducer] = {
    "mean": Mean(),
    "two levels": TwoLevel(),
    "two hosts": TwoLevel(ranks_per_host=2),
    "resident": SharedMemoryMean(),
    "cast": Cast(torch.bfloat16),
}


def refused() -> list[str]:
    """Return where the default did not name rank and tensor, or left a trace."""
    wrong = []
    for name, reducer in REDUCERS.items():
        net = spoiled([1, 2])
        before = snapshot(net)
        run, sync = sync_of(net, reducer=reducer)
        with run:
            told = caught(sync)
            if told != ((1, 2), "larger") or not kept(before, snapshot(net)):
                wrong.append(f"{name}: {told}")
            with torch.no_grad():
                net.larger.nan_to_num_()
            if caught(sync) or not all(equal(r, snapshot(net)) for r in everyone(net)):
                wrong.append(f"{name}: after it was mended")
    return wrong


def test_a_nan_is_refused_before_anything_moves(pool: RankPool) -> None:
    """By default all ranks raise, name ranks and tensor, keep their values, and can go on."""
    assert pool.run(4, refused) == [[]] * 4


def skipped(bad: Sequence[int]) -> list[str]:
    """Return where the mean was not that of the other ranks."""
    wrong = []
    for name, reducer in REDUCERS.items():
        net = spoiled(bad)
        good = [r for rank, r in enumerate(everyone(net)) if rank not in bad]
        run, sync = sync_of(net, reducer=reducer, on_nonfinite="skip")
        with run:
            sync()
            after = everyone(net)
        means = {n: exact_mean([r[n] for r in good]) for n, _ in net.named_parameters()}
        loose = 0.02 if name == "cast" else 1e-6
        fits = all(torch.allclose(after[0][n], m, rtol=loose, atol=loose) for n, m in means.items())
        exact = name in ("two hosts", "cast") or all(
            torch.equal(after[0][n], m) for n, m in means.items()
        )
        if not (fits and exact and all(equal(after[0], other) for other in after)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("bad", [(1,), (2, 3), (0, 3)])
def test_a_rank_with_a_nan_is_left_out(pool: RankPool, bad: tuple[int, ...]) -> None:
    """With ``skip`` all get the mean of the other ranks, also where a host has none of them."""
    assert pool.run(4, skipped, bad) == [[]] * 4


def first_skipped() -> list[list[float]]:
    """Return BatchNorm's statistics after syncs that hand round the first rank's."""
    results = []
    for by_attach in (True, False):
        net = torch.nn.BatchNorm1d(2)
        optimizer = idle(net)
        options: dict[str, Any] = {"buffers": "broadcast", "on_nonfinite": "skip"}
        strategy = Strategy(schedule=every(1), **options)
        run = attach(net, optimizer, strategy) if by_attach else None
        assert net.running_mean is not None
        net.running_mean.fill_(NAN if dist.get_rank() == 0 else float(dist.get_rank()))
        if dist.get_rank() == 0:
            net.weight.data.fill_(NAN)
        if run is None:
            PeriodicModelAverager(1, module=net, **options).average_parameters(net.parameters())
        else:
            with run:
                optimizer.step()
        results.append(net.running_mean.tolist())
    return results


def test_a_rank_that_is_left_out_hands_no_buffers_round(pool: RankPool) -> None:
    """With ``buffers="broadcast"`` all take those of the first rank that has a say."""
    assert pool.run(3, first_skipped) == [[[1.0, 1.0]] * 2] * 3


def passed() -> list[str]:
    """Return what did not let a NaN through to all ranks."""

    def spread(net: Several) -> bool:
        values = [replica["larger"] for replica in everyone(net)]
        return all(v.view(-1)[-1].isnan() and v.isnan().sum() == 1 for v in values)

    wrong = []
    for name, reducer in REDUCERS.items():
        net = spoiled([1])
        run, sync = sync_of(net, reducer=reducer, on_nonfinite="pass")
        with run:
            sync()
        if not spread(net):
            wrong.append(name)
    net = spoiled([1])
    average_(net.parameters())
    if not spread(net):
        wrong.append("average_")
    net = spoiled([1])
    average_parameters(net.parameters(), None)
    if not spread(net):
        wrong.append("average_parameters")
    return wrong


def test_pass_averages_what_is_there(pool: RankPool) -> None:
    """``pass`` and the free functions do nothing about a NaN."""
    assert pool.run(2, passed) == [[]] * 2


def elsewhere() -> list[str]:
    """Return which values outside the parameters were looked at, and what was refused wrongly."""
    wrong = []
    net = Several().double()
    with torch.no_grad():
        net.small.fill_(1e300)  # float32 has no room for it
    run, sync = sync_of(net)
    with run:
        if caught(sync):
            wrong.append("large numbers")
    net = Several()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    strategy = Strategy(schedule=every(1), optimizer_state="average")
    with attach(net, optimizer, strategy):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.state[net.small]["momentum_buffer"].fill_(float("inf"))
        net.small.grad = None
        if caught(optimizer.step):
            wrong.append("infinite momentum")
    return wrong


def test_only_parameters_are_looked_at(pool: RankPool) -> None:
    """Buffers, optimizer state and float64 beyond float32's range pass."""
    assert pool.run(2, elsewhere) == [[]] * 2


def averagers() -> list[str]:
    """Return which averagers did not refuse, or skip, rank 1's NaN in the first parameter."""

    def periodic(**options: Any) -> Callable[[Several], object]:
        averager = PeriodicModelAverager(2, **options)
        return lambda net: averager.average_parameters(net.parameters())

    def hierarchical(**options: Any) -> Callable[[Several], object]:
        averager = HierarchicalModelAverager({2: 2, 4: 4}, **options)
        return lambda net: averager.average_parameters(net.parameters())

    def wrapped(**options: Any) -> Callable[[Several], object]:
        averager = PeriodicModelAverager(2, **options)
        return lambda net: PostLocalSGDOptimizer(idle(net), averager).step()

    def finalized(**options: Any) -> Callable[[Several], object]:
        averager = PeriodicModelAverager(2, warmup_steps=5, **options)
        return lambda net: averager.finalize(net.parameters())

    wrong = []
    for make in (periodic, hierarchical, wrapped, finalized):
        net = spoiled([1], "large")
        before = snapshot(net)
        told = caught(partial(make(module=net), net))
        if told != ((1,), "large") or not kept(before, snapshot(net)):
            wrong.append(f"{make.__name__}: {told}")
        make(module=net, on_nonfinite="skip")(net)
        after = everyone(net)
        if not all(equal(after[0], r) and r["large"].isfinite().all() for r in after):
            wrong.append(f"{make.__name__} skips")
    return wrong


def test_averagers_have_the_same_policies(pool: RankPool) -> None:
    """The drop-in averagers refuse a NaN, or skip its rank, also in ``finalize``."""
    assert pool.run(4, averagers) == [[]] * 4


def late() -> list[str]:
    """Return what is wrong with an average beside training that is refused, and in ``averaged``."""
    wrong = []
    net = spoiled([1])
    optimizer = idle(net)
    strategy = Strategy(schedule=every(4), initial="ignore", overlap_steps=2)
    with attach(net, optimizer, strategy) as run:
        for _ in range(5):
            optimizer.step()
        before = snapshot(net)
        told = caught(optimizer.step)  # where it lands
        if told != ((1,), "larger") or not kept(before, snapshot(net)):
            wrong.append(f"overlap: {told}")
        told = caught(lambda: run.averaged().__enter__())
        if told != ((1,), "larger") or not kept(before, snapshot(net)):
            wrong.append(f"averaged: {told}")
        told = caught(run.finalize)
        if told != ((1,), "larger"):
            wrong.append(f"finalize: {told}")
    return wrong


def test_a_nan_is_refused_where_an_average_lands(pool: RankPool) -> None:
    """An average beside training raises where it would be applied; so do the others."""
    assert pool.run(2, late) == [[]] * 2


def sharded() -> list[str]:
    """Return where a host of two, of which one shard is NaN, was not refused or skipped."""
    wrong = []
    topology = Topology.from_sizes({"host": 2, "world": 4})
    for policy in ("raise", "skip"):
        net = Several()
        group = topology.process_group("host")
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, group, lr=0.0)
        strategy = zero(1, topology=topology, on_nonfinite=policy)
        with attach(net, optimizer, strategy):
            torch.stack([(p * 0).sum() for p in net.parameters()]).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(dist.get_rank() // 2)  # equal on a host
                net.larger[0, 0] = NAN if dist.get_rank() > 1 else 0.0
            before = everyone(net)
            told = caught(optimizer.step)
            after = everyone(net)
        mine = dist.get_rank()
        if policy == "raise":
            same = kept(before[mine], after[mine])
            if told != ((2, 3), "larger") or not same:
                wrong.append(f"raise: {told}, {same}")
        elif told or not all(equal(before[0], replica) for replica in after):
            wrong.append(f"skip: {told}")
    return wrong


def test_a_sharded_replica_is_refused_or_skipped_as_a_whole(pool: RankPool) -> None:
    """A host with a NaN in one shard has no say in any of them."""
    assert pool.run(4, sharded) == [[]] * 4


def fully_sharded() -> list[float]:
    """Leave out the second of two FSDP replicas, of which one shard has a NaN."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    net: Any = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = idle(net)
    topology = Topology.from_sizes({"host": 2, "world": 4})
    schedule = every(1, gradients="host")
    strategy = Strategy(schedule=schedule, topology=topology, initial="ignore", on_nonfinite="skip")
    with attach(net, optimizer, strategy), torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().fill_(dist.get_rank() // 2)
        if dist.get_rank() == 3:
            net.weight.to_local()[0, 0] = NAN
        optimizer.step()
        return [value for p in net.parameters() for value in p.full_tensor().view(-1).tolist()]


def test_a_fully_sharded_replica_is_skipped_as_a_whole(pool: RankPool) -> None:
    """A NaN in one shard leaves the others of that replica out as well."""
    assert pool.run(4, fully_sharded) == [[0.0] * 20] * 4


def test_what_cannot_be_done_is_refused() -> None:
    """Codecs let no NaN pass, skipped ranks cannot add a difference, and there are three words."""
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: Int8(on_nonfinite="pass"), "'raise' or 'skip'"),
        (lambda: post_local_sgd(4, reducer=Int8(), on_nonfinite="pass"), "Int8"),
        (lambda: post_local_sgd(4, overlap_steps=2, on_nonfinite="skip"), "overlap_steps=2"),
        (lambda: post_local_sgd(4, on_nonfinite="ignore"), "'raise', 'skip', 'pass'"),
    ]
    for make, hint in refusals:
        with pytest.raises(ValueError, match=hint):
            make()


FLOAT8 = [
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


class Narrow(torch.nn.Module):
    """Parameters of eight bits, a large one and small ones that are looked at together."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {"large": 600_000, "small": 3, "smaller": 2}
        for name, size in sizes.items():
            values = torch.full((size,), 1.0 + dist.get_rank()).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))


def of_eight_bits(dtype: torch.dtype) -> tuple[bool, list[tuple[tuple[int, ...], str] | None]]:
    """Return whether the mean is right, and what is said of a NaN in each parameter."""
    net, told = Narrow(dtype), []
    optimizer = idle(net)
    with attach(net, optimizer, Strategy(schedule=every(1), initial="ignore")):
        optimizer.step()
        right = all(bool((p.float() == 1.5).all()) for p in net.parameters())
        for parameter in net.parameters():
            last = parameter.data.view(torch.uint8)[-1:]
            if dist.get_rank() == 1:
                last.fill_(0x80 if "fnuz" in str(dtype) else 0x7F)
            told.append(caught(optimizer.step))
            last.zero_()
    return right, told


def all_of_eight_bits() -> list[tuple[bool, list[tuple[tuple[int, ...], str] | None]]]:
    return [of_eight_bits(dtype) for dtype in FLOAT8]


def test_infinities_of_eight_bits_are_found(pool: RankPool) -> None:
    """Of such tensors torch has no sums and cannot say which values are finite."""
    names = ("large", "small", "smaller")
    for told in pool.run(2, all_of_eight_bits):
        assert told == [(True, [((1,), name) for name in names])] * len(FLOAT8)
