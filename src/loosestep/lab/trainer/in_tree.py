"""What PyTorch itself has, as contenders: DDP, post-local SGD and hierarchical SGD.

Gradients are shared by DDP: with all workers, or inside a host. What PyTorch's averagers leave out
(an average for evaluation and at the end) is done by loosestep, so that all are judged alike.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.reducers import AllReduce
from loosestep.lab.trainer.by_strategy import OptimizerPlan
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.torch_plans import Plan
from loosestep.strategy.topology import Topology
from loosestep.sync.averager import average_
from loosestep.telemetry import SyncRecord, Telemetry

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class InTree:
    """A model under DDP, with PyTorch's hook and averager."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerPlan,
        plan: Plan,
        topology: Topology,
        telemetry: Telemetry,
    ) -> None:
        self._plan, self._topology, self._telemetry = plan, topology, telemetry
        self._inner, self._step = model, 0
        self._subgroup: dist.ProcessGroup | None = None
        self._launched: float | None = None  # when the last bucket of this backward was
        if plan.gradients not in topology.levels:
            raise BadInput(f"there is no level {plan.gradients!r}; there are {[*topology.levels]}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what they deprecate among themselves
            self.model: torch.nn.Module = DistributedDataParallel(model)
            self._averager = plan.averager(lambda level: len(topology.members(level)))
        self.optimizer = optimizer.make()
        self.model.register_comm_hook(*self._hook())
        self._numel = sum(p.numel() for p in model.parameters())

    def _hook(self) -> tuple[Any, Hook]:
        if self._averager is None:
            return None, self._timed(allreduce_hook)
        self._subgroup = self._topology.process_group(self._plan.gradients)
        warmup = self._plan.warmup_steps
        self._state = PostLocalSGDState(
            None, self._subgroup, warmup, post_local_gradient_allreduce=True
        )  # type: ignore[no-untyped-call]
        return self._state, self._timed(post_localSGD_hook)

    def _timed(self, hook: Hook) -> Hook:
        def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = hook(state, bucket)
            if bucket.is_last():
                self._launched = time.perf_counter()
            return future

        timed.__annotations__ = {
            "bucket": GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        return timed

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def after_backward(self) -> None:
        """Count what DDP has shared, and how long it was waited for."""
        if self._launched is None:
            return
        warmup = self._averager is not None and self._step < self._plan.warmup_steps
        level = "world" if warmup else self._plan.gradients
        waited, self._launched = time.perf_counter() - self._launched, None
        self._record(level, "gradients", waited)

    def after_step(self) -> None:
        """Average if it is due."""
        level = self._plan.due(self._step)
        if self._averager is not None:
            began = time.perf_counter()
            self._averager.average_parameters(self.model.parameters())  # type: ignore[no-untyped-call]
            if level is not None:
                self._record(level, "parameters", time.perf_counter() - began)
        self._step += 1

    def _record(self, level: str, kind: str, seconds: float) -> None:
        size = len(self._topology.members(level))
        sent = AllReduce().bytes_on_wire(self._numel, torch.float32, size)
        self._telemetry.record(SyncRecord(self._step, level, kind, seconds, sent, 0, None, seconds))

    def clip(self, norm: float) -> None:
        """Clip whole gradients."""
        torch.nn.utils.clip_grad_norm_(self._inner.parameters(), norm)

    def arrive(self) -> None:
        """Do nothing: nothing travels while a worker trains."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average of all replicas inside."""
        kept = [tensor.detach().clone() for tensor in self._everything()]
        self._average()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._everything(), kept)

    def finalize(self) -> None:
        """Average what was not averaged yet."""
        if self._averager is not None:
            began = time.perf_counter()
            self._average()
            self._record("world", "parameters", time.perf_counter() - began)

    def _average(self) -> None:
        if self._averager is not None:
            average_([tensor for tensor in self._everything() if tensor.is_floating_point()])

    def _everything(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in self._inner.state_dict().values()]

    def next_sync(self, step: int) -> int | None:
        """Ask the plan."""
        if self._averager is None:
            return None
        return next((s for s in range(step, step + 10_000) if self._plan.due(s)), None)

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the state."""
        return self.optimizer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps: there is nothing else."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at that step."""
        self._step = state_dict["step"]
        if self._averager is not None:
            self._averager.step = self._state.iter = self._step

    def start_at(self, step: int) -> None:
        """Continue at a step."""
        self.load_state_dict({"step": step})

    def close(self) -> None:
        """Free the process group."""
        if self._subgroup is not None:
            dist.destroy_process_group(self._subgroup)
