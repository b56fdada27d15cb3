"""The same training twice: a plain optimizer and a sharded one, each on a DDP model of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import ZeroOptions, ZeroRedundancyOptimizer

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
Settings = dict[str, Any]


class Odd(torch.nn.Module):
    """Odd sizes, a scalar, a channels_last weight; with ``mixed`` three dtypes."""

    def __init__(self, *, mixed: bool = False) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 7, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(63, 37)
        self.narrow = torch.nn.Linear(37, 5, dtype=torch.bfloat16 if mixed else torch.float32)
        self.last = torch.nn.Linear(5, 3, dtype=torch.float64 if mixed else torch.float32)
        self.gain = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.conv(images)).flatten(1)
        hidden = torch.tanh(self.wide(hidden)) * self.gain
        hidden = torch.tanh(self.narrow(hidden.to(self.narrow.weight.dtype)))
        return self.last(hidden.to(self.last.weight.dtype)).float()


class Matrices(torch.nn.Module):
    """Parameters of two dimensions only."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(75, 21, bias=False)
        self.two = torch.nn.Linear(21, 13, bias=False)
        self.three = torch.nn.Linear(13, 3, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.one(images.flatten(1)))
        return self.three(torch.tanh(self.two(hidden)))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "odd": Odd,
    "mixed": lambda: Odd(mixed=True),
    "matrices": Matrices,
}


def make_model(name: str = "odd") -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of the same batch for the same rank and step, in any process."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(4, 3, 5, 5, generator=generator)
    labels = torch.randint(0, 3, (4,), generator=generator)
    return torch.nn.functional.cross_entropy(model(images), labels)


class Pair:
    """A model under DDP with a plain optimizer, and its twin with a sharded one."""

    def __init__(
        self,
        plain: Make,
        zero: Make,
        model: str = "odd",
        group: dist.ProcessGroup | None = None,
        prepare: Callable[[torch.nn.Module], object] = lambda model: None,
    ) -> None:
        self.rank = dist.get_rank(group)
        modules = [make_model(model) for _ in range(2)]
        for module in modules:
            prepare(module)
        self.nets = [DistributedDataParallel(module, process_group=group) for module in modules]
        self.plain = plain(modules[0])
        self.zero = zero(modules[1])
        self.places = self._places()

    @property
    def sides(self) -> list[tuple[DistributedDataParallel, torch.optim.Optimizer]]:
        return list(zip(self.nets, [self.plain, self.zero], strict=True))

    def backward(self, number: int) -> None:
        for net, _ in self.sides:
            loss_of(net, self.rank, number).backward()

    def step(self, number: int) -> bool:
        """Train both by one batch; say whether they are still the same to the bit."""
        for net, optimizer in self.sides:
            optimizer.zero_grad()
            loss_of(net, self.rank, number).backward()
            optimizer.step()
        return self.same()

    def train(self, steps: int = 5) -> bool:
        """Say whether both are the same after every step, and parameters lie where they lay."""
        same = [self.step(number) for number in range(steps)]  # all: the other ranks go on too
        return all(same) and self.places == self._places()

    def same(self) -> bool:
        return all(torch.equal(one, other) for one, other in self._pairs())

    def close(self) -> bool:
        return all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in self._pairs())

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one, other = (list(net.parameters()) for net in self.nets)
        return list(zip(one, other, strict=True))

    def _places(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(p.data_ptr(), p.stride()) for p in self.nets[1].parameters()]


def pair(
    optimizer_class: type[torch.optim.Optimizer],
    settings: Settings | None = None,
    model: str = "odd",
    options: ZeroOptions | None = None,
    **more: Any,
) -> Pair:
    """Return a pair with one parameter group."""
    given = settings or {}
    group = more.get("group")
    return Pair(
        lambda module: optimizer_class(module.parameters(), **given),
        lambda module: ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class, group, zero_options=options, **given
        ),
        model,
        **more,
    )


class OwnSign(torch.optim.Optimizer):
    """A user's optimizer, elementwise, that counts steps in a plain number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    state["count"] = state.get("count", 0) + 1
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.add_(mean.sign(), alpha=-group["lr"] / state["count"])


class OwnTrust(torch.optim.Optimizer):
    """A user's optimizer that looks at whole parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = (parameter.norm() + 1) / (parameter.grad.norm() + 1)
                    parameter.sub_(group["lr"] * trust * parameter.grad)


class OwnHeun(torch.optim.Optimizer):
    """A user's optimizer that evaluates the closure twice a step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> float:  # type: ignore[override]
        losses = []
        for _ in range(2):
            with torch.enable_grad():
                losses.append(closure())
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"] / 2)
        return losses[0]


def same(one: Any, other: Any) -> bool:
    """Say whether two values are equal to the bit, with dtype and strides."""
    if isinstance(one, torch.Tensor):
        layout = (one.dtype, one.stride()) == (other.dtype, other.stride())
        return layout and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other
