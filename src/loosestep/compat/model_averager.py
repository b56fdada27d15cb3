"""What all model averagers share: options, a count of steps, and the way to the engine."""

from __future__ import annotations

import copy
import operator
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as in_torch
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.group import Group, peers_of, require_process_group, world_group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Mean, NonFinite, Reducer, check_reducer
from loosestep.comm.reducers.reducer import check_policy
from loosestep.comm.sharded_types import check_not_old_fsdp
from loosestep.comm.tensors import Named, unique
from loosestep.comm.torch_versions import broadcast_buffers
from loosestep.compat.parameters import Parameters, get_params_to_average, model_has_buffers
from loosestep.errors import check_instance, check_seconds, choose, warn_once
from loosestep.strategy.clock import Clock
from loosestep.strategy.policies import Buffers
from loosestep.strategy.schedules import check_overlap
from loosestep.strategy.strategy import check_can_overlap
from loosestep.sync.engine import Engine, Settings
from loosestep.sync.owners import check_whose, owner
from loosestep.sync.parts import unwrap_compiled
from loosestep.sync.replica import Replica
from loosestep.telemetry import Telemetry


class Options(TypedDict, total=False):
    """What the averagers take beyond torch's arguments, all by keyword."""

    module: torch.nn.Module | None  # its buffers are averaged too, and its names used in errors
    clock: Clock | None  # share it with PostLocalSGDState(clock=...)
    reducer: Reducer | None  # default: the exact Mean()
    buffers: Buffers | str  # "mean" (default), "broadcast" or "local"
    telemetry: Telemetry | None
    timeout: float | None  # seconds for every wait; default: the process group's own
    overlap_steps: int  # calls between launching an average and applying it; default: 0
    on_nonfinite: NonFinite | str  # infinities and NaN: "raise" (default), "skip" or "pass"


APART = "steps_apart"  # in a state: calls since replicas were equal last
LOCAL = "local_steps"  # as the engine counts them
FIRST = "first"  # the level on which ranks compare what they have; nothing is averaged there


