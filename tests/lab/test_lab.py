"""Emulated hosts: their rates, who reaches whom, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import Topology
from loosestep.lab.emulation import CannotEmulate, EmulatedHosts, Link, missing
from loosestep.sync.connected import resolve
from tests.support.emulated import is_at, run_on, start

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())

# Python without torch, which takes longer to start than all the rest.
LISTEN = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
server.settimeout(20)
print("listening", flush=True)
line, _ = server.accept()
line.settimeout(20)
total, marks = 0, []
while data := line.recv(1 << 20):
    total += len(data)
    marks.append((time.monotonic(), total))
# From the second quarter on: the bucket is full of tokens when a transfer begins.
first = next(mark for mark in marks if mark[1] >= total / 4)
print((total - first[1]) / (marks[-1][0] - first[0]))
"""
SEND = """
import socket, sys
line = socket.create_connection((sys.argv[1], 5000), timeout=20)
line.sendall(bytes(int(sys.argv[2])))
line.close()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedHosts]:
    with EmulatedHosts(3, Link("100mbit")) as made:
        yield made


def transfer(hosts: EmulatedHosts, source: int, target: int, num_bytes: int) -> float:
    """Send bytes from one host to another through TCP; return bytes per second."""
    python = [sys.executable, "-I", "-S", "-c"]
    listen = [*hosts.inside(target), *python, LISTEN, hosts.address(target)]
    listener = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        send = [*hosts.inside(source), *python, SEND, hosts.address(target), str(num_bytes)]
        subprocess.run(send, check=True, timeout=30)
        return float(listener.communicate(timeout=30)[0])
    finally:
        listener.kill()
        listener.communicate(timeout=10)


@needs_namespaces
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (1, 2), (2, 0)])
def test_a_link_carries_its_rate(hosts: EmulatedHosts, source: int, target: int) -> None:
    """100 Mbit/s are 12.5 MB/s, of which 1448 bytes in a frame of 1514 are data."""
    before = [hosts.uplink_bytes(host) for host in range(3)]
    rate = transfer(hosts, source, target, 12_500_000)
    sent = [hosts.uplink_bytes(host) - old for host, old in enumerate(before)]
    assert is_at(rate, 12.5e6), rate
    assert sent[source] == pytest.approx(12_500_000, rel=0.1)
    assert sum(sent) - sent[source] < 1_000_000  # acknowledgements


@needs_namespaces
@pytest.mark.parametrize("text", ["10mbit", "1gbit"])
def test_other_rates(text: str) -> None:
    """Slower and faster ones hold too."""
    link = Link(text)
    with EmulatedHosts(2, link) as hosts:
        rate = transfer(hosts, 0, 1, round(link.bytes_per_second * 0.8))
    assert is_at(rate, link.bytes_per_second), rate


@needs_namespaces
def test_what_a_host_is_sent_is_held_to_the_rate_too(hosts: EmulatedHosts) -> None:
    """Two hosts that send to a third at once share its uplink."""
    began = time.monotonic()
    python = [sys.executable, "-I", "-S", "-c"]
    script = LISTEN.replace("5000", "int(sys.argv[2])")
    listeners, senders = [], []
    for source in (0, 1):
        port = str(5001 + source)
        listen = [*hosts.inside(2), *python, script, hosts.address(2), port]
        listeners.append(subprocess.Popen(listen, stdout=subprocess.PIPE, text=True))
        listeners[-1].stdout.readline()  # type: ignore[union-attr]
        send = [*hosts.inside(source), *python, SEND.replace("5000", port), hosts.address(2)]
        senders.append(subprocess.Popen([*send, "5000000"]))
    try:
        assert [sender.wait(timeout=30) for sender in senders] == [0, 0]
        assert [listener.wait(timeout=30) for listener in listeners] == [0, 0]
    finally:
        for process in senders + listeners:
            process.kill()
            process.communicate(timeout=10)
    assert time.monotonic() - began > 0.7  # 10 MB at 12.5 MB/s, less a burst


def reduce_and_group() -> dict[str, Any]:
    """Reduce over all hosts; return the sum, who shares a host, and bytes per second."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    topology = resolve(Topology.from_hosts(timeout=20))
    buffer = torch.ones(1_250_000)
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(buffer)
    seconds = time.monotonic() - began
    return {"sum": ones.item(), "levels": dict(topology.levels), "seconds": seconds}


@needs_namespaces
def test_namespaces_are_hosts(hosts: EmulatedHosts) -> None:
    """Six ranks on three hosts meet, and know who their neighbours are.

    A ring of six sends 2 * 5 / 6 of 5 MB over each uplink, 8.3 MB: 0.67 s at 12.5 MB/s.
    """
    for found in run_on(hosts, reduce_and_group, 2):
        assert found["sum"] == 6.0
        assert found["levels"]["host"] == [[0, 1], [2, 3], [4, 5]]
        assert 0.55 < found["seconds"] < 2


