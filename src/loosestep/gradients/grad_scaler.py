"""GradScaler under a strategy: ranks agree on what is infinite, and skipped steps count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import NOTHING, AllReduce, Place

PATCHED = ("unscale_", "step", "update")


class ScalerWatch:
    """Stands between a loop and its GradScaler.

    After every unscaling, ``found_inf`` becomes the largest over the ranks that share gradients,
    before the step and before the scale's update: all of them skip or none. ``step_done`` is
    called once for every ``scaler.step``, also for one that skipped.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        gradient_peers: Callable[[], Peers | None],
        step_done: Callable[[], None],
    ) -> None:
        self.stepping = False
        self._scaler, self._optimizer = scaler, optimizer
        self._gradient_peers, self._step_done = gradient_peers, step_done
        self._unscale, self._step, self._update = scaler.unscale_, scaler.step, scaler.update
        self._unscaled = False
        # Not the class's methods: a sharded optimizer may have put others in their place.
        self._before = {name: scaler.__dict__.get(name) for name in PATCHED}
        if scaler.is_enabled():
            # On the instance: the class and other scalers stay as they are.
            scaler.unscale_ = self._agreed_unscale  # type: ignore[method-assign]
            scaler.step = self._counted_step  # type: ignore[method-assign]
            scaler.update = self._noted_update  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the scaler back the methods that it had."""
        for name, method in self._before.items():
            self._scaler.__dict__.pop(name, None)
            if method is not None:
                self._scaler.__dict__[name] = method

    def _agreed_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._unscale(optimizer)
        if optimizer is self._optimizer:
            self._unscaled = True
            self._agree_on_inf()

    def _counted_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not self._optimizer:
            return self._step(optimizer, *args, **kwargs)
        if not self._unscaled:
            self._agreed_unscale(optimizer)
        self.stepping = True
        try:
            result = self._step(optimizer, *args, **kwargs)
        finally:
            self.stepping = self._unscaled = False
        self._step_done()
        return result

    def _noted_update(self, *args: Any, **kwargs: Any) -> None:
        self._unscaled = False  # as in the scaler itself: gradients of before do not count
        self._update(*args, **kwargs)

    def _agree_on_inf(self) -> None:
        peers = self._gradient_peers()
        if peers is None or peers.size == 1:
            return
        peers = peers.during(Phase("agreeing whether gradients are finite"))
        for found in self._scaler._found_inf_per_device(self._optimizer).values():
            place = Place("found_inf")
            AllReduce(dist.ReduceOp.MAX).start(found.view(-1), peers, NOTHING, place).wait()
