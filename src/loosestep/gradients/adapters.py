"""What ``attach`` needs from a kind of module, and several kinds in one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol


class Adapter(Protocol):
    """How a kind of module hands out its gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside the block."""

    def broadcast_buffers(self, wanted: bool) -> None:
        """Allow or forbid the framework's own broadcast of buffers."""

    def before_step(self) -> None:
        """Make sure that gradients are shared as they should be."""

    def close(self) -> None:
        """Leave the module as it was."""


class Together:
    """Several adapters as one."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local everywhere."""
        with ExitStack() as stack:
            for adapter in self._adapters:
                stack.enter_context(adapter.no_sync())
            yield

    def broadcast_buffers(self, wanted: bool) -> None:
        """Tell all."""
        for adapter in self._adapters:
            adapter.broadcast_buffers(wanted)

    def before_step(self) -> None:
        """Ask all."""
        for adapter in self._adapters:
            adapter.before_step()

    def close(self) -> None:
        """Close all."""
        for adapter in self._adapters:
            adapter.close()
