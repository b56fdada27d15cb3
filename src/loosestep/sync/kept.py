"""What the averages of one group keep from one sync to the next; saved and loaded with a run.

Kept is the state of the reducer (residuals, draws), and where differences are sent (see
``differences``) the values that all ranks had in common after the last sync: references.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from loosestep.comm.reducers import NOTHING, Reducer, State
from loosestep.strategy.gate import Gate, History
from loosestep.strategy.gossip import NoLoCo
from loosestep.strategy.outer_rules import Outer
from loosestep.sync.outer_steps import OuterState
from loosestep.sync.slow_weights import SlowWeights

if TYPE_CHECKING:
    from loosestep.sync.jobs import Job


class GateState:
    """A gate, and this rank's own norms so far."""

    def __init__(self, rule: Gate) -> None:
        self.rule, self._history = rule, History()

    def is_outlier(self, norm: float) -> bool:
        """Say whether this rank is to have no say."""
        return self.rule.is_outlier(norm, self._history)

    def learn(self, norm: float) -> None:
        """Take the norm into the history; the sync has succeeded."""
        self._history = self.rule.following(norm, self._history)

    def state_dict(self) -> dict[str, Any]:
        """Return the history; empty: there is none yet."""
        return asdict(self._history) if self._history.num else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        self._history = History(**state_dict)


class Kept:
    """References, where differences are sent, the reducer's state, and those of outer steps.

    Averagers come and go with their process groups; this stays, and is saved and loaded. What is
    loaded before the reducer has seen the tensors waits for that.
    """

    def __init__(
        self, outer: Outer | None = None, gate: Gate | None = None, pair: NoLoCo | None = None
    ) -> None:
        self.references = References()
        self.outer = None if outer is None else OuterState(outer)
        self.gate = None if gate is None else GateState(gate)
        self.slow = None if pair is None else SlowWeights(pair)
        self._state: State | None = None
        self._loaded: dict[str, Any] = {}

    @property
    def state(self) -> State:
        """What the reducer remembers."""
        return NOTHING if self._state is None else self._state

    @property
    def nbytes(self) -> int:
        """How much memory all of it takes."""
        outer = 0 if self.outer is None else self.outer.nbytes
        slow = 0 if self.slow is None else self.slow.nbytes
        return self.references.nbytes + self.state.nbytes + outer + slow

    def begin(self, state: State) -> None:
        """Take a reducer's first state, unless there is one already."""
        if self._state is None:
            state.load_state_dict(self._loaded)
            self._state, self._loaded = state, {}

    def describe(self, reducer: Reducer) -> str:
        """Return what of it must be equal on all ranks; empty: there is nothing."""
        outer = "" if self.outer is None else self.outer.describe()
        outer = outer if self.slow is None else self.slow.describe()
        if self._state is None:
            return "what was loaded" if self._loaded else outer
        return " ".join(told for told in (reducer.describe(self._state), outer) if told)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; empty: nothing."""
        references = self.references.state_dict() if self.references.nbytes else {}
        reducer = self._loaded if self._state is None else self._state.state_dict()
        outer = {} if self.outer is None else self.outer.state_dict()
        gate = {} if self.gate is None else self.gate.state_dict()
        slow = {} if self.slow is None else self.slow.state_dict()
        kept = {"references": references, "reducer": reducer, "outer": outer, "gate": gate}
        kept["slow"] = slow
        return {name: state for name, state in kept.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        self.references.clear()
        if "references" in state_dict:
            self.references.load_state_dict(state_dict["references"])
        if self.outer is not None:
            self.outer.load_state_dict(state_dict.get("outer", {}))
        if self.gate is not None:
            self.gate.load_state_dict(state_dict.get("gate", {}))
        if self.slow is not None:
            self.slow.load_state_dict(state_dict.get("slow", {}))
        loaded = dict(state_dict.get("reducer", {}))
        if self._state is None:
            self._loaded = loaded
        else:
            self._state.load_state_dict(loaded)


def state_of(kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Return what all levels keep; levels that keep nothing are left out."""
    states = {level: held.state_dict() for level, held in kept.items()}
    return {level: state for level, state in states.items() if state}


def load_into(
    kept: dict[str, Kept], state_dict: Mapping[str, Any], make: Callable[[str], Kept]
) -> None:
    """Take back what ``state_of`` returned, in place: averagers hold what is kept."""
    for level in {*kept, *state_dict}:
        make(level).load_state_dict(state_dict.get(level, {}))


class References:
    """The values that all ranks of one group had after their last sync, by name.

    They take as much memory as what is averaged, once for every level that averages (``nbytes``).
    When other tensors are averaged than before, all ranks forget all of them alike.
    """

    def __init__(self) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._signature = ""
        self._followed: Sequence[Job] | None = None  # the jobs whose signature that is, if known

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(values.nbytes for values in self._values.values())

    def follow(self, jobs: Sequence[Job]) -> None:
        """Forget everything unless the jobs are those that the references were kept for."""
        if jobs is self._followed:  # as long as the same tensors are averaged
            return
        signature = _signature(jobs)
        if signature != self._signature:
            self.clear()
        self._signature, self._followed = signature, jobs

    def clear(self) -> None:
        """Forget everything; the next sync is exact."""
        self._values, self._signature, self._followed = {}, "", None

    def get(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Return the common values of a name, or None before its first sync."""
        values = self._values.get(name)
        if values is not None and values.device != device:  # a checkpoint is loaded to the CPU
            values = self._values[name] = values.to(device)
        return values

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Take values that all ranks have; the tensor is theirs from now on."""
        self._values[name] = values

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the values, and what they belong to."""
        values = {name: tensor.clone() for name, tensor in self._values.items()}
        return {"signature": self._signature, "values": values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._signature, self._followed = str(state_dict["signature"]), None
        self._values = {name: tensor.clone() for name, tensor in state_dict["values"].items()}


def _signature(jobs: Sequence[Job]) -> str:
    lines = [f"{job.place.name} {job.window.numel} {job.window.dtype}" for job in jobs]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
