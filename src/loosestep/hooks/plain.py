"""Gradients of a plain module: buckets of our own, filled while backward runs.

Buckets are launched in one fixed order on every rank. [Note: order of collectives] A bucket that
is complete waits for the ones before it, and what is left when backward ends (parameters that
this rank did not use) is launched then. Launching whatever happens to be complete would pair
different buckets on different ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from loosestep.errors import NotFinite
from loosestep.hooks.gradients import GradientSharing

SMALL_BUCKET = 2 << 20  # bytes: below, a message's own time counts for more than its size


class Bucket:
    """Gradients that travel together, and one number a parameter that says if it was used."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self.launched = False  # in this backward
        self.num_flags = len(parameters)
        self.numel = sum(p.numel() for p in parameters) + self.num_flags

    def pack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the gradients in; one that this rank does not have counts as zero."""
        for parameter, part in self._parts(buffer):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        used = [float(parameter.grad is not None) for parameter in self.parameters]
        buffer[-self.num_flags :] = torch.tensor(used)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy the means out; what no rank used keeps no gradient, so nothing decays it."""
        used = buffer[-self.num_flags :].tolist()
        for count, (parameter, part) in zip(used, self._parts(buffer), strict=True):
            if count:
                self._give(parameter, part)

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """Note that backward has made a gradient."""
        if self.launched:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one "
                "backward, after the first was shared: checkpoints with use_reentrant=True run "
                "backward inside backward (use use_reentrant=False), or an error has interrupted "
                "the last backward (restart from a checkpoint)"
            )
        self.take(parameter)
        self.missing.discard(parameter)

    def reset(self) -> None:
        """Await the next backward."""
        self.missing, self.launched = set(self.parameters), False

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Do nothing: a gradient that is ready is packed with the others."""

    def _give(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part)

    def _parts(self, buffer: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            yield parameter, self._view(buffer[start:stop], parameter)
            start = stop

    def _view(self, piece: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        # By position and not by memory, which one rank may have in another format.
        return piece.view(parameter.shape)


class Carrier(Protocol):
    """How a bucket's gradients are shared."""

    bucket_bytes: int  # larger: fewer messages; smaller: less memory, earlier overlap
    bucket_share: float  # of what is left; less: the last ones, which backward awaits, are smaller
    most_under_way: int | None  # buckets at once; fewer: less memory, more waiting in backward
    bucket_type: type[Bucket]

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Make room for new buckets; all ranks come here together."""

    def launch(self, bucket: Bucket, level: str) -> Callable[[], None]:
        """Start to share; what is returned waits and puts the result where it belongs."""

    def before_backward(self) -> None:
        """Refuse where gradients of before are still waiting to be used."""

    def check_local(self) -> None:
        """Raise where gradients cannot stay local."""

    def close(self) -> None:
        """Leave everything as it was."""


class ToAll:
    """Every rank gets the mean of every gradient."""

    bucket_bytes = 25 << 20
    bucket_share = 1.0
    most_under_way: int | None = None
    bucket_type: type[Bucket] = Bucket

    def __init__(self, sharing: GradientSharing) -> None:
        self._sharing = sharing
        self._buffers: dict[Bucket, torch.Tensor] = {}

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Give every bucket a buffer, made when it is first used."""

    def launch(self, bucket: Bucket, level: str) -> Callable[[], None]:
        """Launch the mean of the bucket over the level's group."""
        if bucket not in self._buffers:
            self._buffers[bucket] = bucket.parameters[0].new_empty(bucket.numel)
        buffer, peers = self._buffers[bucket], self._sharing.peers(level)
        future = self._sharing.share(bucket.pack(buffer), peers)

        def land() -> None:
            self._sharing.wait(future, peers)
            bucket.unpack(buffer)

        return land

    def before_backward(self) -> None:
        """Do nothing: gradients add up, as without us."""

    def check_local(self) -> None:
        """Do nothing: they may."""

    def close(self) -> None:
        """Do nothing."""


