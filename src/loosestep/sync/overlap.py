"""Averages that travel while training goes on.

    launch at step t      snapshot = p, and a thread beside training takes the mean of all snapshots
    land at step t + tau  p += mean - snapshot

so that no step taken in between is lost: computation and communication decoupled SGD,
https://arxiv.org/abs/1906.12043. An average between its launch and its landing is a *flight*. The
training thread stands still for one copy at launch and one sum at landing. A snapshot and a mean
are kept in memory beside the model for every flight (``Overlap.nbytes``).

Flights wait in a queue, in the order of their launches, which is the same on all ranks ([Note:
order of collectives] in ``gradients/plain.py``). One thread carries them, one after the other: it
agrees and averages over process groups that nothing else uses meanwhile ([Note: threads and groups]
in ``comm/group.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loosestep.comm.agreement import Progress
from loosestep.comm.tensors import Named, memory
from loosestep.strategy.arrivals import Arrival, Delta
from loosestep.sync.averager import Averager
from loosestep.sync.flight import Carrier, Flight, Room
from loosestep.sync.observing import Numbers
from loosestep.sync.parts import Parts, always_exact
from loosestep.sync.pipeline import Averaging

Share = tuple[Averager, Parts]  # who averages, and which tensors of this rank


class Overlap:
    """Means under way, each applied ``steps`` steps after its launch, in the order of launches.

    ``most`` may be under way at once; ``arrival`` says what becomes of parameters at the end.
    """

    def __init__(self, steps: int, arrival: Arrival | None = None, most: int = 1) -> None:
        self.steps, self._most = steps, most
        self._arrival: Arrival = Delta() if arrival is None else arrival
        self.flights: deque[Flight] = deque()  # what has been launched and has not landed
        self._carrier = Carrier()
        self._rooms: dict[str, list[Room]] = defaultdict(list)  # that no flight uses

    @property
    def nbytes(self) -> int:
        """How much memory snapshots and means take."""
        used = [flight.rooms.values() for flight in self.flights]
        return sum(room.nbytes for rooms in [*self._rooms.values(), *used] for room in rooms)

    @property
    def is_full(self) -> bool:
        """Whether one must land before the next can be launched."""
        return len(self.flights) >= self._most

    def is_due(self, step: int) -> bool:
        """Say whether a mean is to be applied after ``step`` steps."""
        return bool(self.flights) and step - self.flights[0].step >= self.steps

    def prepare(self, shares: Sequence[Share]) -> None:
        """Take the memory now: new pages are slow when they are first written."""
        for averager, parts in shares:
            room = self._take_room(averager)
            mine, means = room.of(averager, parts)
            for _, tensor in [*room.snapshots.of(mine), *memory(means)]:
                tensor.zero_()
            self._rooms[averager.name].append(room)

    @torch.no_grad()
    def launch(
        self, shares: Sequence[Share], step: int, level: str, observed: Numbers = ()
    ) -> None:
        """Copy what takes part, and let the mean of the copies travel.

        What this rank has ``observed`` goes along with the first share.
        """
        assert not self.is_full, "one must land first"
        began = time.perf_counter()
        flight = Flight(step, level, [], peers=[averager.peers for averager, _ in shares])
        legs = []
        for averager, parts in shares:
            legs.append(self._leg(averager, parts, flight, observed))
            observed = ()
        flight.travel = lambda: [leg.travel(flight) for leg in legs]
        self.flights.append(flight)
        self._carrier.add(flight)
        flight.seconds_waited = time.perf_counter() - began

    def _leg(self, averager: Averager, parts: Parts, flight: Flight, observed: Numbers) -> _Leg:
        room = flight.rooms[averager.name] = self._take_room(averager)
        mine, means = room.of(averager, parts)
        snapshots, guesses = room.snapshots.of(mine), averager.steps_outer and self._arrival.guesses
        sample = averager.sample(memory(parts.means), flight.step)
        if guesses:  # what is averaged is copied before, and a snapshot is of the guess
            _copy_(memory(means), mine)
            averager.guess(mine)
        _copy_(snapshots, mine)
        flight.differences += memory(means)
        progress = Progress(flight.step, sample=sample, observed=observed)
        copies = parts.replaced(dict(means))
        return _Leg(averager, copies, progress, snapshots, means, guesses, self._arrival)

    def finish(self) -> None:
        """Wait until nothing is under way; what has come is not applied."""
        for flight in list(self.flights):
            try:
                flight.wait()
            except BaseException:
                if not flight.flying:  # else it still uses its process group
                    self.flights.remove(flight)
                raise

    @torch.no_grad()
    def land(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Flight:
        """Wait for the first that was launched, add it to the tensors, and return it.

        Tensors are found by name, since a module may have new ones for its buffers by now. Those
        that were not launched stay as they are.
        """
        flight = self.flights[0]
        try:
            flight.wait()
        finally:
            if not flight.flying:
                self.flights.popleft()
        began = time.perf_counter()
        self._apply(*_matched(flight, tensors()))
        for name, room in flight.rooms.items():
            self._rooms[name].append(room)
        flight.seconds_waited += time.perf_counter() - began
        return flight

    def _apply(self, tensors: Sequence[Named], differences: Sequence[torch.Tensor]) -> None:
        """Mix means into parameters, or add differences; always the latter to all else."""
        share, added = self._arrival.keeps, []
        for (name, tensor), by in zip(tensors, differences, strict=True):
            if share is None or always_exact(name):
                added.append((tensor, by))
            else:
                tensor.mul_(share).add_(by, alpha=1.0 - share)
        add_([tensor for tensor, _ in added], [by for _, by in added])

    def discard(self) -> None:
        """Drop what is under way, once it no longer uses its process group."""
        while self.flights:
            flight = self.flights[0]
            with contextlib.suppress(Exception):  # the next launch fails too, if the group did
                flight.wait()
            self.flights.popleft().abandon()

    def close(self) -> None:
        """Drop what is under way within a few seconds, and all memory."""
        self._carrier.forget()  # those that have not begun
        while self.flights:
            self.flights.popleft().abandon()
        self._rooms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way and return it, not yet applied.

        One entry a flight, by its place in the queue. There is one also where nothing is under
        way: distributed checkpoints load only what the new run has too.
        """
        self.finish()
        flights = list(self.flights) or [Flight(-1, "", [])]
        told = {str(place): flight.state_dict() for place, flight in enumerate(flights)}
        return {"num_flights": len(self.flights), **told}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Drop what is under way and take back what was saved."""
        self.discard()
        saved = [state_dict.get(str(n)) for n in range(state_dict.get("num_flights", 0))]
        if None in saved:
            raise ValueError(
                f"the checkpoint was taken with {len(saved)} averages under way and does not hold "
                "all of them; save state_dict() with torch.save"
            )
        self.flights.extend(Flight.of(state) for state in saved if state is not None)

    def _take_room(self, averager: Averager) -> Room:
        free = self._rooms[averager.name]
        return free.pop() if free else Room()


@dataclass(frozen=True)
class _Leg:
    """What some ranks average together in one flight."""

    averager: Averager
    copies: Parts  # what takes part, with ``means`` for tensors
    progress: Progress
    snapshots: list[Named]  # of what this rank averages itself
    means: list[Named]  # of all
    filled: bool  # whether copies are there already, and snapshots are of something else
    arrival: Arrival

    @torch.no_grad()
    def travel(self, flight: Flight) -> Averaging:
        """Average the copies, and leave what is to be applied. This is done by the thread."""
        averager, whole = self.averager, self.averager.steps_outer
        with _beside(self.means[0][1].device if self.means else torch.device("cpu")):
            copied = memory(self.means)
            if not self.filled:
                _copy_(copied if whole else averager.share(copied), self.snapshots)
            # With an outer optimizer all ranks of a host have all of the mean.
            agreed = averager.agree(self.copies, self.progress)
            flight.observed = flight.observed or [header.observed for header in agreed.headers]
            flight.left_out = flight.left_out or agreed.left_out
            average = averager.start(agreed, hand_round=whole)
            flight.traffic.add(average.wait())
            came = memory(self.means)  # again: a reducer may have moved them
            flight.take(came)
            self._differ(came if whole else averager.share(came))
            if not whole:
                flight.traffic.add(averager.hand_round(came, flight.step))
        return average

    def _differ(self, came: Sequence[Named]) -> None:
        """Replace means by how far they are from the snapshots, but for what is mixed in."""
        finite: list[tuple[torch.Tensor, torch.Tensor]] = []
        other: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (name, mean), (_, snapshot) in zip(came, self.snapshots, strict=True):
            if self.arrival.keeps is not None and not always_exact(name):
                continue
            # What was found finite on the way is not looked at again.
            known = self.averager.only_finite and not always_exact(name)
            (finite if known else other).append((mean, snapshot))
        if finite:
            torch._foreach_sub_([mean for mean, _ in finite], [old for _, old in finite])
        differ_([mean for mean, _ in other], [old for _, old in other])


def differ_(means: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor]) -> None:
    """Replace means by how far they are from the snapshots.

    >>> means = [torch.tensor([2.0, 3.0])]
    >>> differ_(means, [torch.tensor([2.0, 1.0])])
    >>> means
    [tensor([0., 2.])]
    """
    for mean, snapshot in zip(means, snapshots, strict=True):
        if mean.dtype == torch.bool:
            mean.logical_xor_(snapshot)
        elif not mean.is_floating_point() or snapshot.sum().isfinite():
            mean.sub_(snapshot)
        else:  # equal values differ by nothing, also where they are infinite
            same = mean == snapshot
            mean.sub_(snapshot).masked_fill_(same, 0.0)


def add_(tensors: Sequence[torch.Tensor], differences: Sequence[torch.Tensor]) -> None:
    """Add what ``differ_`` made."""
    pairs = list(zip(tensors, differences, strict=True))
    numbers = [pair for pair in pairs if pair[0].dtype != torch.bool]
    if numbers:
        torch._foreach_add_([tensor for tensor, _ in numbers], [by for _, by in numbers])
    for tensor, flipped in pairs:
        if tensor.dtype == torch.bool:
            tensor.logical_xor_(flipped)


def _matched(
    flight: Flight, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[Named], list[torch.Tensor]]:
    """Return this rank's memory of what was launched, and its differences."""
    missing = [name for name, _ in flight.differences if name not in tensors]
    found = dict(memory([(n, tensors[n]) for n, _ in flight.differences if n in tensors]))
    for name, difference in flight.differences:
        if name in found and found[name].shape != difference.shape:
            missing.append(f"{name} of shape {tuple(difference.shape)}")
    if missing:
        raise ValueError(
            f"the average launched at step {flight.step} holds {missing[:3]} ({len(missing)} in "
            "all), which the model no longer has; change it when no average is under way"
        )
    by_name = {name: d for name, d in flight.differences if name in found}
    return list(found.items()), [by_name[n].to(t.device) for n, t in found.items()]


def _copy_(into: Sequence[Named], source: Sequence[Named]) -> None:
    if into:
        torch._foreach_copy_([tensor for _, tensor in into], [tensor for _, tensor in source])


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run kernels on a stream of their own, where there are streams, and wait for them."""
    if device.type == "cpu":
        yield
        return
    torch.accelerator.synchronize(device)  # the snapshot may still be on its way
    stream = torch.Stream(device)
    with stream:
        yield
    stream.synchronize()
