"""What a process prints, without what Gloo prints into it.

In torch 2.9 and 2.10 Gloo writes to standard output whom it has connected, and has no switch for
that; where several processes write to one pipe, its lines may be torn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def find_line(lines: Iterable[str], pattern: str) -> str:
    """Return the first line that is ``pattern`` as a whole; of a pipe, read no further."""
    for line in lines:
        if re.fullmatch(pattern, line.strip()):
            return line.strip()
    raise AssertionError(f"the process ended without a line like {pattern!r}")
