"""Two ranks: how long a small message takes there and back, and how much goes through a second."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from loosestep.comm.peers import Message, Peers
from loosestep.lab.doctor.links import Pair

WARMUP_ROUNDS, ROUNDS = 3, 21
FIRST_BYTES, MOST_BYTES = 16_000, 16_000_000
GROWTH = 4
# A message that takes less than this part of the time given is too small to tell the rate: it may
# be a burst that a switch lets through, or end before TCP is up to speed.
TELLING_SHARE, ENOUGH_SHARE = 1 / 8, 1 / 4


@dataclass(frozen=True)
class Line:
    """The way from this rank to the other of a pair."""

    peers: Peers
    first: int
    second: int
    tag: int
    device: torch.device

    @classmethod
    def between(cls, peers: Peers, first: int, second: int, tag: int) -> Line:
        """Return the line between two members, of which this rank is one."""
        return cls(peers, first, second, tag, peers.device_for(torch.device("cpu")))

    @property
    def is_first(self) -> bool:
        return self.peers.group_rank == self.first

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor and return when it is on its way."""
        self._move(tensor, outgoing=True)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with what comes."""
        self._move(tensor, outgoing=False)

    def send_number(self, value: float) -> None:
        self.send(torch.tensor([value], dtype=torch.float64, device=self.device))

    def receive_number(self) -> float:
        room = torch.empty(1, dtype=torch.float64, device=self.device)
        self.receive(room)
        return room.item()

    def _move(self, tensor: torch.Tensor, *, outgoing: bool) -> None:
        other = self.second if self.is_first else self.first
        for transfer in self.peers.post([Message(tensor, other, outgoing)], self.tag):
            transfer.wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # there, waiting is only queued


def measure_pair(line: Line, *, same_host: bool, seconds: float) -> Pair | None:
    """Measure latency, clocks and both directions; return that on the first of the two."""
    if not line.is_first:
        _answer(line)
        _take(line)
        line.send_number(_pour(line, seconds))
        return None
    round_trip, offset = _ask(line)
    forth = _pour(line, seconds)
    _take(line)
    return Pair(
        first=line.peers.global_ranks[line.first],
        second=line.peers.global_ranks[line.second],
        same_host=same_host,
        round_trip_seconds=round_trip,
        forth_bytes_per_second=forth,
        back_bytes_per_second=line.receive_number(),
        clock_offset_seconds=offset,
    )


def _ask(line: Line) -> tuple[float, float]:
    """Send numbers to and fro; return the median round trip and the other clock's lead."""
    trips = []
    for _ in range(WARMUP_ROUNDS + ROUNDS):
        wall, began = time.time(), time.perf_counter()
        line.send_number(0.0)
        theirs = line.receive_number()
        took = time.perf_counter() - began
        trips.append((took, theirs - (wall + took / 2)))
    trips = trips[WARMUP_ROUNDS:]
    # The quickest trip knows best when the other side looked at its clock.
    return statistics.median(took for took, _ in trips), min(trips)[1]


def _answer(line: Line) -> None:
    for _ in range(WARMUP_ROUNDS + ROUNDS):
        line.receive_number()
        line.send_number(time.time())


def _pour(line: Line, seconds: float) -> float:
    """Send messages that grow until one takes a while; return bytes per second."""
    size, total, elapsed = FIRST_BYTES, 0, 0.0
    payload = torch.zeros(MOST_BYTES, dtype=torch.uint8, device=line.device)
    while elapsed < seconds * ENOUGH_SHARE:
        line.send_number(size)
        began = time.perf_counter()
        line.send(payload[:size])
        line.receive_number()
        took = time.perf_counter() - began
        if took < seconds * TELLING_SHARE and size < MOST_BYTES:
            size = min(size * GROWTH, MOST_BYTES)
        else:
            total, elapsed = total + size, elapsed + took
    line.send_number(0)
    return total / elapsed


def _take(line: Line) -> None:
    """Receive what the other side pours, and say when each message is there."""
    payload = torch.zeros(MOST_BYTES, dtype=torch.uint8, device=line.device)
    while size := int(line.receive_number()):
        line.receive(payload[:size])
        line.send_number(0.0)
