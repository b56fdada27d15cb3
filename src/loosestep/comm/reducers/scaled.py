"""Every value in units of its own, learnt from the means that have arrived.

    unit = root of the mean square of earlier means
    mean = unit * mean of decode(encode(x / unit))

A block has one scale, and a model's gradients differ by orders of magnitude inside a block. What is
much smaller than its neighbours is lost, or drowns in their noise; and Adam, which divides by the
root of its own mean squares, makes steps of noise as large as those of a signal. In units of their
own all values are alike, and noise is in proportion to each of them. What is left out is left out:
gradients of small batches are noise for the most part, in which rounding errors cancel.

All ranks take their units from means that are bit-equal, so nothing is sent for them. A value that
has been zero has the least unit there is, and where it wakes up it outshines its block, which is
heard less until the unit has grown; blocks need a level at zero for that, as ``Ternary`` has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.flat import STAGING
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.compressed import LARGEST, Compressed, narrow
from loosestep.comm.reducers.feedback import describe_sizes
from loosestep.comm.reducers.nonfinite import all_finite
from loosestep.comm.reducers.packed import Packed
from loosestep.comm.reducers.quantize import Int2
from loosestep.comm.reducers.reducer import Around, Handle, NonFinite, Place, Reducer, State
from loosestep.comm.tensors import Named
from loosestep.errors import is_number

LEAST = 2.0**-40  # of the largest unit: less counts as this, so that what was zero can be more
SMALLEST = 2.0**-60  # a unit, whatever the others are: its square is a normal number


@dataclass(frozen=True)
class Units:
    """The mean squares of one slot's values, and of how many calls."""

    squares: torch.Tensor
    calls: int
    least: float  # the smallest unit that is used

    @classmethod
    def of(cls, squares: torch.Tensor, calls: int = 1) -> Units:
        """Return units whose squares these are."""
        return cls(squares, calls, _least(float(squares.max()) if squares.numel() else 0.0))

    def divide(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values in units; where they are finite, so is what is written."""
        if codec_c.available(out) and values.dtype == out.dtype:
            codec_c.to_units(values, self.squares, self.least, out)
        else:
            out.copy_(codec_torch.to_units(values.to(out.dtype), self.squares, self.least))
        if not all_finite(out) and all_finite(values.to(out.dtype)):
            out.clamp_(-LARGEST, LARGEST)

    def multiply(self, values: torch.Tensor, memory: float, room: torch.Tensor) -> Units:
        """Undo it in place; return what is learnt from the result, which is in ``room``."""
        keep = self.share(memory)
        if codec_c.available(values):
            squares = room.copy_(self.squares)
            largest = codec_c.from_units(values, squares, self.least, keep)
            return self.next(squares, largest)
        plain, squares = codec_torch.from_units(values, self.squares, self.least, keep)
        values.copy_(plain)
        return Units.of(squares, self.calls + 1)

    def share(self, memory: float) -> float:
        """Return how much of the mean squares stays at the next call.

        At first all calls count alike, so that the first ones do not weigh on the others.
        """
        return min(memory, 1.0 - 1.0 / (self.calls + 1))

    def next(self, squares: torch.Tensor, largest: float) -> Units:
        """Return the units after one more call, whose largest mean square is known."""
        return Units(squares, self.calls + 1, _least(largest))

    def on(self, device: torch.device) -> Units:
        """Return the same where the values are: a checkpoint is loaded to the CPU."""
        return replace(self, squares=self.squares.to(device))  # no copy where they are there


def first_units(mean: torch.Tensor) -> Units:
    """Return the magnitudes of the first mean that has arrived."""
    return Units.of(mean.square().clamp_(max=LARGEST))


def _least(largest_square: float) -> float:
    root: float = largest_square**0.5
    return max(SMALLEST, LEAST * root)


class Learnt(State):
    """The units of every slot."""

    def __init__(self, inner: State) -> None:
        self.inner = inner
        self.units: dict[str, Units] = {}
        self.rooms: dict[str, torch.Tensor] = {}  # for the next squares: new pages are slow

    @property
    def nbytes(self) -> int:
        """How much memory all mean squares take."""
        held = [*(units.squares for units in self.units.values()), *self.rooms.values()]
        return self.inner.nbytes + sum(tensor.nbytes for tensor in held)

    def of(self, place: Place, values: torch.Tensor) -> Units | None:
        """Return those of a buffer; None: nothing has arrived in it yet."""
        units = self.units.get(place.slot)
        if units is not None and units.squares.numel() != values.numel():
            raise ValueError(
                f"Scaled keeps {units.squares.numel()} units for {place.slot!r}, but there are "
                f"{values.numel()} values now; its state is of another model, bucket size or "
                "number of ranks: forget it with load_state_dict({}), on all ranks"
            )
        return None if units is None else units.on(values.device)

    def describe(self) -> str:
        """Return how much is kept of what."""
        sizes = {slot: units.squares.numel() for slot, units in self.units.items()}
        return describe_sizes(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return mean squares and calls by slot, and the state of the reducer inside."""
        kept = {
            "squares": {slot: units.squares.clone() for slot, units in self.units.items()},
            "calls": {slot: units.calls for slot, units in self.units.items()},
            "inner": self.inner.state_dict(),
        }
        return {name: state for name, state in kept.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what ``state_dict`` returned; an empty one forgets everything."""
        unknown = sorted(set(state_dict) - {"squares", "calls", "inner"})
        if unknown:
            raise ValueError(
                f"Scaled keeps 'squares', 'calls' and 'inner', but the checkpoint holds {unknown}; "
                "was it written with another reducer?"
            )
        self.inner.load_state_dict(state_dict.get("inner", {}))
        squares, calls = state_dict.get("squares", {}), state_dict.get("calls", {})
        self.units = {slot: Units.of(kept.clone(), calls[slot]) for slot, kept in squares.items()}
        self.rooms = {}


@dataclass(frozen=True)
class Scaled(Reducer):
    """A lossy reducer of gradients that measures every value by itself: ``Scaled(Ternary())``.

    For Adam and its like, at an eighteenth of the bytes; ``python -m benchmarks gradients`` has
    what it costs. Its state has a float32 for every value and belongs into checkpoints, one for
    every rank. ``memory`` is how much of a mean square stays at every call.

    Example::

        wire = TwoLevel(Scaled(Ternary()))  # between hosts
        attach(model, optimizer, ddp(gradient_reducer=wire))
    """

    inner: Reducer
    _: KW_ONLY
    memory: float = 0.95

    lossy = True
    remembers = True

    def __post_init__(self) -> None:
        """Refuse what has nothing to gain from units."""
        inner, memory = self.inner, self.memory
        if not isinstance(inner, Compressed):
            raise ValueError(
                f"Scaled gives a lossy reducer values that are alike, and {inner!r} is none; give "
                "Ternary(), Int4() or Int8()"
            )
        if isinstance(inner, Int2):
            raise ValueError(
                f"{inner!r} has no level at zero: what is little beside its block would become "
                "much, and its unit with it; give Ternary(), in fewer bytes"
            )
        if not (is_number(memory) and 0.0 <= memory < 1.0):
            raise ValueError(
                f"memory must be at least 0 and less than 1, got {memory!r}; 0.95 is that of some "
                "twenty calls"
            )

    @property
    def on_nonfinite(self) -> NonFinite | None:
        """What ``inner`` does about infinities and NaN."""
        return self.inner.on_nonfinite

    def init(self, tensors: Sequence[Named], peers: Peers) -> Learnt:
        """Return that nothing is learnt yet."""
        return Learnt(self.inner.init(tensors, peers))

    def start(self, buffer: torch.Tensor, peers: Peers, state: Learnt, place: Place) -> Handle:
        """Launch the mean of the values in units of their own."""
        if peers.size == 1:
            return self.inner.start(buffer, peers, state.inner, place)
        lesson = _Lesson(state, place, buffer, self.memory)
        values = STAGING.take(buffer.numel(), torch.float32, buffer.device)
        if lesson.units is None:
            values.copy_(buffer)
        else:
            lesson.units.divide(buffer, values)
        mean = self.inner.start(values, peers, state.inner, place)
        return _InUnits(mean, buffer, values, lesson)

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` sends: units need no messages."""
        return self.inner.bytes_on_wire(numel, dtype, group_size, group_rank)

    @property
    def packs(self) -> bool:
        """Whether ``inner`` does."""
        return self.inner.packs

    def packed(self, state: Learnt, place: Place, values: torch.Tensor) -> Packed:
        """Return how a host's replicas of such values become one message, in one pass."""
        inner = self.inner.packed(state.inner, place, values)
        return _PackedInUnits(inner, _Lesson(state, place, values, self.memory))

    def __repr__(self) -> str:
        return f"Scaled({self.inner!r}, memory={self.memory})"


class _Lesson:
    """What one mean teaches about the units of its slot; it counts from ``commit`` on."""

    def __init__(self, state: Learnt, place: Place, values: torch.Tensor, memory: float) -> None:
        self.units, self.memory = state.of(place, values), memory
        self.learnt: Units | None = None
        self._state, self._slot = state, place.slot

    def room(self) -> torch.Tensor:
        """Return memory for the next squares."""
        assert self.units is not None, "the first mean brings its own"
        room = self._state.rooms.pop(self._slot, None)
        fits = room is not None and room.device == self.units.squares.device
        return room if room is not None and fits else torch.empty_like(self.units.squares)

    def commit(self) -> None:
        """Measure by what was learnt from now on."""
        if self.learnt is not None:
            self._state.units[self._slot] = self.learnt
            if self.units is not None:
                self._state.rooms[self._slot] = self.units.squares


class _InUnits(Around):
    """A mean under way."""

    def __init__(
        self, inner: Handle, buffer: torch.Tensor, values: torch.Tensor, lesson: _Lesson
    ) -> None:
        super().__init__(inner)
        self._buffer, self._values, self._lesson = buffer, values, lesson

    @property
    def bytes_held(self) -> int:
        """The values in units, and what their mean takes."""
        return 4 * self._buffer.numel() + super().bytes_held

    def wait(self) -> None:
        """Leave the mean in the buffer; to wait again is harmless."""
        lesson = self._lesson
        if lesson.learnt is not None:
            return
        super().wait()
        if lesson.units is None:
            lesson.learnt = first_units(self._values)
        else:
            lesson.learnt = lesson.units.multiply(self._values, lesson.memory, lesson.room())
        narrow(self._values, self._buffer)
        STAGING.give(self._values)

    def commit(self) -> None:
        """Let the states have what was learnt."""
        super().commit()
        self._lesson.commit()


class _PackedInUnits(Packed):
    """How the values of one buffer travel between two hosts, in units of their own."""

    def __init__(self, inner: Packed, lesson: _Lesson) -> None:
        self._inner, self._lesson, self.nbytes = inner, lesson, inner.nbytes

    def pack(self, replicas: Sequence[torch.Tensor], message: torch.Tensor, _: Any = None) -> bool:
        """Write the mean of the replicas; return whether it is finite."""
        units = self._lesson.units
        kept = None if units is None else (units.squares, units.least)
        return self._inner.pack(replicas, message, kept)

    def unpack(
        self, messages: Sequence[torch.Tensor], places: Sequence[torch.Tensor], _: Any = None
    ) -> float:
        """Write the mean of two messages to all places, and learn from it."""
        lesson, units = self._lesson, self._lesson.units
        if units is None:
            largest = self._inner.unpack(messages, places)
            lesson.learnt = first_units(places[0])
            return largest
        squares = lesson.room().copy_(units.squares)
        kept = (squares, units.least, units.share(lesson.memory))
        largest = self._inner.unpack(messages, places, kept)
        lesson.learnt = units.next(squares, largest)
        return largest

    def commit(self) -> None:
        """Let the states have what was learnt."""
        self._inner.commit()
        self._lesson.commit()
