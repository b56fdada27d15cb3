"""Gradients of a plain module: buckets of our own, filled while backward runs.

[Note: order of collectives] Messages meet by their order, so all ranks launch the same ones in one
order, whatever happens first on each. Here a bucket that is complete waits for the ones before it,
and what is left when backward ends (parameters that this rank did not use) is launched then.
Launching whatever happens to be complete would pair different buckets on different ranks.
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

from loosestep.comm.flat.cuts import Run, Runs, together
from loosestep.errors import NotFinite
from loosestep.gradients.sharing import GradientSharing, check_dense, mean_future

Parameter = tuple[str, torch.nn.Parameter]  # with its name

# Given a level, the parameters that are new there and those of them that ``attach`` has not seen:
# compares them, brings the latter to one start, and raises on all ranks where they differ.
Meeting = Callable[[str, list[Parameter], list[Parameter]], None]

SMALL_BUCKET = 2 << 20  # bytes: below, a message's own time counts for more than its size


class Bucket:
    """Gradients that travel together, and flags: which were used, and whether there are others."""

    def __init__(self, named: list[Parameter]) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.runs = Runs(tuple(Run(name, 0, parameter.numel()) for name, parameter in named))
        self.missing = set(self.parameters)
        self.launched = False  # in this backward
        self.news = False  # whether this rank has parameters in no bucket; once unpacked, any
        self.num_flags = len(self.parameters) + 1
        self.numel = self.runs.numel + self.num_flags

    def pack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the gradients in; one that this rank does not have counts as zero."""
        for parameter, part in self._parts(buffer):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        used = [float(parameter.grad is not None) for parameter in self.parameters]
        buffer[-self.num_flags :] = torch.tensor([*used, float(self.news)])
        return buffer

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy the means out; what no rank used keeps no gradient, so nothing decays it."""
        flags = self.read_flags(buffer)
        for used, (parameter, part) in zip(flags, self._parts(buffer), strict=True):
            if used:
                self._give(parameter, part)

    def read_flags(self, buffer: torch.Tensor) -> list[bool]:
        """Return which parameters any rank used, and take in if any rank has news."""
        *used, news = (bool(count) for count in buffer[-self.num_flags :].tolist())
        self.news = news
        return used

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """Note that backward has made a gradient."""
        if self.launched:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one "
                "backward, after the first was shared: checkpoints with use_reentrant=True run "
                "backward inside backward (use use_reentrant=False), or an error has interrupted "
                "the last backward (restart from a checkpoint)"
            )
        if parameter.grad is not None:
            check_dense(parameter.grad, f"a parameter of shape {tuple(parameter.shape)}")
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
        for parameter, (start, stop) in zip(self.parameters, self.runs.bounds, strict=True):
            yield parameter, self._view(buffer[start:stop], parameter)

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
        find: Callable[[], Iterable[Parameter]],  # the module's, as it is now
        sharing: GradientSharing,
        meet: Meeting,
        carrier: Carrier | None = None,
    ) -> None:
        self._sharing, self._carrier = sharing, carrier or ToAll(sharing)
        self._find, self._meet = find, meet
        self._at_attach = {parameter for _, parameter in find()}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        try:
            self._adopt()
        except BaseException:
            self.close()
            raise
        self._level: str | None = None  # that this backward shares on
        self._news = False  # whether this backward began with parameters in no bucket
        self._shared = False  # whether gradients were shared since the last step
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
        """Refuse a step on gradients that were not shared; share those of new parameters."""
        if self._level is not None:
            raise RuntimeError(
                "the last backward was interrupted by an error, so gradients are only partly "
                "shared and ranks may be out of step; restart from a checkpoint"
            )
        level, shared, self._shared = self._sharing.due.gradients, self._shared, False
        # After a backward that shared, what is new is left to the next one, which asks all ranks.
        if level is not None and self._enabled and not shared and self._has_news(level):
            self._take_in(level)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._carrier.close()

    def _adopt(self) -> list[Bucket]:
        """Make buckets for parameters that require gradients and have none yet."""
        new, carrier = self._without_bucket(), self._carrier
        divided = _divide(new, carrier.bucket_bytes, carrier.bucket_share)
        buckets = [carrier.bucket_type(members) for members in divided]
        if buckets:
            self._carrier.adopt(buckets)
        self._buckets += buckets
        self._bucket_of |= {p: bucket for bucket in buckets for p in bucket.parameters}
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for _, p in new
        ]
        return buckets

    def _without_bucket(self) -> list[Parameter]:
        """Return what was thawed or added to the module since the last look."""
        return [(n, p) for n, p in self._find() if p.requires_grad and p not in self._bucket_of]

    def _has_news(self, level: str) -> bool:
        """Say whether there are new parameters; while no bucket can tell, all ranks are asked."""
        news, peers = bool(self._without_bucket()), self._sharing.peers(level)
        if self._buckets or peers.size == 1:
            return news
        told = torch.tensor([float(news)], device=peers.device_for(torch.device("cpu")))
        self._sharing.wait(mean_future(told, peers.group.process_group), peers)
        return bool(told.item())

    def _take_in(self, level: str) -> None:
        """Make buckets for new parameters and share their gradients, on all ranks or on none."""
        new = self._without_bucket()
        self._meet(level, new, [(name, p) for name, p in new if p not in self._at_attach])
        for bucket in self._adopt():
            self._carrier.launch(bucket, level)()
        self._sharing.settle()

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> None:
        level = self._sharing.due.gradients
        if not self._enabled:
            return
        if level is None:
            self._carrier.check_local()
            return
        if self._level is None:
            self._carrier.before_backward()
            self._level, self._news = level, bool(self._without_bucket())
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
        try:
            while self._landing:
                self._land()
        finally:
            self._sharing.settle()
        self._sharing.stood_still(time.perf_counter() - began)
        for bucket in self._buckets:
            bucket.reset()
        level, error = self._level, self._not_finite
        self._num_launched, self._level, self._not_finite, self._shared = 0, None, None, True
        if error is not None:
            raise error
        if level is not None and any(bucket.news for bucket in self._buckets):
            self._take_in(level)

    def _launch(self, bucket: Bucket) -> None:
        assert self._level is not None
        most = self._carrier.most_under_way
        while most is not None and len(self._landing) >= most:
            self._land()
        bucket.news = self._news
        self._landing.append(self._carrier.launch(bucket, self._level))
        bucket.launched = True
        self._num_launched += 1

    def _land(self) -> None:
        """Take in the oldest bucket; the others come too if its values were not finite."""
        try:
            self._landing.popleft()()
        except NotFinite as error:  # on all ranks, so they can all skip the step and go on
            self._not_finite = self._not_finite or error


def _divide(named: list[Parameter], bucket_bytes: int, share: float = 1.0) -> list[list[Parameter]]:
    """Group parameters of one dtype and device, last first, as backward comes to them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for name, parameter in reversed(named):
        groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))

    def room(left: int) -> int:
        return min(bucket_bytes, max(SMALL_BUCKET, int(left * share)))

    return [
        group[first:last]
        for group in groups.values()
        for first, last in together([p.nbytes for _, p in group], room)
    ]
