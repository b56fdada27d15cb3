"""Hosts that are network namespaces, each with an uplink of a given rate to a common switch.

    with EmulatedHosts(2, Link("100mbit")) as hosts:
        for host in range(2):
            command = [*hosts.inside(host), sys.executable, "worker.py"]
            subprocess.Popen(command, env=os.environ | hosts.environment(host))

The switch is a bridge in a namespace of its own. Both ends of an uplink are held to the rate, so
that what a host sends and what it is sent are: host -> its eth0 -> bridge -> port -> other host.
Ranks in one namespace talk through its loopback, as fast as the machine is, and count as one host
for ``Topology.from_hosts``. Every host gets as many processors as the others, where there are
enough, so that the workers of one do not take the time of another's.

Nothing has a name outside: a namespace ends with the processes in it. Each is held by a process
that reads from a pipe of ours and ends with it, so that a kill of this process leaves nothing.
Whoever starts processes inside sees to it that they end.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loosestep.errors import LoosestepError
from loosestep.lab.emulation.link import Link

INTERFACE = "eth0"  # a host's uplink, seen from inside
SWITCH = "switch0"
PORT = "29500"  # of the store on the first host, where nobody else listens
MOST_HOSTS = 200
NETWORK = 0x40000000  # CLONE_NEWNET, the kind of namespace
SECONDS = 30.0  # how long the kernel may take for one command

_TOOLS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "taskset"), "util-linux"),
}
# What the kernel must have and allow, tried in a namespace that is gone at once.
_TRIALS = {
    "leave to choose processors (sched_setaffinity)": "taskset --cpu-list {processor} true",
    "bridges": f"ip link add {SWITCH} type bridge",
    "pairs of virtual interfaces (veth)": "ip link add port0 type veth peer name port1",
    "the token bucket filter (sch_tbf)": (
        f"tc qdisc add dev port0 root {' '.join(Link('1mbit').token_bucket)}"
    ),
}


FIRST_TRIAL = 10  # what the shell returns if the first of them fails, 11 if the second does


@dataclass(frozen=True)
class Entry:
    """The way into a host, for a process that is forked and not started by a command."""

    holder: int  # a process that is inside
    processors: tuple[int, ...] = ()  # that may be used; none: all

    def __call__(self) -> None:
        """Move this thread, and those that it starts from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(namespace, NETWORK):
                raise CannotEmulate(f"cannot enter a host: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(namespace)
        if self.processors:
            os.sched_setaffinity(0, self.processors)


class CannotEmulate(LoosestepError, RuntimeError):
    """Hosts cannot be emulated here; the text says what the machine lacks."""


@functools.cache
def missing() -> str:
    """Return what this machine lacks for emulated hosts, or ''."""
    if not sys.platform.startswith("linux"):
        return f"emulated hosts need Linux (this is {sys.platform})"
    tools = [tool for tool in _TOOLS if shutil.which(tool) is None]
    lacking = [] if os.geteuid() == 0 else [f"root (this is user {os.geteuid()})"]
    lacking += [f"the command {tool!r} (package {_TOOLS[tool]})" for tool in tools]
    if not lacking:
        lacking = _refused_by_kernel()
    return f"emulated hosts need {' and '.join(lacking)}" if lacking else ""


def _refused_by_kernel() -> list[str]:
    trials = [trial.format(processor=min(os.sched_getaffinity(0))) for trial in _TRIALS.values()]
    steps = [f"{trial} || exit {i}" for i, trial in enumerate(trials, FIRST_TRIAL)]
    command = ["unshare", "--net", "sh", "-c", "; ".join(steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [f"a kernel that makes a network namespace within {SECONDS:g} s"]
    if done.returncode == 0:
        return []
    failed = dict(enumerate(_TRIALS, start=FIRST_TRIAL))
    what = failed.get(done.returncode, "permission to make network namespaces (CAP_SYS_ADMIN)")
    return [f"{what}: {(done.stderr.strip().splitlines() or ['refused'])[-1]}"]


class EmulatedHosts:
    """``num_hosts`` network namespaces, each joined to a switch by a ``link``."""

    def __init__(self, num_hosts: int, link: Link) -> None:
        if not isinstance(num_hosts, int) or not 1 <= num_hosts <= MOST_HOSTS:
            raise ValueError(
                f"num_hosts must be a whole number from 1 to {MOST_HOSTS}, got {num_hosts!r}"
            )
        if not isinstance(link, Link):
            raise TypeError(f"link must be one such as Link('100mbit'), got {link!r}")
        self.num_hosts, self.link = num_hosts, link
        self._holders: list[_Holder] = []  # of the hosts' namespaces, and last of the switch's

    def __enter__(self) -> EmulatedHosts:
        """Make the namespaces and join them; raise ``CannotEmulate`` where that is not allowed."""
        if lacking := missing():
            raise CannotEmulate(lacking)
        try:
            for _ in range(self.num_hosts + 1):
                self._holders.append(_Holder())
            for holder in self._holders:
                holder.wait_started()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of the namespaces; each ends with the last process in it."""
        holders, self._holders = self._holders, []
        for holder in holders:
            holder.end()

    def inside(self, host: int) -> list[str]:
        """Return what to put before a command so that it runs on a host."""
        return [*on_processors(self.processors(host)), *self._holder(host).inside]

    def entry(self, host: int) -> Entry:
        """Return what a process must call first to be on a host, if no command can be run there."""
        return Entry(self._holder(host).pid, tuple(self.processors(host)))

    def processors(self, host: int) -> list[int]:
        """Return which of this process's processors are the host's; none: too few to divide."""
        self._check(host)
        mine = sorted(os.sched_getaffinity(0))
        share = len(mine) // self.num_hosts
        return mine[share * host : share * (host + 1)]

    def address(self, host: int) -> str:
        """Return a host's address, which all hosts can reach."""
        self._check(host)
        return f"10.0.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that a worker on a host needs, besides RANK and WORLD_SIZE."""
        self._check(host)
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": PORT,
        }

    def uplink_bytes(self, host: int) -> int:
        """Return how many bytes have left a host so far, headers included, by the kernel."""
        table = Path(f"/proc/{self._holder(host).pid}/net/dev").read_text()
        for line in table.splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == INTERFACE:
                return int(figures.split()[8])  # after eight of what came in
        raise CannotEmulate(f"host {host} has lost its interface {INTERFACE}")

    def cut(self, host: int) -> None:
        """Pull a host's cable at the switch; inside the host all goes on."""
        self._check(host)
        self._switch.run(f"ip link set port{host} down")

    def _build(self) -> None:
        self._switch.run(f"ip link add {SWITCH} type bridge", f"ip link set {SWITCH} up")
        for host in range(self.num_hosts):
            self._plug_in(host)

    def _plug_in(self, host: int) -> None:
        port, holder, bucket = f"port{host}", self._holder(host), " ".join(self.link.token_bucket)
        self._switch.run(
            f"ip link add {port} type veth peer name {INTERFACE} netns {holder.pid}",
            f"ip link set {port} master {SWITCH}",
            f"tc qdisc add dev {port} root {bucket}",
        )
        # Nobody speaks IPv6 here, and its greetings would be counted; a kernel may have none.
        self._switch.attempt(f"ip link set {port} addrgenmode none")
        holder.attempt(f"ip link set {INTERFACE} addrgenmode none")
        self._switch.run(f"ip link set {port} up")
        holder.run(
            "ip link set lo up",
            f"ip address add {self.address(host)}/24 dev {INTERFACE}",
            f"tc qdisc add dev {INTERFACE} root {bucket}",
            f"ip link set {INTERFACE} up",
        )

    @property
    def _switch(self) -> _Holder:
        return self._holders[-1]

    def _holder(self, host: int) -> _Holder:
        self._check(host)
        if not self._holders:
            raise CannotEmulate("hosts exist inside a `with EmulatedHosts(...) as hosts:` only")
        return self._holders[host]

    def _check(self, host: int) -> None:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"host must lie in 0..{self.num_hosts - 1}, got {host!r}")


def on_processors(numbers: list[int]) -> list[str]:
    """Return what to put before a command so that it runs on some processors only; none: on all.

    >>> on_processors([0, 2]), on_processors([])
    (['taskset', '--cpu-list', '0,2'], [])
    """
    return ["taskset", "--cpu-list", ",".join(map(str, numbers))] if numbers else []


class _Holder:
    """A process that keeps a network namespace open until the pipe that it reads ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not take the hosts from under their workers
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def inside(self) -> list[str]:
        return ["nsenter", "--net", "--target", str(self.pid)]

    def wait_started(self) -> None:
        """Return when the process is inside its namespace."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        if not ready or not self._process.stdout.readline():
            self._process.kill()
            _, errors = self._process.communicate(timeout=SECONDS)
            reason = errors.decode().strip() or f"no answer within {SECONDS:g} s"
            raise CannotEmulate(f"cannot make a network namespace: {reason}")

    def run(self, *commands: str) -> None:
        """Run commands inside, one after another."""
        for command in commands:
            if error := self.attempt(command):
                raise CannotEmulate(f"{command!r} failed: {error}")

    def attempt(self, command: str) -> str:
        """Run a command inside; return what went wrong, or ''."""
        line = [*self.inside, *command.split()]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer within {SECONDS:g} s"
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate(timeout=SECONDS)
