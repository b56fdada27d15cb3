"""What takes part: a list of named tensors, and whether all ranks mean the same list.

Bound are tensor *objects*, never their storages: users re-point ``param.data``. Their memory is
looked up anew at every sync, and an exchange of digests before it makes sure that no byte moves
unless all ranks mean the same thing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from loosestep.errors import RankMismatch
from loosestep.peers import Peers

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Progress:
    """How far this rank is."""

    step: int = 0
    final: bool = False  # it has no more steps of its own
    clean: bool = False  # it has taken none since the widest level averaged


@dataclass(frozen=True)
class Header:
    """What every rank tells the others before a sync."""

    digest: bytes  # of everything that must be equal
    step: int
    final: bool
    clean: bool

    _FORMAT = "<16sq??"

    def encode(self) -> bytes:
        """Return the header as bytes of one length."""
        return struct.pack(self._FORMAT, self.digest, self.step, self.final, self.clean)

    @classmethod
    def decode(cls, payload: bytes) -> Header:
        """Read what ``encode`` wrote."""
        return cls(*struct.unpack(cls._FORMAT, payload))


@dataclass(frozen=True)
class Statement:
    """Everything that must be equal on all ranks, as lines that a person can read."""

    lines: tuple[str, ...]

    @property
    def digest(self) -> bytes:
        """A short hash of the lines."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()


def state(named: Sequence[Named], *agreements: str) -> Statement:
    """Return the statement about ``named`` tensors and further agreements (a schedule, say)."""
    lines = [f"{tuple(t.shape)} {_short(t.dtype)} {name!r}{_placed(t)}" for name, t in named]
    return Statement((*agreements, *lines))


def agree(peers: Peers, statement: Statement, progress: Progress | None = None) -> list[Header]:
    """Exchange headers; raise the same ``RankMismatch`` on every rank where they differ.

    Ranks may differ in their step where one of them is ``final``.
    """
    at = Progress() if progress is None else progress
    mine = Header(statement.digest, at.step, at.final, at.clean)
    if peers.size == 1:
        return [mine]
    headers = [Header.decode(payload) for payload in peers.exchange_fixed(mine.encode())]
    if any(header.digest != mine.digest for header in headers):
        raise _explain(peers, statement)
    if len({header.step for header in headers if not header.final}) > 1:
        steps = {rank: h.step for rank, h in zip(peers.global_ranks, headers, strict=True)}
        raise RankMismatch(
            f"{_me(peers)}ranks are not at the same step: {steps}. Every rank must take the same "
            "number of optimizer steps between syncs; a GradScaler that skipped a step on one "
            "rank does this: hand it to attach(..., scaler=scaler)"
        )
    return headers


def _explain(peers: Peers, statement: Statement) -> RankMismatch:
    payloads = peers.exchange(json.dumps(statement.lines).encode())
    stated = [tuple(json.loads(payload)) for payload in payloads]
    longest = max(len(lines) for lines in stated)
    for index in range(longest):
        said = [lines[index] if index < len(lines) else "nothing more" for lines in stated]
        if len(set(said)) > 1:
            return RankMismatch(
                f"{_me(peers)}ranks disagree about what to average on level {peers.level!r}: "
                f"{_who_says_what(peers, said)}. Nothing has been averaged; build the same "
                "model, optimizer and schedule on every rank"
            )
    raise AssertionError("digests differ but statements do not")


def _who_says_what(peers: Peers, said: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in zip(peers.global_ranks, said, strict=True):
        groups.setdefault(text, []).append(rank)
    parts = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {verb} {text}"
        for (text, ranks) in groups.items()
        for verb in ["have" if len(ranks) > 1 else "has"]
    ]
    return "; ".join(parts)


def _me(peers: Peers) -> str:
    return f"rank {peers.global_ranks[peers.group_rank]}: "


def unique(named: Iterable[Named]) -> list[Named]:
    """Drop tensor objects that were named before: shared parameters count once."""
    seen: set[int] = set()
    kept = []
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept.append((name, tensor))
    return kept


def check_averageable(named: Sequence[Named]) -> None:
    """Raise for tensors that have no mean, with the reason."""
    if not named:
        raise ValueError("there is nothing to average: no parameter requires a gradient")
    for name, tensor in named:
        _check_tensor(name, tensor)
    devices = sorted({str(tensor.device) for _, tensor in named})
    if len(devices) > 1:
        raise ValueError(
            f"all tensors of one averager must be on one device, got {devices}; "
            "use one averager for each device"
        )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name!r} is {tensor.layout}; only dense tensors can be averaged")
    if tensor.is_quantized:
        raise TypeError(f"{name!r} is quantised ({tensor.dtype}); average the float original")
    if tensor.is_meta:
        raise TypeError(f"{name!r} is on the meta device; materialise the model first")
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        raise TypeError(f"{name!r} is a partial DTensor; redistribute it first")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{name!r} is {_short(tensor.dtype)}; only floating tensors have a mean")


def shard_key(tensor: torch.Tensor) -> str:
    """Return which shard of a DTensor this rank holds; empty for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the DTensor's mesh")
    parts = [
        f"{place}={coordinate[dim]}/{tensor.device_mesh.size(dim)}"
        for dim, place in enumerate(tensor.placements)
        if place.is_shard()
    ]
    return ",".join(parts)


def same_shard(peers: Peers, key: str) -> tuple[int, ...]:
    """Return the global ranks of ``peers`` that hold the same shard; all members must ask."""
    keys = [payload.decode() for payload in peers.exchange(key.encode())]
    holders: dict[str, list[int]] = {}
    for rank, held in zip(peers.global_ranks, keys, strict=True):
        holders.setdefault(held, []).append(rank)
    if len({len(ranks) for ranks in holders.values()}) > 1 or len(holders[key]) == 1:
        raise ValueError(
            f"level {peers.level!r} (ranks {list(peers.global_ranks)}) must hold every shard on "
            f"several ranks, got {holders}; a level inside the shard mesh cannot average: "
            "choose one that spans whole meshes"
        )
    return tuple(holders[key])


def _placed(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    return f" {tuple(tensor.placements)} on a mesh of {tuple(tensor.device_mesh.shape)}"


def memory(named: Sequence[Named]) -> list[Named]:
    """Return this rank's own memory of the tensors, as dense real tensors, aliases once.

    Two parameters may share storage (tied through ``.data``): one of them stands for both, since
    two averages in flight over the same bytes would tear them.
    """
    result: list[Named] = []
    tied: set[tuple[int, int]] = set()
    for name, tensor in named:
        local = _local(tensor)
        span = _span(local)
        if local.numel() == 0 or span in tied:
            continue
        if span[1] - span[0] == local.numel() * local.element_size():  # no holes: all of the span
            tied.add(span)
        result.append((name, local))
    _check_overlap(result, tied)
    return result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return torch.view_as_real(local) if local.is_complex() else local


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one after the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def _check_overlap(named: Sequence[Named], dense: set[tuple[int, int]]) -> None:
    spans = sorted(dense)
    for (_, stop), (start, end) in itertools.pairwise(spans):
        if start < stop:
            names = [name for name, t in named if _span(t)[0] in {start} or _span(t)[1] == stop]
            raise ValueError(
                f"{' and '.join(map(repr, names))} overlap in memory (by {min(stop, end) - start} "
                "bytes) without being the same tensor; average only one of them"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
