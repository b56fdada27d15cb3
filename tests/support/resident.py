"""A model and its loss for gradients that live in shared memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Mixed(torch.nn.Module):
    """Several dtypes, a matrix that is not contiguous, a large one, a scalar, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(8, 4099)  # from here on copies go past the caches
        self.turned = torch.nn.Parameter(torch.randn(4099, 5).div(64).t())
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.narrow = torch.nn.Parameter(torch.randn(5).bfloat16())
        self.short = torch.nn.Parameter(torch.randn(5).half())
        self.wide = torch.nn.Parameter(torch.randn(5).double())
        self.none = torch.nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) @ self.turned.t() * self.scale
        result: torch.Tensor = (y + self.narrow + self.short + self.wide).square().mean()
        return result + self.none.sum()


def loss_of(net: torch.nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    torch.manual_seed(1000 * step + 10 * dist.get_rank() + micro)
    loss: torch.Tensor = net(torch.randn(3, 8))
    return loss


def backward(net: torch.nn.Module, run: Any, step: int, loop: str) -> None:
    """Run the backward passes of a step as some loop does."""
    if loop == "micro-batches":
        with run.no_sync():
            loss_of(net, step).backward()
            loss_of(net, step, 1).backward()
    if loop == "two losses":
        loss_of(net, step, 1).backward()
    loss_of(net, step, 2).backward()
    if loop == "clipped":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
