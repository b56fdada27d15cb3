"""Memory that processes of one host share and that no crash can leave behind.

A segment has no name: it is a ``memfd``, opened by the others through ``/proc/<pid>/fd``, which
the kernel allows to processes of the same user. Nothing bounds it but the host's memory (a
container's ``/dev/shm`` is often 64 MB), and it is gone with the last process that maps it. Where
the kernel has no ``memfd``, a file in ``/dev/shm`` serves, unlinked as soon as it is open. Pages
are asked for before they are touched: where there are none that is an error here, and not a
SIGBUS in the middle of training.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import torch

from loosestep.comm.flat.cuts import round_up
from loosestep.comm.flat.packing import pack_bytes
from loosestep.comm.flat.staging import size_class

SHARED_FOLDER = "/dev/shm"
PAGE = mmap.PAGESIZE
SMALLEST_COPY = 1 << 12  # bytes
SIZE_BITS = 40  # of the number that tells file and size


class Segment:
    """A piece of shared memory, mapped into this process until nobody uses it any more."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = -1, size
        self.map = mmap.mmap(fd, size)
        self.fd = fd  # its own from now on; where mapping failed it is the caller's

    @classmethod
    def create(cls, size: int, at_once: int | None = None) -> Segment:
        """Make a new segment, filled with zeros; ``at_once`` bytes are reserved, by default all.

        The others must not be touched before ``reserve``.
        """
        size = round_up(max(size, 1), PAGE)
        fd = _unnamed_file()
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size if at_once is None else at_once)
            return cls(fd, size)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> Segment:
        """Map what another process of this host made, while it still has it open."""
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(mine).st_size != size:
                raise OSError(f"file {fd} of process {pid} is not what it said")
            return cls(mine, size)
        except OSError:
            os.close(mine)
            raise

    def reserve(self, start: int, length: int) -> None:
        """Ask for the pages of a part."""
        os.posix_fallocate(self.fd, start, length)

    def seal(self) -> None:
        """Close the file: those who should have mapped it have."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def bytes(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Return the memory as a tensor; it stays mapped as long as that lives."""
        stop = self.size if length is None else start + length
        return torch.frombuffer(self.map, dtype=torch.uint8)[start:stop]

    def __del__(self) -> None:
        self.seal()


class CopyPool:
    """Segments for copies that neighbours read, used again; files stay open for newcomers."""

    def __init__(self) -> None:
        self._free: dict[int, list[Copy]] = {}
        self._made = 0

    def take(self, tensors: Sequence[torch.Tensor]) -> Copy:
        """Return a copy of tensors, one after the other."""
        needed = sum(tensor.nbytes for tensor in tensors)
        capacity = size_class(needed, SMALLEST_COPY)
        free = self._free.setdefault(capacity, [])
        if free:
            copy = free.pop()
        else:
            self._made += 1
            copy = Copy(Segment.create(capacity), self._made, capacity)
        pack_bytes(tensors, copy.memory)
        return copy

    def give(self, copy: Copy) -> None:
        """Take back a copy that nobody reads any more."""
        self._free[copy.capacity].append(copy)


class Copy:
    """A segment of shared memory that holds a copy of something."""

    def __init__(self, segment: Segment, key: int, capacity: int) -> None:
        self.segment, self.key, self.capacity = segment, key, capacity
        self.memory = segment.bytes()

    @property
    def detail(self) -> int:
        """Which file it is and how large, in one number."""
        return (self.segment.fd << SIZE_BITS) | self.segment.size


def open_copy(opened: dict[int, torch.Tensor], key: int, pid: int, detail: int) -> torch.Tensor:
    """Return a neighbour's copy; what was mapped before is among those ``opened``."""
    if key not in opened:
        segment = Segment.open(pid, detail >> SIZE_BITS, detail & ((1 << SIZE_BITS) - 1))
        segment.seal()
        opened[key] = segment.bytes()
    return opened[key]


def _unnamed_file() -> int:
    try:
        return os.memfd_create("loosestep", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # an old kernel, or a sandbox
        path = f"{SHARED_FOLDER}/loosestep-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        return fd
