"""What a sync changes, by what it does to it: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from loosestep.comm.tensors import Named, unique

STATE = "state "  # in front of the name of a parameter's state
ACROSS = "across "  # in front of a level's name, where shards cross it
BUFFER = "buffer "  # in front of a buffer's name; no attribute of a module has a space


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
    largest: list[Named] = field(default_factory=list)  # counters, which take the largest value
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
