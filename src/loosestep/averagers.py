"""The model averagers under the names that PyTorch users know.

Names, signatures, attributes and the steps at which they average are those of
``torch.distributed.algorithms.model_averaging``; what is new is keyword-only. Parameters are
averaged in place, all that require a gradient take part whether they have one or not, and all
ranks are bit-equal afterwards.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.averaging import Averager
from loosestep.binding import Progress, Statement, agree
from loosestep.clock import Clock
from loosestep.errors import warn_once
from loosestep.groups import own_group, private_twin, require_process_group, world_group
from loosestep.parameters import Parameters, get_params_to_average
from loosestep.peers import peers_of
from loosestep.policies import Buffers, buffers_of, choose, split_floats, unwrap_compiled
from loosestep.telemetry import Telemetry
from loosestep.tensors import Named, unique
from loosestep.wire import Reducer

logger = logging.getLogger(__name__)


class Options(TypedDict, total=False):
    """What the averagers take beyond torch's arguments, all by keyword."""

    module: torch.nn.Module | None  # its buffers are averaged too, and its names used in errors
    clock: Clock | None  # share it with PostLocalSGDState(clock=...)
    reducer: Reducer | None  # default: the exact Mean()
    buffers: Buffers | str  # "mean" (default), "broadcast" or "local"
    telemetry: Telemetry | None
    timeout: float | None  # seconds for every wait; default: the process group's own


