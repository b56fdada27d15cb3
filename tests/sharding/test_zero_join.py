"""Uneven inputs: ranks that have run out of batches go on stepping their shards for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    ZeroOptions,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from loosestep.testing import RankPool
from tests.support.zero_case import OwnTrust, loss_of, make_model, same

BUCKET_MB = 0.005  # several buckets
HOOKS = {"at once": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
    "own, whole": (OwnTrust, {"lr": 0.02}),
}


def train_plain(kind: str, clip: float | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer_class, settings = KINDS[kind]
    net = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB)
    optimizer = optimizer_class(net.parameters(), **settings)
    with Join([net]):
        for number in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), number).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net, optimizer


def train_sharded(
    kind: str, clip: float | None, hook: str | None
) -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    optimizer_class, settings = KINDS[kind]
    net = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB)
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        optimizer_class,
        overlap_with_ddp=hook is not None,
        zero_options=ZeroOptions(clip_norm=clip),
        **settings,
    )
    if hook is not None:
        net.register_comm_hook(None, HOOKS[hook](allreduce_hook, net, zero))
    with Join([net, zero]):
        for number in range(3 + dist.get_rank()):
            zero.zero_grad()
            loss_of(net, dist.get_rank(), number).backward()
            zero.step()
    return net, zero


def joined(kind: str, clip: float | None, hook: str | None) -> tuple[bool, bool, bool]:
    """Say whether parameters are equal, are close, and the state is that of the last rank."""
    plain_net, plain = train_plain(kind, clip)
    net, zero = train_sharded(kind, clip, hook)
    pairs = list(zip(plain_net.parameters(), net.parameters(), strict=True))
    last = dist.get_world_size() - 1
    zero.consolidate_state_dict(to=last)
    exact = dist.get_rank() != last or same(zero.state_dict(), plain.state_dict())
    return (
        all(torch.equal(*both) for both in pairs),
        all(torch.allclose(*both, rtol=1e-3, atol=1e-5) for both in pairs),
        exact,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_inputs(pool: RankPool, kind: str) -> None:
    """Rank r has 3 + r batches; parameters and state end as the plain optimizer's, to the bit."""
    assert pool.run(3, joined, kind, None, None) == [(True, True, True)] * 3


def test_uneven_inputs_with_a_clip_norm(pool: RankPool) -> None:
    """Ranks without batches clip the gradients that they are lent."""
    for _, close, _ in pool.run(3, joined, "own, whole", 0.02, None):
        assert close


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_inputs_with_hooks(pool: RankPool, kind: str, hook: str) -> None:
    """The same inside backward."""
    for _, close, _ in pool.run(3, joined, kind, None, hook):
        assert close
