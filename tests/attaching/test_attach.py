"""``attach`` around all kinds of models, and what its handle offers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from loosestep import (
    RankMismatch,
    Strategy,
    attach,
    ddp,
    hierarchical_sgd,
    post_local_sgd,
)
from loosestep.comm.torch_versions import buffers_are_broadcast
from loosestep.reducers import Mean, Reducer, SharedMemoryMean
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.oracle import close, equal, loss_of, make_net, sgd, snapshot


def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def gather(net: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return all ranks' snapshots."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, snapshot(net))
    return everyone


def all_equal(net: torch.nn.Module) -> bool:
    first, *others = gather(net)
    return all(equal(first, other) for other in others)


def compiled() -> tuple[bool, bool]:
    plain, optimized = make_net(), make_net()
    fast: Any = torch.compile(optimized, backend="aot_eager")
    first, second = sgd(plain), sgd(optimized)
    with attach(plain, first, post_local_sgd(3, warmup_steps=2, gradients=None)):
        go(plain, first, 6)
    with attach(fast, second, post_local_sgd(3, warmup_steps=2, gradients=None)):
        go(fast, second, 6)
    return close(snapshot(plain), snapshot(optimized)), bool(torch.isfinite(plain.gain))


def test_a_compiled_model_trains_like_a_plain_one(pool: RankPool) -> None:
    """``torch.compile`` before ``attach`` changes nothing."""
    assert pool.run(2, compiled, timeout=100) == [(True, True)] * 2


class Checkpointed(torch.nn.Module):
    """Recomputes its inner half in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = make_net(), reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = self.net
        hidden = torch.tanh(inner.norm(inner.first(inputs)))
        hidden = checkpoint(inner.second, hidden, use_reentrant=self.reentrant)
        return inner.last(torch.tanh(hidden))


def with_checkpointing(reentrant: bool) -> bool:
    net = Checkpointed(reentrant)
    net.net.third.bias.requires_grad_(False)
    optimizer = sgd(net)
    with attach(net, optimizer, ddp()):
        go(net, optimizer, 4)
    first, *others = gather(net)
    weights = [n for n in first if "running" not in n and "num" not in n]
    return all(torch.equal(first[n], other[n]) for other in others for n in weights)


@pytest.mark.fast
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(pool: RankPool, reentrant: bool) -> None:
    """Gradients are shared also where backward runs inside backward."""
    assert pool.run(2, with_checkpointing, reentrant) == [True, True]


def several() -> bool:
    """Train two models in one process, each with its own strategy and clock."""
    one, two = make_net(1), make_net(2)
    first, second = sgd(one), sgd(two)
    with (
        attach(one, first, post_local_sgd(3, warmup_steps=0, gradients=None)) as run_one,
        attach(two, second, hierarchical_sgd({"host": 1, "world": 5})) as run_two,
    ):
        go(one, first, 6)
        go(two, second, 5)
        assert (run_one.clock.step, run_two.clock.step) == (6, 5)
        return all_equal(one) and all_equal(two)


@pytest.mark.fast
def test_several_models_in_one_process(pool: RankPool) -> None:
    """Attachments do not disturb each other."""
    assert pool.run(3, several) == [True] * 3


def look_at_the_average() -> tuple[bool, bool, bool]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, post_local_sgd(100, warmup_steps=0, gradients=None)) as run:
        go(net, optimizer, 3)
        before = snapshot(net)
        pointers = [p.data_ptr() for p in net.parameters()]
        with run.averaged():
            inside = all_equal(net)
        same_memory = pointers == [p.data_ptr() for p in net.parameters()]
        return inside, equal(before, snapshot(net)), same_memory and run.clock.step == 3


@pytest.mark.fast
@pytest.mark.parametrize("buffers", ["mean"])
def test_the_average_can_be_looked_at(pool: RankPool, buffers: str) -> None:
    """Inside ``averaged()`` all ranks hold one model; afterwards each has its own again."""
    assert pool.run(3, look_at_the_average) == [(True, True, True)] * 3


def buffers_after_a_sync(policy: str) -> tuple[float, int, bool]:
    net: Any = torch.nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    rank = dist.get_rank()
    with attach(net, optimizer, Strategy(schedule=every(2), buffers=policy)) as run:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.full((4, 1), float(rank))).sum().backward()
            if rank == 1:
                net.num_batches_tracked += 5
            optimizer.step()
        value, count = float(net.running_mean), int(net.num_batches_tracked)
        net.running_mean.fill_(rank)
        with run.averaged():
            return (
                value,
                count,
                float(net.running_mean) == {"mean": 0.5, "broadcast": 0.0}.get(policy, float(rank)),
            )


