"""Calls that might never return, made in a thread of their own and given up in time.

The store of a process group is as dead as the rank that hosts it, and a dead store does not refuse:
it does not answer, and whoever asks holds the connection's lock meanwhile. torch's own time-outs do
not cover all of that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """Return what ``call`` returns; raise what it raises, or ``TimeoutError`` when it takes longer.

    >>> within(1.0, lambda: 3)
    3
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # handed on to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def ask_store(seconds: float, question: Callable[[Any], Answer]) -> Answer | None:
    """Return what ``question(store)`` returns, or None if the store does not answer in time.

    It gets a connection of its own: the usual one may be waiting for an answer that never comes.
    """
    # Whatever is wrong with the store must not hide the error at hand.
    with contextlib.suppress(RuntimeError, ValueError, TimeoutError):
        return within(seconds, lambda: question(_fresh_store()))
    return None


def _fresh_store() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
