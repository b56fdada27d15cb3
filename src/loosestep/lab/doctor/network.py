"""How this worker would meet the others: rendezvous variables and network interfaces."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from loosestep.comm.store import within
from loosestep.lab.doctor.findings import Finding, Level

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
PLACES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
GET_ADDRESS = 0x8915  # SIOCGIFADDR
LOOKUP_SECONDS = 3.0
INTERFACES = Path("/sys/class/net")


def inspect_network() -> list[Finding]:
    """Return what the environment says, and the interfaces that there are."""
    found = [_rendezvous(), *_slurm(), *map(_chosen, filter(os.environ.get, CHOSEN))]
    found += [_name()] if not os.environ.get("GLOO_SOCKET_IFNAME") else []
    return found + [_interface(name) for name in names()]


def names() -> list[str]:
    """Return the names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _rendezvous() -> Finding:
    name = "rendezvous"
    given = {key: os.environ[key] for key in (*RENDEZVOUS, *PLACES) if key in os.environ}
    value = " ".join(f"{key}={text}" for key, text in given.items()) or "no variables set"
    lacking = [key for key in RENDEZVOUS if key not in given]
    if len(lacking) == len(RENDEZVOUS):
        return Finding(name, value)
    if lacking:
        advice = f"set {' and '.join(lacking)} too, or start workers by torchrun, which sets all"
        return Finding(name, value, Level.PROBLEM, advice)
    if reason := _bad_numbers(given) or _unknown_host(given["MASTER_ADDR"]):
        return Finding(name, value, Level.PROBLEM, reason)
    return Finding(name, value)


def _bad_numbers(given: dict[str, str]) -> str:
    numbers = {key: text for key, text in given.items() if key != "MASTER_ADDR"}
    for key, text in numbers.items():
        if not text.isdecimal():
            return f"{key} must be a whole number, got {text!r}"
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        rank, size = given["RANK"], given["WORLD_SIZE"]
        return f"RANK must lie below WORLD_SIZE: {rank} >= {size}; ranks count from 0"
    return ""


def _unknown_host(name: str) -> str:
    try:
        within(LOOKUP_SECONDS, lambda: socket.getaddrinfo(name, None))
    except (OSError, TimeoutError) as error:
        return f"MASTER_ADDR {name!r} cannot be looked up ({error}); give an address"
    return ""


def _slurm() -> list[Finding]:
    given = {key: text for key, text in os.environ.items() if key.startswith("SLURM_")}
    wanted = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NODEID", "SLURM_JOB_NODELIST")
    if not given:
        return []
    value = " ".join(f"{key}={given[key]}" for key in wanted if key in given)
    if given.get("SLURM_NTASKS", "1") != "1" and "RANK" not in os.environ:
        advice = "a loop of your own needs RANK and WORLD_SIZE; loosestep's commands take Slurm's"
        return [Finding("Slurm", value, Level.NOTE, advice)]
    return [Finding("Slurm", value)]


def _chosen(variable: str) -> Finding:
    wanted = os.environ[variable]
    # NCCL takes several, prefixes, and marks for "exactly" and "not".
    heads = [part.lstrip("^=") for part in wanted.split(",")]
    if not any(name.startswith(head) for head in heads for name in names()):
        advice = f"there is no such interface; there are {', '.join(names())}"
        return Finding(variable, wanted, Level.PROBLEM, advice)
    return Finding(variable, wanted)


def _name() -> Finding:
    """Say where Gloo would listen: at the address of the host's name, unless told otherwise."""
    host = socket.gethostname()
    advice = "where there are several hosts set GLOO_SOCKET_IFNAME to the interface between them"
    try:
        found = within(LOOKUP_SECONDS, lambda: socket.gethostbyname(host))
    except (OSError, TimeoutError):
        return Finding("host name", f"{host}, which has no address", Level.NOTE, advice)
    if found.startswith("127."):
        advice = f"Gloo would listen where other hosts cannot come; {advice}"
        return Finding("host name", f"{host} is {found}", Level.NOTE, advice)
    return Finding("host name", f"{host} is {found}")


def _interface(name: str) -> Finding:
    # The loopback does not know whether it is up.
    facts = [_fact(name, "operstate").replace("unknown", ""), address_of(name) or "no address"]
    facts += [f"frames of {_fact(name, 'mtu')} bytes"]
    speed = _fact(name, "speed")
    facts += [f"{speed} Mbit/s by its own word"] if speed.isdecimal() else []
    return Finding(f"interface {name}", ", ".join(filter(None, facts)))


def _fact(interface: str, file: str) -> str:
    try:
        return (INTERFACES / interface / file).read_text().strip()
    except OSError:  # some have no speed, and say so in this way
        return ""


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address, or ''."""
    try:
        import fcntl  # which Windows does not have
    except ImportError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
