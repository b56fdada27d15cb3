"""Compressed means by plain tensor code, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def by_steps(x: torch.Tensor, most: int, block: int) -> torch.Tensor:
    out = []
    for lot in x.split(block):
        scale = lot.abs().max() / most
        out.append(torch.round(lot / scale) * scale if scale > 0 else lot * 0)
    return torch.cat(out)


def by_levels(x: torch.Tensor) -> torch.Tensor:
    out = []
    for lot in x.split(256):
        rms = lot.double().square().mean().sqrt().float()
        size = torch.where(lot.abs() > 0.9816 * rms, 1.510 * rms, 0.4528 * rms)
        out.append(torch.where(lot < 0, -size, size))
    return torch.cat(out)


def by_signs(x: torch.Tensor) -> torch.Tensor:
    out = []
    for lot in x.split(256):
        rms = lot.double().square().mean().sqrt().float()
        out.append(torch.where(lot.abs() > 0.612 * rms, lot.sign() * (1.224 * rms), 0.0))
    return torch.cat(out)


def by_size(x: torch.Tensor, density: float) -> torch.Tensor:
    out = torch.zeros_like(x)
    for lot, kept in zip(x.split(4096), out.split(4096), strict=True):
        wanted = max(1, math.ceil(round(density * lot.numel(), 6)))
        order = lot.abs().sort(descending=True, stable=True).indices[:wanted]
        kept[order] = lot[order]
    return out


def in_two_bits(x: torch.Tensor, density: float) -> torch.Tensor:
    """Replace what is left of every chunk by one of its two mean magnitudes, with its sign."""
    out = by_size(x, density)
    for lot, sparse in zip(x.split(4096), out.split(4096), strict=True):
        wanted = max(1, math.ceil(round(density * lot.numel(), 6)))
        order = lot.abs().sort(descending=True, stable=True).indices[:wanted]
        sizes = lot[order].abs().double()
        above = sizes > halved(sizes) / wanted
        many = int(above.sum())
        low, high = halved(sizes * ~above) / max(1, wanted - many), halved(sizes * above)
        level = torch.where(above, high / max(1, many), low).float()
        sparse[order] = torch.where(lot[order] < 0, -level, level)
    return out


def halved(x: torch.Tensor) -> torch.Tensor:
    """Add the values of their places, each half to the other."""
    while x.numel() & (x.numel() - 1):
        x = torch.cat([x, x.new_zeros(1)])
    while x.numel() > 1:
        x = x[: x.numel() // 2] + x[x.numel() // 2 :]
    return x[0]


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda x: by_steps(x, 127, 256),
    "int8 of 7": lambda x: by_steps(x, 127, 7),
    "int4": lambda x: by_steps(x, 7, 256),
    "int2": by_levels,
    "ternary": by_signs,
    "topk": lambda x: by_size(x, 0.1),
    "topk back": lambda x: by_size(x, 0.1),
    "all": lambda x: x,
    "topk in 2 bits": lambda x: in_two_bits(x, 0.1),
    "sparseloco": lambda x: in_two_bits(x, 64 / 4096),
}
# No means come back, so they lose nothing.
GATHERED = {"topk", "all", "topk in 2 bits", "sparseloco"}


def of_tensors(
    loss: Callable[[torch.Tensor], torch.Tensor], sizes: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what does to each tensor of a flat buffer what ``loss`` does."""
    return lambda x: torch.cat([loss(tensor) for tensor in x.split(list(sizes))])


def oracle(
    replicas: Sequence[torch.Tensor],
    name: str,
    weights: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return what all ranks must hold: values are lossy on the way there and on the way back.

    Between two ranks, and where messages are gathered, there is no way back.
    """
    size, numel, dtype = len(replicas), replicas[0].numel(), replicas[0].dtype
    if size == 1:
        return replicas[0]
    given = weights or [1.0] * size
    if numel == 0:
        return replicas[0]
    loss = of_tensors(LOSSES[name], sizes or [numel])
    total = torch.zeros(numel)
    for replica, weight in zip(replicas, given, strict=True):
        if weight > 0:
            share = torch.tensor(weight / sum(given), dtype=torch.float32)
            total = total + share * loss(replica.float())
    return (total if size == 2 or name in GATHERED else loss(total)).to(dtype)