class PlainAdapter:
    """Connects a module that no framework wraps."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        sharing: GradientSharing,
        carrier: Carrier | None = None,
    ) -> None:
        self._sharing, self._carrier = sharing, carrier or ToAll(sharing)
        self._parameters = list(parameters)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        try:
            self._adopt()
        except BaseException:
            self.close()
            raise
        self._level: str | None = None  # that this backward shares on
        self._num_launched = 0
        self._landing: deque[Callable[[], None]] = deque()
        self._not_finite: NotFinite | None = None  # the first of this backward
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
        if self._level is not None:
            raise RuntimeError(
                "the last backward was interrupted by an error, so gradients are only partly "
                "shared and ranks may be out of step; restart from a checkpoint"
            )
        level = self._sharing.level
        for bucket in self._adopt():
            if level is not None and self._enabled:
                self._carrier.launch(bucket, level)()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._carrier.close()

    def _adopt(self) -> list[Bucket]:
        """Make buckets for parameters that require gradients and have none yet."""
        new = [p for p in self._parameters if p.requires_grad and p not in self._bucket_of]
        carrier = self._carrier
        divided = _divide(new, carrier.bucket_bytes, carrier.bucket_share)
        buckets = [carrier.bucket_type(members) for members in divided]
        if buckets:
            self._carrier.adopt(buckets)
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
        if not self._enabled:
            return
        if level is None:
            self._carrier.check_local()
            return
        if self._level is None:
            self._carrier.before_backward()
            self._level = level
            Variable._execution_engine.queue_callback(self._finish)
        assert isinstance(parameter, torch.nn.Parameter)
        self._bucket_of[parameter].ready(parameter)
        for bucket in self._buckets[self._num_launched :]:
            if bucket.missing:
                break
            self._launch(bucket)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[self._num_launched :]:
            self._launch(bucket)
        began = time.perf_counter()
        while self._landing:
            self._land()
        self._sharing.stood_still(time.perf_counter() - began)
        for bucket in self._buckets:
            bucket.reset()
        self._num_launched, self._level = 0, None
        error, self._not_finite = self._not_finite, None
        if error is not None:
            raise error

    def _launch(self, bucket: Bucket) -> None:
        assert self._level is not None
        most = self._carrier.most_under_way
        while most is not None and len(self._landing) >= most:
            self._land()
        self._landing.append(self._carrier.launch(bucket, self._level))
        bucket.launched = True
        self._num_launched += 1

    def _land(self) -> None:
        """Take in the oldest bucket; the others come too if its values were not finite."""
        try:
            self._landing.popleft()()
        except NotFinite as error:  # on all ranks, so they can all skip the step and go on
            self._not_finite = self._not_finite or error


def _divide(
    parameters: list[torch.nn.Parameter], bucket_bytes: int, share: float = 1.0
) -> list[list[torch.nn.Parameter]]:
    """Group parameters of one dtype and device, last first, as backward comes to them."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in reversed(parameters):
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [bucket for group in groups.values() for bucket in _cut(group, bucket_bytes, share)]


def _cut(
    parameters: list[torch.nn.Parameter], bucket_bytes: int, share: float
) -> Iterator[list[torch.nn.Parameter]]:
    left = sum(p.nbytes for p in parameters)
    bucket: list[torch.nn.Parameter] = []
    filled, most = 0, _room(left, bucket_bytes, share)
    for parameter in parameters:
        if bucket and filled + parameter.nbytes > most:
            yield bucket
            left -= filled
            bucket, filled, most = [], 0, _room(left, bucket_bytes, share)
        bucket.append(parameter)
        filled += parameter.nbytes
    yield bucket


def _room(left: int, bucket_bytes: int, share: float) -> int:
    return min(bucket_bytes, max(SMALL_BUCKET, int(left * share)))
