"""A mean on its way, on a thread of its own whose every wait ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from loosestep.errors import PeerLost
from loosestep.flat import WINDOW_BYTES
from loosestep.peers import Peers
from loosestep.tensors import Named
from loosestep.wire import Traffic

LINGER_SECONDS = 2.0  # for a mean that nobody wants any more, before its connections are cut
ALONE_SECONDS = 600.0  # for one that needs nobody else
_NEVER_SENT = (1 << 24) - 2  # a message tag


@dataclass
class Flight:
    """A mean on its way, or one that has come and is not applied yet."""

    step: int
    level: str
    differences: list[Named]  # mean - snapshot of this rank's memory, once it has come
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0  # from launch until it had come
    seconds_waited: float = 0.0  # how long training stood still for it
    peers: Peers | None = None  # with whom; None: it has come
    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)

    def take_off(self, travel: Callable[[], Traffic]) -> None:
        """Let a thread of its own carry the mean; ``travel`` leaves it in ``differences``."""
        began = time.perf_counter()

        def run() -> None:
            try:
                self.traffic = travel()
            except BaseException as error:  # raised again by wait, where somebody listens
                self._errors.append(error)
            self.seconds = time.perf_counter() - began

        self._thread = threading.Thread(target=run, name="loosestep overlap", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the mean has come; raise what went wrong on the way."""
        if self._thread is None:
            return
        began, limit = time.perf_counter(), self._limit()
        self._thread.join(limit)
        self.seconds_waited += time.perf_counter() - began
        if self.flying:
            raise PeerLost(
                f"the average that was launched at step {self.step} on level {self.level!r} has "
                f"not come within {limit:g} s. Parameters are as they were before it",
                phase="waiting for an average under way",
            )
        self._thread = self.peers = None
        if self._errors:
            raise self._errors.pop()

    @property
    def flying(self) -> bool:
        """Whether its thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def abandon(self) -> None:
        """Let it end soon, whatever becomes of it: its own time-outs end it in any case."""
        if self._thread is not None:
            self._thread.join(LINGER_SECONDS)
            if self.flying and self.peers is not None:
                self.peers.give_up("an average under way was given up")
                _hang_up(self.peers)
                self._thread.join(LINGER_SECONDS)

    def _limit(self) -> float:
        """Return how long all waits on the way may take, should each just not time out."""
        if self.peers is None or self.peers.process_group is None:
            return ALONE_SECONDS
        num_bytes = sum(tensor.nbytes for _, tensor in self.differences)
        num_windows = len(self.differences) + num_bytes // WINDOW_BYTES
        return self.peers.seconds * (4 + num_windows)


def _hang_up(peers: Peers) -> None:
    """Close all connections of a group, so that whoever waits on it need not sit it out."""
    group = peers.process_group
    if group is None or all(kind.type != "cpu" for kind in group._device_types):
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in peers.others:
        with contextlib.suppress(RuntimeError):  # Gloo closes what times out
            group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
