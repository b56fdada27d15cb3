"""What a message leaves out goes into the next one.

    sent_t = encode(x_t + e_t),   e_{t+1} = x_t + e_t - decode(sent_t)

on every rank for its own values, and on every owner for the mean of its part. So what has arrived
after t calls, and what is kept, add up to what was given: nothing is ever lost, only late.
(Seide et al. 2014; Karimireddy et al. 2019; for both directions Tang et al. 2019, DoubleSqueeze.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loosestep.flat import STAGING, slices
from loosestep.peers import Peers
from loosestep.wire.compressed import LARGEST, Compressed, Memories
from loosestep.wire.nonfinite import all_finite
from loosestep.wire.reducer import Handle, Reducer


class ErrorFeedback:
    """A lossy reducer with a memory: ``ErrorFeedback(Int4())``.

    It keeps a float32 for every value, and another for every value of the part that this rank
    owns, by level and slot. What it keeps belongs into checkpoints, one for every rank.
    """

    lossy = True

    def __init__(self, inner: Reducer) -> None:
        engine = getattr(inner, "engine", None)
        if not isinstance(engine, Compressed):
            raise ValueError(
                f"{type(self).__name__} sends later what its inner reducer drops, and {inner!r} "
                "drops nothing that could be kept; use it alone, or give Int8(), Int4(), Int2(), "
                "TopK(...) or Cast(dtype)"
            )
        self.inner, self._engine = inner, engine
        self.on_nonfinite = engine.on_nonfinite
        self._sent: dict[str, torch.Tensor] = {}
        self._mean: dict[str, torch.Tensor] = {}

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of the values and of what was kept of earlier ones."""
        key, size = f"{peers.level}/{slot}", buffer.numel()
        first, last = slices(size, peers.size)[peers.group_rank]
        sent = Residual(self._sent, key, size)
        mean = Residual(self._mean, key, last - first)
        return self._engine.launch(buffer, peers, slot, Memories(sent, mean))

    def describe_kept(self, level: str) -> str:
        """Return how much is kept of what on a level, to be compared across its ranks, or ''."""
        return describe_sizes({key: kept.numel() for key, kept in self._sent.items()}, level)

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` sends through its engine."""
        return self._engine.bytes_on_wire(numel, dtype, group_size, group_rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, as plain tensors by level and slot, and the state of ``inner``."""
        return {
            "sent": {key: kept.clone() for key, kept in self._sent.items()},
            "mean": {key: kept.clone() for key, kept in self._mean.items()},
            "inner": self._engine.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what ``state_dict`` returned; an empty one forgets everything."""
        unknown = sorted(set(state_dict) - {"sent", "mean", "inner"})
        if unknown:
            raise ValueError(
                f"{type(self).__name__} keeps 'sent', 'mean' and 'inner', but the checkpoint "
                f"holds {unknown}; was it written with another reducer?"
            )
        self._engine.load_state_dict(state_dict.get("inner", {}))
        for name, kept in (("sent", self._sent), ("mean", self._mean)):
            kept.clear()
            kept |= {key: value.clone() for key, value in state_dict.get(name, {}).items()}

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.inner!r})"


def describe_sizes(sizes: Mapping[str, int], level: str) -> str:
    """Return a short word for how much is kept in which slots of a level; '': in none."""
    own = sorted(item for item in sizes.items() if item[0].startswith(f"{level}/"))
    return hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest() if own else ""


class Residual:
    """What is kept of one slot, in one direction."""

    def __init__(self, store: dict[str, torch.Tensor], key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self.bytes_held = 4 * size
        kept = store.get(key)
        if kept is not None and kept.numel() != size:
            raise ValueError(
                f"error feedback keeps {kept.numel()} values for {key!r}, but there are {size} "
                "now; its state is of another model, window size or number of ranks: forget it "
                "with load_state_dict({}), on all ranks"
            )

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values and what was kept; that itself changes in ``keep`` only."""
        kept = self._store.get(self._key)
        wanted = STAGING.take(self._size, torch.float32, values.device)
        if kept is None:
            return wanted.copy_(values)
        torch.add(values, kept.to(values.device), out=wanted)
        return wanted if all_finite(wanted) else wanted.clamp_(-LARGEST, LARGEST)

    def keep(self, wanted: torch.Tensor, decoded: Callable[[torch.Tensor], None]) -> None:
        """Keep what did not arrive."""
        kept = self._store.get(self._key)
        if kept is None or kept.device != wanted.device:
            kept = self._store[self._key] = torch.empty_like(wanted)
        decoded(kept)
        torch.sub(wanted, kept, out=kept)
        STAGING.give(wanted)
