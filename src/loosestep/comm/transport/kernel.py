"""What the kernel does for processes that share memory: copy between them, and wake each other."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence

Spans = Sequence[tuple[int, int]]  # address and length in bytes
MOST_SPANS = 1024  # what the kernel takes in one call


FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}  # of the system call, by machine
FUTEX_WAIT, FUTEX_WAKE = 0, 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_from(pid: int, there: Spans, here: Spans) -> str:
    """Copy bytes out of process ``pid``; return what went wrong, or ''.

    The spans of both sides hold equally many bytes, cut as each side likes.
    """
    function = _kernel_copy("process_vm_readv")
    if function is None:
        return "reading other processes' memory is not available here"
    here, there = [s for s in here if s[1]], [s for s in there if s[1]]
    while here:
        local, remote = _vector(here), _vector(there)
        count = function(pid, local, len(local), remote, len(remote), 0)
        if count <= 0:
            return f"its memory cannot be reached: {os.strerror(ctypes.get_errno())}"
        here, there = _after(here, count), _after(there, count)
    return ""


def _vector(spans: Spans) -> ctypes.Array[_IoVec]:
    some = spans[:MOST_SPANS]
    return (_IoVec * len(some))(*(_IoVec(address, length) for address, length in some))


def _after(spans: Spans, count: int) -> Spans:
    """Return what is left of ``spans`` when ``count`` bytes are done.

    >>> _after([(100, 8), (200, 8)], 10)
    [(202, 6)]
    """
    for index, (address, length) in enumerate(spans):
        if count < length:
            return [(address + count, length - count), *spans[index + 1 :]]
        count -= length
    return []


@functools.cache
def _kernel_copy(name: str) -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        vectors = ctypes.POINTER(_IoVec)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors] + [ctypes.c_ulong] * 2
    return function


def sleep_on(address: int, value: int, seconds: float) -> bool:
    """Sleep while the 32 bits at ``address`` are ``value``, until woken or time is up.

    False: the kernel cannot; sleep some other way.
    """
    call = _futex()
    if call is None:
        return False
    whole = int(seconds)
    limit = _TimeSpec(whole, int((seconds - whole) * 1e9))
    call(address, FUTEX_WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))
    return True


def wake(address: int) -> None:
    """Wake all that sleep on ``address``, in whatever process."""
    call = _futex()
    if call is not None:
        call(address, FUTEX_WAKE, 0x7FFFFFFF, None)


@functools.cache
def _futex() -> Callable[..., int] | None:
    number = FUTEX_NUMBER.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return None
    system_call = ctypes.CDLL(None).syscall
    system_call.restype = ctypes.c_long
    system_call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    system_call.argtypes += [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]

    def call(address: int, operation: int, value: int, limit: int | None) -> int:
        result: int = system_call(number, address, operation, value, limit, None, 0)
        return result

    return call
