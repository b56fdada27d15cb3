"""A group seen as hosts: who is on this one, and who is at this rank's place on each."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from loosestep.comm.group import Group
from loosestep.comm.peers import Peers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ways:
    """A group seen as hosts: the members of this rank's, and who is at its place on each."""

    hosts: list[tuple[int, ...]]
    inside: tuple[int, ...]
    across: tuple[int, ...]
    inside_group: Group
    across_group: Group

    def peers(self, whole: Peers) -> tuple[Peers, Peers]:
        """Return the peers inside the host and between hosts, with what ``whole`` says now."""
        inside = _among(whole, self.inside, self.inside_group)
        weights = whole.weights
        if weights is not None:  # a host counts as its ranks together
            weights = tuple(sum(weights[member] for member in host) for host in self.hosts)
            if not any(inside.weights or ()):  # all are silent, and the mean of their zeros is 0
                inside = replace(inside, weights=None)
        across = _among(whole, self.across, self.across_group)
        return inside, replace(across, weights=weights)


def make_ways(peers: Peers, hosts: list[tuple[int, ...]]) -> Ways | None:
    """Make the process groups inside and between hosts; None: there is one host, or uneven ones."""
    if len(hosts) == 1:
        return None
    if len({len(members) for members in hosts}) > 1:
        logger.info(
            "level %r: hosts have %s ranks; all of them are averaged directly",
            peers.level,
            [len(members) for members in hosts],
        )
        return None
    inside = next(members for members in hosts if peers.group_rank in members)
    place = inside.index(peers.group_rank)
    across = tuple(host[place] for host in hosts)
    groups = [_own_group(peers, members) for members in (inside, across)]
    return Ways(hosts, inside, across, *groups)


def blocks(group_size: int, size: int) -> list[tuple[int, ...]]:
    """Return the members of hosts that have ``size`` consecutive ranks each.

    >>> blocks(4, 2)
    [(0, 1), (2, 3)]
    """
    if group_size % size:
        raise ValueError(
            f"ranks_per_host must divide the group: {group_size} ranks are no multiple of {size}"
        )
    return [tuple(range(i, i + size)) for i in range(0, group_size, size)]


def _own_group(peers: Peers, members: tuple[int, ...]) -> Group:
    ranks = tuple(peers.global_ranks[member] for member in members)
    return peers.group.subgroup(ranks, peers.timeout)


def _among(whole: Peers, members: tuple[int, ...], group: Group) -> Peers:
    """Return the peers among some members."""
    weights = whole.weights
    return replace(
        whole,
        group=group,
        weights=None if weights is None else tuple(weights[member] for member in members),
    )
