"""The mean by messages of a codec: the same two phases as ``Mean``, in fewer bytes.

    to owners   every rank encodes every part of its buffer and sends it to the part's owner
    back        the owner decodes all, takes the mean, encodes that and sends it to everybody

    mean = sum of share_r * decoded_r over the ranks r, in rank order, in float32,
    share_r = w_r / sum of w_r

Two ranks swap everything instead, each part of it encoded once, and both take the mean: as many
bytes, on one way in place of two, and nothing is lost on a way back. So do more ranks where a
reducer gathers: n - 1 messages from each in place of less than two.

What becomes of a value depends on its tensor and its place there: parts end where blocks end.

A rank treats its own values as the others' are: encoded and decoded. So all ranks end bit-equal.
Every message to an owner ends with a byte that says whether its sender's whole buffer is finite,
so that all ranks know of all ranks before anything is overwritten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loosestep.comm.codecs.codec import Codec
from loosestep.comm.codecs.rounding import Draw, Rounding, draw_of
from loosestep.comm.flat.cuts import Bounds, Runs
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Message, Peers, Transfer
from loosestep.comm.reducers.nonfinite import all_finite, contributors
from loosestep.comm.reducers.reducer import (
    NOTHING,
    Done,
    Handle,
    NonFinite,
    Place,
    Reducer,
    State,
)
from loosestep.comm.tensors import Named
from loosestep.comm.transport.exchange import Task
from loosestep.errors import check_whole, choose
from loosestep.telemetry.traffic import Traffic

LARGEST = torch.finfo(torch.float32).max
FLAG_BYTES = 1  # at the end of every message to an owner
SAMPLE = 4096  # elements of a part from which drift is estimated


class Memory(Protocol):
    """What is kept of values that could not be sent as they were."""

    bytes_held: int  # until ``keep``

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """Return what is to be encoded: ``values`` and what was kept before."""

    def keep(self, wanted: torch.Tensor, decoded: Callable[[torch.Tensor], None]) -> None:
        """Note the difference between what ``carry`` returned and what arrives."""

    def commit(self) -> None:
        """Let that take the place of what was kept before."""


class Forgetful:
    """Keeps nothing: what is lost is lost."""

    bytes_held = 0

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values

    def keep(self, wanted: torch.Tensor, decoded: Callable[[torch.Tensor], None]) -> None:
        """Do nothing."""

    def commit(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Memories:
    """What a rank keeps of its own values, and of the mean of the part that it owns."""

    sent: Memory
    mean: Memory


class Calls(State):
    """How often each tensor has been rounded by chance."""

    def __init__(self) -> None:
        self.by_tensor: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"calls": dict(self.by_tensor)} if self.by_tensor else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the chances that would have come next."""
        self.by_tensor = dict(state_dict.get("calls", {}))


