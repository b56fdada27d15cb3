"""What of an average a rank does itself: all, or its part where the ranks of a host divide it."""

from __future__ import annotations

from collections.abc import Sequence

from loosestep.binding import Header, Progress, Statement, agree
from loosestep.peers import Peers, Phase
from loosestep.policies import compressible, only_exact
from loosestep.tensors import Named, memory, shard_key
from loosestep.wire import Reducer, Traffic
from loosestep.wire.division import Division, sampled


class Work:
    """How the averages of one group are divided, once ``settle`` was called.

    Divided are parameters, which the ranks of a host have in common, and not buffers.
    """

    def __init__(self, reducer: Reducer, peers: Peers) -> None:
        self._reducer, self._peers = reducer, peers
        self.division: Division | None = None

    def settle(self, named: Sequence[Named]) -> None:
        """Meet those who divide averages of such tensors with this rank; collective."""
        if any(shard_key(tensor) for _, tensor in named):  # shards differ inside a host
            return
        self.division = self._divide(self._peers)
        if self.division is not None and named:
            self.division.prepare(named[0][1].device)

    def among(self, peers: Peers) -> Division | None:
        """Return the division with the weights that ``peers`` have now; None: there is none."""
        return None if self.division is None else self._divide(peers)

    def mine(self, named: Sequence[Named]) -> list[Named]:
        """Return the memory that this rank averages."""
        parts = memory(named)
        if self.division is None:
            return parts
        return [*self.division.share(compressible(parts)), *only_exact(parts)]

    def hand_round(self, named: Sequence[Named], step: int) -> Traffic:
        """Take from this host's other ranks what they have averaged; collective there."""
        if self.division is None:
            return Traffic()
        return self.division.hand_round(compressible(memory(named)), step)

    def sample(self, named: Sequence[Named], step: int) -> bytes:
        """Return a mark of some values, by which ranks that should hold the same can tell."""
        return b"" if self.division is None else sampled(compressible(memory(named)), step)

    def check(self, headers: Sequence[Header], parts: Sequence[Named], step: int) -> None:
        """Raise on all ranks if those of a host do not hold the same; ``headers`` have samples."""
        if self.division is None:
            return
        if not any(header.sample.strip(b"\0") for header in headers):  # nobody knew of hosts yet
            peers = self._peers.during(Phase("comparing the ranks of hosts", step=step))
            told = Progress(step, sample=self.sample(parts, step))
            headers = agree(peers, Statement(()), told)
        self.division.check(self._peers, headers)

    def check_replicas(self, peers: Peers) -> None:
        """Raise where a host has several replicas and the reducer takes it for one."""
        check = getattr(self._reducer, "check_replicas", None)
        if check is not None:
            check(peers)

    def _divide(self, peers: Peers) -> Division | None:
        divide = getattr(self._reducer, "divide", None)
        return None if divide is None else divide(peers)
