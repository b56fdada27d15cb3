"""Whatever can be trained with, by name: loosestep's recipes and what PyTorch itself has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from loosestep.lab.trainer.mistakes import BadInput, nearest
from loosestep.lab.trainer.specs import OURS, Spec, arguments_of, needs
from loosestep.lab.trainer.torch_plans import CONTENDERS, Plan


def names() -> list[str]:
    """Return the names of all contenders."""
    return [*_makers()]


def defaults() -> list[Spec]:
    """Return every contender that can do without options, or with periods by level."""
    needed = {name: needs(make) for name, make in _makers().items()}
    return [Spec(name, options) for name, options in needed.items() if options is not None]


def check_options(spec: Spec) -> None:
    """Raise ``BadInput`` for a name or an option that there is not; needs no torch."""
    make = _makers().get(spec.name)
    if make is None:
        raise BadInput(
            f"there is no strategy {spec.name!r}{nearest(spec.name, names())}; there are "
            f"{', '.join(names())}"
        )
    arguments_of(spec.name, make, spec.options)


def has_option(spec: Spec, name: str) -> bool:
    """Say whether a contender's recipe takes an argument."""
    return name in inspect.signature(_makers()[spec.name]).parameters


def check_spec(spec: Spec) -> None:
    """Raise ``BadInput`` for what is no contender; needs no workers.

    Torch is needed only where name and options are right.
    """
    check_options(spec)
    if plan_of(spec) is None:
        spec.strategy()


def plan_of(spec: Spec) -> Plan | None:
    """Return the plan of a contender that PyTorch itself has; None: it is one of loosestep's."""
    if spec.name not in CONTENDERS:
        return None
    make = CONTENDERS[spec.name]
    try:
        return make(**arguments_of(spec.name, make, spec.options))
    except ValueError as error:
        raise BadInput(f"strategy {spec}: {error}") from error


def _makers() -> dict[str, Callable[..., Any]]:
    return {**OURS, **CONTENDERS}
