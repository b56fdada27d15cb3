"""Gradients that live in memory inside a host, and travel between hosts in few bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import NotAttachable, Strategy, Topology, attach, ddp, post_local_sgd
from loosestep.reducers import (
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    Reducer,
    SharedMemoryMean,
    Ternary,
    TwoLevel,
)
from loosestep.schedules import after, always
from loosestep.testing import RankPool
from tests.support.gradients import parameters
from tests.support.gradients import train as train_in_phases
from tests.support.oracle import Experts, equal, snapshot
from tests.support.resident import Mixed, backward, loss_of

STEPS = 6
INNER: dict[str, Callable[[], Reducer]] = {
    "ternary": Ternary,
    "feedback": lambda: ErrorFeedback(Int4()),
}
WAYS = ("copied", "resident")


def hosts_of_two(inner: str, way: str) -> TwoLevel:
    """Return the reducer of a way."""
    inside = Mean() if way == "copied" else SharedMemoryMean()
    return TwoLevel(INNER[inner](), inside=inside, ranks_per_host=2)


def train(inner: str, way: str, loop: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Train; return parameters, and what the reducer keeps."""
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two(inner, way))) as run:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=loop != "kept")
            backward(net, run, step, loop)
            optimizer.step()
        return snapshot(net), run.state_dict()["gradients"]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("loop", ["plain", "kept", "micro-batches", "two losses", "clipped"])
@pytest.mark.parametrize("inner", INNER)
def test_where_they_live_does_not_show(pool: RankPool, inner: str, loop: str) -> None:
    """Copied through windows or resident: parameters, and what is kept, are equal to the bit."""
    copied, resident = (pool.run(4, train, inner, way, loop) for way in WAYS)
    for one, other in zip(copied, resident, strict=True):
        assert equal(one[0], other[0])
        assert equal(one[0], copied[0][0])
        assert _same(one[1], other[1])


def train_experts(way: str) -> dict[str, torch.Tensor]:
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("ternary", way))):
        for step in range(5):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4), int(dist.get_rank() == step % 4)).square().sum().backward()
            optimizer.step()
    return snapshot(net)


def test_unused_parameters(pool: RankPool) -> None:
    """What one rank of one host used gets the mean on all; what nobody used does not decay."""
    copied, resident = (pool.run(4, train_experts, way) for way in WAYS)
    assert all(equal(copied[0], state) for state in resident)
    assert torch.equal(resident[0]["unused.weight"], snapshot(Experts())["unused.weight"])


def thaw(way: str) -> dict[str, torch.Tensor]:
    net = Mixed()
    net.first.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("feedback", way))):
        for step in range(STEPS):
            net.first.requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    return snapshot(net)


def test_thawed_parameters(pool: RankPool) -> None:
    """Those that are trained later have no room, and are copied."""
    assert equal(*(pool.run(4, thaw, way)[0] for way in WAYS))


def test_resuming_in_either_phase(pool: RankPool) -> None:
    """First all share gradients, then pairs on one host each: from any step it goes on alike."""
    everybody = [0, 1, 2, 3]
    whole = pool.run(4, train_in_phases, "in rooms", "plain", everybody)
    for stop in (1, 3, 5):
        resumed = pool.run(4, train_in_phases, "in rooms", "plain", everybody, stop)
        for (one, _), (other, _) in zip(whole, resumed, strict=True):
            assert equal(parameters(one), parameters(other)), stop


def refuse_on_one_host(levels: int) -> str:
    if dist.get_rank() >= 2:
        os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    topology = Topology({"pair": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}, timeout=60)
    wide = always(gradients="world")
    net, schedule = Mixed(), wide if levels == 1 else after(2, always(gradients="pair"), wide)
    reducer = hosts_of_two("ternary", "resident")
    strategy = Strategy(schedule=schedule, topology=topology, gradient_reducer=reducer)
    try:
        attach(net, torch.optim.SGD(net.parameters(), lr=1e-3), strategy)
    except NotAttachable as error:
        return str(error)
    finally:
        os.environ.pop("LOOSESTEP_SHARED_MEMORY", None)
    return ""


@pytest.mark.parametrize("levels", [1, 2])
def test_all_hosts_hear_why_one_cannot(pool: RankPool, levels: int) -> None:
    """Nobody waits for a host that has left, whichever level it refuses on."""
    for text in pool.run(4, refuse_on_one_host, levels, timeout=40):
        assert "gradients cannot be resident" in text


def test_bad_input() -> None:
    """With the rule, the value and the way out."""
    with pytest.raises(
        TypeError, match=r"inside must be Mean\(\) or SharedMemoryMean\(\), got Int8"
    ):
        TwoLevel(Int4(), inside=Int8())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"nothing is compressed between hosts.*use SharedMemoryMean"
    ):
        TwoLevel(inside=SharedMemoryMean())
    with pytest.raises(
        ValueError, match=r"moves gradients.*give it without inside=SharedMemoryMean\(\)"
    ):
        post_local_sgd(2, reducer=TwoLevel(Int8(), inside=SharedMemoryMean(), ranks_per_host=1))


def test_its_name_says_what_ranks_must_agree_on() -> None:
    """Also where gradients live."""
    assert repr(TwoLevel(Int8(), inside=SharedMemoryMean())).endswith(
        "differ, inside=SharedMemoryMean())"
    )