@pytest.mark.fast
def test_policies_for_buffers(pool: RankPool) -> None:
    """``mean`` averages floats and takes the largest count; ``broadcast`` and ``local`` say it."""
    # The running mean of constants r is r * (1 - 0.9^2) = 0.19 r: 0 on rank 0, 0.19 on rank 1.
    (mean, most, _), (other, count, _) = pool.run(2, buffers_after_a_sync, "mean")
    assert mean == other == pytest.approx(0.095)
    assert most == count == 12
    (first, two, _), (same, also, _) = pool.run(2, buffers_after_a_sync, "broadcast")
    assert first == same == 0.0
    assert two == also == 2
    (zero, two, _), (own, twelve, _) = pool.run(2, buffers_after_a_sync, "local")
    assert (zero, two, twelve) == (0.0, 2, 12)
    assert own == pytest.approx(0.19)


@pytest.mark.fast
def test_averaged_follows_the_policy_for_buffers(pool: RankPool) -> None:
    """Inside ``averaged()`` buffers are what a sync would make of them."""
    for policy in ("mean", "broadcast", "local"):
        assert [fine for _, _, fine in pool.run(2, buffers_after_a_sync, policy)] == [True, True]


def start_different(initial: str) -> str:
    net = make_net(dist.get_rank())
    optimizer = sgd(net)
    try:
        attach(net, optimizer, Strategy(schedule=every(2), initial=initial)).detach()
    except RankMismatch as error:
        return str(error)
    return "equal" if all_equal(net) else "different"


@pytest.mark.fast
def test_policies_for_the_start(pool: RankPool) -> None:
    """Different replicas are made equal, refused by name, or left alone."""
    assert pool.run(2, start_different, "broadcast") == ["equal"] * 2
    assert pool.run(2, start_different, "ignore") == ["different"] * 2
    for text in pool.run(2, start_different, "refuse"):
        assert "'gain'" in text or "'first.weight'" in text
        assert "rank 0" in text
        assert "rank 1" in text


def accumulate(kind: str) -> bool:
    """Take two micro-batches a step under no_sync; compare with one batch a step of both."""
    ours, whole = make_net(), make_net()
    for net in (ours, whole):
        net.norm.eval()
    model: torch.nn.Module = DistributedDataParallel(ours) if kind == "ddp" else ours
    first, second = sgd(model), sgd(whole)
    rank = dist.get_rank()
    with attach(model, first, ddp()) as run, attach(whole, second, ddp()):
        for step in range(3):
            first.zero_grad()
            with run.no_sync():
                loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            first.step()
            second.zero_grad()
            pair = [loss_of(whole, rank, 2 * step + i) for i in range(2)]
            sum(pair, torch.tensor(0.0)).backward()
            second.step()
        assert run.clock.step == 3
    return close(snapshot(ours), snapshot(whole)) and all_equal(ours)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_gradient_accumulation(pool: RankPool, kind: str) -> None:
    """Micro-batches stay local under ``no_sync``, do not tick, and add up to one step."""
    assert pool.run(2, accumulate, kind) == [True, True]


def accumulate_without_no_sync() -> bool:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, ddp()):
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                loss_of(net, dist.get_rank(), 2 * step + micro).backward()
            optimizer.step()
    first, *others = gather(net)
    weights = [n for n in first if "running" not in n and "num" not in n]
    return all(torch.equal(first[n], other[n]) for other in others for n in weights)


@pytest.mark.fast
def test_accumulation_without_no_sync_is_right_too(pool: RankPool) -> None:
    """Sharing after every micro-batch costs more and gives equal replicas as well."""
    assert pool.run(2, accumulate_without_no_sync) == [True, True]


def thaw() -> bool:
    net = make_net()
    net.first.requires_grad_(False)
    optimizer = sgd(net)
    with attach(net, optimizer, ddp()):
        go(net, optimizer, 2)
        frozen = net.first.weight.detach().clone()
        net.first.requires_grad_(True)
        go(net, optimizer, 3, first=2)
        moved = not torch.equal(frozen, net.first.weight)
    first, *others = gather(net)
    return moved and all(
        torch.equal(first[f"first.{n}"], o[f"first.{n}"])
        for o in others
        for n in ("weight", "bias")
    )


@pytest.mark.fast
def test_thawed_parameters_join(pool: RankPool) -> None:
    """Parameters that start to require gradients after ``attach`` are shared from then on."""
    assert pool.run(2, thaw) == [True, True]


def interrupted_backward() -> str:
    net = make_net()
    optimizer = sgd(net)

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("no memory")

    with attach(net, optimizer, ddp()):
        handle = net.first.weight.register_hook(fail)
        try:
            loss_of(net, 0, 0).backward()
        except MemoryError:
            handle.remove()
        try:
            go(net, optimizer, 1)
        except RuntimeError as error:
            return str(error)
    return "went on"


@pytest.mark.fast
def test_a_step_after_an_interrupted_backward_is_refused(pool: RankPool) -> None:
    """A caught error inside backward must not leave ranks silently apart."""
    for text in pool.run(2, interrupted_backward):
        assert "interrupted" in text


