"""Infinities and NaN, which a compressing reducer cannot send: found before anything moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loosestep.binding import Header
from loosestep.errors import NotFinite
from loosestep.peers import Peers
from loosestep.tensors import Named
from loosestep.wire import Reducer


def policy_of(reducer: Reducer) -> str:
    """Return what a reducer does about such values, ``RAISE`` or ``SKIP``; empty: it sends them."""
    return str(getattr(getattr(reducer, "on_nonfinite", None), "name", ""))


@torch.no_grad()
def first_nonfinite(named: Sequence[Named]) -> str:
    """Return the name of the first tensor that is not finite throughout; empty: all are.

    >>> first_nonfinite([("w", torch.ones(2)), ("b", torch.tensor([1.0, float("nan")]))])
    'b'
    """
    for name, tensor in named:
        if tensor.dtype == torch.float64 and tensor.numel() and not _fits_float32(tensor):
            return name
        # A sum needs no memory; one that overflows asks for a closer look.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return ""


def _fits_float32(tensor: torch.Tensor) -> bool:
    """Say whether float64 values can be encoded, which is done from float32."""
    return bool(tensor.abs().max() <= torch.finfo(torch.float32).max)


def ranks_without(peers: Peers, headers: Sequence[Header]) -> tuple[int, ...]:
    """Return the global ranks that said that their values are not all finite."""
    pairs = zip(peers.global_ranks, headers, strict=True)
    return tuple(rank for rank, header in pairs if not header.finite)


def not_finite(peers: Peers, name: str) -> NotFinite:
    """Return the error that names all such ranks and their first such tensors.

    All members call it together; ``name`` is this rank's tensor, or empty.
    """
    names = [name]
    if peers.size > 1:
        names = [payload.decode() for payload in peers.exchange(name.encode())]
    found = {rank: name for rank, name in zip(peers.global_ranks, names, strict=True) if name}
    told = ", ".join(f"rank {rank} in {name!r}" for rank, name in found.items())
    text = (
        f"rank {peers.global_ranks[peers.group_rank]}: only finite values can be compressed, and "
        f"there is an infinity or NaN on {told} (level {peers.level!r}). Nothing has "
        "been changed; lower the learning rate or clip gradients, or leave such ranks out of a "
        "sync with on_nonfinite='skip', as long as one is left"
    )
    return NotFinite(text, ranks=tuple(found), tensor=next(iter(found.values())))
