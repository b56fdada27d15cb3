"""What can go wrong, as a tree, and the checks of arguments that all parts share.

    LoosestepError
    ├── RankMismatch (ValueError)     the ranks disagree about what they are to average
    ├── PeerLost (RuntimeError)       a rank died, hung or was too slow
    ├── NotFinite (ValueError)        there is an infinity or NaN where only numbers can be sent
    ├── NotShardable (ValueError,     a tensor that cannot be divided among ranks
    │                 TypeError)
    └── NotAttachable (ValueError)    this model, optimizer and strategy do not fit together

    LoosestepWarning (UserWarning)    said once: something a call could not see

Plain bad input is a ``ValueError`` or a ``TypeError``, as everywhere in torch, raised where it is
given: the rule, the value, the way out. Nothing here needs torch.
"""

from __future__ import annotations

import enum
import warnings
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=enum.Enum)

MOST_SECONDS = 1_000_000  # of a time-out; backends count milliseconds in 31 bits


class LoosestepError(Exception):
    """The root of what this library raises on its own account."""


class RankMismatch(LoosestepError, ValueError):
    """The ranks of a group disagree; nothing has been averaged."""


class PeerLost(LoosestepError, RuntimeError):
    """A peer died or did not answer in time.

    ``ranks`` holds the global ranks that are suspected, ``phase`` what was going on.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), phase: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.phase = phase


class NotFinite(LoosestepError, ValueError):
    """Some ranks hold an infinity or NaN that a compressing reducer cannot send.

    ``ranks`` holds their global ranks, ``tensor`` the place in the model.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), tensor: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tensor = tensor


class NotShardable(LoosestepError, ValueError, TypeError):
    """A tensor that cannot be divided among ranks; torch raises ``ValueError`` for some of them."""


class NotAttachable(LoosestepError, ValueError):
    """The model, the optimizer and the strategy do not fit together."""


class LoosestepWarning(UserWarning):
    """Something that a call could not see and that the user should know."""


_said: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn about ``topic`` the first time in this process, and never again."""
    if topic not in _said:
        _said.add(topic)
        warnings.warn(message, LoosestepWarning, stacklevel=3)


def forget_warnings() -> None:
    """Let every topic be said once more (for tests)."""
    _said.clear()


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
    if value is not None and not (is_number(value) and 0 < value <= MOST_SECONDS):
        raise ValueError(
            f"{what} must be a number of seconds > 0 and at most {MOST_SECONDS}, got {value!r}; "
            "None waits as long as the process group does"
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


def choose(kind: type[Choice], value: Choice | str) -> Choice:
    """Return the member of ``kind`` that ``value`` names, or raise with all names.

    >>> choose(enum.Enum("Side", {"LEFT": "left"}), "left")
    <Side.LEFT: 'left'>
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{kind.__name__} must be one of {names}; got {value!r}") from None
