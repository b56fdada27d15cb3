"""Infinities and NaN, which a mean would spread to all ranks: found before anything moves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from loosestep.comm import native
from loosestep.comm.flat.cuts import together
from loosestep.comm.flat.packing import Addresses
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Reducer
from loosestep.comm.reducers.reducer import compresses
from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named
from loosestep.errors import NotFinite

BATCH_BYTES = 256 << 10  # of small tensors that torch looks at together; fits a cache
# The bits of an exponent: all of them are set in an infinity or NaN, and in nothing else.
EXPONENTS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}


@dataclass(frozen=True)
class Batch:
    """Tensors of one dtype that are looked at together, by name."""

    names: list[str]
    tensors: list[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all of them."""
        return self.tensors[0].dtype

    @cached_property
    def addresses(self) -> Addresses | None:
        """Where they lie, if one call in C can look at all of them."""
        return Addresses.of(self.tensors) if self.dtype in EXPONENTS else None

    def first_nonfinite(self, encoded: bool) -> str:
        """Return the name of the first that is not finite throughout; empty: all are."""
        where, loops = self.addresses, native.loops()
        if where is not None and loops is not None and not (encoded and self.dtype.itemsize == 8):
            kind = (self.dtype.itemsize, EXPONENTS[self.dtype])
            found = loops.find_nonfinite(where.starts, where.sizes, where.num, *kind)
            return "" if found < 0 else self.names[found]
        one = self.tensors[0]
        more = len(self.tensors) > 1
        together = torch.cat([tensor.reshape(-1) for tensor in self.tensors]) if more else one
        if _all_finite(together, encoded):
            return ""
        pairs = zip(self.names, self.tensors, strict=True)
        return next(name for name, tensor in pairs if not _all_finite(tensor, encoded))


@torch.no_grad()
def first_nonfinite(batches: Sequence[Batch], *, encoded: bool = True) -> str:
    """Return the name of the first tensor that is not finite throughout; empty: all are.

    ``encoded``: what float32 has no room for counts too, since codecs work from it.

    >>> first_nonfinite(batches([("w", torch.ones(2)), ("b", torch.tensor([float("nan")]))]))
    'b'
    """
    return next(filter(None, (batch.first_nonfinite(encoded) for batch in batches)), "")


def batches(named: Sequence[Named]) -> list[Batch]:
    """Return tensors in order, small ones of one dtype together: to look at each costs a call."""
    found: list[Batch] = []
    for _, group in itertools.groupby(named, key=lambda pair: pair[1].dtype):
        names, tensors = map(list, zip(*group, strict=True))
        sizes = [tensor.nbytes for tensor in tensors]
        for first, last in together(sizes, lambda left: BATCH_BYTES):
            found.append(Batch(names[first:last], tensors[first:last]))
    return found


def _all_finite(tensor: torch.Tensor, encoded: bool) -> bool:
    if tensor.dtype.itemsize == 1:  # torch cannot sum them; bfloat16 has room for them all
        pieces = torch.split(tensor.reshape(-1), BATCH_BYTES)
        return all(bool(piece.bfloat16().isfinite().all()) for piece in pieces)
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
