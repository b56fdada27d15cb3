"""Any reducer as a DDP hook: DDP's gradients, memories that survive, errors that name ranks."""

from __future__ import annotations

import copy
import io
import math
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import NotFinite, PeerLost, Topology, gradient_hook
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.reducers import Place
from loosestep.gradients.hook import reduce_bucket
from loosestep.gradients.reductions import Reductions
from loosestep.reducers import Cast, ErrorFeedback, Int4, Int8, Mean, TopK
from loosestep.testing import RankPool
from tests.support.oracle import batch, ddp_with_local_buffers, loss_of, make_net, snapshot

TINY_MB = 0.0005  # some 500 bytes: many buckets, which DDP deals anew after the first backward
TIMEOUT = 1.0
SLACK = 2.5


def wrap(
    reducer: Any,
    level: Any = None,
    group: Any = None,
    timeout: float | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, Any]:
    """Return a DDP module of many buckets whose gradients go through ``reducer``."""
    net = make_net()
    net.norm.eval()  # statistics apart: DDP's broadcast of buffers is not the subject
    model = ddp_with_local_buffers(net, process_group=group, bucket_cap_mb=TINY_MB, **options)
    if reducer is None:
        return model, None
    state, hook = gradient_hook(reducer, level, timeout=timeout)
    model.register_comm_hook(state, hook)
    return model, state


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int | None = None,
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank() if rank is None else rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(reducer: Any, **options: Any) -> dict[str, torch.Tensor]:
    model, state = wrap(reducer, **options)
    train(model, sgd(model), range(5))
    if state is not None:
        state.close()
    return snapshot(model.module)


def beside_ddp(options: dict[str, Any]) -> tuple[Any, Any]:
    return trained(Mean(), **options), trained(None, **options)


@pytest.mark.fast
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
def test_the_mean_is_ddps(pool: RankPool, world: int, options: dict[str, Any]) -> None:
    """With ``Mean`` training is DDP's: to the bit on two ranks, where order does not matter."""
    for ours, theirs in pool.run(world, beside_ddp, options):
        for name in ours:
            if world <= 2:
                assert torch.equal(ours[name], theirs[name]), name
            assert torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6), name


REDUCERS: dict[str, Any] = {
    "int8": lambda: ErrorFeedback(Int8()),
    "int4": lambda: ErrorFeedback(Int4(16, rounding="stochastic")),
    "topk": lambda: ErrorFeedback(TopK(0.1)),
    "cast": lambda: ErrorFeedback(Cast(torch.bfloat16)),
}


def conserve(name: str) -> dict[str, float]:
    """Return how much of all gradients is missing after ten backwards, at the same weights."""
    model, state = wrap(REDUCERS[name]())
    alone = copy.deepcopy(model.module)
    given = [torch.zeros_like(p) for p in alone.parameters()]
    got = [torch.zeros_like(p) for p in alone.parameters()]
    layouts = set()
    state_hook = state.bucket

    def watched(bucket: Any) -> Any:
        layouts.add(tuple(bucket.parameters()))
        return state_hook(bucket)

    state.bucket = watched
    for step in range(10):
        for net, sums in ((alone, given), (model, got)):
            net.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            for total, parameter in zip(sums, net.parameters(), strict=True):
                total += parameter.grad
    for total in given:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    kept = kept_by_parameter(state, list(model.parameters()))
    missing = [g - a for g, a in zip(given, got, strict=True)]
    pairs = list(zip(missing, kept, strict=True))
    return {
        "missing": max(float(m.abs().max()) for m in missing),
        "unexplained": max(float((m - k).abs().max()) for m, k in pairs),
        "layouts": len(layouts) - len({w for w, _ in state._places.values()}),
    }