def detach_and_attach() -> tuple[bool, bool, int]:
    net = DistributedDataParallel(make_net())
    optimizer = sgd(net)
    broadcasts = buffers_are_broadcast(net)
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        with attach(net, optimizer, post_local_sgd(2, warmup_steps=0, gradients=None)):
            go(net, optimizer, 2)
            assert not buffers_are_broadcast(net)
    restored = buffers_are_broadcast(net) == broadcasts
    reference = DistributedDataParallel(make_net())
    reference.load_state_dict(net.state_dict())
    their_sgd = torch.optim.SGD(reference.parameters(), lr=0.05)
    our_sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    go(net, our_sgd, 2)
    go(reference, their_sgd, 2)
    leaked = len(dist.distributed_c10d._world.pg_map) - groups
    return restored, equal(snapshot(net), snapshot(reference)), leaked


@pytest.mark.fast
def test_detaching_leaves_plain_ddp(pool: RankPool) -> None:
    """After ``detach`` a DDP module is what it was, can be attached anew, and no group is left."""
    assert pool.run(2, detach_and_attach) == [(True, True, 0)] * 2


def file_descriptors(reducer: Reducer | None) -> int:
    net = make_net()
    optimizer = sgd(net)
    counts = []
    for _ in range(4):
        strategy = post_local_sgd(2, warmup_steps=0, gradient_reducer=reducer)
        with attach(net, optimizer, strategy) as run:
            go(net, optimizer, 2)
        assert run.clock.step == 2  # it is still there, and holds nothing
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts[-1] - counts[0]


@pytest.mark.fast
@pytest.mark.parametrize("reducer", [None, Mean(), SharedMemoryMean()], ids=repr)
def test_sockets_are_freed(pool: RankPool, reducer: Reducer | None) -> None:
    """Attaching again and again does not pile up descriptors."""
    assert all(extra <= 2 for extra in pool.run(2, file_descriptors, reducer))


def save_with_dcp(folder: str) -> tuple[int, bool]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    strategy = post_local_sgd(4, warmup_steps=0, gradients=None)
    rank = dist.get_rank()
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, 6)
        # In mid-period every replica is its own: one entry a rank.
        state_dict_saver.save(
            {f"net {rank}": net.state_dict(), f"run {rank}": run}, checkpoint_id=folder
        )
        saved = snapshot(net)
        go(net, optimizer, 1, first=6)
    fresh = make_net(9)
    with attach(fresh, torch.optim.AdamW(fresh.parameters()), strategy) as run:
        target = {f"net {rank}": fresh.state_dict(), f"run {rank}": run}
        state_dict_loader.load(target, checkpoint_id=folder)
        return run.clock.step, equal(snapshot(fresh), saved)


@pytest.mark.fast
def test_the_handle_goes_through_a_distributed_checkpoint(pool: RankPool) -> None:
    """DCP saves and loads the handle as a Stateful, in the middle of a period."""
    with tempfile.TemporaryDirectory() as folder:
        assert pool.run(2, save_with_dcp, folder) == [(6, True)] * 2


def on_a_subgroup() -> bool:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return True
    net = DistributedDataParallel(make_net(), process_group=group)
    optimizer = sgd(net)
    with attach(net, optimizer, post_local_sgd(2, warmup_steps=1, gradients=None)) as run:
        go(net, optimizer, 3)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, snapshot(net), group=group)
        return run.topology.ranks == (1, 2) and equal(*everyone)


@pytest.mark.fast
def test_a_ddp_module_on_a_subgroup_brings_its_ranks(pool: RankPool) -> None:
    """Without a topology the ranks are those of the DDP module, not the world."""
    assert pool.run(3, on_a_subgroup) == [True] * 3


def finish_twice() -> list[int]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, post_local_sgd(2, warmup_steps=0, gradients=None)) as run:
        go(net, optimizer, 4)
        counts = [run.metrics()["parameters/world"]["syncs"]]
        run.finalize()
        counts.append(run.metrics()["parameters/world"]["syncs"])
        go(net, optimizer, 1, first=4)
        run.finalize()
        run.finalize()
        counts.append(run.metrics()["parameters/world"]["syncs"])
    return counts


@pytest.mark.fast
def test_finalize_averages_only_what_is_not_averaged(pool: RankPool) -> None:
    """Right after a sync, and a second time, there is nothing to do."""
    assert pool.run(2, finish_twice) == [[2, 2, 3]] * 2


def own_drift() -> tuple[float, float]:
    weight = torch.nn.Parameter(torch.full((1000,), 1.0 + dist.get_rank()))
    net = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, Strategy(schedule=every(1), initial="ignore")) as run:
        weight.grad = torch.zeros(1000)
        optimizer.step()
        return run.metrics()["parameters/world"]["last_drift"], float(weight[0])


@pytest.mark.fast
def test_drift_by_hand(pool: RankPool) -> None:
    """Replicas 1 and 2 are 0.5 from their mean of 1.5: drift 1/3."""
    for drift, value in pool.run(2, own_drift):
        assert drift == pytest.approx(1 / 3)
        assert value == 1.5
