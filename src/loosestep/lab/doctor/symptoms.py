"""What is odd about measured links."""

from __future__ import annotations

import statistics

from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.links import AVERAGE, Links, Pair
from loosestep.lab.doctor.units import rate, seconds

MOST_OFFSET = 0.5  # seconds between two hosts' clocks
SLOW_SHARE = 0.5  # of the usual rate


def inspect_links(links: Links) -> list[Finding]:
    """Return the hosts, their clocks, and pairs that are slower than others like them."""
    found = [_hosts(links)]
    found += [_clocks(links)] if len(links.hosts) > 1 else []
    for same_host, name in ((True, "inside hosts"), (False, "between hosts")):
        alike = [pair for pair in links.pairs if pair.same_host is same_host]
        found += [_speed(name, alike)] if alike else []
    return found + _own_average(links)


def _hosts(links: Links) -> Finding:
    sizes = [len(host) for host in links.hosts]
    value = f"{links.num_ranks} ranks on {len(sizes)} hosts ({links.backend})"
    if len(set(sizes)) > 1:
        advice = "averages in two levels need the same number on every host; all go directly"
        return Finding("hosts", f"{value}, {sizes} on each", Level.NOTE, advice)
    return Finding("hosts", value)


def _clocks(links: Links) -> Finding:
    worst = max(links.pairs, key=lambda pair: abs(pair.clock_offset_seconds))
    apart = abs(worst.clock_offset_seconds)
    value = f"at most {seconds(apart)} apart (ranks {worst.first} and {worst.second})"
    if apart > MOST_OFFSET:
        return Finding("clocks", value, Level.NOTE, "logs will not line up: set them by NTP")
    return Finding("clocks", value)


def _speed(name: str, pairs: list[Pair]) -> Finding:
    directed = [(p.forth_bytes_per_second, p.first, p.second) for p in pairs]
    directed += [(p.back_bytes_per_second, p.second, p.first) for p in pairs]
    usual = statistics.median(speed for speed, _, _ in directed)
    trip = statistics.median(pair.round_trip_seconds for pair in pairs)
    value = f"{rate(usual)}, {seconds(trip)} there and back"
    slowest, source, target = min(directed)
    if slowest < SLOW_SHARE * usual:
        advice = f"rank {source} to rank {target} has {rate(slowest)} only: see to that link"
        # Inside a host another process is to blame as a rule, and gone the next time.
        level = Level.NOTE if pairs[0].same_host else Level.PROBLEM
        return Finding(name, value, level, advice)
    return Finding(name, value)


def _own_average(links: Links) -> list[Finding]:
    rates = [r for r in links.rates if (r.level, r.method) == ("host", AVERAGE)]
    if not rates:
        return []
    largest = max(rates, key=lambda r: r.num_bytes)
    return [Finding("averages inside a host", f"{rate(largest.bytes_per_second)} of parameters")]
