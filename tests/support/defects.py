"""The two libraries under one set of names, and what a test expects of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import (
    hierarchical_model_averager as torch_hierarchical,
)
from torch.distributed.algorithms.model_averaging import utils as torch_utils
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import attach, post_local_sgd
from loosestep.testing import RanksFailed


class TorchNames:
    """Torch's in-tree code."""

    average_parameters = staticmethod(torch_utils.average_parameters)
    PeriodicModelAverager = torch_averagers.PeriodicModelAverager
    HierarchicalModelAverager = torch_hierarchical.HierarchicalModelAverager
    PostLocalSGDState = torch_hook.PostLocalSGDState
    post_localSGD_hook = staticmethod(torch_hook.post_localSGD_hook)  # noqa: N815 (torch's name)

    @property
    def PostLocalSGDOptimizer(self) -> Any:
        # Importing it compiles a dozen optimizers: a second, in every rank that starts.
        return importlib.import_module("torch.distributed.optim").PostLocalSGDOptimizer


both = pytest.mark.parametrize("name", ["torch", "loosestep"])
all_three = pytest.mark.parametrize("name", ["torch", "loosestep", "attach"])


def library(name: str) -> Any:
    """Return torch's in-tree code or ours; both have the same names."""
    return TorchNames() if name == "torch" else loosestep


@contextmanager
def torch_fails(name: str, match: str = "") -> Iterator[None]:
    """Expect the block to pass, but with torch to fail: the control that the test can fail."""
    if name != "torch":
        yield
        return
    with pytest.raises((AssertionError, RanksFailed), match=match):
        yield


def attempt(name: str, body: Callable[..., Any], *args: Any) -> Any:
    """Run a body in which torch raises on every rank, and have the text: a rank that fails dies."""
    if name != "torch":
        return body(name, *args)
    try:
        return body(name, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def scalar() -> torch.nn.Parameter:
    """Return a parameter that holds this rank's number, with a gradient."""
    parameter = torch.nn.Parameter(torch.tensor(float(dist.get_rank())))
    parameter.grad = torch.zeros(())
    return parameter


class Loop:
    """A DDP model in post-local SGD whose gradients stay local after the warm-up.

    It averages after ``warmup_steps + period`` steps for the first time, with every contender.
    """

    def __init__(self, name: str, model: torch.nn.Module, period: int, warmup_steps: int) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        self.run = None
        if name == "attach":
            strategy = post_local_sgd(period, warmup_steps=warmup_steps, gradients=None)
            self.run = attach(self.model, self.optimizer, strategy)
        else:
            self._wrap(name, period, warmup_steps)

    def _wrap(self, name: str, period: int, warmup_steps: int) -> None:
        names, first = library(name), warmup_steps + period - 1
        ours = {} if name == "torch" else {"module": self.model}
        averager = names.PeriodicModelAverager(period, warmup_steps=first, **ours)
        clock = {} if name == "torch" else {"clock": averager.clock}
        state = names.PostLocalSGDState(
            None, None, warmup_steps, post_local_gradient_allreduce=False, **clock
        )
        self.model.register_comm_hook(state, names.post_localSGD_hook)
        self.optimizer = names.PostLocalSGDOptimizer(self.optimizer, averager)

    def backward(self, inputs: torch.Tensor) -> None:
        self.model(inputs).sum().backward()
