"""Gradients of a sharded optimizer under ``attach``: each goes to its owner while backward runs.

What comes out is kept in ``ShardGradients`` until ``optimizer.step()``. ``param.grad`` is a
``DividedGradient`` by then: nobody has all of it, and a part would be mistaken for the whole.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Peers
from loosestep.errors import NotAttachable
from loosestep.gradients.backward import Backward, usage_of
from loosestep.gradients.plain import Bucket
from loosestep.gradients.sharing import GradientSharing, as_parameters, finished
from loosestep.sharding.divided import TWICE, Divided, DividedGradient
from loosestep.sharding.ownership import laid_out_like
from loosestep.sharding.plans import REDUCTIONS_UNDER_WAY, Arrival, Reduction
from loosestep.sharding.shard_set import Parts
from loosestep.sharding.stepping import Given, WholeGradients
from loosestep.sharding.wire import Reducing

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer


class ShardGradients:
    """The parts that this rank has of the mean gradients, from backward until the step."""

    def __init__(self, zero: "ZeroRedundancyOptimizer") -> None:
        self._zero = zero
        self._begin()

    def add(self, used: Sequence[torch.Tensor], parts: Parts, reduction: Reduction) -> None:
        """Keep one bucket's, of parameters that any rank has used."""
        self._parameters += used
        self._parts |= {parameter: parts[parameter] for parameter in used if parameter in parts}
        self._reductions.append(reduction)

    def show(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Let ``param.grad`` stand for what has come (all of it, by default).

        Nobody else may write there any more before the step.
        """
        self._divided.show(self._parameters if parameters is None else parameters)

    def given(self) -> Given:
        """Return what there is, once no gradient is left that has not gone to its owner."""
        present = {p: p.grad for p in self._trained() if p.grad is not None}
        left = [
            self._zero.names[p] for p, g in present.items() if not isinstance(g, DividedGradient)
        ]
        if left:
            raise RuntimeError(
                f"gradients of {left[:3]} ({len(left)} in all) have not been shared, so nobody "
                "can step these parameters: run the last micro-batch outside no_sync(), and "
                "attach again after parameters were added"
            )
        return Given(self._parameters, self._parts)

    def borrowed(self) -> Given:
        """Raise: each rank has its own part only."""
        raise RuntimeError(
            "Join cannot be used under attach: gradients go to their owners there and cannot be "
            "borrowed; give all ranks the same number of batches"
        )

    def _trained(self) -> list[torch.Tensor]:
        return [p for p in self._zero.parameters if p.requires_grad]

    def held(self) -> list[torch.Tensor]:
        """Return the parts."""
        return list(self._parts.values())

    def clear(self) -> None:
        """Forget them and keep their room."""
        self._divided.close()
        reductions = self._reductions
        self._begin()
        for reduction in reductions:
            reduction.close()

    def check_empty(self) -> None:
        """Raise where gradients are left that no step has used."""
        if self._reductions:
            raise RuntimeError(TWICE)

    def _begin(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._parts: Parts = {}
        self._reductions: list[Reduction] = []
        self._divided = Divided(
            self._parameters, self._parts, lambda: self._zero.wire.parameter_peers
        )


class ToOwners:
    """Reduces flat gradients to their owners, over the level that the schedule names.

    A level wider than the optimizer's group needs one more mean, of this rank's parts with those
    at its place in the other groups: ``across`` returns these peers.
    """

    def __init__(
        self,
        zero: "ZeroRedundancyOptimizer",
        sharing: GradientSharing,
        store: ShardGradients,
        across: Callable[[str], Peers],
        weights: tuple[float, ...] | None = None,
    ) -> None:
        self.zero, self.store = zero, store
        self._sharing, self._across, self._weights = sharing, across, weights

    def launch(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> Reducing:
        """Start to reduce the gradients of these parameters."""
        foreign = [p for p in parameters if p not in self.zero.names]
        if foreign:
            raise NotAttachable(
                f"{len(foreign)} parameters of the model have gradients and are not the "
                f"optimizer's (the first has shape {tuple(foreign[0].shape)}), so nobody owns "
                "them; give it all trained parameters, then attach"
            )
        reduction = self.zero.wire.start_reduce(parameters, buffer, self._weights)
        self._sharing.count(reduction.traffic)
        return reduction

    def wait(self, reduction: Reducing, level: str) -> torch.Tensor:
        """Return the level's mean of what this rank owns, packed."""
        packed = reduction.wait()
        peers = self._across(level)
        self._sharing.wait(self._sharing.share(packed, peers), peers)
        self._sharing.arrived()
        return packed

    def take_over(self) -> None:
        """Let the optimizer find its gradients here."""
        self.zero.gradients = self.store
        self._sharing.step_traffic = lambda: self.zero.wire.take_moved()

    def close(self) -> None:
        """Let the optimizer find its gradients where it did before."""
        self.store.clear()
        self.zero.gradients = WholeGradients(self.zero)

    def level(self) -> str:
        """Return the level that shares gradients at this step."""
        level = self._sharing.due.gradients
        if level is None:
            raise RuntimeError(
                "the schedule lets gradients stay local at this step, but every rank steps only "
                "its shard and needs the others' gradients; name a level that holds the "
                "optimizer's group, such as gradients='host'"
            )
        return level


class MemoryBucket(Bucket):
    """A bucket with gradients in their parameters' order of memory, which slices count in."""

    def _view(self, piece: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        return laid_out_like(parameter, piece)


class ShardedBuckets:
    """Buckets of a plain module; gradients are freed as soon as they are packed.

    ``most_under_way`` bounds the buckets that wait to be read by their owners.
    """

    bucket_bytes = 8 << 20  # small: what is under way is in memory twice
    bucket_share = 1.0
    bucket_type: type[Bucket] = MemoryBucket

    def __init__(self, owners: ToOwners, most_under_way: int) -> None:
        self._owners = owners
        self.most_under_way: int | None = most_under_way

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Do nothing: room is taken when gradients are packed."""

    def launch(self, bucket: Bucket, level: str) -> Callable[[], None]:
        """Send every gradient to its owner and free it."""
        parameters = bucket.parameters
        kind = (parameters[0].dtype, parameters[0].device)
        buffer = bucket.pack(STAGING.take(bucket.numel, *kind))
        for parameter in parameters:
            parameter.grad = None
        reduction = self._owners.launch(parameters, buffer)

        def land() -> None:
            packed = self._owners.wait(reduction, level)
            flags = bucket.read_flags(packed)
            used = [parameter for parameter, flag in zip(parameters, flags, strict=True) if flag]
            parts = self._owners.zero.wire.parts_of(parameters, packed)
            self._owners.store.add(used, parts, reduction)
            self._owners.store.show(used)
            reduction.release()
            STAGING.give(buffer)

        return land

    def before_backward(self) -> None:
        """Refuse gradients that would have to be added to those of before."""
        self._owners.store.check_empty()

    def check_local(self) -> None:
        """Raise: every rank needs the others' gradients."""
        self._owners.level()

    def close(self) -> None:
        """Take nothing more."""
        self._owners.close()


class Wide:
    """A reduction whose parts become the mean of a level wider than the optimizer's group."""

    def __init__(self, owners: ToOwners, reduction: Reducing, parameters: Sequence[torch.Tensor]):
        self._owners, self._reduction, self._parameters = owners, reduction, parameters
        self._level = owners.level()

    def parts(self) -> Parts:
        """Wait, and return this rank's part of every gradient."""
        packed = self._owners.wait(self._reduction, self._level)
        return self._owners.zero.wire.parts_of(self._parameters, packed)

    def release(self) -> None:
        """Return when the bucket's memory is this rank's alone again."""
        self._reduction.release()

    def close(self) -> None:
        """Let go of the parts."""
        self._reduction.close()


class ShardedDDP:
    """Buckets of a DDP module, which keeps their memory."""

    def __init__(self, module: DistributedDataParallel, owners: ToOwners) -> None:
        self._owners = owners
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._backward = Backward(self._finish, self._drop)
        self._under_way: deque[Arrival] = deque()
        self._usage = usage_of(module, self._parameters)

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send one bucket's gradients to their owners."""
        if bucket.index() == 0:
            self._owners.store.check_empty()
            self._backward.begin()
        parameters = bucket.parameters()
        flags = None if self._usage is None else self._usage.flags(parameters)
        launched = self._owners.launch(parameters, as_parameters(parameters, bucket.buffer()))
        reduction = Wide(self._owners, launched, parameters)
        self._under_way.append(Arrival(self._owners.zero, parameters, reduction, flags))
        if len(self._under_way) > REDUCTIONS_UNDER_WAY:
            self._take_in().release()
        if bucket.is_last():
            self._backward.end()
        return finished(bucket.buffer())

    def close(self) -> None:
        """Stop watching the parameters, and take nothing more."""
        self._owners.close()
        if self._usage is not None:
            self._usage.close()

    def _finish(self) -> None:
        reductions = [self._take_in() for _ in range(len(self._under_way))]
        for reduction in reductions:
            reduction.release()
        if self._usage is not None:
            self._usage.clear()

    def _take_in(self) -> Reduction:
        """Keep the oldest bucket's gradients."""
        arrival = self._under_way.popleft()
        self._owners.store.add(*arrival.wait(), arrival.reduction)
        return arrival.reduction

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._owners.store.show()