def talk_inside() -> float:
    """Have two ranks of a host reduce."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


@needs_namespaces
def test_a_cut_host_is_out_of_reach_and_goes_on_inside() -> None:
    """Nothing of it arrives any more, but its own ranks still reach each other."""
    with EmulatedHosts(2, Link("1gbit")) as hosts:
        assert transfer(hosts, 0, 1, 10_000_000) > 0
        hosts.cut(0)
        python = [sys.executable, "-I", "-S", "-c", SEND.replace("timeout=20", "timeout=1")]
        lost = subprocess.run(
            [*hosts.inside(0), *python, hosts.address(1), "10"], capture_output=True, timeout=20
        )
        assert lost.returncode != 0
        ranks = [start(hosts, talk_inside, rank=r, host=0, size=2) for r in range(2)]
        try:
            assert [rank.result(timeout=60) for rank in ranks] == [2.0, 2.0]
        finally:
            for rank in ranks:
                rank.kill()


KILLED = """
import os, signal, sys, time
from loosestep.lab.emulation import EmulatedHosts, Link
with EmulatedHosts(3, Link("100mbit")) as hosts:
    print(*(hosts.inside(host)[-1] for host in range(3)), flush=True)
    time.sleep(60)
"""


def links_here() -> str:
    """Return the names of this machine's interfaces."""
    return "\n".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))


def processes_inside(namespaces: set[str]) -> list[int]:
    """Return the processes whose network namespace is one of these."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            inside = os.readlink(folder / "ns" / "net") in namespaces
        except OSError:  # it has just ended
            continue
        found += [int(folder.name)] if inside else []
    return found


def runs(pid: int) -> bool:
    """Say whether a process is there and more than a line that its parent has yet to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_namespaces
def test_nothing_is_left_when_the_parent_is_killed() -> None:
    """Neither processes nor namespaces nor interfaces."""
    before = links_here()
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    holders = [int(pid) for pid in parent.stdout.readline().split()]
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in holders}
    assert len(namespaces) == 3
    assert links_here() == before  # all of them are inside
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while any(map(runs, holders)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(runs, holders))
    assert processes_inside(namespaces) == []
    listed = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True)
    assert not namespaces & {f"net:[{line.strip()}]" for line in listed.stdout.splitlines()}
    assert links_here() == before


@needs_namespaces
def test_nothing_is_left_after_the_block() -> None:
    """The holders end with the block, also when it raises."""
    hosts = EmulatedHosts(2, Link("1gbit"))
    with contextlib.suppress(KeyError), hosts:
        pids = [int(hosts.inside(host)[-1]) for host in range(2)]
        raise KeyError
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(CannotEmulate, match="inside a `with"):
        hosts.inside(0)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5gbit", 2_500_000_000), ("500kbit", 500_000)],
)
def test_rates_are_understood(text: str, bits: int) -> None:
    assert Link(text).bits_per_second == bits
    assert Link(text.upper()).bits_per_second == bits


def test_buckets() -> None:
    """1gbit is 125 MB/s: 5 ms are 625 kB, 50 ms 6.25 MB. Slow links have the least of both."""
    fast = "tbf rate 1000000000bit burst 720000 limit 6250000"
    slow = "tbf rate 1000000bit burst 32000 limit 64000"
    assert " ".join(Link("1gbit").token_bucket) == fast
    assert " ".join(Link("1mbit").token_bucket) == slow


@pytest.mark.parametrize(
    "text", ["100", "fast", "0mbit", "100 furlongs", "", "-1mbit", "100mbps", "1kbit", "101gbit"]
)
def test_other_texts_are_refused(text: str) -> None:
    """With the rule, the value and the way out."""
    with pytest.raises(ValueError, match=r"rate must .*got .*give for example 100mbit") as refused:
        Link(text)
    assert repr(text) in str(refused.value)


def test_what_cannot_be_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="num_hosts must be a whole number from 1 to 200, got 0"):
        EmulatedHosts(0, Link("1gbit"))
    with pytest.raises(TypeError, match="such as Link"):
        EmulatedHosts(2, "1gbit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"host must lie in 0\.\.1, got 2"):
        EmulatedHosts(2, Link("1gbit")).address(2)


UNPRIVILEGED = """
import os, sys
from loosestep.lab.emulation import CannotEmulate, EmulatedHosts, Link, missing
os.setgid(65534); os.setuid(65534)
print(missing())
try:
    EmulatedHosts(2, Link("1gbit")).__enter__()
except CannotEmulate as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root to give it up")
def test_without_privileges_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["emulated hosts need root (this is user 65534)"] * 2


def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else present(name))
    missing.cache_clear()
    try:
        assert "the command 'tc' (package iproute2)" in missing()
    finally:
        missing.cache_clear()


@needs_namespaces
def test_what_the_kernel_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is really tried: here by a ``tc`` that has no such filter."""
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    missing.cache_clear()
    try:
        assert missing() == (
            "emulated hosts need the token bucket filter (sch_tbf): "
            "Error: Specified qdisc kind is unknown."
        )
    finally:
        missing.cache_clear()
