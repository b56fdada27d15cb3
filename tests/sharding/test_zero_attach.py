"""A sharded optimizer under ``attach``: ZeRO inside a group, averaging between groups."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    PeerLost,
    Strategy,
    Topology,
    ZeroOptions,
    ZeroRedundancyOptimizer,
    attach,
    hierarchical_sgd,
    post_local_sgd,
    zero,
)
from loosestep.schedules import every
from loosestep.sharding.divided import DividedGradient
from loosestep.testing import RankPool, run_ranks
from tests.support.netns import TwoHosts, missing, sent
from tests.support.oracle import close, equal, loss_of, make_net, snapshot
from tests.support.pairs import in_pairs

MB = 1 << 20
M_MMAP_THRESHOLD = -3


def pairs(weights: list[float] | None = None) -> Topology:
    """Return the four ranks as two hosts with two ranks each."""
    return Topology({"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}, weights=weights)


STRATEGIES: dict[str, Any] = {
    "periodic": lambda t: Strategy(schedule=every(3, gradients="host"), topology=t),
    "hierarchical": lambda t: hierarchical_sgd(
        {"host": 2, "world": 4}, gradients="host", topology=t
    ),
    "post-local": lambda t: post_local_sgd(3, warmup_steps=2, topology=t),
    "with state": lambda t: Strategy(
        schedule=every(3, gradients="host"), topology=t, optimizer_state="average"
    ),
    "reset": lambda t: Strategy(
        schedule=every(3, gradients="host"), topology=t, optimizer_state="reset"
    ),
}


def train(name: str, sharded: bool, weights: list[float] | None, kind: str) -> Any:
    """Train 9 steps and return the model, and its average in the middle of a period."""
    topology = pairs(weights)
    net: torch.nn.Module = make_net()
    net = DistributedDataParallel(net) if kind == "ddp" else net
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if sharded:
        group = topology.process_group("host")
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9
        )
    with attach(net, optimizer, STRATEGIES[name](topology)) as run:
        for step in range(9):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
            if step == 6:
                with run.averaged():
                    middle = snapshot(net)
    return snapshot(net), middle


@pytest.mark.parametrize(
    ("name", "weights"), in_pairs(STRATEGIES, [None, [1.0, 2.0, 3.0, 4.0]], each=1)
)
def test_averaging_shards_is_averaging(
    pool: RankPool, name: str, weights: list[float] | None
) -> None:
    """Training with shards gives what training without them gives, weighted or not."""
    whole = pool.run(4, train, name, False, weights, "plain")
    parts = pool.run(4, train, name, True, weights, "plain")
    # Gradients of two ranks and means of equal values are exact; four ranks are not.
    same = equal if weights is None and name != "post-local" else close
    for theirs, ours in zip(whole, parts, strict=True):
        assert same(theirs[0], ours[0])
        assert same(theirs[1], ours[1])


@pytest.mark.parametrize("name", ["periodic", "post-local"])
def test_a_ddp_module_does_the_same(pool: RankPool, name: str) -> None:
    """With DDP around the model gradients go to their owners too."""
    for theirs, ours in zip(
        pool.run(4, train, name, False, None, "ddp"),
        pool.run(4, train, name, True, None, "ddp"),
        strict=True,
    ):
        names = [key for key in theirs[0] if "running" not in key and "num_batches" not in key]
        for key in names:
            assert torch.allclose(theirs[0][key], ours[0][key], rtol=1e-4, atol=1e-6), key


def variants(kind: str) -> dict[str, Any]:
    """Train with clipping, accumulation and a scaler, with and without shards."""
    result: dict[str, Any] = {}
    for sharded in (False, True):
        for variant in ("clip", "declared clip", "accumulate", "scaler"):
            net: torch.nn.Module = make_net()
            net = DistributedDataParallel(net) if kind == "ddp" else net
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            if sharded:
                options = ZeroOptions(clip_norm=0.3 if variant == "declared clip" else None)
                optimizer = ZeroRedundancyOptimizer(
                    net.parameters(), torch.optim.SGD, zero_options=options, lr=0.05
                )
            result[f"{variant} {sharded}"] = train_variant(variant, net, optimizer)
    return result


def train_variant(
    variant: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    rank, scaler = dist.get_rank(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    strategy = (
        zero()
        if isinstance(optimizer, ZeroRedundancyOptimizer)
        else Strategy(schedule=zero().schedule)
    )
    watched = scaler if variant == "scaler" else None
    with attach(net, optimizer, strategy, scaler=watched) as run:
        for step in range(6):
            optimizer.zero_grad()
            if variant == "accumulate":
                with run.no_sync():
                    loss_of(net, rank, 100 + step).backward()
            loss = loss_of(net, rank, step)
            if variant == "scaler":
                poison = float("inf") if (rank, step) == (1, 3) else 1.0
                scaler.scale(loss * poison).backward()
                scaler.step(optimizer)
                scaler.update()
                continue
            loss.backward()
            if variant == "clip" and isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.clip_grad_norm_(0.3)
            elif "clip" in variant and not isinstance(optimizer, ZeroRedundancyOptimizer):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
    return {**snapshot(getattr(net, "module", net)), "scale": torch.tensor(scaler.get_scale())}


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_clipping_accumulation_and_scaling(pool: RankPool, kind: str) -> None:
    """They do with shards what they do without; an inf on one rank skips the step on all."""
    for result in pool.run(2, variants, kind):
        for variant in ("clip", "declared clip", "accumulate", "scaler"):
            assert close(result[f"{variant} False"], result[f"{variant} True"]), variant


def gradients_afterwards(kind: str) -> tuple[bool, bool, str]:
    net: torch.nn.Module = make_net()
    net = DistributedDataParallel(net) if kind == "ddp" else net
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05)
    with attach(net, optimizer, zero()):
        loss_of(net, dist.get_rank(), 0).backward()
        gone = all(isinstance(p.grad, DividedGradient) for p in net.parameters())
        error = ""
        try:
            loss_of(net, dist.get_rank(), 1).backward()
        except RuntimeError as problem:
            error = str(problem)
    loss_of(net, dist.get_rank(), 1).backward()
    return gone, all(p.grad is not None for p in net.parameters()), error


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_gradients_that_nobody_owns_whole(pool: RankPool, kind: str) -> None:
    """``param.grad`` is a stand-in; a second backward is refused; detach gives gradients back."""
    for gone, back, error in pool.run(2, gradients_afterwards, kind):
        assert gone
        assert back
        assert "no_sync" in error


REFUSED: dict[str, tuple[str, Any]] = {
    "a plain optimizer": ("needs a sharded optimizer", lambda net: (net, None, zero())),
    "local gradients": (
        "gradients stay local",
        lambda net: (net, {}, post_local_sgd(2, warmup_steps=0, gradients=None)),
    ),
    "stage 2 of a DDP module": (
        "DDP keeps the memory",
        lambda net: (DistributedDataParallel(net), {}, zero(stage=2)),
    ),
    "overlap": ("overlap_with_ddp=False", lambda net: (net, {"overlap_with_ddp": True}, zero())),
    "a group that is no level": (
        "none of this rank's groups",
        lambda net: (net, {}, zero(topology=Topology({"host": [[0], [1]]}))),
    ),
    "a narrow level": (
        "narrower than the optimizer's group",
        lambda net: (
            net,
            {},
            zero(gradients="host", topology=Topology({"host": [[0], [1]], "world": [[0, 1]]})),
        ),
    ),
}


def refused(name: str) -> str:
    net, settings, strategy = REFUSED[name][1](make_net())
    if settings is None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, **settings)
    try:
        attach(net, optimizer, strategy)
    except NotAttachable as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(pool: RankPool, name: str) -> None:
    """Every rank refuses, at once and with the reason."""
    for text in pool.run(2, refused, name):
        assert REFUSED[name][0] in text


def uneven() -> str:
    topology = Topology({"host": [[0, 1], [2]], "world": [[0, 1, 2]]}, timeout=10)
    net = make_net()
    group = topology.process_group("host")
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, process_group=group, lr=0.1
    )
    try:
        attach(net, optimizer, zero(2, topology=topology))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_uneven_groups_are_refused(pool: RankPool) -> None:
    """Groups of different sizes cut parameters differently, so their shards have no mean."""
    assert all("groups of one size" in text for text in pool.run(3, uneven))


def figure(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def gradient_memory(stage: int) -> int:
    """Return how much a second backward adds to what there is before it, at its peak."""
    # Else the allocator keeps what is freed in holes of its heap, and the figure is of those.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(64)])
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1e-4)
    inputs = torch.randn(1, 1024)
    with attach(net, optimizer, zero(stage=stage)):
        ctypes.CDLL(None).malloc_trim(0)
        before = figure("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            optimizer.zero_grad()
            net(inputs).sum().backward()
            optimizer.step()
    return figure("VmHWM") - before


def test_stage_2_frees_gradients_on_the_way() -> None:
    """256 MB of gradients take less than their half, the shard, and 64 MB of buckets."""
    peaks = {stage: max(run_ranks(2, gradient_memory, stage)) for stage in (1, 2)}
    print({stage: f"{size / MB:.0f} MB" for stage, size in peaks.items()})
    assert peaks[2] < (128 + 64) * MB
    assert peaks[2] < 0.6 * peaks[1]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts and a cable between them, for one test."""
    with TwoHosts() as pair:
        yield pair


