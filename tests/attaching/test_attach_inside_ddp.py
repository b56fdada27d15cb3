"""Attaching what lies inside DDP, or holds DDP, is refused: DDP would share every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import NotAttachable, ZeroRedundancyOptimizer, attach, ddp, post_local_sgd, zero
from loosestep.testing import RankPool
from tests.support.oracle import loss_of, make_net, sgd

LOCAL = post_local_sgd(period=4, gradients=None)


def error_of(body: Callable[[], object]) -> str:
    try:
        body()
    except NotAttachable as error:
        return str(error)
    return ""


def first_forward(case: str) -> str:
    """Attach what DDP is put around later, and return what the first forward says."""
    net: Any = make_net()
    if case == "scripted":
        net = torch.jit.script(net)
    with attach(net, sgd(net), LOCAL):
        model = DistributedDataParallel(net)
        return error_of(lambda: loss_of(model, dist.get_rank(), 0))


def inside(case: str) -> str:
    """Attach what is inside DDP in one of several ways, and return what that says."""
    net: Any = make_net()
    if case == "scripted":
        net = torch.jit.script(net)
    wrapped = torch.compile(net, backend="eager") if case.startswith("compiled") else net
    model = DistributedDataParallel(wrapped)
    if case == "compiled, with a forward before":
        loss_of(model, dist.get_rank(), 0)
    attached = {"a part": net.first, "compiled and given so": wrapped}.get(case, net)
    optimizer: torch.optim.Optimizer = sgd(attached)
    if case == "sharded":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    strategies = {"sharded": zero(), "every step": ddp()}
    said = error_of(lambda: attach(attached, optimizer, strategies.get(case, LOCAL)))
    assert isinstance(model, DistributedDataParallel)  # it is alive until here
    return said


CASES = [
    *("local", "every step", "sharded", "a part", "scripted"),
    *("compiled", "compiled and given so", "compiled, with a forward before"),
]


def all_cases() -> dict[str, str]:
    said = {case: inside(case) for case in CASES}
    later = {f"{case}, later": first_forward(case) for case in ("plain", "scripted")}
    return {**said, **later}


def test_what_is_inside_ddp_is_refused_with_what_to_attach(pool: RankPool) -> None:
    """On every rank, before DDP has shared a gradient: at attach, or where DDP comes later."""
    for said in pool.run(2, all_cases):
        for case, text in said.items():
            assert "attach(ddp_model, ...)" in text, case
            assert "DistributedDataParallel" in text, case


def after_ddp() -> int:
    """Train under DDP, then attach the module alone when nobody holds the wrapper any more."""
    net = make_net()
    loss_of(DistributedDataParallel(net), dist.get_rank(), 0).backward()
    with attach(net, sgd(net), LOCAL) as run:
        return run.clock.step


def test_a_wrapper_that_nobody_holds_does_not_count(pool: RankPool) -> None:
    """It is a part of cycles, and may be there still."""
    assert pool.run(2, after_ddp) == [0, 0]


class Holder(torch.nn.Module):
    """A module with DDP inside, as some frameworks make them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(make_net())


def ddp_inside() -> str:
    holder = Holder()
    return error_of(lambda: attach(holder, sgd(holder), LOCAL))


def test_a_module_with_ddp_inside_is_refused(pool: RankPool) -> None:
    """At attach, and the part is named."""
    for said in pool.run(2, ddp_inside):
        assert "'inner'" in said
        assert "attach" in said


def detached() -> int:
    """Train attached and alone, then detached and under DDP; return how many hooks are left."""
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, LOCAL):
        loss_of(net, dist.get_rank(), 0).backward()
        optimizer.step()
    loss_of(DistributedDataParallel(net), dist.get_rank(), 1).backward()
    return len(net._forward_pre_hooks)


def test_a_detached_module_may_be_wrapped(pool: RankPool) -> None:
    """And nothing is left of the watch on its forward."""
    assert pool.run(2, detached) == [0, 0]
