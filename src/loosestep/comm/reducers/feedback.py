"""What a message leaves out goes into the next one.

    sent_t = encode(x_t + decay * e_t),   e_{t+1} = x_t + decay * e_t - decode(sent_t)

on every rank for its own values, and on every owner for the mean of its part. So what has arrived
after t calls, and what is kept, add up to what was given: nothing is ever lost, only late.
(Seide et al. 2014; Karimireddy et al. 2019; for both directions Tang et al. 2019, DoubleSqueeze.)
With a ``decay`` below 1 what waits long fades, since it was learnt from where the model no longer
is (SparseLoCo, https://arxiv.org/abs/2508.15706, has 0.95).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.compressed import LARGEST, Compressed, Memories
from loosestep.comm.reducers.nonfinite import all_finite
from loosestep.comm.reducers.reducer import (
    Handle,
    NonFinite,
    Place,
    Reducer,
    State,
    check_reducer,
)
from loosestep.comm.tensors import Named
from loosestep.errors import is_number


class Residuals(State):
    """What was left out of messages, by name: of this rank's values, and of means that it owns."""

    def __init__(self, inner: State) -> None:
        self.inner = inner
        self.sent: dict[str, torch.Tensor] = {}
        self.mean: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How much memory all of it takes."""
        kept = [*self.sent.values(), *self.mean.values()]
        return self.inner.nbytes + sum(residual.nbytes for residual in kept)

    def describe(self) -> str:
        """Return how much is kept of what."""
        return describe_sizes({name: kept.numel() for name, kept in self.sent.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return copies by name, and the state of the reducer inside."""
        kept = {
            "sent": {name: kept.clone() for name, kept in self.sent.items()},
            "mean": {name: kept.clone() for name, kept in self.mean.items()},
            "inner": self.inner.state_dict(),
        }
        return {name: state for name, state in kept.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what ``state_dict`` returned; an empty one forgets everything."""
        unknown = sorted(set(state_dict) - {"sent", "mean", "inner"})
        if unknown:
            raise ValueError(
                f"error feedback keeps 'sent', 'mean' and 'inner', but the checkpoint holds "
                f"{unknown}; was it written with another reducer?"
            )
        self.inner.load_state_dict(state_dict.get("inner", {}))
        self.sent = {name: kept.clone() for name, kept in state_dict.get("sent", {}).items()}
        self.mean = {name: kept.clone() for name, kept in state_dict.get("mean", {}).items()}


@dataclass(frozen=True)
class ErrorFeedback(Reducer):
    """A lossy reducer with a memory: ``ErrorFeedback(Int4())``.

    Its state has a float32 for every value, and another for every value of the part that this rank
    owns. It belongs into checkpoints, one for every rank.
    """

    inner: Reducer
    decay: float = 1.0  # of what is kept, at every sync; less: what could not be sent soon is lost

    lossy = True
    remembers = True

    def __post_init__(self) -> None:
        """Refuse what drops nothing."""
        check_reducer("inner", self.inner, "Int4()")
        if not (is_number(self.decay) and 0.0 < self.decay <= 1.0):
            raise ValueError(
                f"decay must lie in (0, 1], got {self.decay!r}; 1.0 keeps all that was not sent, "
                "and without ErrorFeedback nothing is kept"
            )
        if self.inner.engine is None:
            raise ValueError(
                f"{type(self).__name__} sends later what its inner reducer drops, and "
                f"{self.inner!r} drops nothing that could be kept; use it alone, or give Int8(), "
                "Int4(), Int2(), TopK(...) or Cast(dtype)"
            )

    @cached_property
    def moves(self) -> Compressed:
        """What moves the messages."""
        engine = self.inner.engine
        assert engine is not None, "checked when it was made"
        return engine

    @property
    def block(self) -> int:
        """That of ``inner``."""
        return self.moves.block

    @property
    def on_nonfinite(self) -> NonFinite | None:
        """What is done about infinities and NaN, which cannot be sent."""
        return self.moves.on_nonfinite

    def init(self, tensors: Sequence[Named], peers: Peers) -> Residuals:
        """Return that nothing was left out yet."""
        return Residuals(self.moves.init(tensors, peers))

    def start(self, buffer: torch.Tensor, peers: Peers, state: Residuals, place: Place) -> Handle:
        """Launch the mean of the values and of what was kept of earlier ones."""
        mine = self.owned(buffer, peers, place)
        sent = Residual(state.sent, place.name, buffer.numel(), self.decay)
        mean = Residual(state.mean, place.name, mine, self.decay)
        return self.moves.launch(buffer, peers, state.inner, place, Memories(sent, mean))

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what is sent for messages with a memory."""
        return self.moves.bytes_on_wire(numel, dtype, group_size, group_rank)

    def owned(self, buffer: torch.Tensor, peers: Peers, place: Place) -> int:
        """Return how many elements the part has of which this rank takes the mean."""
        runs = place.holds(buffer.numel())
        start, stop = runs.slices(peers.size, self.block)[peers.group_rank]
        return stop - start

    def __repr__(self) -> str:
        decay = "" if self.decay == 1.0 else f", decay={self.decay}"
        return f"{type(self).__name__}({self.inner!r}{decay})"


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return a short word for how much is kept in which slots; '': in none."""
    own = sorted(sizes.items())
    return hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest() if own else ""


class Residual:
    """What is kept of one name, in one direction."""

    def __init__(
        self, store: dict[str, torch.Tensor], name: str, size: int, decay: float = 1.0
    ) -> None:
        self._store, self._name, self._size, self._decay = store, name, size, decay
        self._left: torch.Tensor | None = None  # out of this message; kept from ``commit`` on
        self.bytes_held = 4 * size
        kept = store.get(name)
        if kept is not None and kept.numel() != size:
            raise ValueError(
                f"error feedback keeps {kept.numel()} values for {name!r}, but there are {size} "
                "now; its state is of another model, window size or number of ranks: forget it "
                "with load_state_dict({}), on all ranks"
            )

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values and what was kept, which itself stays as it is until ``commit``."""
        kept = self._store.get(self._name)
        wanted = STAGING.take(self._size, torch.float32, values.device)
        if kept is None:
            return wanted.copy_(values)
        if self._decay == 1.0:
            torch.add(values, kept.to(values.device), out=wanted)
        else:  # not add(alpha=): a fused multiply rounds otherwise at the end of a buffer
            torch.mul(kept.to(values.device), self._decay, out=wanted).add_(values)
        return wanted if all_finite(wanted) else wanted.clamp_(-LARGEST, LARGEST)

    def keep(self, wanted: torch.Tensor, decoded: Callable[[torch.Tensor], None]) -> None:
        """Note what did not arrive."""
        left = self._left = torch.empty_like(wanted)
        decoded(left)
        torch.sub(wanted, left, out=left)
        STAGING.give(wanted)

    def commit(self) -> None:
        """Keep what was noted."""
        if self._left is not None:
            self._store[self._name], self._left = self._left, None
