"""A reducer that says what it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Mean, Place, Reducer, check_reducer
from loosestep.comm.tensors import Named


class RecordingReducer(Reducer):
    """A reducer that does what ``inner`` does and keeps a record of it.

    reducer = RecordingReducer()
    average_([torch.zeros(3)], reducer=reducer)
    assert reducer.calls == [("tensor 0", 3, torch.float32)]
    """

    def __init__(self, inner: Reducer | None = None) -> None:
        if inner is not None:
            check_reducer("inner", inner)
        self.inner: Reducer = Mean() if inner is None else inner
        self.calls: list[tuple[str, int, torch.dtype]] = []  # name, number of elements, dtype

    @property
    def host_size(self) -> int | None:
        """That of ``inner``."""
        return self.inner.host_size

    def init(self, tensors: Sequence[Named], peers: Peers) -> Any:
        """Return the state of ``inner``; the record is not part of it."""
        return self.inner.init(tensors, peers)

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Note the call and hand it on."""
        self.calls.append((place.name, buffer.numel(), buffer.dtype))
        return self.inner.start(buffer, peers, state, place)

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` says."""
        return self.inner.bytes_on_wire(numel, dtype, group_size, group_rank)

    def __repr__(self) -> str:
        return f"RecordingReducer({self.inner!r})"
