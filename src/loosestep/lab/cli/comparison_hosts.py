"""The hosts of a comparison: emulated ones with slow links, or this machine as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from loosestep.lab.cli.comparison import Comparison
from loosestep.lab.emulation import CannotEmulate, EmulatedHosts, Link, missing
from loosestep.lab.trainer.launch import Place, ThisMachine
from loosestep.lab.trainer.mistakes import BadInput


@dataclass(frozen=True)
class Hosts:
    """Where all contenders run."""

    place: Place
    num_hosts: int
    workers_per_host: int
    link: dict[str, Any] | None  # None: no link is emulated

    @property
    def num_workers(self) -> int:
        """All workers together."""
        return self.num_hosts * self.workers_per_host


@contextmanager
def hosts(asked: Comparison, console: Console) -> Iterator[Hosts]:
    """Hold the hosts: emulated ones if a link is asked for, or this machine as it is."""
    num_hosts, each, link = asked.num_hosts, asked.workers_per_host, asked.link
    if link is None or _cannot(asked, console):
        yield Hosts(ThisMachine(), num_hosts, each, None)
        return
    said = {"rate": link.rate, "hosts": num_hosts, "workers_per_host": each}
    with _emulated(num_hosts, link) as emulated:
        yield Hosts(emulated, num_hosts, each, said)


@contextmanager
def _emulated(num_hosts: int, link: Link) -> Iterator[EmulatedHosts]:
    """Hold emulated hosts; what is wrong with them is the user's to know, in one line."""
    with ExitStack() as held:
        try:
            emulated = held.enter_context(EmulatedHosts(num_hosts, link))
        except (CannotEmulate, ValueError) as error:
            raise BadInput(str(error)) from error
        yield emulated


def _cannot(asked: Comparison, console: Console) -> bool:
    """Say whether links cannot be emulated here; raise unless the user can do without."""
    if not missing():
        return False
    if not asked.or_loopback:
        raise BadInput(
            f"{missing()}; --or-loopback compares on the plain loopback instead, where nothing is "
            "slow"
        )
    console.print(f"no emulated link: {missing()}. On the plain loopback instead:")
    return True