class ModelAverager(ABC):
    """The base of all model averagers: a process group and a count of steps.

    Without ``process_group`` the world averages, on a process group of its own; one that is
    given is used as it is.
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
        self.process_group = world_group() if process_group is None else process_group
        self.clock = options.get("clock") or Clock()
        module = options.get("module")
        self.module = None if module is None else unwrap_compiled(module)
        self.reducer = options.get("reducer")
        self.buffers = choose(Buffers, options.get("buffers", Buffers.MEAN))
        self.telemetry = options.get("telemetry") or Telemetry()
        self.timeout = options.get("timeout")
        self._own = process_group is None
        self._averagers: dict[str, Averager] = {}
        self._checked = False
        self._synced_step = -1  # the last step after which all ranks of the group were equal

    @property
    def step(self) -> int:
        """How often ``average_parameters`` was called."""
        return self.clock.step

    @step.setter
    def step(self, value: int) -> None:
        self.clock.step = value
        self._synced_step = -1  # what was averaged before says nothing about the step jumped to
        self._follow_broadcast()

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average if this step is due, and count it."""

    def finalize(self, params: Parameters) -> None:
        """Average once more over the whole group, unless the last step already did.

        Call it after training: the steps since the last average would else stay local.
        """
        if self._synced_step != self.step - 1 or self.step == 0:
            self._average(list(params), self.process_group, "final")
            self._synced_step = self.step - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and the reducer's state; no process groups, no pickle."""
        reducer = {} if self.reducer is None else self.reducer.state_dict()
        return {"step": self.step, "synced_step": self._synced_step, "reducer": reducer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.clock.load_state_dict(state_dict)
        self._synced_step = state_dict.get("synced_step", -1)
        self._follow_broadcast()
        if self.reducer is not None:
            self.reducer.load_state_dict(state_dict.get("reducer", {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAverager:
        """Copy the count and share the rest: process groups cannot be copied."""
        clone = copy.copy(self)
        clone.clock = copy.deepcopy(self.clock, memo)
        clone.module = memo.get(id(self.module), self.module)
        return clone

    def __copy__(self) -> ModelAverager:
        """Return an averager with the same settings, clock and process groups."""
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__, _averagers={}, _checked=False)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, so that pickles work."""
        state = self.__dict__.copy()
        state.update(_averagers={}, _checked=False, process_group=None)
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
            self.module.forward_sync_buffers = False

    def _check_once(self, params: list[Any]) -> None:
        """Compare parameters and schedule over the whole group, at the first call."""
        if self._checked or dist.get_rank(self.process_group) < 0:
            return
        named = self._named(params)
        self._averager(self.process_group, "first").agree(named, progress=Progress(self.step))
        self._checked = True
        if self.module is None:
            warn_once(
                "module",
                f"{type(self).__name__} sees parameters only: buffers (BatchNorm statistics) are "
                "not averaged, and DDP's broadcast of them goes on. Pass module=model, or use "
                "loosestep.attach",
            )

    def _average(self, params: list[Any], group: dist.ProcessGroup, level: str) -> None:
        if dist.get_rank(group) < 0:
            return
        named = self._named(params)
        counters: list[Named] = []
        averager, began = self._averager(group, level), time.perf_counter()
        buffers = [] if self.module is None else buffers_of(self.module)
        self._follow_broadcast(local=True)
        if self.buffers is Buffers.MEAN:
            floats, counters = split_floats(buffers)
            named = [*named, *floats]
        traffic = averager.average(named, counters, step=self.step)
        if self.buffers is Buffers.BROADCAST and buffers:
            traffic.add(averager.broadcast(buffers))
        self.telemetry.synced(self.step, level, began, traffic)

    def _averager(self, group: dist.ProcessGroup, level: str) -> Averager:
        if level not in self._averagers:
            own = self._own and group is self.process_group
            chosen = private_twin(group, self.timeout) if own else group
            peers = peers_of(chosen, level=level, timeout=self.timeout)
            self._averagers[level] = Averager(
                peers, reducer=self.reducer, agreements=[self._describe()]
            )
        return self._averagers[level]

    def _named(self, params: list[Any]) -> list[Named]:
        names = {} if self.module is None else {p: n for n, p in self.module.named_parameters()}
        return unique(
            (names.get(parameter, f"parameter {index}"), parameter)
            for index, parameter in enumerate(get_params_to_average(params))
        )


class PeriodicModelAverager(ModelAverager):
    """Average every ``period`` steps after ``warmup_steps`` steps without.

    Averages at calls ``warmup_steps, warmup_steps + period, ...``, counted from 0, as torch's
    does; the algorithm is post-local SGD (https://arxiv.org/abs/1808.07217).

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100, module=model)
        for inputs, labels in data:
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
        averager.finalize(model.parameters())
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(process_group, **options)
        self.warmup_steps = _check_warmup(warmup_steps)
        self.period = _check_period(period)
        if period == 1:
            _warn_period_one("period")

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` (parameters or an optimizer's groups) if due, and count the call."""
        clock = self.clock
        step = clock.step
        due = step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0
        if due or not self._checked:
            listed = list(params)
            self._check_once(listed)
            if due:
                self._average(listed, self.process_group, f"every {self.period}")
                self._synced_step = step
        clock.step = step + 1

    @property
    def _first_due(self) -> int:
        return self.warmup_steps

    def _describe(self) -> str:
        return f"averaging every {self.period} steps after {self.warmup_steps}"


class HierarchicalModelAverager(ModelAverager):
    """Average small groups often and large groups seldom (https://arxiv.org/abs/2010.12998).

    ``period_group_size_dict`` maps periods to group sizes, both growing. A call is due for every
    period that divides its number, counted from 0, once ``warmup_steps`` calls have passed; only
    the largest due group averages. The last size must be that of ``process_group``.

    Example::

        averager = HierarchicalModelAverager(OrderedDict([(4, 8), (16, 32)]), warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(process_group, **options)
        if not period_group_size_dict:
            raise ValueError(
                f"period_group_size_dict must not be empty, got {period_group_size_dict!r}; "
                "give for example OrderedDict([(4, 2), (16, 8)])"
            )
        ranks = dist.get_process_group_ranks(self.process_group)
        _check_hierarchy(period_group_size_dict, len(ranks))
        self.warmup_steps = _check_warmup(warmup_steps)
        self._sizes = dict(period_group_size_dict)
        self._periods = list(period_group_size_dict)
        if self._periods[-1] == 1:
            _warn_period_one("the largest period of period_group_size_dict")
        self._agree_on_groups()
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict(
            (period, self._group_of(size, ranks)) for period, size in self._sizes.items()
        )
        logger.info("hierarchical averaging, period: group size: %s", self._sizes)

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` over the largest group that is due, if any, and count the call."""
        clock = self.clock
        step = clock.step
        period = self._due_period(step)
        if period or not self._checked:
            listed = list(params)
            self._check_once(listed)
            if period:
                self._average(listed, self.period_process_group_dict[period], f"every {period}")
                if self._sizes[period] == self._sizes[self._periods[-1]]:
                    self._synced_step = step
        clock.step = step + 1

    def _due_period(self, step: int) -> int:
        """Return the largest period that is due, or 0."""
        if step >= self.warmup_steps:
            for period in reversed(self._periods):
                if step % period == 0:
                    return period
        return 0

    def _agree_on_groups(self) -> None:
        """Compare the sizes before groups are made: ranks that differ would wait for each other."""
        if len(set(self._sizes.values())) > 1 and dist.get_rank(self.process_group) >= 0:
            peers = self._averager(self.process_group, "first").peers
            agree(peers, Statement((self._describe(),)))

    def _group_of(self, size: int, ranks: list[int]) -> dist.ProcessGroup:
        if size == len(ranks):
            return self.process_group
        blocks = [ranks[i : i + size] for i in range(0, len(ranks), size)]
        if len(ranks) == dist.get_world_size():
            # Everybody is here, so the groups can be torch's usual ones, with a count and a name.
            return cast(
                dist.ProcessGroup,
                dist.new_subgroups_by_enumeration(blocks)[0],  # type: ignore[no-untyped-call]
            )
        mine = next(block for block in blocks if dist.get_rank() in block)
        return own_group(tuple(mine), self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process groups of the levels too."""
        return super().__getstate__() | {"period_process_group_dict": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the levels' process groups again."""
        super().__setstate__(state)
        ranks = dist.get_process_group_ranks(self.process_group)
        self.period_process_group_dict = OrderedDict(
            (period, self._group_of(size, ranks)) for period, size in self._sizes.items()
        )

    @property
    def _first_due(self) -> int:
        return min(-(-self.warmup_steps // period) * period for period in self._periods)

    def _describe(self) -> str:
        return f"averaging every {{steps: group size}} {self._sizes} after {self.warmup_steps}"


def _check_warmup(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}; 0 means no warm-up")
    return warmup_steps


def _check_period(period: int) -> int:
    if not isinstance(period, int) or period < 1:
        raise ValueError(
            f"a period must be a whole number >= 1, got {period}; 4 averages at every 4th step"
        )
    return period


def _check_hierarchy(sizes: Mapping[int, int], total: int) -> None:
    periods, members = list(sizes), list(sizes.values())
    for period in periods:
        _check_period(period)
    if periods != sorted(periods):
        raise ValueError(
            f"periods must grow, got {periods}: a smaller period behind a larger one would never "
            f"be due; give them as {sorted(periods)}"
        )
    if min(members) < 1 or members != sorted(members):
        raise ValueError(f"group sizes must be >= 1 and must not shrink, got {members}")
    for small, large in itertools.pairwise(members):
        if large % small:
            raise ValueError(f"group sizes must nest: {large} is no multiple of {small}")
    if members[-1] != total:
        raise ValueError(
            f"the last group size, {members[-1]}, must be the size of the process group, {total}"
        )


def _warn_period_one(what: str) -> None:
    warnings.warn(
        f"{what} is 1: parameters then travel as often as gradients would in plain "
        "DistributedDataParallel, which does the same with less",
        stacklevel=3,
    )
