"""Two hosts on one machine: network namespaces joined by a cable, with ranks in each.

    with TwoHosts() as hosts:
        ranks = [hosts.start(body, rank, host=rank, world_size=2) for rank in (0, 1)]
        results = [rank.result(timeout=60) for rank in ranks]

The namespaces have no names and no way out: they end with the processes in them, even if this one
is killed. The processes end with this one, since it holds the other end of what they read.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist

from loosestep.lab.emulation import Entry
from loosestep.testing import forking
from loosestep.testing.rank_worker import die_with_parent
from tests.support.lines import find_line

INTERFACE = "eth0"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
SEGMENT_BYTES = 1448  # what a frame of 1500 bytes carries
PORT = "29500"  # of the store on the first host, where nobody else listens
PRELOAD = ("loosestep.testing.rank_worker",)


def missing() -> str:
    """Return what this machine lacks for network namespaces, or ''."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    lacking = [] if os.geteuid() == 0 else ["root"]
    lacking += [f"the command {tool!r} (iproute2 or util-linux)" for tool in tools]
    return f"network namespaces need {' and '.join(lacking)}" if lacking else ""


class TwoHosts:
    """Two network namespaces and a veth pair between them, as fast as it goes or at a ``rate``."""

    def __init__(self, rate: str = "") -> None:
        self._rate = rate  # of each direction, as ``tc`` writes it: 1gbit
        self._holders: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Rank] = []

    def __enter__(self) -> TwoHosts:
        """Make the namespaces, each held open by a process that ends when we let go of it."""
        try:
            for _ in ADDRESSES:
                hold = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._holders.append(subprocess.Popen(hold, **pipes))  # type: ignore[call-overload]
            for holder in self._holders:
                assert holder.stdout is not None
                holder.stdout.readline()  # it is inside by now
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End what runs in the namespaces; they go with it."""
        for rank in self._ranks:
            rank.kill()
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def start(self, body: Callable[..., Any], *args: Any, rank: int, host: int, size: int) -> Rank:
        """Start ``body(*args)`` as one of ``size`` ranks on a host."""
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        self._ranks.append(Rank(call_of(body, args, Entry(self._holders[host].pid)), environment))
        return self._ranks[-1]

    def cut(self) -> None:
        """Pull the cable."""
        _call([*self._inside(0), "ip", "link", "set", INTERFACE, "down"])

    def _join(self) -> None:
        far = str(self._holders[1].pid)
        pair = ["type", "veth", "peer", "name", INTERFACE, "netns", far]
        _call([*self._inside(0), "ip", "link", "add", INTERFACE, *pair])
        for host, address in enumerate(ADDRESSES):
            inside = self._inside(host)
            _call([*inside, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
            _call([*inside, "ip", "link", "set", INTERFACE, "up"])
            _call([*inside, "ip", "link", "set", "lo", "up"])
            if self._rate:
                bucket = ["rate", self._rate, "burst", "256kb", "latency", "50ms"]
                _call([*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket])

    def _inside(self, host: int) -> list[str]:
        return ["nsenter", "--net", "--target", str(self._holders[host].pid)]


class Call(NamedTuple):
    """What a rank is to do, and on which host."""

    entry: Entry
    module: str
    name: str
    args: tuple[Any, ...]
    path: list[str]


def call_of(body: Callable[..., Any], args: tuple[Any, ...], entry: Entry) -> Call:
    """Return the call of a module's function on a host."""
    return Call(entry, body.__module__, body.__name__, args, list(sys.path))


class Rank:
    """A process on one of the hosts, forked from one that has torch loaded."""

    def __init__(self, call: Call, environment: dict[str, str]) -> None:
        reading, writing = os.pipe()
        self._out = os.fdopen(reading)
        self._errors: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by kill)
        with os.fdopen(writing, "w") as out:
            self._process = _start(call, environment, out, self._errors)

    def wait_for(self, line: str) -> None:
        """Wait until the body prints this line."""
        find_line(self._out, line)

    def result(self, timeout: float) -> Any:
        """Return what the body returned; raise with its traceback if it did not."""
        self._process.join(timeout)
        if self._process.exitcode != 0:
            self._errors.seek(0)
            ended = f"the rank ended with {self._process.exitcode}:"
            raise RuntimeError(f"{ended}\n{self._errors.read()}")
        return json.loads(self._out.read().splitlines()[-1])

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._out.close()
        self._errors.close()


def _start(call: Call, environment: dict[str, str], out: TextIO, errors: TextIO) -> Any:
    # Files cannot be handed to a fork server, but connections can, with what is behind them.
    ends = [Connection(os.dup(f.fileno()), readable=False) for f in (out, errors)]
    process = forking.start(be, call, environment, *ends, preload=PRELOAD)
    for end in ends:
        end.close()
    return process


class Sent(NamedTuple):
    """What the kernel has counted on this host, in bytes."""

    in_all: int  # headers included: 66 bytes for every frame of at most 64 kB
    again: int  # TCP took them for lost, since frames overtake each other on a busy machine


def sent() -> Sent:
    """Return what this host has sent so far."""
    columns = _table("dev", INTERFACE)  # eight figures of what came in, then of what went out
    resent = _table("snmp", "Tcp")[11]  # segments
    return Sent(int(columns[8]), int(resent) * SEGMENT_BYTES)


def _table(file: str, name: str) -> list[str]:
    """Return the last line of a table in /proc/net that begins with ``name:``."""
    lines = Path(f"/proc/self/net/{file}").read_text().splitlines()
    found = [line for line in lines if line.strip().startswith(f"{name}:")]
    return found[-1].partition(":")[2].split()


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def be(call: Call, environment: dict[str, str], out: Any, errors: Any) -> None:
    """Be a rank: join the others on its host, run the body and print what it returns."""
    die_with_parent()
    for end, number in ((out, 1), (errors, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = call.path
    try:
        call.entry()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        result = getattr(importlib.import_module(call.module), call.name)(*call.args)
        print(json.dumps(result), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the others may be out of reach, so there is nobody to say goodbye to
