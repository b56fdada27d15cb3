"""A flight: one average between its launch and its landing, and the thread that carries it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from loosestep.comm.flat.windows import WINDOW_BYTES
from loosestep.comm.peers import Peers
from loosestep.comm.tensors import Named, each_once, memory
from loosestep.errors import PeerLost
from loosestep.sync.observing import Numbers
from loosestep.sync.parts import Parts
from loosestep.telemetry.traffic import Traffic

if TYPE_CHECKING:
    from loosestep.sync.averager import Averager
    from loosestep.sync.pipeline import Averaging

LINGER_SECONDS = 2.0  # for a mean that nobody wants any more, before its connections are cut
ALONE_SECONDS = 600.0  # for one that needs nobody else


@dataclass
class Flight:
    """A mean on its way, or one that has come and is not applied yet."""

    step: int
    level: str  # with the fragment, where a part of the parameters travels
    # Once it has come, of this rank's memory: mean - snapshot, or the mean where rules mix it in.
    differences: list[Named]
    observed: list[Numbers] = field(default_factory=list)  # what all ranks told at its launch
    left_out: tuple[int, ...] = ()  # global ranks that had no say
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0  # from launch until it had come
    seconds_waited: float = 0.0  # how long training stood still for it
    peers: Sequence[Peers] = ()  # with whom; none: it has come
    rooms: dict[str, Room] = field(default_factory=dict)  # by who averages in them
    travel: Callable[[], list[Averaging]] | None = None  # leaves the mean in ``differences``
    arrived: threading.Event = field(default_factory=threading.Event)
    _averages: list[Averaging] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)
    _launched: float = field(default_factory=time.perf_counter)

    def carry(self) -> None:
        """Take the mean; what goes wrong is raised by ``wait``, where somebody listens."""
        travel, self.travel = self.travel, None
        assert travel is not None, "carried once"
        try:
            self._averages = travel()
        except BaseException as error:
            self._errors.append(error)
        self.seconds = time.perf_counter() - self._launched
        self.arrived.set()

    def wait(self) -> None:
        """Return when the mean has come, and believe it; raise what went wrong on the way."""
        if not self.peers:
            return
        began, limit = time.perf_counter(), self._limit()
        self.arrived.wait(limit)
        self.seconds_waited += time.perf_counter() - began
        if self.flying:
            raise PeerLost(
                f"the average that was launched at step {self.step} on level {self.level!r} has "
                f"not come within {limit:g} s. Parameters are as they were before it",
                phase="waiting for an average under way",
            )
        self.peers = ()
        if self._errors:
            raise self._errors.pop()
        while self._averages:
            self._averages.pop().commit()

    def take(self, came: Sequence[Named]) -> None:
        """Take some of the means, which may lie elsewhere than they were to."""
        self.differences = list({**dict(self.differences), **dict(came)}.items())

    @property
    def flying(self) -> bool:
        """Whether the thread has it still before it."""
        return bool(self.peers) and not self.arrived.is_set()

    def abandon(self) -> None:
        """Let it end soon, whatever becomes of it: its own time-outs end it in any case."""
        if self.peers and not self.arrived.wait(LINGER_SECONDS):
            for peers in self.peers:
                peers.give_up("an average under way was given up")
            self.arrived.wait(LINGER_SECONDS)

    def state_dict(self) -> dict[str, Any]:
        """Return what is still to be applied, as copies."""
        differences = {name: tensor.clone() for name, tensor in self.differences}
        return {
            "step": self.step,
            "level": self.level,
            "num_tensors": len(differences),
            "differences": differences,
            "observed": [list(numbers) for numbers in self.observed],
            "left_out": list(self.left_out),
        }

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> Flight:
        """Return one that has come, from what ``state_dict`` returned."""
        differences = dict(state_dict["differences"])
        if len(differences) != state_dict["num_tensors"]:
            raise ValueError(
                f"the checkpoint was taken with an average of {state_dict['num_tensors']} tensors "
                f"under way and holds {len(differences)} of them; distributed checkpoints load "
                "only what the new run has too: save state_dict() with torch.save, or after the "
                "average has landed"
            )
        held = [(name, tensor.clone()) for name, tensor in differences.items()]
        observed = [tuple(numbers) for numbers in state_dict.get("observed", [])]
        left_out = tuple(state_dict.get("left_out", ()))
        return cls(state_dict["step"], state_dict["level"], held, observed, left_out)

    def _limit(self) -> float:
        """Return how long all waits on the way may take, should each just not time out."""
        seconds = [peers.seconds for peers in self.peers if peers.size > 1]
        if not seconds:
            return ALONE_SECONDS
        num_bytes = sum(tensor.nbytes for _, tensor in self.differences)
        num_windows = len(self.differences) + num_bytes // WINDOW_BYTES
        return max(seconds) * (4 * len(seconds) + num_windows)


class Carrier:
    """One thread that carries flights in the order in which they come; it ends with the last."""

    def __init__(self) -> None:
        self._lock, self._busy = threading.Lock(), False
        self._waiting: deque[Flight] = deque()

    def add(self, flight: Flight) -> None:
        """Carry a flight after those that were added before."""
        with self._lock:
            self._waiting.append(flight)
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._run, name="loosestep overlap", daemon=True).start()

    def forget(self) -> None:
        """Leave those that have not begun."""
        with self._lock:
            for flight in self._waiting:
                flight.arrived.set()
            self._waiting.clear()

    def _run(self) -> None:
        while (flight := self._next()) is not None:
            flight.carry()

    def _next(self) -> Flight | None:
        with self._lock:
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None


class Room:
    """Memory for what one flight has beside the model."""

    def __init__(self) -> None:
        self.snapshots, self.means = Copies(), Copies()

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return self.snapshots.nbytes + self.means.nbytes

    def of(self, averager: Averager, parts: Parts) -> tuple[list[Named], list[Named]]:
        """Return what this rank averages itself of the parts, and room for the means of all."""
        named = each_once(parts.everything)
        parts_here = memory(named)
        mine = parts_here if averager.steps_outer else averager.share(parts_here)
        return mine, self.means.of(named)


class Copies:
    """Memory for copies of tensors, used again from one flight to the next."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return sum(tensor.nbytes for _, tensor in memory(list(self._held.items())))

    def of(self, named: Sequence[Named]) -> list[Named]:
        """Return tensors that are laid out as ``named`` are, with any content."""
        held: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            old = self._held.get(name)
            fits = old is not None and _layout(old) == _layout(tensor)
            held[name] = old if fits and old is not None else torch.empty_like(tensor.detach())
        self._held = held
        return list(held.items())


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    placements = getattr(tensor, "placements", None)  # of a DTensor
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), placements
