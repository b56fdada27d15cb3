"""Gradients of a DistributedDataParallel module: one hook for the life of the module."""

import gc
import weakref
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.living import living
from loosestep.comm.torch_versions import (
    active_ddp_module,
    broadcast_buffers,
    buffers_are_broadcast,
)
from loosestep.errors import NotAttachable
from loosestep.gradients.backward import Landing
from loosestep.gradients.sharing import GradientSharing, finished, mean_future


class BucketSharing(Protocol):
    """What is done with the buckets of a DDP module."""

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Share one bucket's gradients."""

    def close(self) -> None:
        """Leave everything as it was."""


class WholeBuckets:
    """Every rank gets the mean of every gradient."""

    def __init__(self, sharing: GradientSharing) -> None:
        self._sharing, self._landing = sharing, Landing()

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Share it over the level that the schedule names, if any."""
        level = self._sharing.due.gradients
        if level is None:
            return finished(bucket.buffer())
        peers = self._sharing.peers(level)
        future = self._sharing.share(bucket.buffer(), peers)
        self._landing.add(bucket, lambda: self._sharing.wait(future, peers))
        return future

    def close(self) -> None:
        """Do nothing."""


class Dispatcher:
    """The hook that DDP is given once; what it does can change."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.sharing: BucketSharing | None = None  # None: DDP's plain all-reduce

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Share one bucket as the current strategy says."""
        if self.sharing is None:
            return mean_future(bucket.buffer(), self.process_group)
        return self.sharing.bucket(bucket)


def dispatch(dispatcher: Dispatcher, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call the dispatcher (DDP wants a function with a state)."""
    return dispatcher(bucket)


_dispatchers: weakref.WeakKeyDictionary[DistributedDataParallel, Dispatcher] = (
    weakref.WeakKeyDictionary()
)


class DDPAdapter:
    """Connects a DDP module: its gradients, and its broadcast of buffers."""

    def __init__(
        self, module: DistributedDataParallel, sharing: GradientSharing, buckets: BucketSharing
    ) -> None:
        self._module, self._sharing, self._buckets = module, sharing, buckets
        self._dispatcher = free_dispatcher(module)
        self._dispatcher.sharing = buckets
        self._broadcasts = buffers_are_broadcast(module)
        self._at_attach = set(module.parameters())

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local, for all micro-batches but the last."""
        return self._module.no_sync()

    def broadcast_buffers(self, wanted: bool) -> None:
        """Let DDP broadcast buffers at every forward, or not; never more than it did before."""
        broadcast_buffers(self._module, self._broadcasts and wanted)

    def before_step(self) -> None:
        """Refuse parameters that DDP does not know; it shares the others inside backward."""
        if self._sharing.due.gradients is None:
            return  # nobody's gradients were to be shared
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None and parameter not in self._at_attach:
                raise RuntimeError(
                    f"{name!r} was added after attach, and DDP shares the gradients of parameters "
                    "that it was made with only; detach(), wrap the model anew and attach that, "
                    "or attach the plain module, which takes new parameters in"
                )

    def close(self) -> None:
        """Turn the hook into the plain all-reduce: DDP keeps it for life."""
        self._buckets.close()
        self._dispatcher.sharing = None
        broadcast_buffers(self._module, self._broadcasts)


def check_in_no_ddp(module: torch.nn.Module) -> None:
    """Raise where a module shares parameters with a DDP module, which then shares gradients.

    A forward that was compiled before would not call the hook that is for those made later.
    """
    if isinstance(module, DistributedDataParallel):
        return
    if _ddp_around(module) is None:
        return
    gc.collect()  # DDP is a part of cycles: one that nobody holds any more may be found
    outer = _ddp_around(module)
    if outer is not None:
        raise _outer_ddp(module, outer)


def _ddp_around(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return a DDP module that shares gradients of some of a module's parameters."""
    trained = {p for p in module.parameters() if p.requires_grad}
    parts = set(module.modules())  # what is inside is told by name
    for outer in living([DistributedDataParallel]):
        if "module" not in outer._modules:  # its constructor has failed
            continue
        left_out = outer.parameters_to_ignore
        shared = (p for name, p in outer.module.named_parameters() if name not in left_out)
        if outer not in parts and not trained.isdisjoint(shared):
            return outer
    return None


def refuse_outer_ddp(module: torch.nn.Module, _: object) -> None:
    """Raise in a forward of DDP around ``module``: a hook for modules that are attached alone."""
    outer = active_ddp_module()
    if outer is not None:
        raise _outer_ddp(module, outer)


def _outer_ddp(module: torch.nn.Module, outer: torch.nn.Module) -> NotAttachable:
    return NotAttachable(
        f"this {type(module).__name__} was attached alone, but is inside {type(outer).__name__}, "
        "which shares every gradient itself; attach the module that is called: "
        "attach(ddp_model, ...), or do not wrap it"
    )


def check_no_ddp_inside(module: torch.nn.Module) -> None:
    """Raise where a part of a module is wrapped by DDP, which would share its gradients itself."""
    for name, part in module.named_modules():
        if part is not module and isinstance(part, DistributedDataParallel):
            raise NotAttachable(
                f"the part {name!r} of this {type(module).__name__} is a "
                f"{type(part).__name__}, which shares its gradients itself; attach that part, or "
                "do not wrap it"
            )


def free_dispatcher(module: DistributedDataParallel) -> Dispatcher:
    """Return a module's dispatcher; raise where the module is taken."""
    dispatcher = _dispatcher(module)
    if dispatcher.sharing is not None:
        raise NotAttachable("this DDP module is attached already; detach() it first")
    return dispatcher


def _dispatcher(module: DistributedDataParallel) -> Dispatcher:
    if module not in _dispatchers:
        dispatcher = Dispatcher(module.process_group)
        try:
            module.register_comm_hook(dispatcher, dispatch)
        except RuntimeError as error:
            raise NotAttachable(
                "this DDP module has a communication hook already, and DDP takes one for life: "
                f"wrap the model anew without it ({error})"
            ) from None
        _dispatchers[module] = dispatcher
    return _dispatchers[module]
