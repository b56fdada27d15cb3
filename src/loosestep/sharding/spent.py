"""What is left in ``param.grad`` when the step has been taken inside backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from loosestep.sharding.stand_in import GradientStandIn

GONE = (
    "this gradient is gone: backward has taken the optimizer's step with it already "
    "(overlap_with_ddp=True). To clip or to scale, say so when the optimizer is made: "
    "ZeroOptions(clip_norm=1.0) or ZeroOptions(scaler=scaler); to read gradients, use "
    "overlap_with_ddp=False; zero_grad() clears what is left of it ({})"
)


class SpentGradient(GradientStandIn):
    """Stands for a gradient that has been used and is gone; reading it is an error."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse everything, except what ``model.zero_grad(set_to_none=False)`` does."""
        if func is torch.ops.aten.zero_.default:
            return args[0]
        raise RuntimeError(GONE.format(func))

    def refusal(self, func: object) -> RuntimeError:
        """Return the error for what cannot be done."""
        return RuntimeError(GONE.format(func))


def spend(parameters: Iterable[torch.Tensor]) -> None:
    """Replace gradients that have been used."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = SpentGradient(parameter)


def forget_spent(parameters: Iterable[torch.Tensor]) -> None:
    """Make room for new gradients."""
    for parameter in parameters:
        if isinstance(parameter.grad, SpentGradient):
            parameter.grad = None