class Compressed(Reducer):
    """A reducer whose messages are a codec's; the base of ``Int8``, ``TopK`` and the like."""

    lossy = True
    gather: bool = False  # whether all get the messages of all, and nobody owns the mean
    rounding: Rounding = Rounding.NEAREST
    seed: int = 0  # of the chances, if rounding is stochastic
    on_nonfinite: NonFinite = NonFinite.RAISE

    def _settle(self, **settings: Any) -> None:
        """Take the settings, by names or by values, and refuse those that cannot be."""
        choices = {"rounding": Rounding, "on_nonfinite": NonFinite}
        chosen = {n: choose(k, settings[n]) for n, k in choices.items() if n in settings}
        vars(self).update(settings, **chosen)
        check_whole("seed", self.seed)
        if self.on_nonfinite is NonFinite.PASS:
            raise ValueError(
                "only finite values can be compressed, so on_nonfinite must be 'raise' or 'skip', "
                "got 'pass'; Cast and exact reducers let all values pass"
            )
        _ = self.codec  # which refuses its own

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """What makes messages of values."""

    @property
    def block(self) -> int:
        """That of the codec."""
        return self.codec.block

    @property
    def engine(self) -> Compressed:
        """What moves the messages; others may put memories into it."""
        return self

    def init(self, tensors: Sequence[Named], peers: Peers) -> State:
        """Return counts of calls, if values are rounded by chance."""
        return NOTHING if self.rounding is Rounding.NEAREST else Calls()

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch the mean of what arrives."""
        return self.launch(buffer, peers, state, place, Memories(Forgetful(), Forgetful()))

    def launch(
        self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place, memories: Memories
    ) -> Handle:
        """Launch it, with memories of what is lost on the way."""
        if not buffer.is_floating_point():
            raise TypeError(
                f"{self!r} encodes floating values, got {buffer.dtype} in {place.name!r}; average "
                "it with Mean(), or a complex tensor as its view_as_real"
            )
        if peers.size == 1:
            return Done()
        runs = place.holds(buffer.numel())
        by_chance = self.rounding is Rounding.STOCHASTIC
        chances = Chances(self.seed, state, runs, peers) if by_chance else Certain()
        order = _Order(place.name, runs, self.codec, self.on_nonfinite, chances, memories)
        kind = _Gathered if peers.size == 2 or self.gather else _InFlight
        return kind(order, Task(buffer, peers, runs.slices(peers.size, self.codec.block)))

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the others' parts with a flag each, and my own part to each of them."""
        runs = Runs.of(numel)
        if group_size <= 2 or self.gather:  # nothing, or everything to each of them
            return (group_size - 1) * (self.codec.nbytes(runs) + FLAG_BYTES)
        bounds = runs.slices(group_size, self.codec.block)
        sizes = [self.codec.nbytes(runs.part(start, stop)) for start, stop in bounds]
        mine = sizes[group_rank]
        return sum(sizes) - mine + (group_size - 1) * (mine + FLAG_BYTES)


class Certain:
    """No chance: values are rounded to the nearest."""

    def draws(self, runs: Runs, whose: object) -> Sequence[Draw] | None:
        """Return nothing to round by."""
        return None

    def commit(self) -> None:
        """Do nothing."""


class Chances(Certain):
    """What the values of one buffer are rounded by, in one call.

    A mean is rounded by the same chances whoever owns it, and values of this rank by its number in
    the group: which of a host's ranks carries them to the others depends on where buffers are cut.
    """

    def __init__(self, seed: int, calls: Calls, runs: Runs, peers: Peers) -> None:
        self._calls, self._origin = calls, (seed, peers.level)
        self._call = {run.tensor: calls.by_tensor.get(run.tensor, 0) for run in runs.each}

    def draws(self, runs: Runs, whose: object) -> Sequence[Draw]:
        """Return what each run is rounded by: values of a rank, or of the mean."""
        names = [run.tensor for run in runs.each]
        return [draw_of(*self._origin, name, self._call[name], whose) for name in names]

    def commit(self) -> None:
        """Count the call, once for all buffers that hold parts of a tensor."""
        self._calls.by_tensor.update({name: call + 1 for name, call in self._call.items()})


@dataclass(frozen=True)
class _Order:
    """How one buffer is to be reduced."""

    name: str
    runs: Runs
    codec: Codec
    on_nonfinite: NonFinite
    chances: Certain
    memories: Memories


