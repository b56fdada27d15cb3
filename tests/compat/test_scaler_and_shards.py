"""A GradScaler that skips on one rank, sharded parameters, and ranks that weigh more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    LoosestepError,
    Topology,
    attach,
    average_,
    hierarchical_sgd,
    post_local_sgd,
)
from loosestep.testing import RankPool, run_ranks
from tests.support.defects import all_three, attempt, library, scalar, torch_fails

Fact = tuple[int, float, list[float]]

# No version of torch averages shards, and each says so in its own words.
NO_SHARDS = "NotImplementedError|unevenly sharded|no DeviceMesh|Sharding propagation failed"


KINDS = ["SGD", "fused SGD", "AdamW", "fused AdamW"]


def make_inner(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    fused, name = kind.startswith("fused"), kind.removeprefix("fused ")
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        model.parameters(), lr=0.1, fused=fused
    )
    return optimizer


def train_with_scaler(
    model: torch.nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, bad_steps: Sequence[int]
) -> None:
    """Take eight steps; at ``bad_steps`` rank 1 has an infinite gradient."""
    for step in range(8):
        optimizer.zero_grad()
        bad = step in bad_steps and dist.get_rank() == 1
        inputs = torch.full((1, 2), float("inf") if bad else 1.0 + dist.get_rank())
        scaler.scale(model(inputs).sum()).backward()
        if step % 2:
            scaler.unscale_(optimizer)  # as before clipping; on even steps step() does it
        scaler.step(optimizer)
        scaler.update()


def make_scaler(enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)


def train(
    name: str, kind: str, period: int, bad_steps: Sequence[int], ddp: bool, scaled: bool = True
) -> Fact:
    """Train with four steps of warm-up; return steps counted, the scale and the parameters."""
    plain = torch.nn.Linear(2, 1, bias=False)
    inner, scaler = make_inner(kind, plain), make_scaler(scaled)
    model = DistributedDataParallel(plain) if ddp else plain
    if name == "attach":
        strategy = post_local_sgd(period, warmup_steps=4, gradients=None)
        with attach(model, inner, strategy, scaler=scaler) as run:
            train_with_scaler(model, inner, scaler, bad_steps)
            run.finalize()
            return run.clock.step, scaler.get_scale(), plain.weight.flatten().tolist()
    averager = library(name).PeriodicModelAverager(period, warmup_steps=4)
    optimizer = library(name).PostLocalSGDOptimizer(inner, averager)
    train_with_scaler(model, optimizer, scaler, bad_steps)
    if name != "torch":
        optimizer.finalize()
    return averager.step, scaler.get_scale(), plain.weight.flatten().tolist()


@all_three
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_counts(pool: RankPool, name: str, kind: str):
    """Counters stay together where one rank's GradScaler skips, so no rank waits alone."""
    # Nothing is due in eight steps: torch would go on to wait for a rank that never comes.
    period = 100 if name == "torch" else 2
    with torch_fails(name, r"\(8, 6\)"):
        first, second = pool.run(2, train, name, kind, period, (4, 5), False)
        assert (first[0], second[0]) == (8, 8)
        assert first[2] == second[2]
        assert torch.tensor(first[2]).isfinite().all()
        assert (first[1], second[1]) == (64.0, 16.0)  # gradients are local: rank 0 saw no inf


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["loosestep", "attach"])
def test_a_scaler_leaves_the_result_alone(pool: RankPool, name: str, kind: str):
    """A scale that is a power of two cancels to the bit."""
    scaled, plain = (
        [weights for _, _, weights in pool.run(2, train, name, kind, 2, (), False, use)]
        for use in (True, False)
    )
    assert scaled == plain


@pytest.mark.parametrize(
    ("name", "ddp"), [("loosestep", True), ("attach", True), ("attach", False)]
)
def test_ranks_that_share_gradients_share_the_scale(pool: RankPool, name: str, ddp: bool):
    """While gradients are shared, an infinity on one rank is one on all."""
    first, second = pool.run(2, train, name, "SGD", 2, (0, 1), ddp)
    assert first == second
    assert first[:2] == (8, 16.0)


