"""The command line: ``loosestep train | compare | report | doctor``.

Whatever a user can get wrong ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loosestep.errors import LoosestepError
from loosestep.lab.cli.arguments import parse
from loosestep.lab.runs import NotARun
from loosestep.lab.trainer.mistakes import FAILED, STOPPED, USER_ERROR, BadInput


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except BadInput as error:
        message = str(error)
    except LoosestepError as error:
        print(f"loosestep: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
    except KeyboardInterrupt:
        return STOPPED
    # On one line, whatever a message quotes.
    print(f"loosestep: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


def _run(given: Sequence[str]) -> int:
    options = parse(given)
    try:
        return int(options.command(options))
    except NotARun as error:
        raise BadInput(str(error)) from error
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise BadInput("the command line needs rich: pip install 'loosestep[cli]'") from error
