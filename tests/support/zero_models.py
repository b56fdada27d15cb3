"""Models for the tests of sharded steps inside backward: each layer fills a DDP bucket."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 40
BUCKET_MB = 0.005  # less than a layer's gradients


class Layers(torch.nn.Module):
    """Five layers; ``step`` is the iteration, for the models that look at it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias) for _ in range(5))
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Experts(Layers):
    """Layers of which every rank uses others, and one that is used on even steps only."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second, third, rare, last = self.layers
        inputs = first(inputs)
        if (self.step + dist.get_rank()) % 2:
            inputs = second(inputs)
        if dist.get_rank() == 0:
            inputs = third(inputs)
        if self.step % 2 == 0:
            inputs = rare(inputs)
        output: torch.Tensor = last(inputs)
        return output


class Idle(Layers):
    """Layers of which one is used by nobody, ever."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(WIDTH))


class TwoDtypes(Layers):
    """Every second layer in double precision."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1::2]:
            layer.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))  # type: ignore[arg-type]
        return inputs


class Recomputed(Layers):
    """Layers whose activations are computed again in backward."""

    reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(checkpoint(layer, inputs, use_reentrant=self.reentrant))
        return inputs


class Reentrant(Recomputed):
    """The same, by a backward inside backward."""

    reentrant = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.requires_grad_())


class Tied(Layers):
    """The first layer's weight is also the last's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(super().forward(inputs), self.layers[0].weight)  # type: ignore[arg-type]


class Images(torch.nn.Module):
    """A convolution in channels_last, batch normalisation and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(4, 12, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(12)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.last = torch.nn.Conv2d(12, 4, 3, padding=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.view(-1, 4, 2, 5).contiguous(memory_format=torch.channels_last)
        output: torch.Tensor = self.last(self.scale * self.norm(self.convolution(images)))
        return output


class Many(torch.nn.Module):
    """More parameters than buckets may be under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.nn.ParameterList(torch.ones(WIDTH) for _ in range(150))
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            inputs = inputs * factor
        return inputs


def compiled() -> torch.nn.Module:
    """Return layers whose whole backward is one node of the graph."""
    model = torch.compile(Layers(), backend="aot_eager")
    assert isinstance(model, torch.nn.Module)
    return model


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "layers": Layers,
    "matrices": lambda: Layers(bias=False),
    "experts": Experts,
    "idle": Idle,
    "two dtypes": TwoDtypes,
    "recomputed": Recomputed,
    "reentrant": Reentrant,
    "tied": Tied,
    "images": Images,
    "many": Many,
    "compiled": compiled,
}
