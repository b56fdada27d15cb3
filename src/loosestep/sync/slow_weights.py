"""NoLoCo's slow weights and momentum: the state of a ``strategy.gossip.NoLoCo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from loosestep.comm.tensors import Named, memory
from loosestep.strategy.gossip import NoLoCo
from loosestep.sync.parts import STATE, Parts, compressible, only_exact


class SlowWeights:
    """NoLoCo's slow weights and momentum of one rank, in float32 beside the parameters.

    A worker needs two means of the pair, of slow weights and of pseudo-gradients, and both in one
    sum, so that is what travels, in one vector:

        - beta mean(slow - parameters) - gamma (slow - mean(slow))
            = gamma (mean(slow - beta / gamma (slow - parameters)) - slow)

    Where nobody has moved and all are equal that is 0, without rounding. A tensor that comes later
    (or comes back) begins where it is.
    """

    def __init__(self, rule: NoLoCo) -> None:
        self.rule = rule
        self.num_steps = 0
        self._slow: dict[str, torch.Tensor] = {}
        self._momentum: dict[str, torch.Tensor] = {}
        self._sent: list[Named] = []  # the same tensors as long as the parameters are the same

    @property
    def nbytes(self) -> int:
        """How much memory all of it takes."""
        held = [*self._slow.values(), *self._momentum.values(), *(t for _, t in self._sent)]
        return sum(tensor.nbytes for tensor in held)

    def describe(self) -> str:
        """Return how far it is, to be compared across ranks."""
        return f"{len(self._slow)} slow weights after {self.num_steps} steps"

    @torch.no_grad()
    def anchor(self, parts: Parts) -> None:
        """Go on from where the parameters are; momentum stays."""
        named = compressible(memory(parts.means))
        self._follow(named)
        for name, tensor in named:
            self._slow[name].copy_(tensor)

    @torch.no_grad()
    def blended(self, parts: Parts) -> Parts:
        """Return what is averaged in place of the parameters, which stay as they are."""
        named = compressible(memory(parts.means))
        self._follow(named)
        ratio = self.rule.beta / self.rule.gamma
        for (name, tensor), (_, sent) in zip(named, self._sent, strict=True):
            slow = self._slow[name]
            sent.copy_(tensor).sub_(slow).mul_(ratio).add_(slow)
        return replace(parts, means=[*self._sent, *only_exact(parts.means)])

    @torch.no_grad()
    def step(self, parts: Parts) -> None:
        """Step from what came in place of what ``blended`` returned."""
        alpha, gamma = self.rule.alpha, self.rule.gamma
        pairs = zip(compressible(memory(parts.means)), self._sent, strict=True)
        for (name, tensor), (_, mean) in pairs:
            slow, momentum = self._slow[name], self._momentum[name]
            momentum.mul_(alpha).add_(mean.sub_(slow).mul_(gamma))
            slow.add_(momentum)
            tensor.copy_(slow)
        self.num_steps += 1

    def named(self) -> list[Named]:
        """Return slow weights and momentum, named as a parameter's state is."""
        kinds = {"slow weights": self._slow, "slow momentum": self._momentum}
        return [
            (f"{STATE}{name}.{kind}", tensor)
            for kind, held in kinds.items()
            for name, tensor in held.items()
        ]

    def _follow(self, named: Sequence[Named]) -> None:
        """Forget what is no longer there, and make what is new."""
        shapes = {name: tensor.shape for name, tensor in named}
        if shapes == {name: sent.shape for name, sent in self._sent}:
            return
        for held in (self._slow, self._momentum):
            for name in [n for n, tensor in held.items() if shapes.get(n) != tensor.shape]:
                del held[name]
        for name, tensor in named:
            if name not in self._slow:
                self._slow[name] = tensor.detach().to(torch.float32, copy=True)
                self._momentum[name] = torch.zeros_like(self._slow[name])
            for held in (self._slow, self._momentum):  # a checkpoint is loaded to the CPU
                held[name] = held[name].to(tensor.device)
        self._sent = [(name, torch.empty_like(self._slow[name])) for name in shapes]

    def state_dict(self) -> dict[str, Any]:
        """Return slow weights and momentum as copies."""
        return {
            "num_steps": self.num_steps,
            "slow": {name: tensor.clone() for name, tensor in self._slow.items()},
            "momentum": {name: tensor.clone() for name, tensor in self._momentum.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        self.num_steps, self._sent = int(state_dict.get("num_steps", 0)), []
        self._slow = {n: tensor.clone() for n, tensor in state_dict.get("slow", {}).items()}
        self._momentum = {n: t.clone() for n, t in state_dict.get("momentum", {}).items()}
