"""DDP hooks that run a sharded optimizer's step inside backward.

What happens, in order:

    a bucket is full          its gradients are launched on the way to their owners
    they have arrived         the owners step (at once, or when the last bucket is there)
    a step is done            its parameters are launched on the way back
    backward ends             everything is waited for; parameters are final

Nothing waits in a callback of the backend: Gloo's threads would then wait for themselves. Steps
between buckets run on a thread of their own, and what is left is done where DDP waits too, at the
end of backward. This file knows nothing of ownership.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.hooks.gradients import finished
from loosestep.optim.shard_set import Parts
from loosestep.optim.shard_wire import Gathering, Reducing
from loosestep.optim.spent import forget_spent, spend
from loosestep.optim.zero import ZeroRedundancyOptimizer

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

GATHERS_UNDER_WAY = 2  # more: more room for parameters that have come and wait to be unpacked
REDUCTIONS_UNDER_WAY = 64  # a neighbour's memory can be read at 128 places at once

_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a DDP hook that takes the sharded step when the last bucket's gradients are there.

    ``hook`` is how gradients are averaged. With the plain ``allreduce_hook`` they are reduced to
    their owners instead, which with the way back of the parameters moves as many bytes as DDP
    alone; any other hook runs as it is, and the parameters come on top. ``shard_buckets`` changes
    nothing: owners belong to parameters, so every bucket is divided in any case.

    Example::

        zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, lr=1e-3)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    _check(hook, ddp, zero)
    return _hook_function(Overlap(hook, ddp, zero, AfterLast(zero)))


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a DDP hook that steps every bucket's parameters while backward goes on.

    The same as ``hook_with_zero_step``, earlier. With a clip norm or a scaler, which need all
    gradients, and with an optimizer class that is not known to treat every parameter on its own,
    the step comes after the last bucket here too. A parameter that is also used detached from the
    graph must not change before backward ends: use ``hook_with_zero_step`` then.
    """
    _check(hook, ddp, zero)
    early = zero.kind.by_parameter and not zero.options.needs_all_gradients
    return _hook_function(Overlap(hook, ddp, zero, EachBucket(zero) if early else AfterLast(zero)))


def _hook_function(overlap: "Overlap") -> Hook:
    def zero_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return overlap.bucket(state, bucket)

    return zero_hook


class Reduction(Protocol):
    """A bucket's gradients on their way."""

    def parts(self) -> Parts:
        """Wait, and return this rank's part of every gradient."""

    def release(self) -> None:
        """Return when the bucket's memory is this rank's alone again."""

    def close(self) -> None:
        """Let go of the parts."""


class ByHook:
    """Gradients that a hook of the user's averages whole."""

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        parameters: Sequence[torch.Tensor],
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        self._zero, self._parameters, self.future = zero, parameters, future

    def parts(self) -> Parts:
        """Wait for the hook, and return this rank's part of what it returned."""
        value: Any = self.future.wait()
        buffer = value[0] if isinstance(value, (list, tuple)) else value
        return self._zero.wire.in_bucket(self._parameters, buffer.view(-1))

    def release(self) -> None:
        """Do nothing: nobody else reads the bucket."""

    def close(self) -> None:
        """Do nothing."""


class Arrival:
    """A bucket, and which of its parameters any rank has used."""

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        used: Sequence[bool] | None,
    ) -> None:
        self._zero, self._parameters, self.reduction = zero, parameters, reduction
        self._used = used  # by this rank; None: all of them, by all ranks

    def wait(self) -> tuple[list[torch.Tensor], Parts]:
        """Return the parameters that are to be stepped, and this rank's parts of gradients."""
        parts = self.reduction.parts()
        if self._used is None:
            return list(self._parameters), parts
        used = self._zero.wire.any_of(self._used, "agreeing which parameters were used")
        kept = [p for p, any_rank in zip(self._parameters, used, strict=True) if any_rank]
        return kept, {parameter: parts[parameter] for parameter in kept if parameter in parts}


