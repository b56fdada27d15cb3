"""Gradients under ``attach`` by a reducer of one's choice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    NotFinite,
    Strategy,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    zero,
)
from loosestep.reducers import Int8
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.gradients import REDUCERS, STEPS, parameters, strategy_of, train
from tests.support.oracle import Experts, close, equal, loss_of, make_net, sgd, snapshot
from tests.support.pairs import in_pairs


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3], [2, 3]], ids=str)
def test_the_exact_mean_shares_gradients_as_the_backend_does(
    pool: RankPool, ranks: list[int]
) -> None:
    """With Mean() for gradients training is what it was; and so it is with DDP."""
    plain = pool.run(4, train_by_backend, ranks)
    ours = pool.run(4, train, "mean", "plain", ranks)
    resident = pool.run(4, train, "resident", "plain", ranks)
    for rank in ranks:
        assert close(parameters(ours[rank][0]), parameters(plain[rank]))
        assert equal(parameters(ours[rank][0]), parameters(resident[rank][0]))


def train_by_backend(ranks: list[int]) -> dict[str, torch.Tensor]:
    if dist.get_rank() not in ranks:
        return {}
    strategy = strategy_of("mean", ranks)
    net = make_net()
    optimizer = sgd(net)
    whole = Strategy(schedule=strategy.schedule, topology=strategy.topology)
    with attach(net, optimizer, whole):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
    return snapshot(net)


# DDP's buckets cannot live in memory that a host shares.
PAIRS = [(r, k) for r in REDUCERS for k in ("plain", "ddp") if (r, k) != ("in rooms", "ddp")]


@pytest.mark.parametrize(("case", "stop"), in_pairs(PAIRS, [3, 1, 5], each=1))
def test_resuming_equals_going_on(pool: RankPool, case: tuple[str, str], stop: int) -> None:
    """What a reducer holds back is in the checkpoint, on every level and in both phases."""
    whole = pool.run(2, train, *case, [0, 1])
    resumed = pool.run(2, train, *case, [0, 1], stop)
    for (one, _), (other, _) in zip(whole, resumed, strict=True):
        assert equal(parameters(one), parameters(other))


def test_fewer_bits_are_fewer_bytes_and_are_counted(pool: RankPool) -> None:
    """Telemetry counts what the reducer sent for gradients."""
    eight = pool.run(2, train, "int8", "plain", [0, 1])[0][1]
    four = pool.run(2, train, "int4 + feedback", "ddp", [0, 1])[0][1]
    assert 0 < four["gradients/world"]["bytes_sent"] < eight["gradients/world"]["bytes_sent"]


def train_experts() -> dict[str, torch.Tensor]:
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(gradient_reducer=Int8())):
        for step in range(5):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4), dist.get_rank()).square().sum().backward()
            optimizer.step()
    return snapshot(net)


def test_what_no_rank_used_keeps_no_gradient(pool: RankPool) -> None:
    """Compression does not blur who used what: an unused layer does not decay."""
    one, other = pool.run(2, train_experts)
    assert equal(one, other)
    assert torch.equal(one["unused.weight"], snapshot(Experts())["unused.weight"])


def infinite_gradient(kind: str) -> str:
    net: torch.nn.Module = make_net()
    net = DistributedDataParallel(net) if kind == "ddp" else net
    optimizer = sgd(net)
    with attach(net, optimizer, ddp(gradient_reducer=Int8())):
        scale = float("inf") if dist.get_rank() == 1 else 1.0
        try:
            (loss_of(net, dist.get_rank(), 0) * scale).backward()
        except NotFinite as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_an_infinite_gradient_is_an_error_on_every_rank(pool: RankPool, kind: str) -> None:
    """The error comes out of backward and names the rank."""
    for text in pool.run(2, infinite_gradient, kind):
        assert "rank 1" in text


def refuse(what: str) -> str:
    net = make_net()
    try:
        if what == "zero":
            sharded = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
            strategy = Strategy(schedule=zero().schedule, gradient_reducer=Int8())
            attach(net, sharded, strategy)
        else:
            Strategy(schedule=every(1), gradient_reducer="int8")  # type: ignore[arg-type]
    except (NotAttachable, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "way_out"), [("zero", "leave gradient_reducer"), ("name", "Int8()")]
)
def test_what_cannot_be_is_refused(pool: RankPool, what: str, way_out: str) -> None:
    """With the rule and the way out, on every rank."""
    for text in pool.run(2, refuse, what):
        assert way_out in text
