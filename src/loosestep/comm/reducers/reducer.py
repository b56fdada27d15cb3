"""The interface at the edge: how a buffer becomes its group's mean.

    init     make what is remembered of some tensors in one group: the state
    start    launch the mean of a buffer of them; the state is read, and not changed
    wait     the mean is in the buffer
    commit   the state becomes what it is to be; not called where the sync has failed

A reducer itself is a frozen value: it can be compared, printed, and used for any number of models.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loosestep.comm.flat.cuts import Runs
from loosestep.comm.peers import Peers
from loosestep.comm.tensors import Named
from loosestep.telemetry.traffic import Traffic

if TYPE_CHECKING:
    from loosestep.comm.reducers.compressed import Compressed
    from loosestep.comm.reducers.division import Division


class NonFinite(enum.Enum):
    """What happens when a rank's values are not all finite."""

    RAISE = "raise"  # an error on every rank, nothing is changed
    SKIP = "skip"  # the mean is that of the other ranks, and all ranks get it
    PASS = "pass"  # they are averaged like any value; nobody looks, and no codec can


@dataclass(frozen=True)
class Place:
    """Where in the model a buffer belongs; what is remembered of its values goes by this."""

    name: str  # the same at every sync of the same tensors, and no other buffer's
    runs: Runs | None = None  # what it holds; None: one tensor of that name

    def holds(self, numel: int) -> Runs:
        """Return what a buffer of so many elements holds."""
        if self.runs is None:
            return Runs.of(numel, self.name)
        if self.runs.numel != numel:
            raise ValueError(
                f"the place of a buffer must say what it holds: {self.name!r} has runs of "
                f"{self.runs.numel} elements, and the buffer {numel}; give Place(name) for a part"
            )
        return self.runs


class State:
    """What a reducer remembers in one group; this one remembers nothing."""

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return 0

    def describe(self) -> str:
        """Return how much is kept of what, to be compared across ranks; empty: nothing."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, as copies; empty: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        if state_dict:
            raise ValueError(
                f"this reducer keeps no state, but the checkpoint holds {sorted(state_dict)}; was "
                "it written with another reducer, or with rounding='stochastic'?"
            )


NOTHING = State()  # of all reducers that remember nothing


class Handle(ABC):
    """A reduction under way."""

    traffic: Traffic  # what has been moved so far
    leaves = False  # whether something is ``left`` after ``wait``

    @property
    def left(self) -> torch.Tensor | None:
        """What of this rank's values was not sent, and stays in its replica."""
        return None

    @property
    def bytes_held(self) -> int:
        """How much memory it takes until ``advance`` has been called."""
        return 0

    def advance(self) -> None:  # noqa: B027 (nothing, as a rule)
        """Do what can be done before the end, so that other buffers may overtake the wait."""

    @abstractmethod
    def wait(self) -> None:
        """Leave the group's mean in the buffer."""

    def commit(self) -> None:  # noqa: B027 (nothing, as a rule)
        """Let the state have what was learnt; called once, after a sync that has succeeded."""


