"""When the buckets of one backward are stepped: all together at its end, or each on its own.

A plan is handed every bucket when its gradients have been launched, and is told when backward ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from loosestep.comm.peers import Phase
from loosestep.gradients.sharing import as_parameters, wait_for
from loosestep.sharding.shard_set import Parts
from loosestep.sharding.wire import Gathering

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

GATHERS_UNDER_WAY = 2  # more: more room for parameters that have come and wait to be unpacked
REDUCTIONS_UNDER_WAY = 64  # a neighbour's memory can be read at 128 places at once


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
        phase = Phase("averaging gradients by the hook that was given")
        value = wait_for(self.future, self._zero.wire.gradient_peers.during(phase))
        buffer = value[0] if isinstance(value, (list, tuple)) else value
        # DDP converts too: a hook such as fp16_compress_wrapper(...) returns narrow gradients.
        wide = buffer.view(-1).to(self._parameters[0].dtype.to_real())
        values = as_parameters(self._parameters, wide)
        return self._zero.wire.in_bucket(self._parameters, values)

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

    One thread does all of it, so that every rank gathers parameters in the same order, however its
    gradients come in ([Note: order of collectives] in ``gradients/plain.py``).
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        # [Note: threads and groups] in comm/group.py.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loosestep-zero")
        self._steps: deque[Future[None]] = deque()
        self._failed = False
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
        if self._failed:  # the first one's error is enough, and each would wait as long
            return
        try:
            self._step_one(arrival)
        except BaseException:
            self._failed = True
            raise

    def _step_one(self, arrival: Arrival) -> None:
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
