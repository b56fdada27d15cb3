"""The store by which a group has met: asked without waiting for long, and who hosts it.

A store is as dead as the rank that hosts it. Where that rank has ended, nobody listens any more;
where it hangs, the store takes a question and never answers, and whoever asks holds the
connection's lock meanwhile. torch's own time-outs do not cover all of that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Answer = TypeVar("Answer")

_CONNECT_SECONDS = 0.5
_HOST_KEY = "loosestep/store host"
_LISTENING = "0A"  # a state of a socket in /proc/net/tcp


class GroupStore:
    """A store, seen from one rank; by default that of the default process group."""

    def __init__(self, store: Any | None, rank: int) -> None:
        self._store, self._rank = store, rank
        # The global rank that hosts it, as far as that has said so. None: it is hosted by none
        # (torchrun's agent or a file may be the store), or by a rank that has never made a group.
        self.host: int | None = None
        self._declared = False

    @property
    def is_default(self) -> bool:
        """Whether it is that of the default process group."""
        return self._store is None

    @property
    def c10d(self) -> Any:
        """The store itself; not kept where it is the default one, which ends with its group."""
        return c10d._get_default_store() if self._store is None else self._store

    def ask(self, seconds: float, question: Callable[[Any], Answer]) -> Answer | None:
        """Return what ``question(store)`` returns, or None if the store does not answer in time.

        It gets a connection of its own: the usual one may wait for an answer that never comes.
        """
        # Whatever is wrong with the store must not hide the error at hand.
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            return within(seconds, lambda: question(self._fresh()))
        return None

    def declare_host(self) -> None:
        """Say in the store that this rank hosts it, if it does; called before a group is made."""
        if not self._declared:
            self._declared = True
            if (address := _address(self.c10d)) is not None and _listens(address[1]):
                self.c10d.set(_HOST_KEY, str(self._rank))

    def learn_host(self) -> None:
        """Remember who said so; called when a group is made, for its members have called."""
        if self.host is None and self.c10d.check([_HOST_KEY]):
            self.host = int(self.c10d.get(_HOST_KEY))

    def _fresh(self) -> Any:
        if (address := _address(self.c10d)) is not None:
            # Refused at once where nobody listens; torch goes on trying, and prints a stack trace.
            socket.create_connection(address, _CONNECT_SECONDS).close()
        return self.c10d.clone()


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """Return what ``call`` returns; raise what it raises, or ``TimeoutError`` when it takes longer.

    It runs in a thread of its own, which is left behind where it never returns.

    >>> within(1.0, lambda: 3)
    3
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # handed on to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def _address(store: Any) -> tuple[str, int] | None:
    """Return where a store is served, or None if it is no server."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return store.host, store.port
    return None


def _listens(port: int) -> bool:
    """Say whether this very process listens at a port; False where that cannot be told."""
    listening = {f"socket:[{inode}]" for inode in _listening_at(port)}
    with contextlib.suppress(OSError), os.scandir("/proc/self/fd") as files:
        return any(_target(file) in listening for file in files)
    return False


def _target(file: os.DirEntry[str]) -> str:
    try:
        return os.readlink(file.path)
    except OSError:  # closed meanwhile
        return ""


def _listening_at(port: int) -> Iterator[str]:
    """Yield the inodes of sockets on this machine that listen at a port."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