class Reducer(ABC):
    """Turns a flat buffer into its group's mean: the base of all that do.

    ``start`` and ``bytes_on_wire`` make a reducer; everything else has a default that fits one
    which is exact, remembers nothing and takes one buffer at a time. Make it a frozen dataclass:
    ranks compare reducers by what they print.
    """

    @property
    def lossy(self) -> bool:
        """Whether it drops something, so that buffers and optimizer state go another way."""
        return False

    @property
    def sends_differences(self) -> bool:
        """Whether averages of parameters give it differences to the last sync's result."""
        return self.lossy

    @property
    def leaves_apart(self) -> bool:
        """Whether replicas still differ after a sync, by what could not be sent."""
        return False

    @property
    def block(self) -> int:
        """How many neighbours of a tensor it treats together: buffers are cut between blocks."""
        return 1

    @property
    def remembers(self) -> bool:
        """Whether its state grows to about a float32 for every value."""
        return False

    @property
    def on_nonfinite(self) -> NonFinite | None:
        """What it does about infinities and NaN; None: they pass."""
        return None

    @property
    def host_size(self) -> int | None:
        """How many consecutive ranks it takes for a host, of which groups are whole; None: any."""
        return None

    def init(self, tensors: Sequence[Named], peers: Peers) -> Any:
        """Return the state for averages of such tensors, and move those if need be; collective.

        Gradients are made later: for them ``tensors`` is empty.
        """
        return NOTHING

    @abstractmethod
    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch the mean of a contiguous one-dimensional buffer; all members call this."""

    @abstractmethod
    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return how many bytes this rank will send for a buffer, before it does anything.

        ``numel`` are the sizes of the tensors in it, or that of the one.
        """

    def describe(self, state: Any) -> str:
        """Return what of a state must be equal on all ranks; empty: nothing is kept."""
        described: str = state.describe()
        return described

    @property
    def exact(self) -> Reducer | None:
        """What averages exactly on the ways that this reducer takes; None: ``Mean()``."""
        return None

    # Hosts whose ranks hold the same values, or stand for several ranks.

    def check_replicas(self, peers: Peers) -> None:  # noqa: B027
        """Raise where it cannot average what differs between the ranks of a host."""

    def divide(self, peers: Peers) -> Division | None:
        """Return how the ranks of a host divide an average among them; None: they do not."""
        return None

    def among_groups(self, group_size: int) -> Reducer:
        """Return the reducer for groups of ranks that are averaged through one rank of each."""
        return self

    # Gradients that live in memory which the ranks of a host share.

    @property
    def resident(self) -> bool:
        """Whether gradients are to live there."""
        return False

    def room(
        self, size: int, devices: Sequence[torch.device], groups: Sequence[Peers]
    ) -> torch.Tensor | None:
        """Return such memory, which the neighbours in all these groups see; collective there."""
        return None

    # Other ways in than one buffer at a time.

    def takes_many(self, peers: Peers, dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether ``start_many`` can be used; the same on all ranks."""
        return False

    def start_many(self, buffers: Sequence[torch.Tensor], peers: Peers) -> Handle:
        """Launch the means of several buffers of one dtype."""
        raise NotImplementedError(f"{self} takes one buffer at a time")

    # What wrappers ask of the reducer inside.

    @property
    def engine(self) -> Compressed | None:
        """What moves its messages and can be given a memory of what they leave out, if anything."""
        return None


class Done(Handle):
    """The handle of a reduction that had nothing to do."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def wait(self) -> None:
        """Do nothing."""


class Around(Handle):
    """The handle of a reduction that does something before and after another one."""

    def __init__(self, inner: Handle) -> None:
        self._inner = inner

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
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

    def commit(self) -> None:
        """Let the inner state have what was learnt."""
        self._inner.commit()


def check_reducer(what: str, reducer: object, example: str = "Mean()") -> None:
    """Raise where this is no reducer; its class is none either."""
    if isinstance(reducer, Reducer):
        return
    if hasattr(reducer, "start") and not isinstance(reducer, type):
        raise TypeError(
            f"{what} must be a reducer, and {type(reducer).__name__} is no subclass of "
            "loosestep.reducers.Reducer, which has a default for all but start and bytes_on_wire"
        )
    raise TypeError(f"{what} must be a reducer such as {example}, got {reducer!r}")


def check_suits_gradients(reducer: Reducer) -> None:
    """Raise for a reducer that averages parameters only."""
    if reducer.leaves_apart:
        raise ValueError(
            f"{reducer} leaves what was not sent in the replica's parameters, and gradients are "
            "gone after a step; share gradients by ErrorFeedback(...)"
        )


def check_suits_parameters(reducer: Reducer) -> None:
    """Raise for a reducer that shares gradients only."""
    if reducer.resident and reducer.lossy:
        raise ValueError(
            f"{reducer} moves gradients into shared memory, and no parameters; give it without "
            "inside=SharedMemoryMean(), or SharedMemoryMean() alone where there is one host"
        )


def compresses(reducer: Reducer | None) -> bool:
    """Say whether a reducer can send finite values only; such a one has a policy of its own."""
    return reducer is not None and reducer.on_nonfinite is not None


def check_policy(reducer: Reducer | None, wanted: NonFinite) -> None:
    """Raise where such values are to pass and cannot."""
    if wanted is NonFinite.PASS and compresses(reducer):
        raise ValueError(
            f"on_nonfinite='pass' lets infinities and NaN through, and {reducer} has no bytes for "
            "them; give 'raise' or 'skip', or a reducer such as Mean() or Cast(torch.bfloat16)"
        )


def policy_of(reducer: Reducer | None, wanted: NonFinite) -> NonFinite:
    """Return what is done about such values where one policy is wanted and a reducer may have one.

    >>> policy_of(None, NonFinite.PASS)
    <NonFinite.PASS: 'pass'>
    """
    own = None if reducer is None else reducer.on_nonfinite
    if own is None:
        return wanted
    return NonFinite.SKIP if NonFinite.SKIP in (own, wanted) else NonFinite.RAISE
