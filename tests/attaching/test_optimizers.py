"""Every optimizer of torch, in every variant, under averaging."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from loosestep import PeriodicModelAverager, PostLocalSGDOptimizer, Strategy, attach
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.optimizers import (
    VARIANTS,
    build,
)
from tests.support.oracle import equal, exact_mean, loss_of, make_net, snapshot


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(net, rank, number).backward()
    optimizer.step()


def train(cases: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Train under attach and by hand, and say whether the results are equal to the bit."""
    rank, outcomes = dist.get_rank(), []
    for name, options in cases:
        net = make_net()
        optimizer = build(name, options, net)
        with attach(net, optimizer, Strategy(schedule=every(2), buffers="local")):
            for number in range(4):
                step(net, optimizer, rank, number)
        outcomes.append(equal(snapshot(net), by_hand(name, options)[rank]))
    return outcomes


def by_hand(name: str, options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    nets = [copy.deepcopy(make_net()) for _ in range(2)]
    optimizers = [build(name, options, net) for net in nets]
    for number in range(4):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            step(net, optimizer, rank, number)
        if number % 2:
            for same in zip(*(net.parameters() for net in nets), strict=True):
                mean = exact_mean([p.detach() for p in same])
                for parameter in same:
                    parameter.data.copy_(mean)
    return [snapshot(net) for net in nets]


def test_every_optimizer_trains_as_by_hand(pool: RankPool) -> None:
    """All classes, plain, foreach and fused, with two groups, end where a plain loop ends."""
    assert len(VARIANTS) > 25
    for outcomes in pool.run(2, train, VARIANTS, timeout=110):
        wrong = [case for case, fine in zip(VARIANTS, outcomes, strict=True) if not fine]
        assert not wrong


def train_with_closure() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    with attach(net, optimizer, Strategy(schedule=every(2))):
        for number in range(4):

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, rank, number)
                loss.backward()
                return loss

            optimizer.step(closure)
    return snapshot(net)


def test_lbfgs_with_a_closure(pool: RankPool) -> None:
    """An optimizer that evaluates several times a step still counts one step."""
    one, other = pool.run(2, train_with_closure)
    assert equal(one, other)


def train_sparse() -> torch.Tensor:
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    with attach(table, optimizer, Strategy(schedule=every(3))):
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([dist.get_rank()])).sum().backward()
            optimizer.step()
    return table.weight.detach()


def test_sparse_gradients_leave_dense_parameters_to_average(pool: RankPool) -> None:
    """SparseAdam's parameters are dense and average like others; each rank moved its own row."""
    one, other = pool.run(2, train_sparse)
    assert torch.equal(one, other)


def train_muon() -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.1)
    with attach(net, optimizer, Strategy(schedule=every(2))):
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    return net.weight.detach()


def test_muon(pool: RankPool) -> None:
    """An optimizer of matrices averages too."""
    one, other = pool.run(2, train_muon)
    assert torch.equal(one, other)


def wrapped_like_plain() -> bool:
    """Compare an optimizer with itself in a wrapper that never averages."""
    plain, wrapped = make_net(), make_net()
    inner = torch.optim.AdamW(plain.parameters(), lr=0.01)
    outer = PostLocalSGDOptimizer(
        torch.optim.AdamW(wrapped.parameters(), lr=0.01), PeriodicModelAverager(1000, 1000)
    )
    for number in range(4):
        step(plain, inner, 0, number)
        step(wrapped, outer, 0, number)
    return equal(snapshot(plain), snapshot(wrapped))


def test_wrapping_alone_changes_nothing(pool: RankPool) -> None:
    """Before its first average the wrapper trains exactly as what it wraps."""
    assert pool.run(2, wrapped_like_plain) == [True, True]


def momentum_after_sync(policy: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    rank = dist.get_rank()
    net = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    strategy = Strategy(schedule=every(2), optimizer_state=policy)
    with attach(net, optimizer, strategy):
        for number in range(2):
            optimizer.zero_grad()
            net.weight.grad = torch.full((1, 2), float(rank + 1 + number))
            optimizer.step()
    state = optimizer.state.get(net.weight, {})
    average = state.get("exp_avg", torch.tensor([]))
    return average, state.get("step", torch.tensor(-1.0)), len(state)


def test_policies_for_optimizer_state(pool: RankPool) -> None:
    """``keep`` leaves each rank its own, ``average`` gives all the mean, ``reset`` empties it."""
    # exp_avg after gradients g, g + 1 from 0: 0.9 * (0.1 g) + 0.1 (g + 1) = 0.19 g + 0.1,
    # so 0.29 on rank 0 (g = 1), 0.48 on rank 1 (g = 2), 0.385 on average.
    kept = [average for average, _, _ in pool.run(2, momentum_after_sync, "keep")]
    assert torch.allclose(kept[0], torch.tensor(0.29))
    assert torch.allclose(kept[1], torch.tensor(0.48))
    for average, steps, _ in pool.run(2, momentum_after_sync, "average"):
        assert torch.allclose(average, torch.tensor(0.385))
        assert steps == 2
    assert [size for _, _, size in pool.run(2, momentum_after_sync, "reset")] == [0, 0]
