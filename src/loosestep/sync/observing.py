"""What a rank observes between syncs, and what all of them have observed together.

A rank's numbers travel in its header, with the agreement before a sync. Every rank gets all of
them and takes the same means, so that none can come to another answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named
from loosestep.errors import NotAttachable
from loosestep.strategy.timetable import Observed
from loosestep.sync.parts import compressible

SAMPLE = 256  # values of the parameters by which drift is estimated

Numbers = tuple[float, ...]


class Observer:
    """Collects what a rule asks for: the losses since the last sync, the rate, some values.

    The learning rate is that of the optimizer's first group.
    """

    def __init__(self, asks: frozenset[str], optimizer: torch.optim.Optimizer) -> None:
        self._asks, self._optimizer = asks, optimizer
        self._losses: list[float] = []  # since the last sync
        self._loss = math.nan  # the mean of those before; of a rank that has finished, it stays

    def observe(self, loss: float) -> None:
        """Take the loss of a step."""
        if "loss" in self._asks:
            self._losses.append(loss)

    def tell(self, named: Sequence[Named], period: int) -> Numbers:
        """Return this rank's numbers, as many on all ranks; nothing where nobody asks."""
        if not self._asks:
            return ()
        losses, self._losses = self._losses, []
        self._loss = _mean(losses) if losses else self._loss
        sample = sample_of(named) if "drift" in self._asks else []
        rate = float(self._optimizer.param_groups[0].get("lr", 0.0))
        return (float(period), rate, self._loss, *sample)

    def reduce(self, told: Sequence[Numbers]) -> Observed:
        """Return means over the ranks, in their order; raise on all where a loss is missing."""
        periods, rates, losses, *samples = zip(*told, strict=True)
        if "loss" in self._asks and any(map(math.isnan, losses)):
            without = [rank for rank, loss in enumerate(losses) if math.isnan(loss)]
            raise ValueError(
                f"the schedule goes by the training loss, and group ranks {without} have observed "
                "none or NaN; call run.observe(loss) at every step"
            )
        loss = _mean(losses) if "loss" in self._asks else 0.0
        return Observed(round(_mean(periods)), _mean(rates), loss, drift_of(samples))

    def state_dict(self) -> dict[str, Any]:
        """Return the losses, if anybody asks for them."""
        return {"losses": list(self._losses), "loss": self._loss} if "loss" in self._asks else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them back."""
        self._losses = list(state_dict.get("losses", []))
        self._loss = float(state_dict.get("loss", math.nan))


def sample_of(named: Sequence[Named]) -> list[float]:
    """Return some values of the parameters, at even distances through all of them.

    >>> sample_of([("a", torch.arange(3.0)), ("b", torch.tensor([7.0]))])[:2]
    [0.0, 0.0]
    """
    parameters = [tensor for _, tensor in compressible(named) if tensor.is_floating_point()]
    if any(map(is_dtensor, parameters)):
        raise NotAttachable(
            "a schedule that goes by drift needs whole parameters, and these are sharded; use "
            "qsr(...) or a fixed period"
        )
    total = sum(tensor.numel() for tensor in parameters)
    if not total:
        return [0.0] * SAMPLE
    places = [i * total // SAMPLE for i in range(SAMPLE)]
    values: list[float] = []
    before = 0
    for tensor in parameters:
        inside = [place - before for place in places if before <= place < before + tensor.numel()]
        if inside:
            where = torch.unravel_index(torch.tensor(inside), tensor.shape) if tensor.ndim else ()
            values += tensor.detach()[where].reshape(-1).double().tolist()
        before += tensor.numel()
    return values


def drift_of(samples: Sequence[Sequence[float]]) -> float:
    """Return the replicas' rms distance from their mean, relative to the mean's rms.

    ``samples`` has the ranks' values of each place.

    >>> drift_of([(1.0, 3.0)])
    0.5
    """
    deviation = magnitude = 0.0
    for values in samples:
        mean = _mean(values)
        deviation += sum((value - mean) ** 2 for value in values)
        magnitude += len(values) * mean**2
    if magnitude == 0.0:
        return 0.0 if deviation == 0.0 else math.inf
    return math.sqrt(deviation / magnitude)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