class ModelAverager(in_torch.ModelAverager):
    """The base of all model averagers: a process group and a count of steps.

    Without ``process_group`` the world averages, on a process group of its own; one that is
    given is used as it is. With ``overlap_steps`` an average travels while that many calls pass
    and is applied then (see ``overlap``); its process groups are this averager's own.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, **options: Unpack[Options]
    ) -> None:
        # Not torch's __init__, which would set a clock to 0 that somebody else may count by.
        require_process_group()
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            raise TypeError(
                f"unknown option {sorted(unknown)}; there are {[*Options.__annotations__]}"
            )
        _check_options(process_group, options)
        self.process_group = world_group() if process_group is None else process_group
        self.clock = options.get("clock") or Clock()
        module = options.get("module")
        self.module = None if module is None else unwrap_compiled(module)
        self.reducer = options.get("reducer")
        self.buffers = choose(Buffers, options.get("buffers", Buffers.MEAN))
        self.telemetry = options.get("telemetry") or Telemetry()
        self.timeout = check_seconds("timeout", options.get("timeout"))
        self.overlap_steps = check_overlap(options.get("overlap_steps", 0), [])
        self.on_nonfinite = choose(NonFinite, options.get("on_nonfinite", NonFinite.RAISE))
        check_policy(self.reducer, self.on_nonfinite)
        check_can_overlap(self.overlap_steps, self.reducer, self.on_nonfinite)
        self._own = process_group is None
        self._listed: list[torch.nn.Parameter] = []  # what was given last
        self._names_of_listed: list[Named] = []
        self._groups: dict[tuple[int, ...], Group] = {}  # for averages under way
        self._begun = False  # whether ranks have compared what they have
        self._made: Engine | None = None
        self._saved: dict[str, Any] = {}  # of the engine that is not made yet

    @property
    def step(self) -> int:
        """How often ``average_parameters`` was called."""
        return self.clock.step

    @step.setter
    def step(self, value: int) -> None:
        self.clock.step = value
        self._engine.forget_syncs()
        self._follow_broadcast()

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average if this step is due, and count it."""

    def finalize(self, params: Parameters) -> None:
        """Average once more over the whole group, unless the last step left all equal.

        Call it after training: the steps since the last average would else stay local. An average
        under way is applied first.
        """
        if self._is_member:
            self._list(params)
            self._engine.finalize(self.step - 1, name="final")

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and what averages keep; no process groups, no pickle.

        An average under way is waited for, and saved as what is still to be applied.
        """
        engine = self._engine.state_dict()
        return {**engine, **self.clock.state_dict(), **owner(), APART: self._steps_apart}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; an average that is under way is dropped.

        All members load together: in mid-period each must load a state of its own.
        """
        self.check_whose(state_dict)
        self.clock.load_state_dict(state_dict)
        self._engine.load_state_dict(state_dict)
        self._follow_broadcast()

    def check_whose(self, state_dict: Mapping[str, Any]) -> None:
        """Raise on all members where one of them would load what is another's in mid-period."""
        if self._is_member:
            after = "or model and state right after `finalize(params)`"
            check_whose(state_dict, state_dict.get(APART, 0), self._peers(FIRST), after)

    def kept_state(self) -> dict[str, Any]:
        """Return what must survive a restart beside the steps, and nothing where there is none.

        In mid-period that is also whose replica the state belongs to.
        """
        state = self.state_dict()
        kept: dict[str, Any] = {"kept": state["kept"]} if state["kept"] else {}
        if state["flights"]["num_flights"]:
            kept["flights"] = state["flights"]
        if state[APART]:
            kept |= {key: state[key] for key in (*owner(), APART, LOCAL)}
        return kept

    def load_kept_state(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``kept_state`` returned."""
        # Where it says nothing of steps the last call has averaged, and is counted when it has.
        self._engine.load_state_dict({LOCAL: 1, **state_dict})

    def close(self) -> None:
        """Drop an average under way and free the process groups that overlapping needed."""
        self._engine.close()
        self._begun = False
        while self._groups:
            self._groups.popitem()[1].close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAverager:
        """Copy the count and share the rest: process groups cannot be copied."""
        clone = copy.copy(self)
        clone.clock = copy.deepcopy(self.clock, memo)
        clone.module = memo.get(id(self.module), self.module)
        return clone

    def __copy__(self) -> ModelAverager:
        """Return an averager with the same settings, clock and process groups."""
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__, **self._left_out())
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, so that pickles work."""
        state = {**self.__dict__, **self._left_out(), "process_group": None}
        state["telemetry"] = Telemetry()  # sinks are open files
        state["_ranks"] = dist.get_process_group_ranks(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the process group again: the world, or a new one with the same ranks."""
        ranks = state.pop("_ranks")
        self.__dict__.update(state)
        self.process_group = world_group() if self._own else Group.make(tuple(ranks)).hand_over()

    def _left_out(self) -> dict[str, Any]:
        """Return what a copy has in place of engine and groups: the engine's state."""
        return {"_made": None, "_groups": {}, "_begun": False, "_saved": self._engine.state_dict()}

    def _describe(self) -> str:
        """Return what must be equal on all ranks besides the parameters."""
        return type(self).__name__

    @property
    def _first_due(self) -> int:
        """The first call that averages: from then on replicas differ between averages."""
        return 0

    @property
    def _steps_apart(self) -> int:
        """How many calls since the warm-up and the last average, as far as one knows."""
        # A call is counted when it has averaged, so that one is in all replicas.
        return max(0, min(self._engine.local_steps - 1, self.step - self._first_due))

    def _follow_broadcast(self, *, local: bool | None = None) -> None:
        """Stop DDP's broadcast of buffers once averaging has begun: they have a policy then."""
        local = self.step > self._first_due if local is None else local
        if local and isinstance(self.module, DistributedDataParallel):
            broadcast_buffers(self.module, False)

    def _levels(self) -> dict[str, dist.ProcessGroup]:
        """Return who averages on which level, the whole group last."""
        return {"final": self.process_group}

    @property
    def _is_member(self) -> bool:
        return dist.get_rank(self.process_group) >= 0

    def _follow(self, params: Parameters, level: str | None) -> None:
        """Average over ``level``; None: nothing is due, but some averages may have come."""
        if not self._is_member:
            return
        if level is None and self._begun and not self._engine.lands(self.step):
            return
        self._list(params)
        if not self._begun:
            self._begin()
        if level is not None:
            self._follow_broadcast(local=True)
        self._engine.follow(level, self.step)

    def _begin(self) -> None:
        """Compare parameters and schedule over the whole group, at the first call."""
        self._engine.begin(FIRST)
        self._begun = True
        given = [tensor for _, tensor in self._names_of_listed]
        if self.module is None and model_has_buffers(given):
            warn_once(
                "module",
                f"{type(self).__name__} sees parameters only: buffers (BatchNorm statistics) are "
                "not averaged, and DDP's broadcast of them goes on. Pass module=model, or use "
                "loosestep.attach",
            )

    @property
    def _engine(self) -> Engine:
        """What averages, made when it is first asked for: then the levels are known."""
        if self._made is None:
            tau = self.overlap_steps
            late = [f"applied {tau} steps after its launch"] if tau else []
            settings = Settings(
                reducer=self.reducer or Mean(),
                on_nonfinite=self.on_nonfinite,
                overlap_steps=tau,
                agreements=lambda: (self._describe(), *late),
            )
            replica = Replica(lambda: self._names_of_listed, self.module, buffers=self.buffers)
            self._made = Engine(
                replica, list(self._levels()), self._peers, settings, self.clock, self.telemetry
            )
            if self._saved:
                self._made.load_state_dict(self._saved)
        return self._made

    def _peers(self, level: str) -> Peers:
        """Return who averages on a level; the first call may be collective."""
        group = self.process_group
        if level != FIRST:  # the whole group: before there are levels, and if a period was changed
            group = self._levels().get(level, group)
        ranks, chosen = tuple(dist.get_process_group_ranks(group)), Group.of(group)
        if self.overlap_steps and level != FIRST and len(ranks) > 1:
            if ranks not in self._groups:
                self._groups[ranks] = Group.make(ranks, self.timeout, group)
            chosen = self._groups[ranks]
        elif self._own and group is self.process_group:
            chosen = chosen.twin(self.timeout)
        return peers_of(chosen, level=level, timeout=self.timeout)

    def _list(self, params: Parameters) -> None:
        """Take the parameters that were given, with names that stay when one is frozen."""
        nested = (item["params"] if isinstance(item, dict) else [item] for item in params)
        flat = [parameter for inner in nested for parameter in inner]
        if len(flat) == len(self._listed) and all(map(operator.is_, flat, self._listed)):
            return
        get_params_to_average(flat)  # raises for what is no parameter
        names = {} if self.module is None else {p: n for n, p in self.module.named_parameters()}
        self._listed = flat
        self._names_of_listed = unique(
            (names.get(parameter, f"parameter {index}"), parameter)
            for index, parameter in enumerate(flat)
        )


def _check_options(process_group: object, options: Options) -> None:
    """Raise for what is of another kind than asked for."""
    if process_group is not None:
        check_instance("process_group", process_group, dist.ProcessGroup, "a process group or None")
    if (module := options.get("module")) is not None:
        check_instance("module", module, torch.nn.Module, "a module such as model")
        check_not_old_fsdp(module)
    if (clock := options.get("clock")) is not None:
        check_instance("clock", clock, Clock, "a Clock such as Clock()")
    if (telemetry := options.get("telemetry")) is not None:
        check_instance("telemetry", telemetry, Telemetry, "a Telemetry such as Telemetry()")
    if (reducer := options.get("reducer")) is not None:
        check_reducer("reducer", reducer)
