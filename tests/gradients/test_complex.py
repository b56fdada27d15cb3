"""Complex parameters: exact means keep both parts, and what compresses real numbers is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    PeerLost,
    Strategy,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    gradient_hook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    post_local_sgd,
    zero,
)
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.gradients import reductions
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int8,
    Mean,
    Reducer,
    SharedMemoryMean,
    Ternary,
    TwoLevel,
)
from loosestep.testing import RankPool

STEPS = 3
EXACT: dict[str, Reducer | None] = {
    "backend": None,
    "mean": Mean(),
    "resident": SharedMemoryMean(),
    "two levels": TwoLevel(ranks_per_host=2),
}
LOSSY: list[Reducer] = [
    Int8(),
    Cast(torch.bfloat16),
    ErrorFeedback(Int8()),
    TwoLevel(Ternary(), inside=SharedMemoryMean(), ranks_per_host=2),
]


class Waves(torch.nn.Module):
    """Complex parameters among real ones, in several buckets of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 140_000, 5]
        self.waves = torch.nn.ParameterList(
            torch.zeros(size, dtype=torch.complex64) for size in sizes
        )
        self.heights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, factor: float) -> torch.Tensor:
        """Return what has the gradients ``factor * (1 + 2j)`` and ``factor``."""
        complex_ones = torch.stack([wave.sum() for wave in self.waves]).sum()
        real_ones = torch.stack([height.sum() for height in self.heights]).sum()
        return factor * ((complex_ones * (1 - 2j)).real + real_ones)


def went_to(net: torch.nn.Module) -> set[complex]:
    assert all(p.eq(p[0]).all() for p in net.parameters())
    return {p[0].item() for p in net.parameters()}


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> set[complex]:
    """Take steps of size 1 along gradients that grow with rank and step."""
    for step in range(STEPS):
        net.zero_grad()
        net((1 + dist.get_rank()) * 2.0**step).backward()
        if optimizer is not None:
            optimizer.step()
    return went_to(net)


# Factors are 1 to 4 on the four ranks, so the three steps have the means 2.5, 5 and 10: 17.5.
EXPECTED = {-17.5 - 35j, -17.5}


def attached(strategy: Strategy, wrapped: bool) -> set[complex]:
    net: torch.nn.Module = Waves()
    if wrapped:
        net = DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if strategy.sharding is not None:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0)
    with attach(net, optimizer, strategy) as run:
        train(net, optimizer)
        run.finalize()
    return went_to(net)


def every_exact_way() -> dict[str, set[complex]]:
    results = {}
    for name, reducer in EXACT.items():
        for wrapped in (False, True):
            results[f"{name} {wrapped}"] = attached(ddp(gradient_reducer=reducer), wrapped)
    for wrapped in (False, True):
        results[f"zero {wrapped}"] = attached(zero(stage=1), wrapped)
    results["stage 2"] = attached(zero(stage=2), False)
    for overlap in (0, 1):
        local = post_local_sgd(period=2, gradients=None, overlap_steps=overlap)
        results[f"averages, overlap {overlap}"] = attached(local, False)
    return results


def test_exact_means_keep_both_parts(pool: RankPool) -> None:
    """Whatever shares gradients or averages parameters, plain or under DDP, on one host or two."""
    for results in pool.run(4, every_exact_way):
        for name, result in results.items():
            assert result == EXPECTED, name


def hooked(make: Callable[[DistributedDataParallel], torch.optim.Optimizer | None]) -> set[complex]:
    net = DistributedDataParallel(Waves(), bucket_cap_mb=1)
    return train(net, make(net))


def by_gradient_hook(net: DistributedDataParallel) -> torch.optim.Optimizer:
    net.register_comm_hook(*gradient_hook(Mean()))
    return torch.optim.SGD(net.parameters(), lr=1.0)


def by_zero_hook(
    hook: Callable[..., Callable[..., Any]], given: Callable[..., object]
) -> Callable[[DistributedDataParallel], None]:
    def register(net: DistributedDataParallel) -> None:
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0
        )
        net.register_comm_hook(None, hook(given, net, optimizer))

    return register


def own_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Let DDP's hook be one that we do not know."""
    return allreduce_hook(state, bucket)


def every_hook() -> list[set[complex]]:
    results = [hooked(by_gradient_hook)]
    for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for given in (allreduce_hook, own_hook):
            results.append(hooked(by_zero_hook(hook, given)))
    return results


def test_the_hooks_of_ddp_keep_both_parts(pool: RankPool) -> None:
    """DDP hands complex gradients out as pairs of real ones."""
    for results in pool.run(4, every_hook):
        assert results == [EXPECTED] * 5


def refusals() -> list[str]:
    said = []
    for reducer in LOSSY:
        for wrapped in (False, True):
            try:
                attached(ddp(gradient_reducer=reducer), wrapped)
            except NotAttachable as error:
                said.append(str(error))
    return said


def test_what_compresses_real_numbers_is_refused_at_attach(pool: RankPool) -> None:
    """With the reducer, the parameter and both ways out."""
    for said in pool.run(2, refusals):
        assert len(said) == 2 * len(LOSSY)
        for text in said:
            assert "complex64" in text
            assert "Mean()" in text
            assert "view_as_real" in text


def hooks_refuse() -> list[str]:
    said = []
    for reducer in LOSSY:
        if reducer.resident:
            continue  # that is refused by gradient_hook itself
        net = DistributedDataParallel(Waves(), bucket_cap_mb=1)
        net.register_comm_hook(*gradient_hook(reducer))
        try:
            net(1.0).backward()
        except NotAttachable as error:
            said.append(str(error))
    return said


def test_a_hook_that_compresses_refuses_them_in_backward(pool: RankPool) -> None:
    """It sees the parameters there first; the error is that of attach, and nobody waits."""
    for said in pool.run(2, hooks_refuse):
        assert len(said) == 3
        for text in said:
            assert "complex64" in text
            assert "Mean()" in text
            assert "view_as_real" in text


@dataclass(frozen=True)
class Stuck(Mean):
    """A reducer that never comes back, until somebody lets it go."""

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        LET_GO.wait()
        return super().start(buffer, peers, state, place)


LET_GO = threading.Event()
PATIENCE = 5.0  # seconds for every message


def stuck(wrapped: bool) -> str:
    LET_GO.clear()
    net: torch.nn.Module = Waves()
    net = DistributedDataParallel(net) if wrapped else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    said = ""
    with (
        # Messages have their time, also on a busy machine; the wait for the thread is shorter.
        mock.patch.object(reductions, "SLACK_SECONDS", 0.3 - 2 * PATIENCE),
        attach(net, optimizer, ddp(gradient_reducer=Stuck()), timeout=PATIENCE),
    ):
        try:
            net(1.0).backward()
        except PeerLost as error:
            said = str(error)
        LET_GO.set()
    return said


def test_backward_does_not_wait_for_ever_for_a_reduction(pool: RankPool) -> None:
    """The time-out bounds that wait too; who was slower than the others hears it from them."""
    for wrapped in (False, True):
        said = pool.run(2, stuck, wrapped)
        assert any("the reduction has not ended within 0.3 s" in text for text in said), said
        for text in said:
            assert "sharing gradients" in text
            assert "has not ended within" in text or "gave this rank up" in text
