"""Measuring links: pairs one after another, then what groups reduce in a second.

Every rank calls ``measure_links``, and all of them return the same. Every wait has a time-out, and
a rank that is lost is named by the error.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch.distributed as dist

from loosestep.comm.peers import Peers, Phase
from loosestep.lab.doctor.links import Links, Pair, Rate
from loosestep.lab.doctor.pairs import Line, measure_pair
from loosestep.lab.doctor.rates import measure_level
from loosestep.strategy.topology import Topology
from loosestep.sync.connected import ConnectedTopology

MOST_RANKS = 16  # of which all pairs are measured; else a sample
MOST_SECONDS = 2.0  # for one measurement
LEAST_SECONDS = 0.02  # below, nothing but noise is measured

Hosts = Sequence[Sequence[int]]


def measure_links(
    *,
    budget_seconds: float = 30.0,
    timeout: float = 30.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Links:
    """Measure between all ranks of the default process group; a collective call.

    ``budget_seconds`` is about what all pairs together may take, ``timeout`` what any wait may;
    ``tell`` is told what comes next, on every rank.
    """
    for name, seconds in (("budget_seconds", budget_seconds), ("timeout", timeout)):
        if not seconds > 0:
            raise ValueError(f"{name} must be > 0, got {seconds!r}")
    topology = ConnectedTopology.meet(Topology.from_hosts(timeout=timeout))
    try:
        return _measure(topology, budget_seconds, tell)
    finally:
        topology.close()


def _measure(
    topology: ConnectedTopology, budget_seconds: float, tell: Callable[[str], None]
) -> Links:
    hosts = topology.levels["host"]
    world = topology.peers("world")
    own_pairs, own_rates = [], []
    if world.size > 1:
        own_pairs = _pairs(world, hosts, budget_seconds, tell)
        own_rates = _rates(topology, tell)
    mine = {
        "host": socket.gethostname(),
        "pairs": [asdict(pair) for pair in own_pairs],
        "rates": [asdict(rate) for rate in own_rates],
    }
    gathering = world.during(Phase("gathering what was measured"))
    told = [json.loads(text) for text in gathering.exchange(json.dumps(mine).encode())]
    return Links.from_dict(
        {
            "backend": dist.get_backend(),
            "hosts": hosts,
            "host_names": [told[host[0]]["host"] for host in hosts],
            "pairs": [pair for each in told for pair in each["pairs"]],
            # Narrow levels first; each comes from the first rank of its group.
            "rates": sorted((r for each in told for r in each["rates"]), key=lambda r: r["level"]),
        }
    )


def _pairs(
    world: Peers, hosts: Hosts, budget_seconds: float, tell: Callable[[str], None]
) -> list[Pair]:
    """Return the pairs that this rank was the first of."""
    pairs = pairs_of(hosts)
    seconds = min(MOST_SECONDS, max(LEAST_SECONDS, budget_seconds / len(pairs) / 2))
    tag = world.next_tags(1)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    found = []
    for first, second in pairs:
        tell(f"ranks {first} and {second}")
        phase = Phase(f"measuring the link between ranks {first} and {second}")
        peers = world.during(phase)
        if world.group_rank in (first, second):
            line = Line.between(peers, first, second, tag)
            pair = measure_pair(line, same_host=host_of[first] == host_of[second], seconds=seconds)
            found += [pair] if pair is not None else []
        peers.exchange_fixed(b"+")  # the next ones begin when these are through
    return found


def pairs_of(hosts: Hosts) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or of many ranks a sample.

    That is one rank a host with those of other hosts, and every rank with its next neighbour.

    >>> pairs_of([[0, 1], [2]])
    [(0, 1), (0, 2), (1, 2)]
    """
    ranks = sorted(itertools.chain.from_iterable(hosts))
    if len(ranks) <= MOST_RANKS:
        return list(itertools.combinations(ranks, 2))
    leaders = sorted(min(host) for host in hosts)
    found = {pair for host in hosts for pair in itertools.pairwise(sorted(host))}
    if len(leaders) <= MOST_RANKS:
        found |= set(itertools.combinations(leaders, 2))
    else:
        found |= set(itertools.pairwise(leaders)) | {(leaders[0], other) for other in leaders[1:]}
    return sorted(found)


def _rates(topology: ConnectedTopology, tell: Callable[[str], None]) -> list[Rate]:
    """Return the rates of the groups that this rank is the first of."""
    several = len(topology.levels["host"]) > 1
    found: list[Rate] = []
    for level in ("host", "world") if several else ("host",):
        peers = topology.peers(level)
        tell(f"level {level}")
        rates = [] if peers.size == 1 else measure_level(peers, MOST_SECONDS)
        found += rates if peers.group_rank == 0 else []
    return found
