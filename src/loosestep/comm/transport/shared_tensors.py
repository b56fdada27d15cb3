"""Tensors of any size that neighbours read for a while: sharded optimizers move theirs so.

Where the kernel lets processes read each other (``process_vm_readv``), a tensor is read where it
lies. Elsewhere (Yama's ``ptrace_scope``, some containers) its owner copies it to shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from loosestep.comm.flat.packing import unpack_bytes
from loosestep.comm.flat.ranges import Ranges, pack_ranges
from loosestep.comm.transport.segments import Copy, open_copy
from loosestep.comm.transport.shared_memory import (
    DETAIL,
    OFFERED,
    PLACE,
    TAKEN,
    SharedMemory,
    Slot,
)

if TYPE_CHECKING:
    from loosestep.comm.peers import Peers


class SharedTensor:
    """One tensor that neighbours read, and theirs that this rank reads in turn."""

    def __init__(self, shared: SharedMemory, peers: Peers, tensors: Sequence[torch.Tensor]) -> None:
        self._shared, self._peers, self._slot = shared, peers, Slot(shared, peers)
        self.members = self._slot.members
        self._kept: Sequence[torch.Tensor] = ()  # while neighbours may read it
        self._copy: Copy | None = None
        if shared.readable:
            assert len(tensors) == 1, "several tensors are shared by a table of their addresses"
            self._kept = tensors
            self._slot.offer(tensors[0].data_ptr())
        else:
            self._copy = shared.copies.take(tensors)
            self._slot.offer(self._copy.key, self._copy.detail)

    def wait(self, member: int) -> None:
        """Return when a neighbour has offered its tensor."""
        self._slot.wait(member, OFFERED)

    def read(self, member: int, ranges: Ranges, into: torch.Tensor) -> None:
        """Copy ranges of elements of a neighbour's tensor to a contiguous one, in this order."""
        if self._shared.readable:
            base, size = self._slot.told(member, PLACE), into.element_size()
            there = [(base + start * size, (stop - start) * size) for start, stop in ranges]
            self.read_spans(member, there, [into])
            return
        pack_ranges(self._copy_of(member).view(into.dtype), ranges, into)

    def read_spans(
        self, member: int, there: list[tuple[int, int]], into: Sequence[torch.Tensor]
    ) -> None:
        """Copy parts of a neighbour's memory to contiguous tensors, in this order."""
        here = [(tensor.data_ptr(), tensor.nbytes) for tensor in into]
        error = self._shared.neighbours[member].read(there, here)
        if error:
            raise self._peers.lost(member, error)

    def read_copies(self, member: int, into: Sequence[torch.Tensor]) -> None:
        """Copy all tensors of which a neighbour has shared copies, in their order."""
        unpack_bytes(self._copy_of(member), into)

    def taken(self, member: int) -> None:
        """Tell a neighbour that this rank needs its tensor no more."""
        self._slot.tell(member, TAKEN)

    def close(self) -> None:
        """Return when the neighbours have taken what they need of mine."""
        self._slot.wait_until_taken()
        self._slot.finish()
        self._kept = ()
        if self._copy is not None:
            self._shared.copies.give(self._copy)
        self._copy = None

    def _copy_of(self, member: int) -> torch.Tensor:
        key, neighbour = self._slot.told(member, PLACE), self._shared.neighbours[member]
        reason, detail = "", self._slot.told(member, DETAIL)
        try:
            return open_copy(neighbour.copies, key, neighbour.pid, detail)
        except OSError as error:
            reason = f"its memory cannot be shared: {error}"
        raise self._peers.lost(member, reason)


class SharedParts:
    """Parts of tensors that all neighbours take: where they lie, or out of one copy."""

    def __init__(self, tensors: Sequence[torch.Tensor], peers: Peers, shared: SharedMemory) -> None:
        self._by_table = shared.readable
        addresses = [tensor.data_ptr() for tensor in tensors]
        table = [torch.tensor(addresses, dtype=torch.int64)]
        self._tensor = SharedTensor(shared, peers, table if shared.readable else tensors)

    def collect(self, places: Sequence[Sequence[torch.Tensor]]) -> None:
        """Read every neighbour's parts to their places, and let it have its memory back."""
        for member in self._tensor.members:
            self._tensor.wait(member)
            if places[member] and self._by_table:
                self._tensor.read_spans(member, list(self._spans(member, places)), places[member])
            elif places[member]:
                self._tensor.read_copies(member, places[member])
            self._tensor.taken(member)

    def release(self) -> None:
        """Return when the neighbours have read mine."""
        self._tensor.close()

    def _spans(
        self, member: int, places: Sequence[Sequence[torch.Tensor]]
    ) -> Iterator[tuple[int, int]]:
        table = torch.empty(len(places[member]), dtype=torch.int64)
        self._tensor.read(member, [(0, table.numel())], table)
        for address, place in zip(table.tolist(), places[member], strict=True):
            yield address, place.nbytes
