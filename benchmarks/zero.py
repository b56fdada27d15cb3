"""Training steps with a sharded AdamW: 6 transformer layers of width 384, 10.6M parameters."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import Contender, alternate, rows
from benchmarks.report import Row
from loosestep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from loosestep.testing import run_ranks

WIDTH, LAYERS, HEADS = 384, 6, 6
BATCHES = ((1, 64), (4, 128))  # sequences, tokens in each
AGAINST = ["floor", "DDP", "torch ZeRO"]


class Block(torch.nn.Module):
    """A plain transformer layer, 12 width^2 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attention = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.project = torch.nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = (
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        wide = torch.nn.functional.gelu(self.widen(self.norms[1](x)))
        return torch.add(x, self.narrow(wide))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block() for _ in range(LAYERS)])


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def contenders(batch: tuple[int, int]) -> dict[str, Contender]:
    """Return one training step of every contender, each with a model of its own."""
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(*batch, WIDTH)
    return {
        "compute alone": step_of(inputs, model(), None),
        "AdamW alone": optimizer_of(model()),
        "DDP, no optimizer": step_of(inputs, DistributedDataParallel(model()), None),
        "DDP": with_optimizer(inputs, adamw),
        "torch ZeRO": with_optimizer(inputs, torch_zero),
        "loosestep ZeRO": with_optimizer(inputs, loosestep_zero),
        "hook_with_zero_step": with_hook(inputs, hook_with_zero_step),
        "interleaved": with_hook(inputs, hook_with_zero_step_interleaved),
    }


def torch_zero(net: torch.nn.Module) -> torch.optim.Optimizer:
    return TorchZero(
        net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )


def loosestep_zero(net: torch.nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)


def with_optimizer(
    inputs: torch.Tensor, make: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> Contender:
    net = DistributedDataParallel(model())
    return step_of(inputs, net, make(net))


def with_hook(inputs: torch.Tensor, make_hook: Callable[..., object]) -> Contender:
    net = DistributedDataParallel(model())
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-4, fused=True
    )
    net.register_comm_hook(None, make_hook(allreduce_hook, net, zero))  # type: ignore[arg-type]
    return step_of(inputs, net, zero)


def step_of(
    inputs: torch.Tensor, net: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Contender:
    def step() -> None:
        net.zero_grad()
        net(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def optimizer_of(net: torch.nn.Module) -> Contender:
    optimizer = adamw(net)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return lambda: optimizer.step()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what an optimizer keeps on this rank."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def measure_memory() -> dict[str, int]:
    """Return the state's bytes on the fullest rank, after one step."""
    sizes: dict[str, int] = {}
    for name, make in {"DDP": adamw, "loosestep ZeRO": loosestep_zero}.items():
        net = DistributedDataParallel(model())
        optimizer = make(net)
        step_of(torch.randn(1, 4, WIDTH), net, optimizer)()
        size = torch.tensor(state_bytes(optimizer))
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        sizes[name] = int(size)
    return sizes


def memory_rows(world_size: int) -> list[Row]:
    sizes = run_ranks(world_size, measure_memory, timeout=300)[0]
    condition = f"{world_size} ranks, optimizer state"
    return [
        Row(condition, name, size / 1e6, (size / 1e6,) * 2, {"DDP": sizes["DDP"] / size}, "MB")
        for name, size in sizes.items()
    ]


def measure(batch: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Time all contenders in turn; the floor is DDP without an optimizer and 1/n of AdamW."""
    seconds = alternate(contenders(batch), rounds)
    share = statistics.median(seconds["AdamW alone"]) / dist.get_world_size()
    return {"floor": [bare + share for bare in seconds["DDP, no optimizer"]], **seconds}


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        result += memory_rows(world_size)
        for batch in BATCHES:
            seconds = run_ranks(
                world_size, measure, batch, rounds, timeout=1200, group_timeout=120
            )[0]
            condition = f"{world_size} ranks, {batch[0]}x{batch[1]} tokens"
            result += rows(condition, seconds, AGAINST)
    return result
