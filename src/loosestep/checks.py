"""Arguments that make sense, checked where they are given: the rule, the value, the way out.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from typing import Any


def check_whole(what: str, value: object, least: int = 0, *, hint: str = "") -> int:
    """Return a whole number; raise for what is none, or too small.

    >>> check_whole("period", 4, 1)
    4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        way_out = f"; {hint}" if hint else ""
        raise ValueError(f"{what} must be a whole number >= {least}, got {value!r}{way_out}")
    return value


def is_number(value: object) -> bool:
    """Say whether this is a number, which True is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_seconds(what: str, value: Any) -> float | None:
    """Return a time-out in seconds, or None; raise for what is none.

    >>> check_seconds("timeout", 2.5)
    2.5
    """
    if value is not None and not (is_number(value) and 0 < value < math.inf):
        raise ValueError(
            f"{what} must be a number of seconds > 0 and finite, got {value!r}; None waits as long "
            "as the process group does"
        )
    return None if value is None else float(value)


def check_level(what: str, value: object) -> None:
    """Raise unless this is a level's name, or None for no level."""
    if value is not None and not (isinstance(value, str) and value):
        raise TypeError(
            f"{what} must be a level's name such as 'host' or 'world', or None, got {value!r}"
        )


def check_instance(what: str, value: object, kind: type | tuple[type, ...], hint: str) -> None:
    """Raise unless ``value`` is one of ``kind``; a class in place of an instance is told apart.

    >>> check_instance("step", 3, int, "4")
    """
    if isinstance(value, type) and issubclass(value, kind):
        raise TypeError(f"{what} must be an instance, got the class {value.__name__}; give {hint}")
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be {hint}, got {value!r}")
