"""Tensors that are bound: what does not change from one sync of them to the next.

Bound are tensor objects. Users re-point ``param.data``, so every sync looks whether all lie where
they lay; that look is all that a sync costs a tensor beside its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_

import torch

from loosestep.comm.agreement import Statement, state
from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named, check_averageable, cuts, memory, shard_key
from loosestep.sync.parts import Parts


class Places:
    """Where tensors lay when they were looked up; ``parts`` is what was made of them then."""

    def __init__(self, named: list[Named], parts: Sequence[Named]) -> None:
        self._named, known = named, dict(parts)
        self._tensors = [tensor for _, tensor in named]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        # Aliases keep the memory: its addresses do not come to mean something else.
        self._aliases = [_alias(tensor, known.get(name)) for name, tensor in named]
        self._sharded = any(map(is_dtensor, self._tensors))
        self._addresses = [] if self._sharded else list(map(_ADDRESS, self._tensors))

    def hold(self, named: list[Named]) -> bool:
        """Say whether these are the same tensors, and lie where they lay.

        DTensors are looked up anew at every sync: what they hold may be exchanged inside.
        """
        # By loops in C, and nothing is made: 20,000 tuples would wake the garbage collector.
        return (
            not self._sharded
            and len(named) == len(self._named)
            and (all(map(is_, named, self._named)) or self._are(named))
            and list(map(_DTYPE, self._tensors)) == self._dtypes
            and list(map(_ADDRESS, self._tensors)) == self._addresses
            and all(map(_LIES_AT, self._tensors, self._aliases))
        )

    def _are(self, named: list[Named]) -> bool:
        pairs = zip(named, self._named, strict=True)
        return all(one is other and name == known for (name, one), (known, other) in pairs)


def _alias(tensor: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """Return an alias of a tensor: the part that was made of it, where that is all of it."""
    whole = part is not None and part.shape == tensor.shape and part.dtype is tensor.dtype
    return part if whole and part is not None else tensor.detach()


_ADDRESS, _LIES_AT, _DTYPE = (
    torch.Tensor.data_ptr,  # another one where a storage was resized
    torch.Tensor.is_set_to,  # compares storage, offset, shape and strides
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
)


@dataclass
class Bound:
    """Tensors, and what was made of them."""

    places: Places
    counters: list[Named]  # those that take the largest value
    parts: list[Named]  # this rank's memory of those that have a mean, every byte once
    shard_keys: dict[str, str]  # which shard this rank holds, of those that are sharded
    lines: tuple[str, ...]  # what ranks must agree on
    _statements: dict[tuple[str, ...], Statement] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Parts) -> Bound:
        """Bind tensors; raise for those that have no mean."""
        named, counters = parts.means, parts.largest
        if named or not parts.partial:
            check_averageable(named)
        own = memory(named)
        kept = {name for name, _ in own}
        told = [*((name, t) for name, t in named if name in kept), *counters]
        shared = [f"{n} numbers of {name!r} alone" for name, n in cuts(own, named)]
        keys = {name: shard_key(tensor) for name, tensor in named if is_dtensor(tensor)}
        lines = state(told, *shared).lines
        return cls(Places([*named, *counters], own), list(counters), own, keys, lines)

    def statement(self, agreements: tuple[str, ...]) -> Statement:
        """Return what must be equal on all ranks, with further lines before the tensors'."""
        if agreements not in self._statements:
            self._statements[agreements] = Statement((*agreements, *self.lines))
        return self._statements[agreements]


class Binder:
    """Binds tensors once; all averagers of the same tensors share one."""

    def __init__(self) -> None:
        self._last: Bound | None = None

    def bind(self, parts: Parts) -> Bound:
        """Return what was made of these tensors before, or make it."""
        given = [*parts.means, *parts.largest]
        if self._last is None or not self._last.places.hold(given):
            self._last = None  # first: its aliases keep memory
            self._last = Bound.of(parts)
        return self._last


def by_shard(parts: Sequence[Named], keys: dict[str, str]) -> dict[str, list[Named]]:
    """Group memory by the shard that this rank holds of it; empty parts count."""
    if not keys:
        return {"": list(parts)} if parts else {}
    groups: dict[str, list[Named]] = {}
    for name, local in parts:
        groups.setdefault(keys.get(name, ""), []).append((name, local))
    return groups