def skip_unseen(period: int) -> tuple[str, str, float]:
    """Attach without telling it of the scaler, and return what became of that."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer, scaler = make_inner("SGD", model), make_scaler()
    strategy = post_local_sgd(period, warmup_steps=0, gradients=None)
    run, began = attach(model, optimizer, strategy, timeout=2.0), time.monotonic()
    try:
        train_with_scaler(model, optimizer, scaler, bad_steps=(2,))
    except LoosestepError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "ended", str(run.clock.step), time.monotonic() - began


def test_a_scaler_that_nobody_told_of_is_no_hang(pool: RankPool):
    """The rank that is ahead gives up within the time-out and names the one it missed."""
    (first, text, seconds), (second, _, _) = pool.run(2, skip_unseen, 4, timeout=20.0)
    assert first in ("PeerLost", "RankMismatch")
    assert "rank 1" in text
    assert seconds < 10.0
    assert second in ("ended", "PeerLost", "RankMismatch")


def make_sharded(rows: int = 3) -> tuple[torch.nn.Linear, DeviceMesh]:
    """Return a layer on two pairs of ranks; two cannot share three rows evenly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "shard"))
    model = torch.nn.Linear(4, rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + dist.get_rank() // 2)
    fully_shard(model, mesh=mesh["shard"])
    return model, mesh


def full(model: torch.nn.Module) -> list[list[float]]:
    tensors = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return [tensor.flatten().tolist() for tensor in tensors]


def average_shards(name: str, rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the whole parameters before and after an average between pairs."""
    model, mesh = make_sharded(rows)
    if name == "attach":
        topology = Topology.from_mesh(mesh)
        strategy = post_local_sgd(1, warmup_steps=0, gradients="shard", topology=topology)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attach(model, optimizer, strategy):
            with torch.no_grad():  # attaching has made the pairs equal
                for parameter in model.parameters():
                    parameter.mul_(1 + dist.get_rank() // 2)
            before = full(model)
            optimizer.step()
            return before, full(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = full(model)
    library(name).PeriodicModelAverager(period=4).average_parameters(model.parameters())
    return before, full(model)


@all_three
@pytest.mark.parametrize("rows", [4, 3])
def test_shards_are_averaged_with_the_same_shard(name: str, rows: int):
    """An FSDP2 model is averaged between meshes, shard by shard: each whole is the mean."""
    with torch_fails(name, NO_SHARDS):
        seen = run_ranks(4, attempt, name, average_shards, rows, group_timeout=5.0)
        assert not any(isinstance(result, str) for result in seen), seen
        one, other = (seen[rank][0] for rank in (0, 2))  # the wholes of the two pairs
        assert one != other
        for _, after in seen:
            for mean, a, b in zip(after, one, other, strict=True):
                assert mean == pytest.approx([(x + y) / 2 for x, y in zip(a, b, strict=True)])


def train_shards() -> tuple[list[list[float]], list[list[float]]]:
    """Train two steps under FSDP2 and attach; return the parameters and a plain loop's."""
    inputs = torch.randn(4, 2, 8, 4)  # rank, step, batch; the same on every rank
    model, mesh = make_sharded()
    strategy = hierarchical_sgd({"pairs": 2}, gradients="shard", topology=Topology.from_mesh(mesh))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, strategy):
        start = full(model)
        for batch in inputs[dist.get_rank()]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return full(model), plain_loop(start, inputs)


def plain_loop(start: list[list[float]], inputs: torch.Tensor) -> list[list[float]]:
    """Train both pairs in turn, each on its two ranks' batches, and take the mean."""
    ends = []
    for pair in (inputs[:2], inputs[2:]):
        weight = torch.tensor(start[0]).view(3, 4).requires_grad_()
        bias = torch.tensor(start[1]).requires_grad_()
        for step in range(2):
            batch = torch.cat([pair[0, step], pair[1, step]])
            loss = torch.nn.functional.linear(batch, weight, bias).square().mean()
            for tensor, grad in zip(
                (weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True
            ):
                tensor.data -= 0.1 * grad
        ends.append((weight.detach(), bias.detach()))
    return [((a + b) / 2).flatten().tolist() for a, b in zip(*ends, strict=True)]


def test_sharded_training_equals_a_plain_loop():
    """Gradients inside a mesh are FSDP's, the average between meshes is ours."""
    for ours, oracle in run_ranks(4, train_shards):
        for tensor, expected in zip(ours, oracle, strict=True):
            assert tensor == pytest.approx(expected, abs=1e-6)


def average_inside_mesh(way: str) -> str:
    model, mesh = make_sharded()
    try:
        if way == "attach":
            strategy = hierarchical_sgd(
                {"shard": 1, "pairs": 4}, gradients="shard", topology=Topology.from_mesh(mesh)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with attach(model, optimizer, strategy):
                optimizer.step()
        else:
            group = mesh["shard"].get_group()
            averager = library(way).PeriodicModelAverager(4, process_group=group)
            averager.average_parameters(model.parameters())
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("way", ["attach", "loosestep"])
def test_a_level_inside_the_mesh_is_refused(way: str):
    """Different shards have no mean; every rank says so."""
    for said in run_ranks(4, average_inside_mesh, way, timeout=30.0, group_timeout=5.0):
        assert "inside the shard mesh" in said


def average_by_weight(name: str) -> float:
    """Average rank 0, which saw one sample, and rank 1, which saw three."""
    parameter = scalar()
    if name == "attach":
        topology = Topology.from_sizes({"world": 2}, weights=[1.0, 3.0])
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        strategy = hierarchical_sgd({"world": 1}, topology=topology)
        with attach(torch.nn.ParameterList([parameter]), optimizer, strategy):
            parameter.data.fill_(dist.get_rank())
            optimizer.step()
    elif name == "loosestep":
        average_([parameter], weights=[1.0, 3.0])
    else:
        library(name).average_parameters(iter([parameter]), None)  # it takes no weights
    return parameter.item()


@all_three
def test_ranks_may_weigh_more(pool: RankPool, name: str):
    """(1 * 0 + 3 * 1) / (1 + 3) = 3/4."""
    with torch_fails(name, "0.5"):
        assert pool.run(2, average_by_weight, name) == [0.75, 0.75]
