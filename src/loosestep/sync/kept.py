"""What the averages of one group keep from one sync to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loosestep.comm.reducers import NOTHING, Reducer, State
from loosestep.strategy.outer import Outer
from loosestep.sync.outer import OuterState
from loosestep.sync.references import References


class Kept:
    """References, where differences are sent, what the reducer remembers, and the outer optimizer.

    Averagers come and go with their process groups; this stays, and is saved and loaded. What is
    loaded before the reducer has seen the tensors waits for that.
    """

    def __init__(self, outer: Outer | None = None) -> None:
        self.references = References()
        self.outer = None if outer is None else OuterState(outer)
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
        return self.references.nbytes + self.state.nbytes + outer

    def begin(self, state: State) -> None:
        """Take a reducer's first state, unless there is one already."""
        if self._state is None:
            state.load_state_dict(self._loaded)
            self._state, self._loaded = state, {}

    def describe(self, reducer: Reducer) -> str:
        """Return what of it must be equal on all ranks; empty: there is nothing."""
        outer = "" if self.outer is None else self.outer.describe()
        if self._state is None:
            return "what was loaded" if self._loaded else outer
        return " ".join(told for told in (reducer.describe(self._state), outer) if told)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; empty: nothing."""
        references = self.references.state_dict() if self.references.nbytes else {}
        reducer = self._loaded if self._state is None else self._state.state_dict()
        outer = {} if self.outer is None else self.outer.state_dict()
        kept = {"references": references, "reducer": reducer, "outer": outer}
        return {name: state for name, state in kept.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one forgets everything."""
        self.references.clear()
        if "references" in state_dict:
            self.references.load_state_dict(state_dict["references"])
        if self.outer is not None:
            self.outer.load_state_dict(state_dict.get("outer", {}))
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