def bytes_leaving(sharded: bool) -> dict[str, int]:
    """Train and average; return what this host sent for one average, and the model's size."""
    topology = Topology({"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]})
    net = torch.nn.ParameterList([torch.ones(n) for n in (1_000_000, 700_001, 3, 50_000)])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(),
            torch.optim.SGD,
            process_group=topology.process_group("host"),
            lr=0.1,
        )
    strategy = Strategy(schedule=every(3, gradients="host"), topology=topology)
    counts = []
    with attach(net, optimizer, strategy):
        for step in range(6):
            dist.barrier()
            before = sent()
            sum(p.sum() for p in net).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            after = sent()
            if step >= 3:
                counts.append(after.in_all - before.in_all - (after.again - before.again))
    return {"model": sum(p.nbytes for p in net), "local": max(counts[:2]), "average": counts[2]}


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_one_copy_of_the_model_leaves_a_host(hosts: TwoHosts) -> None:
    """An average between two hosts sends the model once from each, and local steps nothing."""
    ranks = [hosts.start(bytes_leaving, True, rank=r, host=r // 2, size=4) for r in range(4)]
    for rank in ranks:
        counted = rank.result(timeout=60)
        print(counted)
        assert counted["average"] == pytest.approx(counted["model"], rel=0.03)
        assert counted["local"] < 0.01 * counted["model"]


def telemetry_of_a_step() -> tuple[float, int]:
    net = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 100))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with attach(net, optimizer, zero()) as run:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 100)).sum().backward()
            optimizer.step()
        totals = run.metrics()["gradients/world"]
    moved = totals["bytes_sent"] + totals["bytes_copied"]
    return moved / sum(p.nbytes for p in net.parameters()), totals["syncs"]


