"""What happens to buffers and to optimizer state when parameters are averaged."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from loosestep.tensors import Named, unique


class Buffers(enum.Enum):
    """What a sync does to a module's buffers (BatchNorm statistics and the like)."""

    MEAN = "mean"  # floats are averaged, counters take the largest value
    BROADCAST = "broadcast"  # all take those of the group's first rank
    LOCAL = "local"  # every rank keeps its own


class OptimizerState(enum.Enum):
    """What a sync does to the inner optimizer's state (momentum and the like)."""

    KEEP = "keep"  # every rank keeps its own
    AVERAGE = "average"  # floats are averaged with the parameters, counters take the largest value
    RESET = "reset"  # dropped, so that the optimizer starts afresh


class Initial(enum.Enum):
    """What happens when replicas differ at the start."""

    BROADCAST = "broadcast"  # all take the first rank's parameters and buffers
    REFUSE = "refuse"  # an error that names the first tensor that differs
    IGNORE = "ignore"  # start from different points, on purpose


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a sharded optimizer's gradients are kept until its step."""

    stage: int | None = None  # 1: kept until backward ends; 2: freed on the way; None: what fits

    def __post_init__(self) -> None:
        """Refuse stages that there are not."""
        if self.stage not in (None, 1, 2):
            raise ValueError(
                f"stage must be 1 (optimizer state is sharded), 2 (gradients too) or None, got "
                f"{self.stage!r}; to shard parameters as well, use FSDP2"
            )


STATE = "state "  # in front of the name of a parameter's state
BUFFER = "buffer "  # in front of a buffer's name; no attribute of a module has a space

Choice = TypeVar("Choice", bound=enum.Enum)


def choose(kind: type[Choice], value: Choice | str) -> Choice:
    """Return the member of ``kind`` that ``value`` names, or raise with all names.

    >>> choose(Buffers, "mean")
    <Buffers.MEAN: 'mean'>
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{kind.__name__} must be one of {names}; got {value!r}") from None


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


def buffers_of(module: torch.nn.Module) -> list[Named]:
    """Return the module's buffers by name, also those that are not saved."""
    return [(f"{BUFFER}{name}", buffer) for name, buffer in module.named_buffers()]


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
    largest: list[Named]  # counters, which take the largest value
    firsts: list[Named] | None = None  # take the first rank's values; None: that is not asked for

    @property
    def everything(self) -> list[Named]:
        """All of it."""
        return unique([*self.means, *self.largest, *(self.firsts or [])])

    def replaced(self, by: Mapping[str, torch.Tensor]) -> Parts:
        """Return the same parts with other tensors of those names, and without the rest."""

        def swap(named: list[Named]) -> list[Named]:
            return [(name, by[name]) for name, _ in named if name in by]

        firsts = None if self.firsts is None else swap(self.firsts)
        return Parts(swap(self.means), swap(self.largest), firsts)


def parts_of(parameters: list[Named], module: torch.nn.Module | None, buffers: Buffers) -> Parts:
    """Return what a sync of ``parameters`` changes where a module's buffers have a policy."""
    held = [] if module is None else buffers_of(module)
    if buffers is Buffers.MEAN:
        floats, counters = split_floats(held)
        return Parts([*parameters, *floats], counters)
    asked = buffers is Buffers.BROADCAST and module is not None
    return Parts(parameters, [], held if asked else None)


def optimizer_state_of(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> tuple[list[Named], list[Named]]:
    """Return the state tensors shaped like their parameter, and the counters beside them."""
    shaped: list[Named] = []
    counters: list[Named] = []
    for parameter, name in names.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                kind = counters if value.ndim == 0 else shaped
                kind.append((f"{STATE}{name}.{key}", value))
    return shaped, counters