class Plan(Protocol):
    """When the buckets of one backward are stepped."""

    def make_room(self) -> None:
        """Finish the oldest of too many reductions; all ranks do so at the same bucket."""

    def arrive(self, arrival: Arrival) -> None:
        """Take a bucket that has just been launched."""

    def finish(self) -> None:
        """Return when all parameters are final."""


class AfterLast:
    """One step when all gradients are there."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        self._begin()

    def make_room(self) -> None:
        """Take the oldest gradients in, and let the others have their memory back."""
        if len(self._arrivals) >= REDUCTIONS_UNDER_WAY:
            self._take_in(self._arrivals.popleft()).release()

    def arrive(self, arrival: Arrival) -> None:
        """Keep it."""
        self._arrivals.append(arrival)

    def finish(self) -> None:
        """Wait for all gradients, step, and bring the parameters back."""
        reductions = [self._take_in(arrival) for arrival in self._arrivals]
        if self._zero.step_params(self._parts):
            self._zero.wire.start_gather(self._parameters).wait()
        for reduction in reductions:
            reduction.release()
        for reduction in self._taken_in:
            reduction.close()
        self._begin()

    def _begin(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._taken_in: list[Reduction] = []
        self._parameters: list[torch.Tensor] = []
        self._parts: Parts = {}

    def _take_in(self, arrival: Arrival) -> Reduction:
        stepped, parts = arrival.wait()
        self._parameters += stepped
        self._parts |= parts
        self._taken_in.append(arrival.reduction)
        return arrival.reduction


class EachBucket:
    """A step for every bucket, on a thread of its own, in the order of the buckets.

    [Note: order of collectives] One thread does all of it, so that every rank gathers parameters
    in the same order, however its gradients come in.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loosestep-zero")
        self._steps: deque[Future[None]] = deque()
        # The memory of a reduction is released late: the others may still need it.
        self._stepped: deque[tuple[Gathering, Reduction]] = deque()

    def make_room(self) -> None:
        """Wait for the oldest step."""
        if len(self._steps) >= REDUCTIONS_UNDER_WAY:
            self._steps.popleft().result()

    def arrive(self, arrival: Arrival) -> None:
        """Step it when its turn comes."""
        self._steps.append(self._thread.submit(self._step, arrival))

    def finish(self) -> None:
        """Wait for all steps and gathers; raise what went wrong in the first that failed."""
        while self._steps:
            self._steps.popleft().result()
        while self._stepped:
            self._settle()

    def _step(self, arrival: Arrival) -> None:
        parameters, parts = arrival.wait()
        self._zero.step_params(parts)
        arrival.reduction.close()
        self._stepped.append((self._zero.wire.start_gather(parameters), arrival.reduction))
        while len(self._stepped) > GATHERS_UNDER_WAY:
            self._settle()

    def _settle(self) -> None:
        gathering, reduction = self._stepped.popleft()
        gathering.wait()
        reduction.release()


