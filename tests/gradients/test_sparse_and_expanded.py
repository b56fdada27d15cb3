"""Sparse gradients and expanded parameters are refused where they are given, or are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    Strategy,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    ddp,
    gradient_hook,
    hook_with_zero_step,
    post_local_sgd,
    zero,
)
from loosestep.reducers import Mean, SharedMemoryMean
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

STRATEGIES = [ddp(), ddp(gradient_reducer=Mean()), ddp(gradient_reducer=SharedMemoryMean())]
SPARSE = r"'embedding.weight' is sparse, by sparse=True; only dense .*sparse=False, or attach a DDP"


class Words(torch.nn.Module):
    """An embedding with sparse gradients, by the module or by the function."""

    def __init__(self, by_function: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_function = by_function
        self.embedding = torch.nn.Embedding(5, 4, sparse=not by_function)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the sum of some squares."""
        found = torch.nn.functional.embedding(words, self.embedding.weight, sparse=True)
        return found.square().sum()


def step(model: torch.nn.Module, strategy: Strategy | None) -> torch.Tensor:
    """Return the parameters after one step on this rank's words."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = None if strategy is None else attach(model, optimizer, strategy)
    model(torch.tensor([dist.get_rank(), 2])).backward()
    optimizer.step()
    if run is not None:
        run.finalize()
        run.detach()
    return next(model.parameters()).detach().clone()


def sparse_gradients() -> None:
    for strategy in STRATEGIES:
        with pytest.raises(NotAttachable, match=SPARSE):
            step(Words(), strategy)
    with pytest.raises(TypeError, match=r"shape \(5, 4\) is torch.sparse_coo; only dense"):
        step(Words(by_function=True), ddp())
    for strategy in STRATEGIES[1:]:
        with pytest.raises(NotAttachable, match="sparse=True"):
            step(DistributedDataParallel(Words()), strategy)
    # What shares nothing, or as DDP does, goes on.
    wrapped = step(DistributedDataParallel(Words()), None)
    torch.testing.assert_close(step(DistributedDataParallel(Words()), ddp()), wrapped)
    step(Words(), post_local_sgd(period=1, gradients=None))


def sparse_gradients_in_hooks() -> None:
    model = DistributedDataParallel(Words())
    model.register_comm_hook(*gradient_hook(Mean()))
    with pytest.raises(TypeError, match=r"bucket 0 is torch.sparse_coo; only dense"):
        model(torch.tensor([1])).backward()
    model = DistributedDataParallel(Words())
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(NotAttachable, match="sparse=True"):
        hook_with_zero_step(allreduce_hook, model, sharded)
    words = Words()
    sharded = ZeroRedundancyOptimizer(words.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(NotAttachable, match="sparse=True"):
        attach(words, sharded, zero())


class Expanded(torch.nn.Module):
    """A parameter, and a buffer, of four elements that are one."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        one = torch.ones(1).expand(4)
        if trained:
            self.scale = torch.nn.Parameter(one)
        else:
            self.register_buffer("scale", one)


def expanded_tensors() -> None:
    text = r"scale' was expanded: .*shape \(4,\), strides \(0,\).* make it with .contiguous"
    for trained in (True, False):
        for strategy in (ddp(), post_local_sgd(period=2)):
            model = Expanded(trained)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ValueError, match=text):
                attach(model, optimizer, strategy)
    with pytest.raises(ValueError, match="was expanded"):
        average_([torch.ones(1).expand(4)])
    value = torch.full((1, 4), float(dist.get_rank())).expand(1, 4)  # nothing is there twice
    average_([value])
    assert value.tolist() == [[0.5] * 4]


def test_sparse_gradients_are_refused_or_shared(pool: RankPool) -> None:
    """What packs gradients refuses a sparse embedding at attach; DDP's own way takes it."""
    pool.run(2, sparse_gradients)


def test_sparse_gradients_are_refused_by_hooks(pool: RankPool) -> None:
    """Hooks of DDP that pack gradients say so too."""
    pool.run(2, sparse_gradients_in_hooks)


def test_expanded_tensors_are_refused(pool: RankPool) -> None:
    """A tensor whose elements share memory cannot be written, and is named."""
    pool.run(2, expanded_tensors)
