"""Doing something at the end of a DDP backward, and knowing which parameters it used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class Backward:
    """Calls ``finish`` when a backward ends, and ``last`` when DDP has put gradients back too.

    Both run where DDP itself waits: on the thread that called ``backward``, after the last node.
    """

    def __init__(self, finish: Callable[[], None], last: Callable[[], None]) -> None:
        self._finish, self._last = finish, last
        self.under_way = False

    def begin(self) -> None:
        """Note that a backward has come to its first bucket."""
        self.check_whole()
        self.under_way = True

    def check_whole(self) -> None:
        """Raise if the last backward never came to its end."""
        if self.under_way:
            raise RuntimeError(
                "the last backward was interrupted by an error, so its gradients are only partly "
                "used and ranks may be out of step; restart from a checkpoint"
            )

    def end(self) -> None:
        """Note that it has come to its last bucket.

        Not before: with reentrant checkpoints there are backwards inside backward, and what is
        queued in one of them runs when that one ends.
        """
        engine = Variable._execution_engine
        try:
            engine.queue_callback(self.finish)
        except RuntimeError:  # no backward runs: a rank without batches shadows the others'
            return
        # DDP queues its own end later than this, so what is to come after it is queued by then.
        engine.queue_callback(lambda: engine.queue_callback(self._last))

    @torch.no_grad()
    def finish(self) -> None:
        """Do what is left, once."""
        if self.under_way:
            self._finish()
            self.under_way = False


class Landing:
    """Waits for the buckets of a backward just before DDP does, which makes errors mere text."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []  # of this backward

    def add(self, bucket: GradBucket, wait: Callable[[], None]) -> None:
        """Call ``wait`` when backward ends; what it raises comes out of ``backward()`` as it is."""
        if bucket.index() == 0:
            self._waits = []  # an error may have ended the last backward early
        self._waits.append(wait)
        if bucket.is_last():
            waits, self._waits = self._waits, []
            with contextlib.suppress(RuntimeError):  # no backward runs, see Backward.end
                Variable._execution_engine.queue_callback(lambda: _call(waits))


def _call(waits: Iterable[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def usage_of(module: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> Usage | None:
    """Watch the parameters of a module that may leave some unused; None: it uses all of them."""
    if module.find_unused_parameters or module.static_graph:
        return Usage(parameters)
    return None


class Usage:
    """Which parameters this rank has used since the last ``clear``.

    DDP knows it too, but tells it only after the optimizer's step would have been taken.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._used: set[torch.Tensor] = set()
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def flags(self, parameters: Sequence[torch.Tensor]) -> list[bool]:
        """Say for each parameter whether it was used."""
        return [parameter in self._used for parameter in parameters]

    def clear(self) -> None:
        """Begin anew."""
        self._used.clear()

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
