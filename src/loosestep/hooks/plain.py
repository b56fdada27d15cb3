"""Gradients of a plain module: buckets of our own, filled while backward runs.

Buckets are launched in one fixed order on every rank. [Note: order of collectives] A bucket that
is complete waits for the ones before it, and what is left when backward ends (parameters that
this rank did not use) is launched then. Launching whatever happens to be complete would pair
different buckets on different ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from loosestep.hooks.gradients import GradientSharing
from loosestep.peers import Peers

BUCKET_BYTES = 25 << 20  # larger: fewer collectives; smaller: earlier overlap with backward


class Bucket:
    """Gradients that travel together, and one number a parameter that says if it was used."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        size = sum(p.numel() for p in parameters) + len(parameters)
        self.buffer = parameters[0].new_empty(size)

    def pack(self) -> torch.Tensor:
        """Copy the gradients in; one that this rank does not have counts as zero."""
        for index, (parameter, part) in enumerate(self._parts()):
            used = parameter.grad is not None
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
            self.buffer[index - len(self.parameters)] = float(used)
        return self.buffer

    def unpack(self) -> None:
        """Copy the means out; what no rank used keeps no gradient, so nothing decays it."""
        used = self.buffer[-len(self.parameters) :].tolist()
        for count, (parameter, part) in zip(used, self._parts(), strict=True):
            if count == 0.0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)

    def _parts(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            yield parameter, self.buffer[start:stop].view(parameter.shape)
            start = stop


class PlainAdapter:
    """Connects a module that no framework wraps."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], sharing: GradientSharing) -> None:
        self._sharing = sharing
        self._parameters = list(parameters)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        self._adopt()
        self._peers: Peers | None = None
        self._launched: list[tuple[Bucket, torch.futures.Future[torch.Tensor]]] = []
        self._enabled = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local, for all micro-batches but the last."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def broadcast_buffers(self, wanted: bool) -> None:
        """Do nothing: a plain module broadcasts no buffers."""

    @torch.no_grad()
    def before_step(self) -> None:
        """Refuse a step on gradients that were not shared; share those of thawed parameters."""
        if self._peers is not None:
            raise RuntimeError(
                "the last backward was interrupted by an error, so gradients are only partly "
                "shared and ranks may be out of step; restart from a checkpoint"
            )
        level = self._sharing.level
        for bucket in self._adopt():
            if level is not None and self._enabled:
                peers = self._sharing.peers(level)
                self._sharing.wait(self._sharing.share(bucket.pack(), peers), peers)
                bucket.unpack()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _adopt(self) -> list[Bucket]:
        """Make buckets for parameters that require gradients and have none yet."""
        new = [p for p in self._parameters if p.requires_grad and p not in self._bucket_of]
        buckets = _buckets(new)
        self._buckets += buckets
        self._bucket_of |= {p: bucket for bucket in buckets for p in bucket.parameters}
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in new
        ]
        return buckets

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> None:
        level = self._sharing.level
        if not self._enabled or level is None:
            return
        if self._peers is None:
            self._peers = self._sharing.peers(level)
            Variable._execution_engine.queue_callback(self._finish)
        assert isinstance(parameter, torch.nn.Parameter)
        self._bucket_of[parameter].missing.discard(parameter)
        for bucket in self._buckets[len(self._launched) :]:
            if bucket.missing:
                break
            self._launch(bucket)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[len(self._launched) :]:
            self._launch(bucket)
        assert self._peers is not None
        for bucket, future in self._launched:
            self._sharing.wait(future, self._peers)
            bucket.unpack()
            bucket.missing = set(bucket.parameters)
        self._launched.clear()
        self._peers = None

    def _launch(self, bucket: Bucket) -> None:
        assert self._peers is not None
        self._launched.append((bucket, self._sharing.share(bucket.pack(), self._peers)))


def _buckets(parameters: list[torch.nn.Parameter]) -> list[Bucket]:
    """Group parameters of one dtype and device, last first, as backward comes to them."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[torch.nn.Parameter]]] = {}
    for parameter in reversed(parameters):
        lists = groups.setdefault((parameter.dtype, parameter.device), [[]])
        filled = sum(p.numel() * p.element_size() for p in lists[-1])
        if lists[-1] and filled + parameter.numel() * parameter.element_size() > BUCKET_BYTES:
            lists.append([])
        lists[-1].append(parameter)
    return [Bucket(members) for lists in groups.values() for members in lists if members]
