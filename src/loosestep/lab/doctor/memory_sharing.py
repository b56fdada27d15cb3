"""Whether workers of this host can share memory: each part is tried, not looked up."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from loosestep.comm.transport import kernel
from loosestep.comm.transport.segments import SHARED_FOLDER, Segment
from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.units import size

SMALL_FOLDER = 1 << 30  # bytes; containers have 64 MB unless told otherwise
SECONDS = 20.0  # for another process to start and to read 8 bytes
MARK = b"loosestp"

# A process that is not our child's parent reads our memory, as a neighbouring worker would. It
# runs the library's own file, which needs no torch.
READ = """
import ctypes, runpy, sys
copy_from = runpy.run_path(sys.argv[1])["copy_from"]
room = ctypes.create_string_buffer(8)
error = copy_from(int(sys.argv[2]), [(int(sys.argv[3]), 8)], [(ctypes.addressof(room), 8)])
print(error or room.raw.decode())
"""


def inspect_sharing() -> list[Finding]:
    """Return what the kernel allows to workers of one host."""
    return [_memory(), _folder(), _reading(), _sleeping()]


def _memory() -> Finding:
    name = "shared memory"
    if os.environ.get("LOOSESTEP_SHARED_MEMORY") == "0":
        advice = "workers of a host talk through sockets: unset LOOSESTEP_SHARED_MEMORY"
        return Finding(name, "switched off", Level.NOTE, advice)
    try:
        segment = Segment.create(1 << 16)
        kind = os.readlink(f"/proc/self/fd/{segment.fd}")
        Segment.open(os.getpid(), segment.fd, segment.size)
    except OSError as error:
        advice = "workers of a host will talk through sockets; allow memfd_create, or mount /proc"
        return Finding(name, f"cannot be had: {error}", Level.PROBLEM, advice)
    if "memfd" in kind:
        return Finding(name, "by memfd, bounded by the host's memory only")
    return Finding(name, f"by files in {SHARED_FOLDER}", Level.NOTE, "see that it is large enough")


def _folder() -> Finding:
    try:
        about = os.statvfs(SHARED_FOLDER)
    except OSError as error:
        advice = "data loaders with workers need it: mount a tmpfs there"
        return Finding(SHARED_FOLDER, f"cannot be used: {error}", Level.NOTE, advice)
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    value = f"{size(free)} free of {size(total)}"
    if free < SMALL_FOLDER:
        advice = "averages do without it, data loaders with workers may not: --shm-size=1g"
        return Finding(SHARED_FOLDER, value, Level.NOTE, advice)
    return Finding(SHARED_FOLDER, value)


def _reading() -> Finding:
    name = "reading neighbours"
    room = ctypes.create_string_buffer(MARK, len(MARK))
    where = [kernel.__file__, str(os.getpid()), str(ctypes.addressof(room))]
    try:
        command = [sys.executable, "-I", "-S", "-c", READ, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        said = done.stdout.strip() or done.stderr.strip()[-100:]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said == MARK.decode():
        return Finding(name, "allowed (process_vm_readv)")
    advice = "sharded optimizers copy once more; kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE helps"
    return Finding(name, said, Level.NOTE, advice)


def _sleeping() -> Finding:
    word = ctypes.c_uint32(1)
    # The value differs, so that a kernel that can sleep returns at once.
    if kernel.sleep_on(ctypes.addressof(word), 2, 0.001):
        return Finding("waking neighbours", "by futex")
    advice = "workers that wait look again and again, which takes processor time"
    return Finding("waking neighbours", "no futex on this machine", Level.NOTE, advice)
