"""Averages in pairs: who this rank's partner is in a sync.

The ranks of the level agree first, all together, so that who has finished or differs is known to
all; then each averages with its partner. Groups of pairs are made when the engine begins, in the
order of rounds: every round pairs all ranks, so nobody waits for one who is not there yet.
"""

from __future__ import annotations

from dataclasses import replace

from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Mean
from loosestep.comm.tensors import Named
from loosestep.strategy.gossip import Gossip
from loosestep.sync.averager import Agreed, Averager
from loosestep.sync.bound import Binder
from loosestep.sync.parts import Parts
from loosestep.sync.pipeline import Averaging
from loosestep.sync.slow_weights import SlowWeights
from loosestep.telemetry.traffic import Traffic


class Gossiping:
    """The pairs that this rank is in, on one level."""

    def __init__(self, rule: Gossip, slow: SlowWeights | None) -> None:
        self.rule, self._slow = rule, slow
        self._averagers: dict[tuple[int, ...], Averager] = {}
        self._binder = Binder()  # all pairs average the same tensors

    def prepare(self, whole: Peers, parts: Parts, *, common: bool) -> None:
        """Make the groups of all pairs; all ranks of the level call this.

        ``common``: slow weights begin where the parameters are.
        """
        if self._slow is not None:
            if common:
                self._slow.anchor(parts)
            parts = self._slow.blended(parts)
        for sync in range(self.rule.num_rounds(whole.size)):
            pair = self._with_partner(whole, sync)
            pair.prepare(parts.means, common=False)
            _ = pair.peers.depth  # they meet now, and not in the middle of training

    def launch(self, agreed: Agreed, parts: Parts, whole: Peers, sync: int) -> InPair:
        """Start the average of this rank and its partner in a sync, counted from 0."""
        slow = self._slow
        sent = parts if slow is None else slow.blended(parts)
        pair = self._with_partner(whole, sync)
        return InPair(pair.start(pair.take_over(agreed, sent)), slow, parts)

    def state(self) -> list[Named]:
        """Return what pairs keep that has a mean over all ranks."""
        return [] if self._slow is None else self._slow.named()

    def close(self) -> None:
        """Let go of the process groups."""
        self._averagers.clear()

    def _with_partner(self, whole: Peers, sync: int) -> Averager:
        pairs = self.rule.pairs(whole.size, sync)
        pair = next(members for members in pairs if whole.group_rank in members)
        if pair not in self._averagers:
            ranks = tuple(whole.global_ranks[index] for index in pair)
            weights = whole.weights
            peers = replace(
                whole,
                group=whole.group.subgroup(ranks, whole.timeout),
                weights=None if weights is None else tuple(weights[index] for index in pair),
            )
            self._averagers[pair] = Averager(peers, reducer=Mean(), binder=self._binder)
        return self._averagers[pair]


class InPair:
    """A pair's average under way, and the outer step that follows it."""

    def __init__(self, average: Averaging, slow: SlowWeights | None, parts: Parts) -> None:
        self._average, self._slow, self._parts = average, slow, parts

    def wait(self) -> Traffic:
        """Let the mean come, and step from it."""
        traffic = self._average.wait()
        if self._slow is not None:
            self._slow.step(self._parts)
        return traffic

    def commit(self) -> None:
        """Nothing is learnt beside that."""
        self._average.commit()
