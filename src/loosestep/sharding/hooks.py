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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.flat.cuts import following, together
from loosestep.gradients.backward import Backward, usage_of
from loosestep.gradients.sharing import as_parameters, check_no_sparse_parts, finished
from loosestep.sharding.plans import AfterLast, Arrival, ByHook, EachBucket, Plan, Reduction
from loosestep.sharding.recognize import is_sharded, is_wrapper, scaler_of, unwrap_optimizer
from loosestep.sharding.stand_in import forget_spent, spend

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

PIECE_BYTES = 8 << 20  # of a bucket that travel together; smaller: more messages, less idle time

_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
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
    zero = _checked(hook, ddp, zero)
    return _hook_function(Overlap(hook, ddp, zero, AfterLast(zero)))


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
    shard_buckets: bool = False,
) -> Hook:
    """Return a DDP hook that steps every bucket's parameters while backward goes on.

    The same as ``hook_with_zero_step``, earlier. With a clip norm or a scaler, which need all
    gradients, and with an optimizer class that is not known to treat every parameter on its own,
    the step comes after the last bucket here too. A parameter that is also used detached from the
    graph must not change before backward ends: use ``hook_with_zero_step`` then.
    """
    zero = _checked(hook, ddp, zero)
    early = zero.kind.by_parameter and not zero.options.needs_all_gradients
    return _hook_function(Overlap(hook, ddp, zero, EachBucket(zero) if early else AfterLast(zero)))


def _hook_function(overlap: "Overlap") -> Hook:
    def zero_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return overlap.bucket(state, bucket)

    return zero_hook


class Overlap:
    """A DDP module whose backward takes a sharded optimizer's step."""

    def __init__(
        self, hook: Hook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", plan: Plan
    ) -> None:
        self._hook, self._zero, self._plan = hook, zero, plan
        self._parameters = list(_reduced(ddp).values())
        self._usage = usage_of(ddp, self._parameters)
        self._backward = Backward(self._finish, lambda: spend(self._parameters))
        zero.in_backward.shadowed = self._backward.finish
        ddp.register_forward_pre_hook(lambda *_: self._before_forward())
        _hooked.update((ddp, zero))

    @torch.no_grad()
    def bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Launch one bucket's gradients; DDP calls this in the same order on all ranks."""
        if bucket.index() == 0:
            self._backward.begin()
        future = self._launch(state, bucket)
        if bucket.is_last():
            self._backward.end()
        return future

    def _launch(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._hook is allreduce_hook and _same_ranks(state, self._zero.process_group):
            # Through memory nothing is on its way while a rank computes, so nothing is gained.
            most = PIECE_BYTES if self._zero.wire.networked else bucket.buffer().nbytes
            buffer = as_parameters(bucket.parameters(), bucket.buffer())
            for parameters, piece in _pieces(bucket.parameters(), buffer, most):
                self._plan.make_room()
                self._arrive(parameters, self._zero.wire.start_reduce(parameters, piece))
            return finished(bucket.buffer())
        future = self._hook(state, bucket)
        self._arrive(bucket.parameters(), ByHook(self._zero, bucket.parameters(), future))
        return future

    def _arrive(self, parameters: Sequence[torch.Tensor], reduction: Reduction) -> None:
        used = None if self._usage is None else self._usage.flags(parameters)
        self._plan.arrive(Arrival(self._zero, parameters, reduction, used))

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():  # DDP would complain too, of parameters that were not used
            self._backward.check_whole()
        forget_spent(self._parameters)

    def _finish(self) -> None:
        self._plan.finish()
        self._zero.finish()
        if self._usage is not None:
            self._usage.clear()


def _pieces(
    parameters: Sequence[torch.Tensor], buffer: torch.Tensor, most: int
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Cut a bucket between parameters: one piece can be stepped while the next is on its way."""
    sizes = [parameter.numel() for parameter in parameters]
    groups = together(sizes, lambda left: most // buffer.element_size())
    bounds = following(sum(sizes[first:last]) for first, last in groups)
    for (first, last), (start, stop) in zip(groups, bounds, strict=True):
        yield list(parameters[first:last]), buffer[start:stop]


def _same_ranks(state: Any, group: dist.ProcessGroup) -> bool:
    """Say whether an all-reduce hook with this state averages over the optimizer's ranks."""
    if state is None:  # for torch's hook the world, which a subgroup's ranks would wait for
        return True
    if not isinstance(state, dist.ProcessGroup):
        return False
    return dist.get_process_group_ranks(state) == dist.get_process_group_ranks(group)


def _checked(hook: Any, ddp: Any, zero: Any) -> "ZeroRedundancyOptimizer":
    """Return the sharded optimizer, out of a framework's wrapper; raise for what does not fit."""
    if not callable(hook):
        raise TypeError(f"hook must be a DDP communication hook, got {hook!r}; give allreduce_hook")
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel module, got {type(ddp).__name__}")
    scaler = scaler_of(zero)
    zero = unwrap_optimizer(zero) if is_wrapper(zero) else zero
    if not is_sharded(zero):
        raise TypeError(
            f"zero must be a loosestep.ZeroRedundancyOptimizer, got {type(zero).__name__}"
        )
    if scaler is not None and scaler.is_enabled() and zero.options.scaler is not scaler:
        raise ValueError(
            "the optimizer's wrapper has a GradScaler, which cannot unscale what is stepped inside "
            "backward; make the optimizer with zero_options=ZeroOptions(scaler=scaler)"
        )
    _ = zero.in_backward  # raises where the optimizer was not made for hooks
    theirs, ours = dist.get_process_group_ranks(ddp.process_group), zero.process_group
    if theirs != dist.get_process_group_ranks(ours):
        raise ValueError(
            f"DDP and the optimizer must have the same ranks: DDP has {theirs}, the optimizer "
            f"{dist.get_process_group_ranks(ours)}; give both the same process_group"
        )
    check_no_sparse_parts(ddp)
    _check_parameters(ddp, zero)
    if ddp in _hooked or zero in _hooked:
        which = "DDP module" if ddp in _hooked else "optimizer"
        raise ValueError(f"this {which} has a ZeRO hook already; make one hook for each pair")
    return zero


def _reduced(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the parameters that DDP reduces the gradients of, by name."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {n: p for n, p in named if p.requires_grad and n not in ignored}


def _check_parameters(ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer") -> None:
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
