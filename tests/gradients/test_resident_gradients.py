"""Gradients that live in memory which the ranks of a host share."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    LoosestepWarning,
    NotAttachable,
    Strategy,
    Topology,
    attach,
    ddp,
    gradient_hook,
)
from loosestep.errors import forget_warnings
from loosestep.reducers import Mean, Reducer, SharedMemoryMean, Ternary, TwoLevel
from loosestep.schedules import after, always, every
from loosestep.testing import RankPool, RanksFailed
from tests.support.oracle import Experts, equal, snapshot
from tests.support.resident import Mixed, backward, loss_of

pytestmark = pytest.mark.fast

STEPS = 6
REDUCERS: dict[str, Reducer] = {"mean": Mean(), "resident": SharedMemoryMean()}


def train(reducer: str, loop: str, weights: bool = False) -> dict[str, torch.Tensor]:
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    shares = {rank: 1.0 + rank for rank in range(dist.get_world_size())} if weights else None
    topology = Topology({"world": [list(range(dist.get_world_size()))]}, weights=shares)
    strategy = ddp(gradient_reducer=REDUCERS[reducer], topology=topology)
    with attach(net, optimizer, strategy) as run:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=loop != "kept")
            backward(net, run, step, loop)
            optimizer.step()
    return snapshot(net)


@pytest.mark.parametrize("loop", ["plain", "kept", "micro-batches", "two losses", "clipped"])
@pytest.mark.parametrize("size", [2, 3])
def test_they_are_those_of_the_exact_mean(pool: RankPool, loop: str, size: int) -> None:
    """To the bit, whatever the loop does with gradients between steps."""
    assert equal(*(pool.run(size, train, name, loop)[0] for name in REDUCERS))


def test_weights_count(pool: RankPool) -> None:
    """Ranks that weigh more count for more, and all end equal."""
    results = [pool.run(2, train, name, "plain", True) for name in REDUCERS]
    assert equal(results[0][0], results[1][0])
    assert equal(*results[1])


def addresses() -> tuple[bool, bool]:
    """Say whether gradients stay where they are, and whether a layout is kept."""
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    seen = []
    with attach(net, optimizer, ddp(gradient_reducer=SharedMemoryMean())):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            seen.append({n: _address(p) for n, p in net.named_parameters() if p.is_contiguous()})
            optimizer.step()
        assert net.turned.grad is not None
        own = net.turned.grad.stride() == net.turned.stride()
    return seen[0] == seen[1], own


def _address(parameter: torch.nn.Parameter) -> int:
    assert parameter.grad is not None
    return parameter.grad.data_ptr()


def test_they_are_views_of_one_place(pool: RankPool) -> None:
    """Contiguous ones stay where they are from step to step; others keep their layout."""
    assert pool.run(2, addresses) == [(True, True)] * 2


def train_experts(reducer: str) -> dict[str, torch.Tensor]:
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(gradient_reducer=REDUCERS[reducer])):
        for step in range(5):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4), (dist.get_rank() + step) % 2).square().sum().backward()
            optimizer.step()
    return snapshot(net)


def test_unused_parameters(pool: RankPool) -> None:
    """What one rank used gets the mean on all; what nobody used gets nothing and does not decay."""
    whole, resident = (pool.run(2, train_experts, name) for name in REDUCERS)
    assert equal(whole[0], resident[0])
    assert equal(*resident)
    assert torch.equal(resident[0]["unused.weight"], snapshot(Experts())["unused.weight"])


def thaw(reducer: str) -> dict[str, torch.Tensor]:
    net = Mixed()
    net.first.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with attach(net, optimizer, ddp(gradient_reducer=REDUCERS[reducer])):
        for step in range(STEPS):
            net.first.requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    return snapshot(net)


def test_thawed_parameters_move_in_too(pool: RankPool) -> None:
    """Parameters that are trained later get room when they first have gradients."""
    assert equal(*(pool.run(2, thaw, name)[0] for name in REDUCERS))


def test_a_rank_alone_needs_no_room(pool: RankPool) -> None:
    """A group of one shares nothing, and its gradients are views all the same."""
    assert equal(*(pool.run(1, train, name, "plain")[0] for name in REDUCERS))


def refuse_on_some_ranks() -> str:
    if dist.get_rank() >= 2:
        os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    topology = Topology({"pair": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}, timeout=60)
    strategy = Strategy(
        schedule=after(2, every(4, "world", gradients="pair"), always(gradients="world")),
        topology=topology,
        gradient_reducer=SharedMemoryMean(),
    )
    net = Mixed()
    try:
        attach(net, torch.optim.SGD(net.parameters(), lr=1e-3), strategy)
    except NotAttachable as error:
        return str(error)
    finally:
        os.environ.pop("LOOSESTEP_SHARED_MEMORY", None)
    return ""


def test_all_ranks_hear_why_one_cannot(pool: RankPool) -> None:
    """Also those whose own neighbours all could: nobody waits for somebody who has left."""
    for text in pool.run(4, refuse_on_some_ranks, timeout=40):
        assert "gradients cannot be resident" in text


def accumulate_late() -> str:
    net = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def once_more(weight: torch.Tensor) -> None:
        with torch.enable_grad():  # inside backward, when the gradient is on its way
            weight.square().sum().backward()

    with attach(net, optimizer, ddp(gradient_reducer=SharedMemoryMean())):
        net.weight.register_post_accumulate_grad_hook(once_more)
        try:
            net(torch.randn(2, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_second_gradient_after_the_first_was_shared_is_an_error(pool: RankPool) -> None:
    """It would be lost, or be written into what neighbours read."""
    for text in pool.run(2, accumulate_late, timeout=60):
        assert "use_reentrant=False" in text


def refuse() -> str:
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    try:
        attach(net, optimizer, ddp(gradient_reducer=SharedMemoryMean()))
    except ValueError as error:
        loss_of(net, 0).backward()  # hooks are gone
        return str(error)
    finally:
        del os.environ["LOOSESTEP_SHARED_MEMORY"]
    return ""


def test_refused_where_nobody_is_near(pool: RankPool) -> None:
    """With the rule and the way out, on every rank."""
    for text in pool.run(2, refuse):
        assert "gradients cannot be resident" in text
        assert "use Mean()" in text


def under_ddp(reducer: Reducer) -> str:
    net = DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attach(net, optimizer, ddp(gradient_reducer=reducer)).detach()
        except NotAttachable as error:
            return f"refused: {error}"
    return "".join(str(w.message) for w in caught if w.category is LoosestepWarning)


def all_under_ddp() -> list[str]:
    return [
        under_ddp(r) for r in (TwoLevel(Ternary(), inside=SharedMemoryMean()), SharedMemoryMean())
    ]


def test_ddp_keeps_its_buckets(pool: RankPool) -> None:
    """Gradients would stay where they are: refused, or said where the mean is the same."""
    for few_bits, exact in pool.run(2, all_under_ddp):
        assert few_bits.startswith("refused: TwoLevel(")
        assert "Here it does what Mean() does" in exact
        assert all("attach the plain module" in text for text in (few_bits, exact))


def by_hook() -> str:
    with pytest.raises(NotAttachable) as error:
        gradient_hook(TwoLevel(Ternary(), inside=SharedMemoryMean()))
    return str(error.value)


def test_a_hook_of_ddp_says_so_too(pool: RankPool) -> None:
    """``gradient_hook`` cannot move DDP's buckets either."""
    assert "attach the plain module" in pool.run(1, by_hook)[0]


def lose_a_neighbour() -> None:
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    topology = Topology({"world": [[0, 1]]}, timeout=20)
    strategy = Strategy(
        schedule=always(gradients="world"), topology=topology, gradient_reducer=SharedMemoryMean()
    )
    with attach(net, optimizer, strategy):
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()


def test_a_dead_neighbour_is_named(pool: RankPool) -> None:
    """Nobody hangs, and the error says who is gone and for what it was waited."""
    with pytest.raises(RanksFailed) as failure:
        pool.run(2, lose_a_neighbour, timeout=60)
    assert "PeerLost" in failure.value.failures[0]
    assert "sharing gradients" in failure.value.failures[0]
