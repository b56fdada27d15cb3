"""The post-local SGD communication hook for DistributedDataParallel."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from loosestep.clock import Clock
from loosestep.errors import warn_once
from loosestep.groups import own_group, require_process_group, world_group
from loosestep.hooks.gradients import finished, mean_future
from loosestep.peers import peers_of
from loosestep.places import host_key

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """Share gradients with ``process_group`` for ``start_localSGD_iter`` steps, then locally.

    Afterwards they are shared inside ``subgroup`` only (None: the ranks of this host, found now
    and not hours later inside backward), or not at all if ``post_local_gradient_allreduce`` is
    off. Without ``clock`` the state counts backward passes, which is more than steps under
    gradient accumulation: give it the averager's clock.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
        *,
        clock: Clock | None = None,
    ) -> None:
        require_process_group()
        if start_localSGD_iter < 0:
            raise ValueError(f"start_localSGD_iter must be >= 0, got {start_localSGD_iter}")
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.clock = Clock() if clock is None else clock
        self._counts = clock is None
        if clock is None:
            warn_once(
                "clock",
                "PostLocalSGDState counts backward passes, an averager counts steps: with "
                "gradient accumulation they part. Pass clock=averager.clock, or use "
                "loosestep.attach",
            )
        if subgroup is None and post_local_gradient_allreduce:
            self.subgroup = _host_group(process_group)

    @property
    def iter(self) -> int:
        """How many steps (without a clock: backward passes) are finished."""
        return self.clock.step

    @iter.setter
    def iter(self, value: int) -> None:
        self.clock.step = value

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a backward pass at its last bucket, unless somebody else's clock counts."""
        if self._counts and bucket.is_last():
            self.clock.tick()
            if self.iter == self.start_localSGD_iter:
                logger.info("gradients stay local from step %d on", self.iter)

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the settings; no process groups, no pickle."""
        return {
            "iter": self.iter,
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; the process groups stay the current ones."""
        self.clock.load_state_dict({"step": state_dict["iter"]})
        self.start_localSGD_iter = state_dict["start_localSGD_iter"]
        self.post_local_gradient_allreduce = state_dict["post_local_gradient_allreduce"]


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the world during the warm-up, over the subgroup afterwards.

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100, clock=averager.clock)
        ddp_model.register_comm_hook(state, post_localSGD_hook)
    """
    warming_up = state.iter < state.start_localSGD_iter
    if warming_up:
        state.maybe_increase_iter(bucket)
        return mean_future(bucket.buffer(), state.process_group)
    if not state.post_local_gradient_allreduce:
        return finished(bucket.buffer())
    return mean_future(bucket.buffer(), state.subgroup)


def _host_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group of the ranks on this host; collective over ``process_group``."""
    group = world_group() if process_group is None else process_group
    peers = peers_of(group)
    hosts = [name.decode() for name in peers.exchange(host_key().encode())]
    ranks = zip(peers.global_ranks, hosts, strict=True)
    mine = tuple(rank for rank, host in ranks if host == host_key())
    return group if len(mine) == peers.size else own_group(mine)
