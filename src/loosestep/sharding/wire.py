"""Gradients to their owners, parameters back to everybody: ownership meets the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from loosestep.comm.flat.cuts import following, together
from loosestep.comm.flat.packing import tell_autograd
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Message, Peers, Phase
from loosestep.comm.reducers.parcels import GatherFromOwners, ReduceToOwners
from loosestep.comm.transport.exchange import reach
from loosestep.errors import NotShardable
from loosestep.sharding.ownership import Ownership, as_laid_out, laid_out_like, memory_of
from loosestep.sharding.shard_set import Parts
from loosestep.telemetry.traffic import Traffic

GATHER_BYTES = 16 << 20  # parameters that come back together; smaller: less memory for parcels
LENDING_TAG = 7  # below the tags that all members count together
DEPTH = 2  # such gathers under way at once


class ShardWire:
    """Moves gradients and parameters between their owners, each on a group of its own.

    While backward runs, gradients are sent by one thread and parameters by another. On one group
    the two would mix in an order that differs from rank to rank ([Note: threads and groups] in
    ``comm/group.py``).
    """

    def __init__(
        self,
        ownership: Ownership,
        gradients: Peers,
        parameters: Peers,
        names: dict[torch.Tensor, str],
        *,
        recycles: bool,
    ) -> None:
        self._ownership, self._names = ownership, names
        self.recycles = recycles  # whether the optimizer lets go of gradients after its step
        self.gradient_peers, self.parameter_peers = gradients, parameters
        self.group_rank = gradients.group_rank
        self._moved = Traffic()
        device = next(iter(ownership.shares)).device
        distant = bool(reach(gradients, device)[1])
        # Whether any member reaches any other by the network: all must know, or they part.
        self.networked = self.any_of([distant], "agreeing who is reached by the network")[0]

    def start_reduce(
        self,
        parameters: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        weights: tuple[float, ...] | None = None,
    ) -> Reducing:
        """Launch the mean of a flat buffer that holds these parameters' gradients in order.

        What follows them in the buffer goes to everybody.
        """
        owned = self._ownership.ranges(parameters)
        held = sum(parameter.numel() for parameter in parameters)
        if buffer.numel() > held:
            owned = [[*ranges, (held, buffer.numel())] for ranges in owned]
        talking = self.gradient_peers.during(
            Phase("reducing the gradients of", self._names[parameters[0]])
        )
        peers = replace(talking, weights=weights)
        return Reducing(self, parameters, ReduceToOwners(buffer, owned, peers))

    def parts_of(self, parameters: Sequence[torch.Tensor], packed: torch.Tensor) -> Parts:
        """Return this rank's part of every gradient, as views of what it owns, packed."""
        owned = [self._ownership.shares[parameter][self.group_rank] for parameter in parameters]
        bounds = following(stop - start for start, stop in owned)
        return {
            parameter: self._ownership.shaped(parameter, packed[start:stop])
            for parameter, (start, stop) in zip(parameters, bounds, strict=True)
            if start < stop
        }

    def own_parts(
        self, gradients: Mapping[torch.Tensor, torch.Tensor], group_rank: int | None = None
    ) -> Parts:
        """Return a member's part (default: this rank's) of gradients that are whole."""
        member = self.group_rank if group_rank is None else group_rank
        parts: Parts = {}
        for parameter, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise NotShardable(
                    f"the gradient of {self._names[parameter]!r} is {gradient.layout}, which "
                    "cannot be divided by position; make the embedding with sparse=False"
                )
            view = self._ownership.view(as_laid_out(gradient, parameter), parameter, member)
            if view is not None:
                parts[parameter] = view
        return parts

    def in_bucket(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> Parts:
        """Return this rank's part of gradients that lie one after the other in a buffer."""
        pieces = torch.split(buffer, [parameter.numel() for parameter in parameters])
        whole = {p: laid_out_like(p, piece) for p, piece in zip(parameters, pieces, strict=True)}
        return self.own_parts(whole)

    def start_gather(self, parameters: Sequence[torch.Tensor]) -> Gathering:
        """Launch the way back of parameters: everybody gets every owner's values, in place."""
        return Gathering(self, list(_batches(parameters)))

    def gather(self, parameters: Sequence[torch.Tensor]) -> GatherFromOwners:
        """Launch one batch of that."""
        places: list[list[torch.Tensor]] = [[] for _ in range(self._ownership.group_size)]
        for parameter in parameters:
            memory = memory_of(parameter.detach())
            bounds = self._ownership.shares[parameter]
            for member, (start, stop) in zip(places, bounds, strict=True):
                if start < stop:
                    member.append(memory[start:stop])
        peers = self.parameter_peers.during(Phase("gathering parameters"))
        return GatherFromOwners(places, peers)

    def moved(self, traffic: Traffic) -> None:
        """Count what a gather has moved."""
        self._moved.add(traffic)

    def take_moved(self) -> Traffic:
        """Return what gathers have moved since the last call."""
        moved, self._moved = self._moved, Traffic()
        return moved

    def send(self, tensor: torch.Tensor, member: int) -> None:
        """Send a dense tensor to a member, which calls ``receive``."""
        self._message(tensor, member, outgoing=True)

    def receive(self, tensor: torch.Tensor, member: int) -> None:
        """Receive what a member sends."""
        self._message(tensor, member, outgoing=False)

    def _message(self, tensor: torch.Tensor, member: int, *, outgoing: bool) -> None:
        # Only two members talk, so no tag of all is used up; messages of two keep their order.
        peers = self.parameter_peers.during(Phase("lending gradients"))
        message = Message(memory_of(tensor).view(torch.uint8), member, outgoing=outgoing)
        for transfer in peers.post([message], LENDING_TAG):
            transfer.wait()

    def any_of(self, flags: Sequence[bool], verb: str) -> list[bool]:
        """Return, flag by flag, whether it is set on any member."""
        peers = self.parameter_peers.during(Phase(verb))
        payloads = peers.exchange_fixed(bytes(flags))
        return [any(column) for column in zip(*payloads, strict=True)]


class Reducing:
    """One buffer's gradients on their way to their owners."""

    def __init__(
        self, wire: ShardWire, parameters: Sequence[torch.Tensor], reduction: ReduceToOwners
    ) -> None:
        self._wire, self._parameters, self._reduction = wire, parameters, reduction
        self._packed: torch.Tensor | None = None

    @property
    def traffic(self) -> Traffic:
        """What this rank sent."""
        return self._reduction.traffic

    def wait(self) -> torch.Tensor:
        """Return the mean of what this rank owns and of what goes to everybody, packed."""
        self._packed = self._reduction.wait()
        return self._packed

    def parts(self) -> Parts:
        """Wait, and return this rank's part of every gradient."""
        return self._wire.parts_of(self._parameters, self.wait())

    def release(self) -> None:
        """Return when the buffer is this rank's alone again."""
        self._reduction.release()

    def close(self) -> None:
        """Keep the room of the parts for the next ones: nobody uses them any more."""
        if self._packed is not None and self._wire.recycles:
            STAGING.give(self._packed)
        self._packed = None


class Gathering:
    """Parameters on their way back, a few batches at a time."""

    def __init__(self, wire: ShardWire, batches: list[list[torch.Tensor]]) -> None:
        self._wire, self._batches = wire, deque(batches)
        self._under_way: deque[tuple[list[torch.Tensor], GatherFromOwners]] = deque()
        self._launch()

    @torch.no_grad()
    def wait(self) -> None:
        """Return when every parameter holds its owners' values."""
        while self._under_way:
            batch, gathering = self._under_way.popleft()
            gathering.wait()
            self._wire.moved(gathering.traffic)
            tell_autograd(batch)  # the kernel wrote some of them
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        while self._batches and len(self._under_way) < DEPTH:
            batch = self._batches.popleft()
            self._under_way.append((batch, self._wire.gather(batch)))


def _batches(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parameters of one dtype and device, at most ``GATHER_BYTES`` together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if not parameter.numel():
            continue
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in kinds.values():
        sizes = [parameter.nbytes for parameter in members]
        for first, last in together(sizes, lambda left: GATHER_BYTES):
            yield members[first:last]
