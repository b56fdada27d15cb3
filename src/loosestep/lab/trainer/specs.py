"""Strategies by name and options, as they are given on a command line or in a file.

    ddp
    post_local_sgd:period=8,reducer=int4,overlap_steps=5
    hierarchical_sgd:host=4,world=32,warmup_steps=100

Names are those of the recipes, options those of the recipe's arguments; nothing is listed here a
second time. Where a recipe has periods by level, a level is an option of its own.

Nothing here needs torch before a strategy is made: mistakes are answered without it.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loosestep.lab.trainer.mistakes import BadInput, nearest
from loosestep.lab.trainer.reducer_names import ReducerName, parse_gradient_reducer, parse_reducer
from loosestep.strategy.recipes import RECIPES
from loosestep.strategy.schedules import always

if TYPE_CHECKING:
    from loosestep.strategy.strategy import Strategy
    from loosestep.strategy.topology import Topology


def alone(*, topology: Topology | None = None) -> Strategy:
    """Share nothing: what computing takes, and what a worker learns by itself."""
    from loosestep.strategy.strategy import Strategy

    return Strategy(schedule=always(), topology=topology)


OURS = {**RECIPES, alone.__name__: alone}

LEVELS = ("host", "world")  # those of Topology.from_hosts
# Types in the recipes' signatures that need torch; on a command line there is a name for a reducer,
# a period is a number, and of parts that have no word there the recipe's own stand.
PARTS = ("Arrival", "Fragments", "Gate", "Outer", "Strategy", "Topology")
STAND_INS = {**dict.fromkeys(PARTS, object), "Reducer": ReducerName, "Rule": int}
Value = str | int | float | bool | None | Mapping[str, int]


@dataclass(frozen=True)
class Spec:
    """A recipe's name and its options, not yet made into a strategy."""

    name: str
    options: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return it as it can be given on a command line."""
        pairs = [
            f"{key}={_text(value)}"
            for name, given in self.options.items()
            for key, value in (given.items() if isinstance(given, Mapping) else [(name, given)])
        ]
        return f"{self.name}:{','.join(pairs)}" if pairs else self.name

    def having(self, **options: Value) -> Spec:
        """Return the same with more options; None leaves one as it is."""
        given = {name: value for name, value in options.items() if value is not None}
        return Spec(self.name, {**self.options, **given})

    def strategy(self, topology: Topology | None = None) -> Strategy:
        """Make the strategy; raise ``BadInput`` where the recipe refuses it."""
        recipe = _recipe(self.name)
        arguments = _with_reducers(arguments_of(self.name, recipe, self.options))
        try:
            return recipe(**arguments, topology=topology)
        except (ValueError, TypeError) as error:
            raise BadInput(f"strategy {self}: {error}") from error


def parse_spec(text: str) -> Spec:
    """Read ``name:key=value,key=value``.

    >>> parse_spec("post_local_sgd:period=8,reducer=int4")
    Spec(name='post_local_sgd', options={'period': 8, 'reducer': 'int4'})
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, Value] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise BadInput(
                f"strategy {text!r}: {pair!r} must be key=value, as in post_local_sgd:period=8"
            )
        options[key.strip().replace("-", "_")] = _value(value.strip())
    return Spec(name.strip(), options)


def parse_periods(text: str) -> dict[str, int]:
    """Read ``host=4,world=32``.

    >>> parse_periods("host=4,world=32")
    {'host': 4, 'world': 32}
    """
    periods: dict[str, int] = {}
    for pair in text.split(","):
        level, _, period = pair.partition("=")
        if not level.strip() or not period.strip().isdecimal():
            raise BadInput(f"periods must be like host=4,world=32, got {text!r}")
        periods[level.strip()] = int(period)
    return periods


