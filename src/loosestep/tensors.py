"""What can be averaged, and where it lies: tensors by name, their memory, their shards.

Bound are tensor *objects*, never their storages: users re-point ``param.data``. Their memory is
looked up anew at every sync.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from loosestep.peers import Peers
from loosestep.sharded_types import is_dtensor

Named = tuple[str, torch.Tensor]


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
    if is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements):
        raise TypeError(f"{name!r} is a partial DTensor; redistribute it first")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"{name!r} is {short_dtype(tensor.dtype)}; only floating tensors have a mean"
        )


def shard_key(tensor: torch.Tensor) -> str:
    """Return which shard of a DTensor this rank holds; empty for a whole tensor."""
    if not is_dtensor(tensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the DTensor's mesh")
    parts = [
        f"{place}={coordinate[dim]}/{tensor.device_mesh.size(dim)}"
        for dim, place in enumerate(tensor.placements)
        if not place.is_replicate()  # is_shard() is False for the strided shards of FSDP with TP
    ]
    return ",".join(parts)


@dataclass(frozen=True)
class Holders:
    """Which ranks of a group hold which shard."""

    by_shard: dict[str, tuple[int, ...]]
    mine: tuple[int, ...]  # those that hold the same shard as this rank

    @property
    def can_average(self) -> bool:
        """Whether every shard lies on equally many ranks, and on more than one."""
        counts = {len(ranks) for ranks in self.by_shard.values()}
        return len(counts) == 1 and counts != {1}


def holders_of(peers: Peers, key: str) -> Holders:
    """Find out who holds the same shard; all members of ``peers`` must ask together."""
    by_shard: dict[str, tuple[int, ...]] = {}
    for rank, payload in zip(peers.global_ranks, peers.exchange(key.encode()), strict=True):
        by_shard[payload.decode()] = (*by_shard.get(payload.decode(), ()), rank)
    return Holders(by_shard, by_shard[key])


def placement(tensor: torch.Tensor) -> str:
    """Return how a DTensor is spread, without this rank's place in it."""
    if not is_dtensor(tensor):
        return ""
    return f" {tuple(tensor.placements)} on a mesh of {tuple(tensor.device_mesh.shape)}"


def memory(named: Sequence[Named]) -> list[Named]:
    """Return this rank's own memory of the tensors, as dense real tensors, aliases once.

    Two parameters may share storage (tied through ``.data``): one of them stands for both, since
    two averages in flight over the same bytes would tear them. A shard may be empty here and not
    elsewhere, so empty ones stay in the list.
    """
    result: list[Named] = []
    tied: set[tuple[int, int]] = set()
    for name, tensor in named:
        local = _local(tensor)
        span = _span(local)
        if local.numel() and span in tied:
            continue
        dense = span[1] - span[0] == local.numel() * local.element_size()
        if local.numel() and dense:
            tied.add(span)
        result.append((name, local))
    _check_overlap(result, tied)
    return result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    if is_dtensor(local):
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
            names = [name for name, t in named if _span(t)[0] == start or _span(t)[1] == stop]
            raise ValueError(
                f"{' and '.join(map(repr, names))} overlap in memory (by {min(stop, end) - start} "
                "bytes) without being the same tensor; average only one of them"
            )


def short_dtype(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
