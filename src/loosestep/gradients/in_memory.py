"""Gradients that live in shared memory: buckets that neighbours read and write where they are.

A gradient is copied to its bucket as soon as backward has made it, while it is in the cache, and
``param.grad`` is a view of the bucket from then on. Neighbours sum straight out of each other's
buckets, so that one copy is all that is left of packing, sending and unpacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from loosestep.comm.flat.cuts import round_up
from loosestep.comm.reducers.shared_memory_mean import ALIGNMENT, move_in
from loosestep.gradients.plain import Bucket
from loosestep.gradients.reducing import ByReducer


class ResidentBucket(Bucket):
    """A bucket that gradients are views of.

    A parameter that is not contiguous keeps a gradient of its own, in the order of its memory,
    which is copied to and fro; so does a gradient with a graph, which a view would not have.
    """

    def settle(self, buffer: torch.Tensor) -> None:
        """Take a buffer for good."""
        self._places = dict(super()._parts(buffer))

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Let a gradient that is ready move in, unless it lives there already."""
        place, gradient = self._places[parameter], parameter.grad
        if gradient is not None and gradient is not place and _can_move(parameter):
            move_in(place, gradient)
            parameter.grad = place

    def _parts(self, buffer: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        # The same tensors each time: copying one to itself is free.
        return iter(self._places.items())

    def _give(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> None:
        if _can_move(parameter):
            parameter.grad = part
        else:
            super()._give(parameter, part)


def _can_move(parameter: torch.nn.Parameter) -> bool:
    """Say whether a parameter's gradient may be a view of its bucket."""
    has_graph = parameter.grad is not None and parameter.grad.requires_grad  # create_graph=True
    return parameter.is_contiguous() and not has_graph


class InSharedMemory(ByReducer):
    """Buckets of a plain module in memory that the ranks of a host share."""

    bucket_type = ResidentBucket
    most_under_way = 32  # there are slots for four times as many, on all ranks the same ones

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Let the first ones move into memory that all levels' neighbours see.

        Those of parameters that are thawed later get memory of their own, which is copied to and
        fro: sharing memory is collective, and other levels' ranks need not be here at that step.
        """
        super().adopt(buckets)
        for bucket, buffer in zip(buckets, self._buffers_for(buckets), strict=True):
            assert isinstance(bucket, ResidentBucket)
            bucket.settle(buffer)
            self._take_in(bucket, buffer)

    def _buffers_for(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        firsts = [bucket.parameters[0] for bucket in buckets]
        sizes = [self._bytes(bucket) for bucket in buckets]
        devices = [first.device for first in firsts]
        memory = None if self._slots else self._memory(sum(sizes), devices)
        if memory is None:
            return [f.new_empty(b.numel) for f, b in zip(firsts, buckets, strict=True)]
        pieces = torch.split(memory[: sum(sizes)], sizes)
        wide = [piece.view(first.dtype) for piece, first in zip(pieces, firsts, strict=True)]
        return [buffer[: b.numel] for buffer, b in zip(wide, buckets, strict=True)]

    def _memory(self, size: int, devices: Sequence[torch.device]) -> torch.Tensor | None:
        return self._reductions.reducer.room(size, devices, self._groups)

    def launch(self, bucket: Bucket, level: str) -> Callable[[], None]:
        """Launch the mean of the bucket and of who used what, which is exact in any case."""
        if self._reductions.reducer.lossy:
            return super().launch(bucket, level)
        buffer = self._buffers[bucket]
        shared = self._share(bucket, bucket.pack(buffer), level)

        def land() -> None:
            shared.wait()
            self._sharing.arrived()
            bucket.unpack(buffer)

        return land

    def _bytes(self, bucket: Bucket) -> int:
        return round_up(bucket.numel * bucket.parameters[0].element_size(), ALIGNMENT)
