"""The command line: ``loosestep train | compare | report | doctor``.

Whatever a user can get wrong ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

USER_ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from rich.console import Console  # noqa: F401
    except ImportError:
        print(
            "loosestep: the command line needs rich: pip install 'loosestep[cli]'", file=sys.stderr
        )
        return USER_ERROR
    from loosestep.cli.arguments import parse
    from loosestep.runs import NotARun
    from loosestep.trainer.mistakes import BadInput

    try:
        options = parse(given)
        return int(options.command(options))
    except (BadInput, NotARun) as error:
        print(f"loosestep: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
