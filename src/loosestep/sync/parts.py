"""What a sync changes, by what it does to it: parameters, buffers, optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch

from loosestep.comm.tensors import Named, unique

STATE = "state "  # in front of the name of a parameter's state
ACROSS = "across "  # in front of a level's name, where shards cross it
BUFFER = "buffer "  # in front of a buffer's name; no attribute of a module has a space
FRAGMENT = ", fragment "  # behind a level's name, where a part of the parameters is averaged there


def level_of(name: str) -> str:
    """Return the level of what averages on it: of all, of a fragment, or of shards that cross it.

    >>> level_of("across world, fragment 2")
    'world'
    """
    return name.removeprefix(ACROSS).partition(FRAGMENT)[0]


def parameter_of(name: str) -> str:
    """Return the name of the parameter whose state a tensor is, or else its own.

    >>> parameter_of("state layer.weight.exp_avg")
    'layer.weight'
    """
    return name.removeprefix(STATE).rpartition(".")[0] if name.startswith(STATE) else name


def split_floats(named: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    """Return the tensors that have a mean, and the counters and masks, which have a largest."""
    floats: list[Named] = []
    counters: list[Named] = []
    for name, tensor in named:
        has_mean = tensor.is_floating_point() or tensor.is_complex()
        (floats if has_mean else counters).append((name, tensor))
    return floats, counters


def unwrap_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside ``torch.compile``'s wrapper: it holds the parameters."""
    return getattr(module, "_orig_mod", module)


class ModuleTensors:
    """A module's parameters and buffers by name: listed once, and anew where the module changed.

    The look at every sync compares what the module and its parts hold, by identity; to walk the
    module costs ten times as much. One that lists its tensors in a way of its own (TorchScript,
    FSDP1) is walked.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._parts: list[dict[str, Any]] = []  # attributes of the module and of all that are in it
        self._names: list[str] = []  # under which they hold things,
        self._things: list[object] = []  # which,
        self._counts: list[int] = []  # and how many of each kind
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []

    def listed(self) -> tuple[list[Named], list[Named]]:
        """Return parameters and buffers: the same two lists as long as nothing has changed."""
        if not self._parts or not self._holds_the_same():
            walked = _is_walked(self._module)
            self._parts = [] if walked else [vars(part) for part in self._module.modules()]
            self._names = list(itertools.chain.from_iterable(self._tables()))
            self._things = list(self._values())
            self._counts = list(map(len, self._tables()))
            self._parameters = list(self._module.named_parameters())
            named = self._module.named_buffers()  # also those that are not saved
            self._buffers = [(f"{BUFFER}{name}", buffer) for name, buffer in named]
        return self._parameters, self._buffers

    def _holds_the_same(self) -> bool:
        # By loops in C, as in Places.hold: a module may have 20,000 tensors.
        return (
            list(map(len, self._tables())) == self._counts
            and all(map(is_, self._values(), self._things))
            and list(itertools.chain.from_iterable(self._tables())) == self._names
        )

    def _tables(self) -> Iterator[dict[str, object]]:
        return itertools.chain.from_iterable(map(_TABLES, self._parts))

    def _values(self) -> Iterator[object]:
        return itertools.chain.from_iterable(map(methodcaller("values"), self._tables()))


_TABLES = itemgetter("_parameters", "_buffers", "_modules")


def _is_walked(module: torch.nn.Module) -> bool:
    """Say whether a module's tensors are not simply those of the tables of its parts."""
    base, parts = torch.nn.Module, list(module.modules())
    own = (
        getattr(module.named_parameters, "__func__", None) is not base.named_parameters
        or getattr(module.named_buffers, "__func__", None) is not base.named_buffers
        or any(type(part).named_modules is not base.named_modules for part in parts)
    )
    return own or any(isinstance(part, torch.jit.ScriptModule) for part in parts)


def always_exact(name: str) -> bool:
    """Say whether a tensor is never compressed.

    Buffers are small and at times infinite (masks). Of an optimizer's state, second moments must
    not be negative, and a difference that lost some bits could make them so.
    """
    return name.startswith((BUFFER, STATE))


def compressible(named: Iterable[Named]) -> list[Named]:
    """Return what a lossy reducer may be given."""
    return [(name, tensor) for name, tensor in named if not always_exact(name)]


def only_exact(named: Iterable[Named]) -> list[Named]:
    """Return the rest."""
    return [(name, tensor) for name, tensor in named if always_exact(name)]


@dataclass(frozen=True)
class Parts:
    """What a sync changes, by what it does to it."""

    means: list[Named]  # become the mean
    largest: list[Named] = field(default_factory=list)  # counters, which take the largest value
    firsts: list[Named] | None = None  # take the first rank's values; None: that is not asked for
    partial: bool = False  # a share of what takes part: it may be empty

    @property
    def everything(self) -> list[Named]:
        """All of it."""
        return unique([*self.means, *self.largest, *(self.firsts or [])])

    def only(self, wanted: Callable[[str], bool]) -> Parts:
        """Return what has certain names."""

        def those(named: list[Named]) -> list[Named]:
            return [pair for pair in named if wanted(pair[0])]

        firsts = None if self.firsts is None else those(self.firsts)
        return Parts(those(self.means), those(self.largest), firsts, partial=True)

    def replaced(self, by: Mapping[str, torch.Tensor]) -> Parts:
        """Return the same parts with other tensors of those names, and without the rest."""

        def swap(named: list[Named]) -> list[Named]:
            return [(name, by[name]) for name, _ in named if name in by]

        firsts = None if self.firsts is None else swap(self.firsts)
        return Parts(swap(self.means), swap(self.largest), firsts)


def optimizer_state_of(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> tuple[list[Named], list[Named]]:
    """Return the state tensors that have a mean, and the counters beside them.

    Of a parameter that is a single number ``step`` alone is a counter: its momentum is one too.
    """
    shaped: list[Named] = []
    counters: list[Named] = []
    for parameter, name in names.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                counts = value.ndim == 0 and (key == "step" or parameter.ndim > 0)
                kind = counters if counts else shaped
                kind.append((f"{STATE}{name}.{key}", value))
    return shaped, counters
