"""The groups of a topology: made when first asked for, closed together."""

from __future__ import annotations

import torch.distributed as dist

from loosestep.comm.agreement import Statement, agree
from loosestep.comm.group import Group, require_process_group
from loosestep.comm.peers import Peers
from loosestep.comm.transport.meeting import host_key
from loosestep.strategy.topology import Topology


class ConnectedTopology(Topology):
    """A topology with groups of its own, which nobody else's traffic uses."""

    def __init__(self, topology: Topology, timeout: float | None = None) -> None:
        timeout = topology.timeout if timeout is None else timeout
        super().__init__(topology.levels, weights=topology.weights, timeout=timeout)
        self._groups: dict[tuple[int, ...], Group] = {}

    @classmethod
    def meet(cls, topology: Topology, timeout: float | None = None) -> ConnectedTopology:
        """Return a topology with groups; where hosts are to be told, its ranks call this.

        The group by which they have told them is the world's from then on.
        """
        timeout = topology.timeout if timeout is None else timeout
        ranks = topology.asked()
        if not ranks:
            return cls(topology, timeout)
        require_process_group()
        group = Group.alone(dist.get_rank()) if len(ranks) == 1 else Group.make(ranks, timeout)
        everyone = Peers(group, "world", None, timeout)
        # A rank that was given a topology compares it now, and must hear that the others have none.
        agree(everyone, Statement((topology.describe(),)))
        hosts = [name.decode() for name in everyone.exchange(host_key().encode())]
        made = cls(topology.of(hosts), timeout)
        if group.size > 1:
            made._groups[ranks] = group
        return made

    def peers(self, level: str, *, within: str | None = None) -> Peers:
        """Return this rank's peers on ``level``.

        With ``within`` only those at this rank's place in the other ``within`` groups.
        """
        if within is None:
            return self.subset(level, self.members(level))
        return self.subset(level, self.peers_across(level, within=within))

    def subset(self, level: str, ranks: tuple[int, ...]) -> Peers:
        """Return the peers among ``ranks``, which every one of them must ask for together."""
        require_process_group()
        if len(ranks) == 1:
            group = Group.alone(dist.get_rank())
        else:
            if ranks not in self._groups:
                self._groups[ranks] = Group.make(ranks, self.timeout)
            group = self._groups[ranks]
        weights = None if self.weights is None else tuple(self.weights[rank] for rank in ranks)
        return Peers(group, level, weights, self.timeout)

    def close(self) -> None:
        """Close the groups; the next call of ``peers`` makes new ones."""
        while self._groups:
            self._groups.popitem()[1].close()


def resolve(topology: Topology, timeout: float | None = None) -> Topology:
    """Return a topology whose levels are known; where hosts are to be told, its ranks call this."""
    if not topology.asked():
        return topology
    met = ConnectedTopology.meet(topology, timeout)
    met.close()
    return Topology(met.levels, weights=met.weights, timeout=topology.timeout)
