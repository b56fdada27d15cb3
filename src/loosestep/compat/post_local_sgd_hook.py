"""The post-local SGD communication hook for DistributedDataParallel."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as in_torch

from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.peers import Phase
from loosestep.comm.transport.meeting import host_key
from loosestep.errors import check_instance, check_whole, warn_once
from loosestep.gradients.backward import Landing
from loosestep.gradients.sharing import finished, mean_future, wait_for
from loosestep.strategy.clock import Clock

logger = logging.getLogger(__name__)


class PostLocalSGDState(in_torch.PostLocalSGDState):
    """Share gradients with ``process_group`` for ``start_localSGD_iter`` steps, then locally.

    Afterwards they are shared inside ``subgroup`` only (None: the ranks of this host), or not at
    all if ``post_local_gradient_allreduce`` is off. The ranks of this host are found now, or in
    the first backward where there is no process group yet, and not hours later. Without ``clock``
    the state counts backward passes, which is more than steps under gradient accumulation: give it
    the averager's clock.
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
        # Not torch's __init__, which would set a clock to 0 that somebody else may count by.
        for name, group in (("process_group", process_group), ("subgroup", subgroup)):
            if group is not None:
                check_instance(name, group, dist.ProcessGroup, "a process group or None")
        check_whole("start_localSGD_iter", start_localSGD_iter)
        check_instance(
            "post_local_gradient_allreduce", post_local_gradient_allreduce, bool, "True or False"
        )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.clock = Clock() if clock is None else clock
        self.landing = Landing()
        self._counts = clock is None
        if clock is None:
            warn_once(
                "clock",
                "PostLocalSGDState counts backward passes, an averager counts steps: with "
                "gradient accumulation they part. Pass clock=averager.clock, or use "
                "loosestep.attach",
            )
        if dist.is_available() and dist.is_initialized():
            _find_subgroup(self)

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
    state: in_torch.PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the world during the warm-up, over the subgroup afterwards.

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100, clock=averager.clock)
        ddp_model.register_comm_hook(state, post_localSGD_hook)
    """
    _find_subgroup(state)  # in the first bucket of the first backward, where it was not found yet
    step = state.iter
    warming_up = step < state.start_localSGD_iter
    if warming_up:
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call] # in torch
    elif not state.post_local_gradient_allreduce:
        return finished(bucket.buffer())
    group = state.process_group if warming_up else state.subgroup
    future = mean_future(bucket.buffer(), group)
    if isinstance(state, PostLocalSGDState):  # torch's own has no room: DDP words its errors
        peers = peers_of(world_group() if group is None else group)
        peers = peers.during(Phase("sharing gradients", step=step))
        state.landing.add(bucket, lambda: wait_for(future, peers))
    return future


def _find_subgroup(state: in_torch.PostLocalSGDState) -> None:
    """Let a state share inside this host where nobody said with whom; the first time collective."""
    if state.subgroup is None and state.post_local_gradient_allreduce:
        state.subgroup = _host_group(state.process_group)


def _host_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group of the ranks on this host; collective over ``process_group``."""
    group = world_group() if process_group is None else process_group
    peers = peers_of(group)
    hosts = [name.decode() for name in peers.exchange(host_key().encode())]
    ranks = zip(peers.global_ranks, hosts, strict=True)
    mine = tuple(rank for rank, host in ranks if host == host_key())
    return group if len(mine) == peers.size else Group.make(mine).hand_over()
