"""The process of one worker that ``launch`` has started."""

from __future__ import annotations

import os
import sys
import threading
import traceback

from loosestep.trainer.launch import ORDERS_VARIABLE
from loosestep.trainer.orders import Orders
from loosestep.trainer.ranks import rank_from
from loosestep.trainer.worker import FAILED, run


def main() -> None:
    """Do what the environment says, and end with whoever started this."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    orders, rank = Orders.from_json(os.environ.pop(ORDERS_VARIABLE)), rank_from()
    assert rank is not None, "the launcher has set it"
    code = FAILED
    try:
        code = run(orders, rank)
    except BaseException as error:
        (orders.folder / f"rank-{rank.rank}.error").write_text(traceback.format_exc())
        first = str(error).strip().splitlines() or [type(error).__name__]
        print(
            f"loosestep: worker {rank.rank} failed: {first[0]} (the whole story is in "
            f"{orders.folder / f'rank-{rank.rank}.error'})",
            file=sys.stderr,
            flush=True,
        )
    sys.stdout.flush()
    os._exit(code)  # Gloo's threads may wait for a worker that is gone


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # ends when the other end of the pipe is closed
    os._exit(FAILED)


if __name__ == "__main__":
    main()
