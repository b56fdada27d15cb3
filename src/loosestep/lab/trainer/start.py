"""The process of one worker that ``launch`` has started."""

from __future__ import annotations

import os
import sys
import threading

from loosestep.lab.trainer.mistakes import FAILED
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.ranks import rank_from
from loosestep.lab.trainer.worker import run


def main() -> None:
    """Do what the pipe says, and end with whoever started this."""
    orders = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = rank_from()
    assert rank is not None, "the launcher has set it"
    code = run(Orders.from_json(orders.decode()), rank) if orders else FAILED
    sys.stdout.flush()
    os._exit(code)  # Gloo's threads may wait for a worker that is gone


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # ends when the other end of the pipe is closed
    os._exit(FAILED)
