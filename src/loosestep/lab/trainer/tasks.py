"""What is trained on: samples by number, a model for them, and a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(Protocol):
    """Data and a model; the same on all workers."""

    unit: str  # what is counted: tokens or images
    units_per_sample: int
    num_samples: int  # to train on
    num_held_out: int

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Return the training samples of these numbers."""

    def held_out(self, numbers: torch.Tensor) -> Batch:
        """Return samples that are never trained on."""

    def make_model(self) -> torch.nn.Module:
        """Return a new model, initialised from torch's generator."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch, in nats."""

    def describe(self) -> dict[str, Any]:
        """Return what the data is: name, bytes, sha256."""


class Order:
    """All samples in an order of their own in every epoch, for ever.

    The order depends on the seed only, so whoever knows how many samples were used can go on,
    with any number of workers.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._last: tuple[int, torch.Tensor] = (-1, torch.empty(0))  # epoch and its order

    def take(self, start: int, count: int) -> torch.Tensor:
        """Return the numbers of ``count`` samples from position ``start`` on."""
        return torch.cat(list(self._pieces(start, count)))

    def _pieces(self, start: int, count: int) -> Iterator[torch.Tensor]:
        while count > 0:
            epoch, at = divmod(start, self.num_samples)
            piece = self._epoch(epoch)[at : at + count]
            yield piece
            start, count = start + len(piece), count - len(piece)

    def _epoch(self, epoch: int) -> torch.Tensor:
        if self._last[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._last = (epoch, torch.randperm(self.num_samples, generator=generator))
        return self._last[1]


class Feed:
    """One worker's batches: at every step the next samples of the order, shared out."""

    def __init__(self, order: Order, *, rank: int, num_workers: int, batch: int) -> None:
        self._order, self._rank, self._batch = order, rank, batch
        self.together = num_workers * batch  # samples that all workers use at once
        self.position = 0  # samples that all workers have used together

    def next(self) -> torch.Tensor:
        """Return the numbers of this worker's next samples."""
        numbers = self._order.take(self.position, self.together)
        self.position += self.together
        return numbers[self._rank * self._batch : (self._rank + 1) * self._batch]
