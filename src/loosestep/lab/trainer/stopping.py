"""Ending together: workers that are not in step agree on the step after which all stop.

A worker may be some steps ahead of another, and may just be waiting for it in an average. So a
thread beside the training loop does the talking:

    somebody asks to stop     every worker's thread holds it at the step that it has begun, and says
                              which one that is
    all have said it          all go on to the largest one, and stop after it

Nobody waits for anybody inside a step, so nothing can lock: whoever has to catch up can.
"""

from __future__ import annotations

import threading
import time

from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.2
ASKED = "stop/asked"


class Stopping:
    """One worker's part of it; ``ask`` may be called from a signal handler or anywhere else."""

    def __init__(self, store: Store, rank: int, num_workers: int, timeout: float) -> None:
        self._store, self._rank, self._num_workers = store, rank, num_workers
        self._timeout = timeout
        self._begun = 0  # steps
        self._last: int | None = None  # the step after which all stop, once it is known
        self._held = False
        self._changed = threading.Condition()
        self._asked, self._closed = threading.Event(), threading.Event()
        self.reason = ""  # the one that all agreed on
        self._wanted = ""  # this worker's
        self._thread = threading.Thread(target=self._watch, name="loosestep stop", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask all workers to stop soon."""
        if not self._wanted:  # a second set() from a signal handler could meet the first
            self._wanted = reason
            self._asked.set()

    def may_begin(self) -> bool:
        """Say whether another step is to be taken, before it begins."""
        with self._changed:
            if self._held:
                self._changed.wait_for(lambda: not self._held, self._timeout)
            if self._last is not None and self._begun >= self._last:
                return False
            self._begun += 1
            return True

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(self._timeout)

    def _watch(self) -> None:
        while not self._closed.is_set():
            asked = self._asked.wait(POLL_SECONDS)
            try:
                if asked:  # the first to ask says why
                    self.reason = self._store.compare_set(ASKED, "", self._wanted).decode()
                elif self._store.check([ASKED]):
                    self.reason = self._store.get(ASKED).decode()
                else:
                    continue
            except RuntimeError:  # the store has ended with its worker
                if not asked:
                    return
                self.reason = self._wanted
            self._agree()
            return

    def _said(self) -> list[bytes]:
        """Return what all workers have said, once they have."""
        names = [f"stop/{rank}" for rank in range(self._num_workers)]
        limit = time.monotonic() + self._timeout
        while not self._store.check(names):  # a blocking wait would keep others from the store
            if self._closed.is_set() or time.monotonic() > limit:
                raise TimeoutError
            time.sleep(POLL_SECONDS / 10)
        return [self._store.get(name) for name in names]

    def _agree(self) -> None:
        with self._changed:
            self._held = True
            begun = self._begun
        try:
            self._store.set(f"stop/{self._rank}", str(begun))
            last = max(map(int, self._said()))
        except (RuntimeError, TimeoutError):
            last = begun  # somebody is gone; the next average says who
        with self._changed:
            self._last, self._held = last, False
            self._changed.notify_all()