def kept_by_parameter(state: Any, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what all ranks together keep of each parameter's mean gradient."""
    memory, world = state.state_dict(), dist.get_world_size()
    flat = {}
    for window in state._windows:
        key = f"gradients {window.index}"
        total = memory["sent"][key] / world
        if "mean" in memory:  # nobody owns what is gathered
            start, stop = window.runs.slices(world, state.reducer.block)[dist.get_rank()]
            total[start:stop] += memory["mean"][key]
        dist.all_reduce(total)
        flat[key] = total
    kept = []
    for parameter in parameters:
        index, (start, _) = state._places[parameter]
        part = flat[f"gradients {index}"][start : start + parameter.numel()]
        kept.append(part.view(parameter.shape))
    return kept


@pytest.mark.fast
@pytest.mark.parametrize("name", REDUCERS)
def test_gradients_are_late_but_not_lost(pool: RankPool, name: str) -> None:
    """What did not come out is what is kept, parameter by parameter, though buckets change."""
    for figures in pool.run(3, conserve, name):
        assert figures["layouts"] > 0, "DDP kept its first buckets, so this says nothing"
        assert figures["missing"] > 1e-4
        assert figures["unexplained"] < 1e-5


def descend(name: str) -> list[float]:
    """Return the loss of each of sixty epochs over four batches a rank."""
    model, _ = wrap(REDUCERS[name]() if name else None)
    optimizer = sgd(model)
    return [sum(train(model, optimizer, range(4))) / 4 for _ in range(60)]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_it_trains(pool: RankPool, name: str) -> None:
    """The loss goes where DDP's goes."""
    for ours, theirs in zip(pool.run(2, descend, name), pool.run(2, descend, ""), strict=True):
        assert theirs[-1] < 0.5 * theirs[0]
        assert ours[-1] == pytest.approx(theirs[-1], abs=0.1)


def resume(name: str) -> bool:
    """Train six steps at once, and three and three with a checkpoint in between."""
    model, _ = wrap(REDUCERS[name]())
    train(model, sgd(model), range(6))
    first, state = wrap(REDUCERS[name]())
    optimizer = sgd(first)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    parts = {"model": first.module, "optimizer": optimizer, "hook": state}
    torch.save({key: part.state_dict() for key, part in parts.items()}, file)
    file.seek(0)
    second, state = wrap(REDUCERS[name]())
    optimizer = sgd(second)
    parts = {"model": second.module, "optimizer": optimizer, "hook": state}
    for key, saved in torch.load(file, weights_only=True).items():
        parts[key].load_state_dict(saved)
    train(second, optimizer, range(3, 6))
    one, two = snapshot(model.module), snapshot(second.module)
    return all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", REDUCERS)
def test_resumed_is_uninterrupted(pool: RankPool, name: str) -> None:
    """To the bit, though a new DDP begins with its first buckets again."""
    assert pool.run(2, resume, name) == [True, True]


def in_subgroup() -> dict[str, torch.Tensor] | None:
    """Train on ranks 2 and 3 alone, with the batches of ranks 0 and 1."""
    rank = dist.get_rank()
    if dist.get_world_size() == 4 and rank < 2:
        return None
    members = (2, 3) if dist.get_world_size() == 4 else (0, 1)
    group = Group.make(members).process_group
    model, _ = wrap(ErrorFeedback(Int8()), level=group, group=group)
    train(model, sgd(model), range(4), rank=rank - members[0])
    return snapshot(model.module)


def test_a_group_that_does_not_begin_with_rank_0(pool: RankPool) -> None:
    """Ranks 2 and 3 train as 0 and 1 would."""
    expected, _ = pool.run(2, in_subgroup)
    assert expected is not None
    for found in pool.run(4, in_subgroup)[2:]:
        assert found is not None
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def on_a_level() -> float:
    """Share inside pairs only; return how far this rank is from rank 0 after three steps."""
    topology = Topology({"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]})
    model, _ = wrap(Mean(), level=topology.process_group("host"))
    train(model, sgd(model), range(3))
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).abs().max())


def test_a_level_of_a_topology(pool: RankPool) -> None:
    """Pairs stay equal inside and drift apart from each other."""
    distances = pool.run(4, on_a_level)
    assert distances[:2] == [0.0, 0.0]
    assert distances[2] == distances[3] > 0.0


def meet_nan() -> dict[str, Any]:
    """Give rank 1 a NaN in the second step; go on with the third."""
    model, _ = wrap(ErrorFeedback(Int8()))
    optimizer = sgd(model)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    inputs, labels = batch(dist.get_rank(), 1)
    if dist.get_rank() == 1:
        inputs[0, 0] = math.nan
    text, ranks = "", tuple[int, ...]()
    try:
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    except NotFinite as error:
        text, ranks = str(error), error.ranks
    train(model, optimizer, range(2, 4))
    return {"text": text, "ranks": ranks, "model": snapshot(model.module)}


def test_backward_raises_what_is_not_finite(pool: RankPool) -> None:
    """On every rank, naming rank and bucket; the step after it is whole again."""
    results = pool.run(3, meet_nan)
    for rank, result in enumerate(results):
        assert result["ranks"] == (1,)
        assert result["text"].startswith(f"rank {rank}: ")
        assert "while sharing gradients 'bucket " in result["text"]
        for key, value in result["model"].items():
            assert bool(value.isfinite().all())
            assert torch.equal(value, results[0]["model"][key])


def die_in_training(fault: str, timeout: float | None) -> dict[str, Any]:
    model, _ = wrap(ErrorFeedback(Int8()), timeout=timeout)
    optimizer = sgd(model)
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        if dist.get_rank() == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        began = time.monotonic()
        try:
            loss.backward()
        except PeerLost as error:
            seconds = time.monotonic() - began
            return {"step": step, "text": str(error), "ranks": error.ranks, "seconds": seconds}
        optimizer.step()
    return {}


@pytest.mark.parametrize(("fault", "timeout"), [("kill", None), ("stop", TIMEOUT)])
def test_a_lost_rank_ends_backward(pool: RankPool, fault: str, timeout: float | None) -> None:
    """``backward`` raises PeerLost within the time-out, naming rank, bucket and step."""
    results = pool.run(3, die_in_training, fault, timeout, allow_dead=[1])
    for rank in (0, 2):
        assert results[rank]["step"] == 4, results
        assert results[rank]["ranks"] == (1,)
        assert f"rank {rank}: lost rank 1 while sharing gradients 'bucket" in results[rank]["text"]
        assert "at step 4" in results[rank]["text"]
        assert results[rank]["seconds"] < TIMEOUT + SLACK


def share_some() -> list[Any]:
    """Share buffers, one of them with an error."""
    peers, rank = peers_of(world_group()), dist.get_rank()
    reductions = Reductions(Int8())
    buffers = [torch.full((100,), float(rank + 1)) for _ in range(3)]
    if rank == 0:
        buffers[1][5] = math.inf
    launched = [reductions.share(b, peers, Place(f"slot {i}")) for i, b in enumerate(buffers)]
    found: list[Any] = []
    for shared in launched:
        try:
            found.append(float(shared.wait().mean()))
        except NotFinite as error:
            found.append(error.tensor)
    reductions.close()
    return found


def test_reductions_are_waited_for(pool: RankPool) -> None:
    """Waiting gives the buffer with the mean, or its own error, and later ones go on."""
    expected = [pytest.approx(1.5, rel=0.01), "slot 1", pytest.approx(1.5, rel=0.01)]
    assert pool.run(2, share_some) == [expected, expected]


def wrong_module() -> str:
    model, state = wrap(Mean())
    train(model, sgd(model), range(1))
    other = DistributedDataParallel(torch.nn.Linear(6, 3))
    other.register_comm_hook(*gradient_hook(Mean()))
    third = DistributedDataParallel(torch.nn.Linear(6, 3))
    third.register_comm_hook(state, reduce_bucket)
    loss_of(other, 0, 0).backward()
    try:
        loss_of(third, 0, 0).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.fast
def test_a_hook_serves_one_module(pool: RankPool) -> None:
    """A second module is refused with a way out."""
    for text in pool.run(2, wrong_module):
        assert "one DDP module" in text
        assert "make a hook for each" in text
