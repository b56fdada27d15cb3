"""What all model averagers share: a process group, a count of steps, and one way to average."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.averaging import Averager
from loosestep.binding import Progress
from loosestep.checks import check_instance, check_seconds
from loosestep.clock import Clock
from loosestep.errors import warn_once
from loosestep.groups import free_group, own_group, private_twin, require_process_group, world_group
from loosestep.overlap import Overlap, check_can_overlap
from loosestep.parameters import Parameters, get_params_to_average
from loosestep.peers import peers_of
from loosestep.policies import Buffers, Parts, buffers_of, choose, parts_of, unwrap_compiled
from loosestep.references import References
from loosestep.schedule import check_overlap
from loosestep.telemetry import Telemetry
from loosestep.tensors import Named, unique
from loosestep.torch_versions import broadcast_buffers
from loosestep.wire import Reducer, check_reducer, exact_like, leaves_apart


class Options(TypedDict, total=False):
    """What the averagers take beyond torch's arguments, all by keyword."""

    module: torch.nn.Module | None  # its buffers are averaged too, and its names used in errors
    clock: Clock | None  # share it with PostLocalSGDState(clock=...)
    reducer: Reducer | None  # default: the exact Mean()
    buffers: Buffers | str  # "mean" (default), "broadcast" or "local"
    telemetry: Telemetry | None
    timeout: float | None  # seconds for every wait; default: the process group's own
    overlap_steps: int  # calls between launching an average and applying it; default: 0


FIRST = "first"  # the level on which ranks compare what they have; nothing is averaged there
Due = tuple[dist.ProcessGroup, str]  # who averages now, and what the level is called


