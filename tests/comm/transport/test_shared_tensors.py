"""Sharded optimizers through shared memory where processes may not read each other's."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import ZeroRedundancyOptimizer, hook_with_zero_step
from loosestep.testing import RankPool
from tests.support.oracle import loss_of, make_net, snapshot


def train(read: str, with_hook: str) -> tuple[dict[str, torch.Tensor], bool, int]:
    """Train with a sharded optimizer; say whether neighbours were read, and what was sent."""
    os.environ["LOOSESTEP_READ_MEMORY"] = read
    net = DistributedDataParallel(make_net())
    group = dist.new_group(list(range(dist.get_world_size())))
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.AdamW,
        process_group=group,
        overlap_with_ddp=with_hook == "hook",
        lr=0.05,
    )
    if with_hook == "hook":
        net.register_comm_hook(None, hook_with_zero_step(allreduce_hook, net, zero))
    for step in range(6):
        zero.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        zero.step()
    del os.environ["LOOSESTEP_READ_MEMORY"]
    shared = zero.wire.parameter_peers.shared_memory
    return snapshot(net), shared.readable, zero.wire.take_moved().bytes_sent


@pytest.mark.parametrize("with_hook", ["hook", "step"])
@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_lent_as_copies_where_reading_is_forbidden(
    pool: RankPool, world: int, with_hook: str
) -> None:
    """A kernel that forbids reading other processes changes the way and not the values."""
    read = pool.run(world, train, "1", with_hook)
    lent = pool.run(world, train, "0", with_hook)
    for (one, was_read, _), (other, was_lent, sent) in zip(read, lent, strict=True):
        assert was_read
        assert not was_lent
        assert sent == 0
        names = [name for name in one if "running" not in name]
        same = torch.equal if world == 2 else torch.allclose
        assert all(same(one[name], other[name]) for name in names)
