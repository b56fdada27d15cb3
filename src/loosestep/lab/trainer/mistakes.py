"""Bad input: one clear line for the user, and the nearest name that there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

USER_ERROR, FAILED, STOPPED = 2, 1, 130  # exit codes
LOST = 3  # of a worker that has lost another, which says more about what happened


class BadInput(Exception):
    """What the user gave cannot be done; the text is the whole message, on one line."""


def nearest(given: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most like the given one, or nothing.

    >>> nearest("post_local_sdg", ["ddp", "post_local_sgd"])
    " (did you mean 'post_local_sgd'?)"
    """
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def one_line(error: BaseException) -> str:
    r"""Return the first line of what an error says, or its name if it says nothing.

    >>> one_line(ValueError("too short\nand more"))
    'too short'
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