@pytest.mark.parametrize(("world", "copies"), [(2, 1.0), (4, 1.5)])
def test_telemetry_counts_gradients_and_parameters(
    pool: RankPool, world: int, copies: float
) -> None:
    """A step moves (n - 1) / n of the gradients to their owners and as much of parameters back."""
    for moved, syncs in pool.run(world, telemetry_of_a_step):
        assert moved == pytest.approx(3 * copies, rel=0.02)
        assert syncs == 3


def wait_for_a_sleeper() -> tuple[str, tuple[int, ...], float]:
    net = torch.nn.Linear(50, 50)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    run = attach(net, optimizer, zero(), timeout=1.5)
    if dist.get_rank() == 1:
        time.sleep(4)
        return "", (), 0.0
    began = time.monotonic()
    try:
        net(torch.ones(1, 50)).sum().backward()
        optimizer.step()
    except PeerLost as error:
        return str(error), error.ranks, time.monotonic() - began
    finally:
        run.detach()
    return "nothing", (), 0.0


def test_the_time_out_of_attach_holds_for_shards() -> None:
    """A rank that hangs is an error within ``attach``'s time-out that names it and the gradient."""
    text, ranks, seconds = run_ranks(2, wait_for_a_sleeper)[0]
    assert ranks == (1,)
    assert "reducing the gradients of" in text
    assert seconds < 4