class Overlap:
    """A DDP module whose backward takes a sharded optimizer's step."""

    def __init__(
        self, hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, plan: Plan
    ) -> None:
        self._hook, self._zero, self._plan = hook, zero, plan
        self._parameters = list(_reduced(ddp).values())
        self._under_way = False
        self._used: set[torch.Tensor] | None = None
        if ddp.find_unused_parameters or ddp.static_graph:
            self._watch_use()
        zero.in_backward.shadowed = self._finish
        ddp.register_forward_pre_hook(lambda *_: self._before_forward())
        _hooked.update((ddp, zero))

    @torch.no_grad()
    def bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Launch one bucket's gradients; DDP calls this in the same order on all ranks."""
        if bucket.index() == 0:
            self._check_whole()
            self._under_way = True
        parameters, used = bucket.parameters(), None
        if self._used is not None:
            used = [parameter in self._used for parameter in parameters]
        reduction, future = self._launch(state, bucket)
        self._plan.arrive(Arrival(self._zero, parameters, reduction, used))
        if bucket.is_last():
            self._finish_with_backward()
        return future

    def _launch(
        self, state: Any, bucket: GradBucket
    ) -> tuple[Reduction, torch.futures.Future[torch.Tensor]]:
        if self._hook is allreduce_hook and _same_ranks(state, self._zero.process_group):
            self._plan.make_room()
            name = self._zero.names[bucket.parameters()[0]]
            reduction: Reducing = self._zero.wire.start_reduce(
                bucket.parameters(), bucket.buffer(), f"the bucket of {name}"
            )
            return reduction, finished(bucket.buffer())
        future = self._hook(state, bucket)
        return ByHook(self._zero, bucket.parameters(), future), future

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():  # DDP would complain too, of parameters that were not used
            self._check_whole()
        forget_spent(self._parameters)

    def _check_whole(self) -> None:
        if self._under_way:
            raise RuntimeError(
                "the last backward was interrupted by an error, so parameters are only partly "
                "stepped and ranks may be out of step; restart from a checkpoint"
            )

    def _finish_with_backward(self) -> None:
        # Not from the first bucket on: with reentrant checkpoints there are backwards inside
        # backward, and what is queued in one of them runs when that one ends.
        try:
            Variable._execution_engine.queue_callback(self._finish)
        except RuntimeError:  # no backward runs: a rank without batches shadows the others'
            return
        # After DDP's own end of backward, which is queued later and puts gradients back.
        Variable._execution_engine.queue_callback(self._spend_later)

    @torch.no_grad()
    def _finish(self) -> None:
        if not self._under_way:
            return
        self._plan.finish()
        self._zero.finish()
        self._under_way = False
        if self._used is not None:
            self._used.clear()

    def _spend_later(self) -> None:
        Variable._execution_engine.queue_callback(lambda: spend(self._parameters))

    def _watch_use(self) -> None:
        """Remember which parameters this rank has used since the last step."""
        used: set[torch.Tensor] = set()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(used.add)  # type: ignore[no-untyped-call]
        self._used = used


def _same_ranks(state: Any, group: dist.ProcessGroup) -> bool:
    """Say whether an all-reduce hook with this state averages over the optimizer's ranks."""
    given = state if state is not None else dist.group.WORLD
    if not isinstance(given, dist.ProcessGroup):
        return False
    return dist.get_process_group_ranks(given) == dist.get_process_group_ranks(group)


def _check(hook: Any, ddp: Any, zero: Any) -> None:
    if not callable(hook):
        raise TypeError(f"hook must be a DDP communication hook, got {hook!r}; give allreduce_hook")
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel module, got {type(ddp).__name__}")
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"zero must be a loosestep.ZeroRedundancyOptimizer, got {type(zero).__name__}"
        )
    _ = zero.in_backward  # raises where the optimizer was not made for hooks
    theirs, ours = dist.get_process_group_ranks(ddp.process_group), zero.process_group
    if theirs != dist.get_process_group_ranks(ours):
        raise ValueError(
            f"DDP and the optimizer must have the same ranks: DDP has {theirs}, the optimizer "
            f"{dist.get_process_group_ranks(ours)}; give both the same process_group"
        )
    _check_parameters(ddp, zero)
    if ddp in _hooked or zero in _hooked:
        which = "DDP module" if ddp in _hooked else "optimizer"
        raise ValueError(f"this {which} has a ZeRO hook already; make one hook for each pair")


def _reduced(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the parameters that DDP reduces the gradients of, by name."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {n: p for n, p in named if p.requires_grad and n not in ignored}


def _check_parameters(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    for name, module in ddp.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"module {name!r} has sparse gradients, which cannot be divided by position; make "
                "it with sparse=False"
            )
    reduced = _reduced(ddp)
    stepped = {p for p in zero.parameters if p.requires_grad}
    missing = [name for name, parameter in reduced.items() if parameter not in stepped]
    foreign = stepped - set(reduced.values())
    if missing or foreign:
        raise ValueError(
            f"the optimizer must have exactly DDP's trained parameters: {missing[:3] or 'none'} of "
            f"{len(missing)} are missing, {len(foreign)} are not DDP's; give it ddp.parameters()"
        )
