"""What can be averaged, and where it lies: tensors by name, their memory, their shards.

Bound are tensor *objects*, never their storages: users re-point ``param.data``. Their memory is
looked up anew at every sync.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loosestep.comm.peers import Peers
from loosestep.comm.sharded_types import is_dtensor

Named = tuple[str, torch.Tensor]
Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
Span = tuple[int, int]  # the addresses of a tensor's first byte and of the one after its last


def named_tensors(argument: str, given: Tensors) -> list[Named]:
    """Return a module's parameters and buffers, or tensors as they were given, by name.

    >>> named_tensors("also", {"shadow": torch.zeros(1)})
    [('also shadow', tensor([0.]))]
    """
    pairs: Iterable[tuple[object, torch.Tensor]]
    if isinstance(given, torch.nn.Module):
        pairs = [*given.named_parameters(), *given.named_buffers()]
    elif isinstance(given, Mapping):
        pairs = given.items()
    elif isinstance(given, Iterable) and not isinstance(given, torch.Tensor):
        pairs = enumerate(given)
    else:
        pairs = [(0, given)]
    named = [(f"{argument} {key}", tensor) for key, tensor in pairs]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{argument} must be a module, a mapping of tensors by name or tensors, got "
                f"{type(tensor).__name__} for {name!r}"
            )
    return unique(named)


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
    devices = {tensor.device for _, tensor in named}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors of one averager must be on one device, got {sorted(map(str, devices))}; "
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
    """Return this rank's own memory of the tensors, as dense real tensors, every byte once.

    Two parameters may share storage (tied through ``.data``): one of them stands for both, since
    two averages in flight over the same bytes would tear them. Where they share a part of it, that
    part is left to the one that begins first. A shard may be empty here and not elsewhere, so
    empty ones stay in the list.
    """
    result: list[Named] = []
    dense: dict[Span, int] = {}  # where in the result
    for name, tensor in named:
        local = _local(tensor)
        _check_repeats(name, local)
        span = _span(local)
        if local.numel() and span in dense:
            continue
        if local.numel() and span[1] - span[0] == local.numel() * local.element_size():
            dense[span] = len(result)
        result.append((name, local))
    spans = sorted(dense)
    if any(start < stop for (_, stop), (start, _) in itertools.pairwise(spans)):
        return _cut(result, dense)
    return result


def each_once(named: Sequence[Named]) -> list[Named]:
    """Return the tensors without those, or without the parts, that others stand for."""
    kept = dict(memory(named))
    cut = {name for name, _ in cuts(list(kept.items()), named)}
    return [(name, kept[name] if name in cut else t) for name, t in named if name in kept]


def cuts(parts: Sequence[Named], named: Sequence[Named]) -> list[tuple[str, int]]:
    """Return of which tensors ``memory`` has left a part to others, and how many numbers it kept.

    >>> shared = torch.zeros(10)
    >>> named = [("left", shared[:6]), ("right", shared[4:])]
    >>> cuts(memory(named), named)
    [('right', 4)]
    """
    numbers = {name: part.numel() for name, part in parts}
    return [
        (name, numbers[name])
        for name, tensor in named
        if name in numbers
        and not is_dtensor(tensor)  # this rank has a shard only
        and numbers[name] != tensor.numel() * (2 if tensor.is_complex() else 1)
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    if is_dtensor(local):
        local = local.to_local()
    return torch.view_as_real(local) if local.is_complex() else local


def _check_repeats(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and stride == 0 for size, stride in steps):
        raise ValueError(
            f"{name!r} was expanded: several of its elements are one place in memory (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}), which cannot be written; make it "
            "with .contiguous(), or expand it in forward"
        )


def _span(tensor: torch.Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def _cut(named: Sequence[Named], dense: dict[Span, int]) -> list[Named]:
    """Leave every byte to one tensor: to the one that begins first, and of those to the longest."""
    result: dict[int, Named] = dict(enumerate(named))
    before, end = -1, 0  # the tensor that reaches furthest so far, and where it ends
    for start, stop in sorted(dense, key=lambda span: (span[0], -span[1])):
        at = dense[start, stop]
        name, tensor = named[at]
        if start < end:
            _check_alike(named[before], named[at], end - start)
            rest = tensor.view(-1)[(end - start) // tensor.element_size() :]
            result[at] = (name, rest)
            if not rest.numel():
                del result[at]
        if stop > end:
            before, end = at, stop
    return list(result.values())


def _check_alike(first: Named, second: Named, nbytes: int) -> None:
    """Raise for two tensors that share bytes and cannot be cut at an element of both."""
    (_, one), (_, two) = first, second
    contiguous = one.is_contiguous() and two.is_contiguous()
    if not contiguous or one.dtype != two.dtype or nbytes % one.element_size():
        raise ValueError(
            f"{first[0]!r} and {second[0]!r} overlap in memory (by {min(nbytes, two.nbytes)} "
            "bytes), which can be averaged only where both are contiguous and of one dtype, got "
            f"{short_dtype(one.dtype)} {tuple(one.shape)} and {short_dtype(two.dtype)} "
            f"{tuple(two.shape)}; average only one of them"
        )


def short_dtype(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
