"""Anchors and the optimizer that steps them: the state of a ``strategy.outer_rules.Outer``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from loosestep.comm.tensors import Named
from loosestep.sharding.kinds import ELEMENTWISE
from loosestep.strategy.outer_rules import Outer

Pair = tuple[torch.Tensor, torch.Tensor]  # a piece of an anchor, and of the mean

CHUNK_BYTES = 1 << 20  # of anchors that are stepped together: what is on the way stays in the cache
PIECE = 1 << 18  # numbers that are stepped at once, or a norm is taken of, for the same reason


class OuterState:
    """Anchors, and the outer optimizer that steps them, of what is averaged over one level.

    A tensor that has no anchor takes the mean, which is its first one. One that was left out of a
    sync (frozen, say) has none either when it comes back: it may have been changed meanwhile.
    """

    def __init__(self, rule: Outer) -> None:
        self.rule = rule
        self.num_steps = 0
        self._anchors: dict[str, torch.Tensor] = {}
        self._stepped: dict[str, Sequence[torch.Tensor]] = {}  # what the optimizer has of each
        self._in_pieces = rule.optimizer in ELEMENTWISE
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: LRScheduler | None = None

    @property
    def nbytes(self) -> int:
        """How much memory anchors and the optimizer's state take."""
        state = [] if self._optimizer is None else self._optimizer.state.values()
        values = [value for held in state for value in held.values()]
        held = [*self._anchors.values(), *(v for v in values if isinstance(v, torch.Tensor))]
        return sum(tensor.nbytes for tensor in held)

    def describe(self) -> str:
        """Return how far it is, to be compared across ranks."""
        return f"{len(self._anchors)} anchors after {self.num_steps} outer steps"

    @torch.no_grad()
    def anchor(self, named: Sequence[Named]) -> None:
        """Take values that all replicas have in common for anchors; momentum stays."""
        values = dict(named)
        for name in self._follow(named):
            self._anchors[name].copy_(values[name])

    @torch.no_grad()
    def apply(self, named: Sequence[Named]) -> None:
        """Step the anchors by the means in ``named``, and leave the result there."""
        known = self._follow(named)
        for chunk in self._chunks([(name, tensor) for name, tensor in named if name in known]):
            self._move(chunk)
        self.num_steps += 1
        if self._scheduler is not None:
            self._scheduler.step()

    @torch.no_grad()
    def guess(self, named: Sequence[Named]) -> None:
        """Replace values by what a step would lead to, were they the mean; no step is taken."""
        for chunk in self._chunks([(n, tensor) for n, tensor in named if n in self._anchors]):
            optimizer = self._optimizer
            assert optimizer is not None, "there are anchors"
            before = [(a, a.clone(), copy.deepcopy(optimizer.state.get(a))) for a, _ in chunk]
            self._move(chunk)
            for anchor, values, state in before:
                anchor.copy_(values)
                optimizer.state.pop(anchor, None)
                if state is not None:
                    optimizer.state[anchor] = state

    @torch.no_grad()
    def distance(self, named: Sequence[Named]) -> float:
        """Return the norm of anchor - values, rounded so that the order of its sum does not show.

        What has no anchor yet has not moved.
        """
        total = 0.0
        for anchor, values in self._known(named):
            pairs = zip(_pieces(anchor), _pieces(values), strict=True)
            for one, other in pairs:
                total += float((one.double() - other.to(one.device).double()).square().sum())
        return float(torch.tensor(math.sqrt(total), dtype=torch.float32))

    @torch.no_grad()
    def shrink(self, named: Sequence[Named], share: float) -> None:
        """Leave of how far values are from their anchors only a share."""
        if share == 1.0:
            return
        for anchor, values in self._known(named):
            moved = values.to(anchor.device, anchor.dtype) - anchor
            values.copy_(moved.mul_(share).add_(anchor))

    def _known(self, named: Sequence[Named]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors that have an anchor of their shape, behind that."""
        known = self._anchors
        return [(known[n], t) for n, t in named if n in known and known[n].shape == t.shape]

    def _chunks(self, named: Sequence[Named]) -> Iterator[list[Pair]]:
        """Yield what is stepped, beside the means, a little at a time; in the end all is there."""
        chunk: list[Pair] = []
        copied: list[Pair] = []
        for name, tensor in named:
            stepped, means = self._stepped[name], [tensor]
            if len(stepped) > 1:
                flat = tensor.reshape(-1)
                means = list(_pieces(flat))
                copied += [] if tensor.is_contiguous() else [(flat, tensor)]
            for pair in zip(stepped, means, strict=True):
                chunk.append(pair)
                if sum(anchor.nbytes for anchor, _ in chunk) >= CHUNK_BYTES:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk
        for flat, tensor in copied:
            tensor.copy_(flat.view(tensor.shape))

    def _move(self, chunk: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        optimizer = self._optimizer
        assert optimizer is not None, "there are anchors"
        if self._takes_the_mean:  # anchor - (anchor - mean) is the mean but for a rounding
            for anchor, mean in chunk:
                anchor.copy_(mean)
            return
        for anchor, mean in chunk:
            here = mean.to(anchor.device, anchor.dtype)
            # Into the mean's own memory, which the result is written to: no new pages. An optimizer
            # that nothing is known of may keep its gradients.
            anchor.grad = torch.sub(anchor, here, out=here if self._in_pieces else None)
        optimizer.param_groups[0]["params"] = [anchor for anchor, _ in chunk]
        optimizer.step()
        for anchor, tensor in chunk:
            anchor.grad = None
            tensor.copy_(anchor)

    @property
    def _takes_the_mean(self) -> bool:
        """Whether the next step is all of the pseudo-gradient, and nothing else."""
        assert self._optimizer is not None, "there are anchors"
        group = self._optimizer.param_groups[0]
        rest = ("momentum", "weight_decay", "maximize")
        plain = self.rule.optimizer is torch.optim.SGD and not any(group[key] for key in rest)
        return plain and float(group["lr"]) == 1.0

    def _follow(self, named: Sequence[Named]) -> list[str]:
        """Return which of these have an anchor; forget others', and make what is missing."""
        shapes = {name: tensor.shape for name, tensor in named}
        gone = [name for name, held in self._anchors.items() if shapes.get(name) != held.shape]
        for name in gone:
            del self._anchors[name]
            for part in self._stepped.pop(name):
                if self._optimizer is not None:
                    self._optimizer.state.pop(part, None)
        known = [name for name in shapes if name in self._anchors]
        for name, tensor in named:
            if name not in self._anchors:
                device = tensor.device if self.rule.device is None else self.rule.device
                self._keep(name, tensor.detach().to(device, torch.float32, copy=True))
        if self._anchors and self._optimizer is None:
            self._make()
        return known

    def _keep(self, name: str, anchor: torch.Tensor) -> None:
        """Take an anchor, of which an optimizer that treats all values alike steps pieces."""
        self._anchors[name] = anchor
        cut = self._in_pieces and anchor.is_contiguous() and anchor.numel() > PIECE
        self._stepped[name] = _pieces(anchor) if cut else [anchor]

    @property
    def _all_stepped(self) -> list[torch.Tensor]:
        return [part for parts in self._stepped.values() for part in parts]

    def _make(self) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        made = self.rule.make(self._all_stepped)
        self._optimizer = made
        self._scheduler = None if self.rule.scheduler is None else self.rule.scheduler(made)
        return made, self._scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return anchors, the optimizer's state and its schedule, as copies; empty: nothing yet."""
        if self._optimizer is None:
            return {}
        self._optimizer.param_groups[0]["params"] = self._all_stepped
        scheduler = {} if self._scheduler is None else self._scheduler.state_dict()
        return {
            "num_steps": self.num_steps,
            "anchors": {name: anchor.clone() for name, anchor in self._anchors.items()},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "scheduler": {
                key: v for key, v in scheduler.items() if key != "_get_lr_called_within_step"
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        self._optimizer, self._scheduler = None, None
        self.num_steps = int(state_dict.get("num_steps", 0))
        device = self.rule.device
        self._anchors, self._stepped = {}, {}
        for name, anchor in state_dict.get("anchors", {}).items():
            self._keep(name, anchor.to(device or anchor.device, copy=True))
        if self._anchors:
            optimizer, scheduler = self._make()
            optimizer.load_state_dict(state_dict["optimizer"])
            if scheduler is not None:
                scheduler.load_state_dict(state_dict["scheduler"])


def _pieces(values: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = torch.split(values.reshape(-1), PIECE)
    return pieces
