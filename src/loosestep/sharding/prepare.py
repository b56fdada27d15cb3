"""What happens to gradients between their mean and the step: unscale, agree, clip.

All of it works on parts of gradients: every rank looks at what it owns, and the group agrees.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from loosestep.comm.peers import Peers, Phase


def total_norm(parts: Iterable[torch.Tensor], norm_type: float, peers: Peers) -> float:
    """Return the norm of all members' parts together, the same number on every one.

    (sum over members of norm^p)^(1/p); the largest for p = inf.
    """
    check_norm_type(norm_type)
    own = float(torch.nn.utils.get_total_norm(list(parts), norm_type))
    talking = peers.during(Phase("agreeing on the norm of the gradients"))
    payloads = talking.exchange_fixed(struct.pack("<d", own))
    norms = [struct.unpack("<d", payload)[0] for payload in payloads]
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    if math.isinf(norm_type) or max(norms) in (0.0, math.inf):
        return float(max(norms))
    return float(sum(norm**norm_type for norm in norms) ** (1.0 / norm_type))


def check_norm_type(norm_type: float) -> float:
    """Return the order of a norm; raise for one that cannot be taken over parts."""
    if not norm_type > 0:
        raise ValueError(f"norm_type must be > 0 (inf is allowed), got {norm_type!r}")
    return norm_type


def scale_to_norm_(gradients: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Shrink gradients whose norm is above ``max_norm``, as ``clip_grad_norm_`` does."""
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1.0:  # also for NaN, which then spreads to all, as it does in torch
        # A tensor: a plain number would be rounded to the gradients' 16 bits first.
        multiply_(gradients, torch.tensor(factor, dtype=torch.float64))


def multiply_(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all of them, in place."""
    if gradients:
        torch._foreach_mul_(list(gradients), factor)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale as a GradScaler computes it."""
    return scale.double().reciprocal().float()


class ScalerLink:
    """Unscales for a GradScaler where it cannot see the gradients, and agrees on what is infinite.

    The scaler then steps and updates as if it had unscaled them itself.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        peers: Callable[[], Peers],
    ) -> None:
        self._scaler, self._optimizer, self._peers = scaler, optimizer, peers

    def unscale_(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divide gradients by the scale; return whether any member's were infinite."""
        device = gradients[0].device if gradients else self._scaler._device
        if self._scaler._scale is None:  # nothing was scaled here: this rank has had no batch
            self._scaler._lazy_init_scale_growth_tracker(torch.device(device))
        scale = self._scaler._scale
        assert scale is not None
        multiply_(gradients, inverse_of(scale).to(device))
        peers = self._peers().during(Phase("agreeing whether gradients are finite"))
        found = any(payload != b"\0" for payload in peers.exchange_fixed(bytes([_bad(gradients)])))
        state = self._scaler._per_optimizer_states[id(self._optimizer)]
        state["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(found))}
        state["stage"] = OptState.UNSCALED
        return found

    def take_over(self, held: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Let the scaler do it this way for this optimizer, in ``unscale_`` and in ``step``."""
        scaler, self._held = self._scaler, held
        self._stock = (scaler.unscale_, scaler._check_inf_per_device)
        # On the instance: the class and other scalers stay as they are.
        scaler.unscale_ = self._unscale  # type: ignore[method-assign]
        scaler._check_inf_per_device = self._check_inf  # type: ignore[method-assign]

    def close(self) -> None:
        """Undo ``take_over``."""
        for name in ("unscale_", "_check_inf_per_device"):
            self._scaler.__dict__.pop(name, None)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer:
            self._stock[0](optimizer)
            return
        if self._scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() has been called on this optimizer since the last update()"
            )
        self.unscale_(self._held())

    def _check_inf(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if optimizer is not self._optimizer:
            return self._stock[1](optimizer)
        self.unscale_(self._held())  # ``step`` sees by the stage that nothing is left to unscale
        state = self._scaler._per_optimizer_states[id(optimizer)]
        found: dict[str, Any] = state["found_inf_per_device"]
        return found


def _bad(gradients: Sequence[torch.Tensor]) -> bool:
    some = [gradient for gradient in gradients if gradient.numel()]
    if not some:
        return False
    largest = torch._foreach_norm(some, math.inf)
    return not bool(torch.stack([norm.float() for norm in largest]).isfinite().all())
