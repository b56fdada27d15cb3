"""Calls that might never return, made in a thread of their own and given up in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

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
