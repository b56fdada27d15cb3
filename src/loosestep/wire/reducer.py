"""The interface at the edge: how a buffer becomes its group's mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from loosestep.peers import Peers


@dataclass
class Traffic:
    """What one rank moved for one buffer, and how far apart the replicas were.

    ``deviation`` and ``magnitude`` are sums of squares over a sample of the elements: of
    (replica - mean) over all replicas, and of the mean.
    """

    bytes_sent: int = 0  # handed to the network
    bytes_copied: int = 0  # read straight from a neighbour's memory
    deviation: float = 0.0
    magnitude: float = 0.0
    samples: int = 0

    def add(self, other: Traffic) -> None:
        """Add another buffer's figures to these."""
        self.bytes_sent += other.bytes_sent
        self.bytes_copied += other.bytes_copied
        self.deviation += other.deviation
        self.magnitude += other.magnitude
        self.samples += other.samples


class Handle(Protocol):
    """A reduction under way."""

    @property
    def traffic(self) -> Traffic:
        """What has been moved so far."""

    @property
    def bytes_held(self) -> int:
        """How much memory it takes until ``advance`` has been called."""

    def advance(self) -> None:
        """Do what can be done before the end, so that other buffers may overtake the wait."""

    def wait(self) -> None:
        """Leave the group's mean in the buffer."""


@runtime_checkable
class Reducer(Protocol):
    """Turns a flat buffer into its group's mean.

    ``slot`` names the place in the model that the buffer came from, so that whatever a reducer
    remembers belongs to tensors and not to calls.
    """

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of a contiguous one-dimensional buffer; all members call this."""

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return how many bytes this rank will send for a buffer, before it does anything."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; empty for a reducer without memory."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""


class Stateless:
    """A reducer that remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state that belongs to another reducer."""
        if state_dict:
            raise ValueError(
                f"{type(self).__name__} keeps no state, but the checkpoint holds "
                f"{sorted(state_dict)}; was it written with another reducer?"
            )


class Done:
    """The handle of a reduction that had nothing to do."""

    bytes_held = 0

    def __init__(self) -> None:
        self.traffic = Traffic()

    def advance(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


class Around:
    """The handle of a reduction that does something before and after another one."""

    def __init__(self, inner: Handle) -> None:
        self._inner = inner

    @property
    def traffic(self) -> Traffic:
        """What has been moved so far."""
        return self._inner.traffic

    @property
    def bytes_held(self) -> int:
        """How much memory it takes until ``advance`` has been called."""
        return self._inner.bytes_held

    def advance(self) -> None:
        """Go on as far as the messages have come."""
        self._inner.advance()

    def wait(self) -> None:
        """Leave the mean in the buffer."""
        self._inner.wait()


def check_reducer(what: str, reducer: object, example: str = "Mean()") -> None:
    """Raise where this is no reducer; its class is none either."""
    if isinstance(reducer, type) or not isinstance(reducer, Reducer):
        raise TypeError(f"{what} must be a reducer such as {example}, got {reducer!r}")


def leaves_apart(reducer: object) -> bool:
    """Say whether replicas still differ after this reducer's syncs."""
    return bool(getattr(reducer, "leaves_apart", False))


def check_suits_gradients(reducer: object) -> None:
    """Raise for a reducer that averages parameters only."""
    if leaves_apart(reducer):
        raise ValueError(
            f"{reducer} leaves what was not sent in the replica's parameters, and gradients are "
            "gone after a step; share gradients by ErrorFeedback(...)"
        )
