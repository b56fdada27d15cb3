"""Infinities and NaN, which a mean would spread to all ranks: found before anything moves."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Reducer
from loosestep.comm.reducers.reducer import compresses
from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named
from loosestep.errors import NotFinite

Batch = tuple[list[str], list[torch.Tensor]]  # names, and tensors that are looked at together

BATCH_BYTES = 256 << 10  # of small tensors that are looked at together; fits a cache


@torch.no_grad()
def first_nonfinite(batches: Sequence[Batch], *, encoded: bool = True) -> str:
    """Return the name of the first tensor that is not finite throughout; empty: all are.

    ``encoded``: what float32 has no room for counts too, since codecs work from it.

    >>> first_nonfinite(batches([("w", torch.ones(2)), ("b", torch.tensor([float("nan")]))]))
    'b'
    """
    for names, tensors in batches:
        together = tensors[0] if len(tensors) == 1 else _together(tensors)
        if not _all_finite(together, encoded):
            pairs = zip(names, tensors, strict=True)
            return next(name for name, tensor in pairs if not _all_finite(tensor, encoded))
    return ""


def batches(named: Sequence[Named]) -> list[Batch]:
    """Return tensors in order, small ones of one dtype together: to look at each costs a call."""
    found: list[Batch] = []
    room = 0
    for name, tensor in named:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        if not found or tensor.nbytes > room or tensor.dtype is not found[-1][1][0].dtype:
            found.append(([], []))
            room = BATCH_BYTES
        found[-1][0].append(name)
        found[-1][1].append(flat)
        room -= tensor.nbytes
    return found


def _together(tensors: list[torch.Tensor]) -> torch.Tensor:
    if all(tensor.ndim == 1 for tensor in tensors):
        return torch.cat(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _all_finite(tensor: torch.Tensor, encoded: bool) -> bool:
    if encoded and tensor.dtype == torch.float64 and tensor.numel() and not _fits_float32(tensor):
        return False
    # A sum needs no memory; one that overflows asks for a closer look.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _fits_float32(tensor: torch.Tensor) -> bool:
    """Say whether float64 values can be encoded, which is done from float32."""
    return bool(tensor.abs().max() <= torch.finfo(torch.float32).max)


def whole_replicas(peers: Peers, ranks: Sequence[int], named: Sequence[Named]) -> tuple[int, ...]:
    """Return global ranks with those that hold other shards of the same replicas.

    Else one shard would be the mean of all replicas, and another that of some. All members of
    ``peers`` call it together, with tensors that are sharded alike.
    """
    meshes = [tensor.device_mesh.mesh for _, tensor in named if is_dtensor(tensor)]
    if not meshes:
        return tuple(ranks)
    mine = sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
    told = peers.exchange(json.dumps(mine).encode())
    replicas = dict(zip(peers.global_ranks, map(json.loads, told), strict=True))
    left_out = {other for rank in ranks for other in replicas[rank]}
    return tuple(rank for rank in peers.global_ranks if rank in left_out)


def not_finite(peers: Peers, name: str, reducer: Reducer) -> NotFinite:
    """Return the error that names all such ranks and their first such tensors.

    All members call it together; ``name`` is this rank's tensor, or empty.
    """
    names = [name]
    if peers.size > 1:
        names = [payload.decode() for payload in peers.exchange(name.encode())]
    found = {rank: name for rank, name in zip(peers.global_ranks, names, strict=True) if name}
    told = ", ".join(f"rank {rank} in {name!r}" for rank, name in found.items())
    lossy = compresses(reducer)
    rule = "only finite values can be compressed" if lossy else "a mean would spread them to all"
    text = (
        f"rank {peers.global_ranks[peers.group_rank]}: {rule}, and "
        f"there is an infinity or NaN on {told} (level {peers.level!r}). Nothing has "
        "been changed; lower the learning rate or clip gradients, or leave such ranks out of a "
        "sync with on_nonfinite='skip', as long as one is left"
        + ("" if lossy else "; on_nonfinite='pass' averages them as they are")
    )
    return NotFinite(text, ranks=tuple(found), tensor=next(iter(found.values())))
