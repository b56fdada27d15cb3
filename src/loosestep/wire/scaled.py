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

from dataclasses import dataclass
from typing import Any

import torch

import loosestep.wire.codec_c as codec_c
import loosestep.wire.codec_torch as codec_torch
from loosestep.checks import is_number
from loosestep.flat import STAGING
from loosestep.peers import Peers
from loosestep.wire.compressed import LARGEST, Compressed, narrow
from loosestep.wire.feedback import describe_sizes
from loosestep.wire.nonfinite import all_finite
from loosestep.wire.quantize import Int2
from loosestep.wire.reducer import Around, Handle, Reducer

LEAST = 2.0**-40  # of the largest unit: less counts as this, so that what was zero can be more
SMALLEST = 2.0**-60  # a unit, whatever the others are: its square is a normal number


@dataclass
class Units:
    """The mean squares of one slot's values, and of how many calls."""

    squares: torch.Tensor
    calls: int = 1

    def __post_init__(self) -> None:
        """Find the smallest unit that is used."""
        self.settle(float(self.squares.max()) if self.squares.numel() else 0.0)

    def settle(self, largest: float) -> None:
        """Take note of the largest mean square."""
        self.least = max(SMALLEST, LEAST * largest**0.5)

    def count(self, memory: float) -> float:
        """Count a call; return how much of the mean squares stays.

        At first all calls count alike, so that the first ones do not weigh on the others.
        """
        self.calls += 1
        return min(memory, 1.0 - 1.0 / self.calls)

    def divide(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values in units; where they are finite, so is what is written."""
        if codec_c.available(out) and values.dtype == out.dtype:
            codec_c.to_units(values, self.squares, self.least, out)
        else:
            out.copy_(codec_torch.to_units(values.to(out.dtype), self.squares, self.least))
        if not all_finite(out) and all_finite(values.to(out.dtype)):
            out.clamp_(-LARGEST, LARGEST)

    def multiply(self, values: torch.Tensor, memory: float) -> None:
        """Undo it in place, and learn from the result."""
        keep = self.count(memory)
        if codec_c.available(values):
            largest = codec_c.from_units(values, self.squares, self.least, keep)
        else:
            found = codec_torch.from_units(values, self.squares, self.least, keep)
            values.copy_(found[0])
            self.squares.copy_(found[1])
            largest = float(self.squares.max()) if self.squares.numel() else 0.0
        self.settle(largest)


class Scaled:
    """A lossy reducer of gradients that measures every value by itself: ``Scaled(Ternary())``.

    For Adam and its like, at an eighteenth of the bytes; ``python -m benchmarks gradients`` has
    what it costs. It keeps a float32 for every value, by level and slot, which belongs into
    checkpoints, one for every rank. ``memory`` is how much of a mean square stays at every call.

    Example::

        wire = TwoLevel(Scaled(Ternary()))  # between hosts
        attach(model, optimizer, ddp(gradient_reducer=wire))
    """

    lossy = True

    def __init__(self, inner: Reducer, *, memory: float = 0.95) -> None:
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
        self.inner, self.memory = inner, memory
        self.on_nonfinite = inner.on_nonfinite
        self._units: dict[str, Units] = {}

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of the values in units of their own."""
        if peers.size == 1:
            return self.inner.start(buffer, peers, slot)
        return _InUnits(self, f"{peers.level}/{slot}", buffer, (peers, slot))

    def units(self, key: str, values: torch.Tensor) -> Units | None:
        """Return those of a slot; None: nothing has arrived in it yet."""
        units = self._units.get(key)
        if units is not None and units.squares.numel() != values.numel():
            raise ValueError(
                f"Scaled keeps {units.squares.numel()} units for {key!r}, but there are "
                f"{values.numel()} values now; its state is of another model, bucket size or "
                "number of ranks: forget it with load_state_dict({}), on all ranks"
            )
        if units is not None and units.squares.device != values.device:
            units.squares = units.squares.to(values.device)
        return units

    def learn(self, key: str, mean: torch.Tensor) -> None:
        """Take the first mean's own magnitudes for units."""
        self._units[key] = Units(mean.square().clamp_(max=LARGEST))

    def describe_kept(self, level: str) -> str:
        """Return how much is kept of what on a level, to be compared across its ranks, or ''."""
        sizes = {key: units.squares.numel() for key, units in self._units.items()}
        return describe_sizes(sizes, level)

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` sends: units need no messages."""
        return self.inner.bytes_on_wire(numel, dtype, group_size, group_rank)

    def state_dict(self) -> dict[str, Any]:
        """Return mean squares and calls by level and slot, and the state of ``inner``."""
        return {
            "squares": {key: units.squares.clone() for key, units in self._units.items()},
            "calls": {key: units.calls for key, units in self._units.items()},
            "inner": self.inner.state_dict(),
        }

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
        self._units = {key: Units(kept.clone(), calls[key]) for key, kept in squares.items()}

    def __repr__(self) -> str:
        return f"Scaled({self.inner!r}, memory={self.memory})"


class _InUnits(Around):
    """A mean under way."""

    def __init__(
        self, owner: Scaled, key: str, buffer: torch.Tensor, to: tuple[Peers, str]
    ) -> None:
        self._owner, self._key, self._buffer = owner, key, buffer
        self._units = owner.units(key, buffer)
        self._values = STAGING.take(buffer.numel(), torch.float32, buffer.device)
        if self._units is None:
            self._values.copy_(buffer)
        else:
            self._units.divide(buffer, self._values)
        super().__init__(owner.inner.start(self._values, *to))
        self._done = False

    @property
    def bytes_held(self) -> int:
        """The values in units, and what their mean takes."""
        return 4 * self._buffer.numel() + super().bytes_held

    def wait(self) -> None:
        """Leave the mean in the buffer; to wait again is harmless."""
        if self._done:
            return
        super().wait()
        if self._units is None:
            self._owner.learn(self._key, self._values)
        else:
            self._units.multiply(self._values, self._owner.memory)
        narrow(self._values, self._buffer)
        STAGING.give(self._values)
        self._done = True
