"""Several hosts on one machine, joined by links of a given rate, to try strategies on."""

from loosestep.lab.emulation.hosts import CannotEmulate, EmulatedHosts, Entry, missing
from loosestep.lab.emulation.link import Link

__all__ = ["CannotEmulate", "EmulatedHosts", "Entry", "Link", "missing"]
