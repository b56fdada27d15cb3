"""Whatever can be trained with, by name: loosestep's recipes and what PyTorch itself has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from loosestep.telemetry import Telemetry
from loosestep.topology import Topology
from loosestep.trainer.in_tree import CONTENDERS, InTree, Plan
from loosestep.trainer.mistakes import BadInput, nearest
from loosestep.trainer.settings import Settings
from loosestep.trainer.sharing import OptimizerPlan, Ours, Sharing
from loosestep.trainer.specs import OURS, Spec, Value, arguments_of


def names() -> list[str]:
    """Return the names of all contenders."""
    return [*OURS, *CONTENDERS]


def defaults() -> list[Spec]:
    """Return every contender with the options that it has by default."""
    makers: dict[str, Callable[..., Any]] = {**OURS, **CONTENDERS}
    return [Spec(name, _needed(make)) for name, make in makers.items()]


def _needed(make: Callable[..., Any]) -> dict[str, Value]:
    """Return options for arguments that have no default: periods by level."""
    parameters = inspect.signature(make).parameters.values()
    return {
        level: period
        for parameter in parameters
        if parameter.default is parameter.empty
        for level, period in {"host": 4, "world": 16}.items()
    }


def check_spec(spec: Spec) -> None:
    """Raise ``BadInput`` for what is no contender; needs no workers."""
    if spec.name in CONTENDERS:
        _plan(spec)
    elif spec.name in OURS:
        spec.strategy()
    else:
        raise BadInput(
            f"there is no strategy {spec.name!r}{nearest(spec.name, names())}; there are "
            f"{', '.join(names())}"
        )


def make_sharing(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: OptimizerPlan,
    topology: Topology,
    telemetry: Telemetry,
) -> Sharing:
    """Connect a model; all workers call it."""
    spec = settings.spec
    if spec.name in CONTENDERS:
        return InTree(model, optimizer, _plan(spec), topology, telemetry)
    return Ours(model, optimizer, spec.strategy(topology), telemetry, settings.timeout)


def _plan(spec: Spec) -> Plan:
    make = CONTENDERS[spec.name]
    try:
        return make(**arguments_of(spec.name, make, spec.options))
    except ValueError as error:
        raise BadInput(f"strategy {spec}: {error}") from error