def arguments_of(
    name: str, recipe: Callable[..., Any], options: Mapping[str, Value]
) -> dict[str, Any]:
    """Return a recipe's arguments for options; raise for those that it does not have.

    In place of a reducer there is a ``ReducerName``.
    """
    wanted = _arguments(recipe)
    by_level = next((key for key, hint in wanted.items() if _is_mapping(hint)), None)
    arguments: dict[str, Any] = {}
    for given, value in options.items():
        if given in wanted:
            arguments[given] = _converted(f"{name}: {given}", wanted[given], given, value)
        elif by_level is not None and given in LEVELS and isinstance(value, int):
            arguments.setdefault(by_level, {})[given] = value
        else:
            raise _no_option(name, given, [*wanted, *(LEVELS if by_level else ())])
    _check_required(name, recipe, arguments)
    _check_levels(name, arguments)
    return arguments


def _with_reducers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's arguments with what names of reducers stand for."""
    if not any(isinstance(value, ReducerName) for value in arguments.values()):
        return dict(arguments)
    from loosestep.lab.trainer.named_reducers import gradient_reducer, parameter_reducer

    makers = {"reducer": parameter_reducer, "gradient_reducer": gradient_reducer}
    return {
        key: makers[key](value) if isinstance(value, ReducerName) else value
        for key, value in arguments.items()
    }


def needs(recipe: Callable[..., Any]) -> dict[str, Value] | None:
    """Return options for what a recipe must be given; None: nobody here can know them.

    >>> needs(RECIPES["ddp"]), needs(RECIPES["hierarchical_sgd"])
    ({}, {'host': 4, 'world': 16})
    """
    hints, parameters = _arguments(recipe), inspect.signature(recipe).parameters
    required = [hints[key] for key, one in parameters.items() if one.default is one.empty]
    if not all(map(_is_mapping, required)):
        return None
    return {"host": 4, "world": 16} if required else {}


def _no_option(name: str, given: str, wanted: Sequence[str]) -> BadInput:
    return BadInput(
        f"strategy {name!r} has no option {given!r}{nearest(given, wanted)}; "
        f"it has {', '.join(wanted) or 'none'}"
    )


def _check_levels(name: str, arguments: Mapping[str, Any]) -> None:
    given = [*arguments.get("periods", ()), arguments.get("gradients") or LEVELS[0]]
    for level in given:
        if level not in LEVELS:
            raise BadInput(
                f"strategy {name!r}: there is no level {level!r}{nearest(level, LEVELS)}; there "
                f"are {' and '.join(LEVELS)}"
            )


def _check_required(name: str, recipe: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    for key, parameter in inspect.signature(recipe).parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            hint = "host=4,world=32" if key == "periods" else f"{key}=..."
            raise BadInput(f"strategy {name!r} needs {key}: give {name}:{hint}")


def _recipe(name: str) -> Callable[..., Strategy]:
    if name not in OURS:
        known = ", ".join(OURS)
        raise BadInput(f"there is no strategy {name!r}{nearest(name, OURS)}; there are {known}")
    return OURS[name]


def _arguments(recipe: Callable[..., Any]) -> dict[str, Any]:
    """Return what can be given on a command line, with its type."""
    function = getattr(recipe, "__init__") if isinstance(recipe, type) else recipe  # noqa: B009
    hints = typing.get_type_hints(function, localns=STAND_INS)
    return {key: hints[key] for key in inspect.signature(recipe).parameters if key != "topology"}


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is not None and issubclass(
        typing.get_origin(hint) if isinstance(typing.get_origin(hint), type) else object, Mapping
    )


def _converted(what: str, hint: Any, key: str, value: Value) -> Any:
    """Return an option as the recipe wants it."""
    allowed = (not _is_mapping(hint) and typing.get_args(hint)) or (hint,)
    if ReducerName in allowed:
        return (parse_reducer if key == "reducer" else parse_gradient_reducer)(str(value))
    if value is None or isinstance(value, Mapping):
        return value
    kinds = tuple(kind for kind in allowed if isinstance(kind, type))
    fits = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
    if fits and isinstance(value, bool) == (bool in kinds):
        return value
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise BadInput(f"strategy {what} must be of type {wanted}, got {value!r}")


def _value(text: str) -> Value:
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(value: Value) -> str:
    return "none" if value is None else str(value)