class ModelAverager(ABC):
    """The base of all model averagers: a process group and a count of steps.

    Without ``process_group`` the world averages, on a process group of its own; one that is
    given is used as it is. With ``overlap_steps`` an average travels while that many calls pass
    and is applied then (see ``overlap``); its process groups are this averager's own.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, **options: Unpack[Options]
    ) -> None:
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
        check_can_overlap(self.overlap_steps, self.reducer)
        self._own = process_group is None
        self._averagers: dict[str, Averager] = {}
        self._references: dict[str, References] = {}  # by level, for lossy reducers
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # for averages under way
        self._overlap = Overlap(self.overlap_steps)
        self._checked = False
        self._synced_step = -1  # the last step after which the whole group averaged

    @property
    def step(self) -> int:
        """How often ``average_parameters`` was called."""
        return self.clock.step

    @step.setter
    def step(self, value: int) -> None:
        self.clock.step = value
        self._synced_step = -1  # what was averaged before says nothing about the step jumped to
        self._overlap.discard()
        self._follow_broadcast()

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average if this step is due, and count it."""

    def finalize(self, params: Parameters) -> None:
        """Average once more over the whole group, unless the last step already made all equal.

        Call it after training: the steps since the last average would else stay local. An average
        under way is applied first.
        """
        listed = list(params)
        self._land(listed)
        if leaves_apart(self.reducer):
            self._average_exactly(listed)
        elif self._synced_step != self.step - 1 or self.step == 0:
            self._average(listed, self._widest, "final")
            self._synced_step = self.step - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and what averages keep; no process groups, no pickle.

        An average under way is waited for, and saved as what is still to be applied.
        """
        kept = {"reducer": {}, **self.kept_state()}
        return {"step": self.step, "synced_step": self._synced_step, **kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; an average that is under way is dropped."""
        self.load_kept_state(state_dict)
        self.clock.load_state_dict(state_dict)
        self._synced_step = state_dict.get("synced_step", -1)
        self._follow_broadcast()

    def kept_state(self) -> dict[str, Any]:
        """Return what must survive a restart beside the steps, and nothing where there is none."""
        flight = self._overlap.state_dict()  # first: what is under way changes the rest
        reducer = {} if self.reducer is None else self.reducer.state_dict()
        references = {level: r.state_dict() for level, r in self._references.items() if r.nbytes}
        kept = {"reducer": reducer, "references": references}
        if flight["step"] >= 0:
            kept["flight"] = flight
        return {name: state for name, state in kept.items() if state}

    def load_kept_state(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``kept_state`` returned."""
        self._overlap.load_state_dict(state_dict.get("flight", {}))
        loaded = state_dict.get("references", {})
        for level in {*self._references, *loaded}:  # in place: averagers hold them
            references = self._references.setdefault(level, References())
            references.clear()
            if level in loaded:
                references.load_state_dict(loaded[level])
        if self.reducer is not None:
            self.reducer.load_state_dict(state_dict.get("reducer", {}))

    def close(self) -> None:
        """Drop an average under way and free the process groups that overlapping needed."""
        self._overlap.close()
        self._averagers, self._checked = {}, False
        while self._groups:
            free_group(self._groups.popitem()[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAverager:
        """Copy the count and share the rest: process groups cannot be copied."""
        clone = copy.copy(self)
        clone.clock = copy.deepcopy(self.clock, memo)
        clone.module = memo.get(id(self.module), self.module)
        return clone

    def __copy__(self) -> ModelAverager:
        """Return an averager with the same settings, clock and process groups."""
        clone = type(self).__new__(type(self))
        mine = {
            "_overlap": copy.copy(self._overlap),
            "_references": copy.deepcopy(self._references),
        }
        clone.__dict__.update(self.__dict__, _averagers={}, _groups={}, _checked=False, **mine)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, so that pickles work."""
        state = self.__dict__.copy()
        state.update(_averagers={}, _groups={}, _checked=False, process_group=None)
        state["telemetry"] = Telemetry()  # sinks are open files
        state["_ranks"] = dist.get_process_group_ranks(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the process group again: the world, or a new one with the same ranks."""
        ranks = state.pop("_ranks")
        self.__dict__.update(state)
        self.process_group = world_group() if self._own else own_group(tuple(ranks))

    def _describe(self) -> str:
        """Return what must be equal on all ranks besides the parameters."""
        return type(self).__name__

    @property
    def _first_due(self) -> int:
        """The first call that averages: from then on replicas differ between averages."""
        return 0

    def _follow_broadcast(self, *, local: bool | None = None) -> None:
        """Stop DDP's broadcast of buffers once averaging has begun: they have a policy then."""
        local = self.step > self._first_due if local is None else local
        if local and isinstance(self.module, DistributedDataParallel):
            broadcast_buffers(self.module, False)

    def _check_once(self, params: list[Any]) -> None:
        """Compare parameters and schedule over the whole group, at the first call."""
        if self._checked or dist.get_rank(self.process_group) < 0:
            return
        named = self._named(params)
        self._averager((self.process_group, FIRST)).agree(named, progress=Progress(self.step))
        self._checked = True
        if self.overlap_steps:
            parts = self._parts(params)
            for due in self._levels():  # now, and not on the thread of an average
                self._averager(due).prepare(parts.means, common=False)
            self._overlap.prepare(self._averager(self._widest), parts)
        if self.module is None:
            warn_once(
                "module",
                f"{type(self).__name__} sees parameters only: buffers (BatchNorm statistics) are "
                "not averaged, and DDP's broadcast of them goes on. Pass module=model, or use "
                "loosestep.attach",
            )

    @property
    def _widest(self) -> Due:
        """The whole group, on the level that averages it."""
        return self.process_group, "final"

    def _levels(self) -> list[Due]:
        """Return everything that may ever be due."""
        return [self._widest]

    def _turn(self, params: Parameters, due: Due | None) -> None:
        """Apply what has come, and average what is due."""
        landing = due is not None or self._overlap.due(self.step)
        if not landing and self._checked:
            return
        listed = list(params)
        self._check_once(listed)
        if landing:
            self._land(listed)  # the one under way comes first, however close the next one is
        if due is not None and dist.get_rank(due[0]) >= 0:
            self._follow_broadcast(local=True)
            self._average(listed, due) if not self.overlap_steps else self._launch(listed, due)

    def _average(self, params: list[Any], due: Due, name: str | None = None) -> None:
        """Average at once; ``name`` is what telemetry calls it, by default the level."""
        if dist.get_rank(due[0]) >= 0:
            began = time.perf_counter()
            traffic = self._averager(due).average_parts(self._parts(params), Progress(self.step))
            self.telemetry.synced(self.step, name or due[1], began, traffic)

    def _average_exactly(self, params: list[Any]) -> None:
        """Make replicas equal that a reducer has left apart."""
        if dist.get_rank(self.process_group) >= 0:
            began = time.perf_counter()
            peers, reducer = self._averager(self._widest).peers, exact_like(self.reducer)
            exact = Averager(peers, reducer=reducer, agreements=[self._describe()])
            traffic = exact.average_parts(self._parts(params), Progress(self.step))
            self.telemetry.synced(self.step, "final", began, traffic)

    def _launch(self, params: list[Any], due: Due) -> None:
        self._overlap.launch(self._averager(due), self._parts(params), self.step, due[1])

    def _land(self, params: list[Any]) -> None:
        """Wait for what is under way, if anything is, and apply it."""

        def by_name() -> dict[str, torch.Tensor]:
            buffers = [] if self.module is None else buffers_of(self.module)
            return dict([*self._names(params), *buffers])

        flight = self._overlap.land(by_name)
        if flight is not None:
            seconds = {"seconds": flight.seconds, "seconds_waited": flight.seconds_waited}
            self.telemetry.averaged(flight.step, flight.level, flight.traffic, **seconds)

    def _averager(self, due: Due) -> Averager:
        group, level = due
        if level not in self._averagers:
            peers = peers_of(self._chosen(group, level), level=level, timeout=self.timeout)
            self._averagers[level] = Averager(
                peers,
                reducer=self.reducer,
                agreements=[self._describe(), *self._overlap.describe()],
                references=self._references.setdefault(level, References()),
            )
        return self._averagers[level]

    def _chosen(self, group: dist.ProcessGroup, level: str) -> dist.ProcessGroup:
        """Return the process group that messages take; the first call may be collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if not self.overlap_steps or level == FIRST or len(ranks) == 1:
            own = self._own and group is self.process_group
            return private_twin(group, self.timeout) if own else group
        if ranks not in self._groups:
            self._groups[ranks] = own_group(ranks, self.timeout, group)
        return self._groups[ranks]

    def _parts(self, params: list[Any]) -> Parts:
        """Return what an average changes."""
        parts = parts_of(self._named(params), self.module, self.buffers)
        return parts if parts.firsts else replace(parts, firsts=None)

    def _named(self, params: list[Any]) -> list[Named]:
        return [(name, p) for name, p in self._names(params) if p.requires_grad]

    def _names(self, params: list[Any]) -> list[Named]:
        """Return all parameters with names, which do not change when one is frozen."""
        names = {} if self.module is None else {p: n for n, p in self.module.named_parameters()}
        return unique(
            (names.get(parameter, f"parameter {index}"), parameter)
            for index, parameter in enumerate(_flattened(params))
        )


def _check_options(process_group: object, options: Options) -> None:
    """Raise for what is of another kind than asked for."""
    if process_group is not None:
        check_instance("process_group", process_group, dist.ProcessGroup, "a process group or None")
    if (module := options.get("module")) is not None:
        check_instance("module", module, torch.nn.Module, "a module such as model")
    if (clock := options.get("clock")) is not None:
        check_instance("clock", clock, Clock, "a Clock such as Clock()")
    if (telemetry := options.get("telemetry")) is not None:
        check_instance("telemetry", telemetry, Telemetry, "a Telemetry such as Telemetry()")
    if (reducer := options.get("reducer")) is not None:
        check_reducer("reducer", reducer)


def _flattened(params: list[Any]) -> list[torch.nn.Parameter]:
    """Return all parameters, of groups too, whether they require a gradient or not."""
    get_params_to_average(params)  # raises for what is no parameter
    nested = (item["params"] if isinstance(item, dict) else [item] for item in params)
    return [parameter for inner in nested for parameter in inner]
