"""A small modern transformer: RMS norms, rotary positions, gated linear units, tied embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from loosestep.lab.trainer.mistakes import BadInput


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a transformer is."""

    context: int  # positions that it sees
    width: int  # numbers at every position
    depth: int  # layers
    heads: int

    def __post_init__(self) -> None:
        """Refuse what makes no transformer."""
        for name in ("context", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise BadInput(
                f"--width must be a multiple of twice --heads: {self.width} is none of "
                f"{2 * self.heads}; give --width {round_up(self.width, 2 * self.heads)}"
            )


class Transformer(torch.nn.Module):
    """Predicts the next of ``vocabulary`` symbols at every position."""

    def __init__(self, vocabulary: int, shape: Shape) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, shape.width)
        layers = [Layer(shape) for _ in range(shape.depth)]
        self.layers = torch.nn.ModuleList(layers)
        self.norm = torch.nn.RMSNorm(shape.width)
        self.angles: torch.Tensor
        angles = rotations(shape.context, shape.width // shape.heads)
        self.register_buffer("angles", angles, persistent=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        for layer in layers:  # so that depth does not grow the sum of all layers
            for weight in (layer.project.weight, layer.narrow.weight):
                torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.depth))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next symbol at every position."""
        x = self.embedding(symbols)
        for layer in self.layers:
            x = layer(x, self.angles[: symbols.shape[1]])
        return F.linear(self.norm(x), self.embedding.weight)


class Layer(torch.nn.Module):
    """Attention to what came before, then a gated linear unit, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, round_up(shape.width * 8 // 3, 8)
        self._heads = shape.heads
        self.before_attention, self.before_unit = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attend = torch.nn.Linear(width, 3 * width, bias=False)
        self.project = torch.nn.Linear(width, width, bias=False)
        self.widen = torch.nn.Linear(width, 2 * hidden, bias=False)
        self.narrow = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input."""
        x = x + self.project(self._attention(self.before_attention(x), angles))
        value, gate = self.widen(self.before_unit(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.narrow(value * F.silu(gate))
        return result

    def _attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, angles), rotate(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


def rotations(context: int, size: int, base: float = 10_000.0) -> torch.Tensor:
    """Return cosines and sines by position: [context, 2, size // 2]."""
    speeds = base ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(context)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of numbers by an angle that grows with the position."""
    cosine, sine = angles.to(x.dtype).unbind(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple.

    >>> round_up(341, 8)
    344
    """
    return -(-number // multiple) * multiple
