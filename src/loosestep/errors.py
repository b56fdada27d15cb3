"""What can go wrong, as a tree.

    LoosestepError
    ├── RankMismatch (ValueError)     the ranks disagree about what they are to average
    ├── PeerLost (RuntimeError)       a rank died, hung or was too slow
    ├── NotFinite (ValueError)        there is an infinity or NaN where only numbers can be sent
    └── NotAttachable (ValueError)    this model, optimizer and strategy do not fit together

    LoosestepWarning (UserWarning)    said once: something a call could not see

Plain bad input is a ``ValueError`` or a ``TypeError``, as everywhere in torch.
"""

from __future__ import annotations

import warnings


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
