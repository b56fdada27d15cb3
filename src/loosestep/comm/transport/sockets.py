"""Exchange by messages over the network."""

from __future__ import annotations

import torch

from loosestep.comm.flat import STAGING
from loosestep.comm.peers import Message, Transfer
from loosestep.comm.transport.exchange import Task


class SocketExchange:
    """Slices travel as messages; what arrives is kept in buffers until it is summed."""

    in_memory = False

    def __init__(self, task: Task, members: list[int]) -> None:
        self.members = members
        self._task, self._tag = task, task.peers.next_tags(2)
        kind = (task.buffer.dtype, task.buffer.device)
        # Owners may be left with nothing when the buffer has fewer elements than there are ranks.
        self._room = {p: STAGING.take(task.mine.numel(), *kind) for p in members}
        self._arriving, self._leaving = self._post(
            {p: task.part(p) for p in members}, self._room, self._tag
        )

    def ready(self) -> None:
        """Return when all versions of my slice have arrived."""
        for transfer in self._arriving:
            transfer.wait()

    def read(self, member: int) -> torch.Tensor:
        """Return what arrived."""
        return self._room[member]

    def mirrors(self) -> list[torch.Tensor]:
        """Return nothing: results are sent."""
        return []

    def publish(self) -> None:
        """Send my slice to everybody and start to receive theirs."""
        for buffer in self._room.values():
            STAGING.give(buffer)
        # A peer sends its result after it has got my slice, so the place is free by then.
        places = {p: self._task.part(p) for p in self.members}
        self._arriving, leaving = self._post(
            dict.fromkeys(self.members, self._task.mine), places, self._tag + 1
        )
        self._leaving += leaving

    def collect(self) -> None:
        """Return when the results have arrived, each in its place."""
        for transfer in self._arriving:
            transfer.wait()

    def release(self) -> None:
        """Return when everything that I sent has left."""
        for transfer in self._leaving:
            transfer.wait()

    def _post(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], tag: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        receives = [
            Message(part.view(torch.uint8), p, outgoing=False)
            for p, part in incoming.items()
            if part.numel()
        ]
        sends = [
            Message(part.view(torch.uint8), p, outgoing=True)
            for p, part in outgoing.items()
            if part.numel()
        ]
        transfers = self._task.peers.post([*receives, *sends], tag)
        return transfers[: len(receives)], transfers[len(receives) :]
