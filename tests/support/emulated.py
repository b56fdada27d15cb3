"""Ranks on emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from loosestep.lab.emulation import EmulatedHosts
from tests.support.netns import Rank, call_of


def start(
    hosts: EmulatedHosts, body: Callable[..., Any], *args: Any, rank: int, host: int, size: int
) -> Rank:
    """Start a body as one of ``size`` ranks on a host."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    environment = os.environ | hosts.environment(host) | own
    return Rank(call_of(body, args, hosts.entry(host)), environment)


def run_on(
    hosts: EmulatedHosts, body: Callable[..., Any], per_host: int, *args: Any, timeout: float = 60
) -> list[Any]:
    """Run a body on ``per_host`` ranks of every host and return the results by rank."""
    size = per_host * hosts.num_hosts
    ranks = [start(hosts, body, *args, rank=r, host=r // per_host, size=size) for r in range(size)]
    try:
        return [rank.result(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def is_at(found: float, rate: float) -> bool:
    """Return whether so much went through a link of a rate.

    More never does. Less may: whoever sends and receives shares the machine with others.
    """
    return 0.3 * rate < found < 1.15 * rate