class _InFlight(Handle):
    """One buffer on its way: parts to owners, then (in ``advance``) means back, then ``wait``."""

    def __init__(self, order: _Order, task: Task) -> None:
        self.traffic = Traffic()
        self._order, self._task, self._peers = order, task, task.peers
        self._codec, self._bounds, self._mine = order.codec, *self._divide(task)
        self._parts = [order.runs.part(start, stop) for start, stop in self._bounds]
        self._error: Exception | None = None
        self._reduced = False
        self._tag = self._peers.next_tags(2)
        self._wanted, self._outbox = self._encode(task.buffer.to(torch.float32))
        self._inbox = {p: self._room(self._my_runs, FLAG_BYTES) for p in self._peers.others}
        self._arriving, self._leaving = self._post(self._outbox, self._inbox, self._tag)

    @staticmethod
    def _divide(task: Task) -> tuple[Bounds, torch.Tensor]:
        """Return what each message holds, and of what this rank takes the mean."""
        return task.bounds, task.mine

    @property
    def _my_runs(self) -> Runs:
        """What my part holds."""
        return self._parts[self._peers.group_rank]

    @property
    def bytes_held(self) -> int:
        """All messages to owners, and what memories need; the same number on every rank."""
        parts = [self._codec.nbytes(part) + FLAG_BYTES for part in self._parts]
        return sum(parts) + self._peers.size * max(parts) + self._order.memories.sent.bytes_held

    def advance(self) -> None:
        """Take the mean of my part and start to hand it round."""
        if self._error is not None:
            raise self._error
        if not self._reduced:
            _wait(self._arriving)
            self._inbox[self._peers.group_rank] = self._outbox[self._peers.group_rank]
            members = self._members()
            self._remember()
            self._reduce(members)
            self._reduced = True

    def wait(self) -> None:
        """Decode everybody's means into the buffer."""
        self.advance()
        _wait(self._arriving)
        for member, message in self._inbox.items():
            self._write(message, self._parts[member], self._task.part(member))
        _wait(self._leaving)
        _give(self._inbox, self._outbox)
        # To wait again is harmless; a message that is waited for twice never comes.
        self._inbox, self._outbox, self._arriving, self._leaving = {}, {}, [], []

    def commit(self) -> None:
        """Let what was left out, and that there was a call, be remembered."""
        self._order.memories.sent.commit()
        self._order.memories.mean.commit()
        self._order.chances.commit()

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return what is to arrive (None: nothing of this rank), and a message for each part."""
        weights, me = self._peers.weights, self._peers.group_rank
        counts = weights is None or weights[me] > 0.0
        bad = counts and not all_finite(values)
        wanted = self._order.memories.sent.carry(values) if counts and not bad else None
        outbox = {}
        for member, ((start, stop), runs) in enumerate(zip(self._bounds, self._parts, strict=True)):
            message = self._room(runs, FLAG_BYTES)
            if wanted is None:
                message.zero_()
            else:
                draws = self._order.chances.draws(runs, me)
                self._codec.encode(wanted[start:stop], runs, message[:-FLAG_BYTES], draws)
            message[-FLAG_BYTES:] = int(bad)
            outbox[member] = message
        return wanted, outbox

    def _members(self) -> list[int]:
        """Return whose values count; raise on all ranks if that cannot be said."""
        bad = [p for p, message in self._inbox.items() if int(message[-1])]
        try:
            return contributors(self._peers, bad, self._order.on_nonfinite, self._order.name)
        except ValueError as error:
            _wait(self._leaving)  # so that the group can go on with other things
            self._error = error
            raise

    def _remember(self) -> None:
        """Note what my messages left out."""
        if self._wanted is None:
            return

        def decoded(out: torch.Tensor) -> None:
            bounds = zip(self._bounds, self._parts, strict=True)
            for member, ((start, stop), runs) in enumerate(bounds):
                self._codec.decode(self._outbox[member], runs, out[start:stop])

        self._order.memories.sent.keep(self._wanted, decoded)
        self._wanted = None

    def _mean(self, members: list[int], total: torch.Tensor) -> torch.Tensor:
        """Write the mean of my part to ``total``, and return that."""
        weights = self._peers.weights or (1.0,) * self._peers.size
        whole = sum(weights[p] for p in members)
        shares = [float(torch.tensor(weights[p] / whole, dtype=torch.float32)) for p in members]
        if not members:  # everybody has weight 0
            total.zero_()
        for count, (member, share) in enumerate(zip(members, shares, strict=True)):
            take_in = self._codec.decode if count == 0 else self._codec.add
            take_in(self._inbox[member], self._my_runs, total, share)
        if total.device.type != "cpu" or not all_finite(total):  # elsewhere to ask is to wait
            total.clamp_(-LARGEST, LARGEST)
        self._sample(total, members)
        return total

    def _wide(self) -> torch.Tensor:
        """Return memory for the mean of my part."""
        return STAGING.take(self._mine.numel(), torch.float32, self._mine.device)

    def _reduce(self, members: list[int]) -> None:
        """Encode the mean of my part and hand it round."""
        total = self._mean(members, self._wide())
        runs = self._my_runs
        wanted, message = self._order.memories.mean.carry(total), self._room(runs)
        self._codec.encode(wanted, runs, message, self._order.chances.draws(runs, "mean"))
        self._order.memories.mean.keep(wanted, lambda out: self._codec.decode(message, runs, out))
        STAGING.give(total)
        self._hand_round(message)

    def _sample(self, mean: torch.Tensor, members: list[int]) -> None:
        """Estimate from the front of my part how far apart the replicas are."""
        count = self._my_runs.front(SAMPLE, self._codec.block)
        front, replica = mean[:count].double(), mean.new_empty(count)
        for member in members:
            self._codec.decode(self._inbox[member], self._my_runs, replica)
            self.traffic.deviation += float((front - replica).square().sum())
        self.traffic.magnitude += float(front.square().sum()) * len(members)
        self.traffic.samples += count * len(members)

    def _hand_round(self, message: torch.Tensor) -> None:
        """Send the mean of my part to everybody and start to receive theirs."""
        me, others = self._peers.group_rank, self._peers.others
        self._write(message, self._my_runs, self._mine)
        _give(self._inbox)  # with my own message, which has been used
        del self._outbox[me]
        self._inbox = {p: self._room(self._parts[p]) for p in others}
        outgoing = dict.fromkeys(others, message)
        self._arriving, leaving = self._post(outgoing, self._inbox, self._tag + 1)
        self._leaving += leaving
        self._outbox[me] = message

    def _write(self, message: torch.Tensor, runs: Runs, part: torch.Tensor) -> None:
        if part.dtype == torch.float32:
            self._codec.decode(message, runs, part)
            return
        wide = STAGING.take(part.numel(), torch.float32, part.device)
        self._codec.decode(message, runs, wide)
        narrow(wide, part)
        STAGING.give(wide)

    def _room(self, runs: Runs, more: int = 0) -> torch.Tensor:
        return STAGING.take(self._codec.nbytes(runs) + more, torch.uint8, self._mine.device)

    def _post(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], tag: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        others = self._peers.others
        receives = [Message(incoming[p], p, outgoing=False) for p in others if incoming[p].numel()]
        sends = [Message(outgoing[p], p, outgoing=True) for p in others if outgoing[p].numel()]
        self.traffic.bytes_sent += sum(message.tensor.nbytes for message in sends)
        transfers = self._peers.post([*receives, *sends], tag)
        return transfers[: len(receives)], transfers[len(receives) :]


class _Gathered(_InFlight):
    """One buffer of which everything goes to everybody, and all take the mean."""

    @staticmethod
    def _divide(task: Task) -> tuple[Bounds, torch.Tensor]:
        return [(0, task.buffer.numel())], task.buffer

    @property
    def _my_runs(self) -> Runs:
        return self._order.runs

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        wanted, outbox = super()._encode(values)
        return wanted, dict.fromkeys(range(self._peers.size), outbox[0])

    def _reduce(self, members: list[int]) -> None:
        """Write the mean; nothing comes back."""
        if self._mine.dtype == torch.float32:
            self._mean(members, self._mine)
        else:
            total = self._mean(members, self._wide())
            narrow(total, self._mine)
            STAGING.give(total)
        me = self._peers.group_rank
        _give({member: self._inbox[member] for member in self._peers.others})
        self._inbox, self._arriving = {}, []
        self._outbox = {me: self._outbox[me]}  # it may still be on its way


def narrow(wide: torch.Tensor, part: torch.Tensor) -> None:
    """Write float32 values, which may lie beyond the range of a narrower dtype."""
    if part.dtype != torch.float32:
        limit = min(LARGEST, torch.finfo(part.dtype).max)
        wide.clamp_(-limit, limit)
    part.copy_(wide)


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _give(*boxes: dict[int, torch.Tensor]) -> None:
    for box in boxes:
        for message in box.values():
            STAGING.give(message)
