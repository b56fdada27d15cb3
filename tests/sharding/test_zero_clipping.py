"""Torch's own ways to clip and to look at gradients, where each rank has a part of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from loosestep import Strategy, ZeroRedundancyOptimizer, attach, zero
from loosestep.testing import RankPool
from tests.support.oracle import close


class Net(torch.nn.Module):
    """Two dtypes, a scalar, an odd size, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 3, dtype=torch.float64)
        self.gain = torch.nn.Parameter(torch.tensor(2.0))
        self.idle = torch.nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second((self.first(inputs) * self.gain).double())


Clip = Callable[[torch.nn.Module], torch.Tensor | None]


def by_groups(net: torch.nn.Module) -> torch.Tensor:
    """Clip the parameters in two halves, as loops with two learning rates do."""
    parameters = list(net.parameters())
    return clip_grad_norm_(parameters[:3], 0.02) + clip_grad_norm_(parameters[3:], 0.02)


def by_hand(net: torch.nn.Module) -> torch.Tensor:
    """Look at every gradient on its own, as loggers do, and scale."""
    norms = [p.grad.data.norm(3) for p in net.parameters() if p.grad is not None]
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.25).div_(torch.tensor(2.0))
    return torch.stack(norms).sum()


WAYS: dict[str, Clip] = {
    "norm": lambda net: clip_grad_norm_(net.parameters(), 0.05),
    "not above it": lambda net: clip_grad_norm_(net.parameters(), 1e6),
    "norm 1": lambda net: clip_grad_norm_(net.parameters(), 0.05, norm_type=1.0),
    "largest": lambda net: clip_grad_norm_(net.parameters(), 0.01, torch.inf),
    "for each": lambda net: clip_grad_norm_(net.parameters(), 0.05, foreach=True),
    "one by one": lambda net: clip_grad_norm_(net.parameters(), 0.05, foreach=False),
    "value": lambda net: clip_grad_value_(net.parameters(), 0.01),
    "value, for each": lambda net: clip_grad_value_(net.parameters(), 0.01, foreach=True),
    "total": lambda net: get_total_norm([p.grad for p in net.parameters() if p.grad is not None]),
    "twice": lambda net: (
        clip_grad_norm_(net.parameters(), 0.1) + clip_grad_norm_(net.parameters(), 0.05)
    ),
    "by groups": by_groups,
    "by hand": by_hand,
}


def train(kind: str, sharded: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Train on, with one way of clipping after the other; return what each returned and led to."""
    net = Net()
    model: torch.nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    result: dict[str, dict[str, torch.Tensor]] = {}
    with attach(model, optimizer, zero() if sharded else Strategy(schedule=zero().schedule)):
        for step, (way, clip) in enumerate(WAYS.items()):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + dist.get_rank())
            model(torch.randn(4, 5)).square().mean().backward()
            returned = clip(model)
            optimizer.step()
            result[way] = {name: p.detach().clone() for name, p in net.named_parameters()}
            result[way]["returned"] = torch.tensor(0.0 if returned is None else float(returned))
    return result


def both(kind: str) -> dict[str, bool]:
    whole, parts = train(kind, False), train(kind, True)
    return {way: close(whole[way], parts[way]) for way in WAYS}


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_torchs_own_clipping_is_right(pool: RankPool, kind: str) -> None:
    """What ``torch.nn.utils`` returns and does is what it is with whole gradients."""
    for same in pool.run(3, both, kind):
        assert all(same.values()), same


def sharded_after_backward() -> tuple[Net, ZeroRedundancyOptimizer, Any]:
    net = Net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.5)
    run = attach(net, optimizer, zero())
    net(torch.ones(2, 5)).sum().backward()
    return net, optimizer, run


READS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "values": (lambda grad: grad.sum(), "the part that it owns"),
    "arithmetic": (lambda grad: grad + 1, "the part that it owns"),
    "a whole tensor": (lambda grad: grad.mul_(torch.ones(7, 5)), "the part that it owns"),
    "norms by row": (lambda grad: grad.norm(dim=1), "the part that it owns"),
    "a scaler": (
        lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], torch.zeros(1), torch.ones(1)
        ),
        r"attach\(..., scaler=scaler\)",
    ),
    "order 0": (lambda grad: grad.norm(0), "norm_type must be > 0"),
}


def refusals() -> dict[str, str]:
    net, _, run = sharded_after_backward()
    grad = net.first.weight.grad
    assert grad is not None
    said = {}
    for name, (read, _) in READS.items():
        with pytest.raises((RuntimeError, ValueError, ZeroDivisionError)) as error:
            read(grad)
        said[name] = str(error.value)
    with pytest.raises(RuntimeError) as error:
        net(torch.ones(2, 5)).sum().backward()
    said["backward again"] = str(error.value)
    run.detach()
    with pytest.raises(RuntimeError) as error:
        grad.norm()
    said["too late"] = str(error.value)
    assert all(p.grad is None for p in net.parameters())
    return said


def test_what_needs_the_whole_gradient_is_refused(pool: RankPool) -> None:
    """Reading, adding and whole tensors are errors with a way out, never None or zero."""
    expected = {name: words for name, (_, words) in READS.items()}
    expected |= {"backward again": r"run\.no_sync\(\)", "too late": "used or dropped"}
    for said in pool.run(2, refusals):
        for name, words in expected.items():
            assert re.search(words, said[name]), (name, said[name])


def not_finite(value: float) -> tuple[str, bool]:
    net, optimizer, run = sharded_after_backward()
    with run:
        optimizer.zero_grad()
        bad = value if dist.get_rank() == 1 else 1.0
        (net(torch.ones(2, 5)).sum() * bad).backward()
        with pytest.raises(RuntimeError) as error:
            clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        norm = clip_grad_norm_(net.parameters(), 1.0)
    return str(error.value), bool(norm.isfinite())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite(pool: RankPool, value: float) -> None:
    """A norm that is not finite on one rank is so on all."""
    for message, finite in pool.run(2, not_finite, value):
        assert "non-finite" in message
        assert not finite


def dropped() -> bool:
    """Zero gradients between backward and step in torch's two ways; return whether all holds."""
    net, optimizer, run = sharded_after_backward()
    before = [p.detach().clone() for p in net.parameters()]
    with run:
        net.zero_grad(set_to_none=False)
        optimizer.step()
        return all(map(torch.equal, before, net.parameters()))


def test_zeroed_gradients_change_nothing(pool: RankPool) -> None:
    """``model.zero_grad(set_to_none=False)`` zeroes the parts; SGD then moves nothing."""
    assert pool.run(2, dropped) == [True] * 2
