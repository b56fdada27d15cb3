"""What ``param.grad`` holds where this rank has no gradient that a user could read.

A ``SpentGradient`` is left there when the step has been taken inside backward; the parts of a
divided gradient have a stand-in of their own (``divided``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Self

import torch

GONE = (
    "this gradient is gone: backward has taken the optimizer's step with it already "
    "(overlap_with_ddp=True). To clip or to scale, say so when the optimizer is made: "
    "ZeroOptions(clip_norm=1.0) or ZeroOptions(scaler=scaler); to read gradients, use "
    "overlap_with_ddp=False; zero_grad() clears what is left of it ({})"
)


class GradientStandIn(torch.Tensor):
    """Looks like a parameter's gradient and has no memory; what it cannot do is an error.

    With None in its place, ``clip_grad_norm_`` or a GradScaler would do nothing and say nothing.
    """

    # Results are plain tensors: torch's default would make them stand-ins too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, *_: Any) -> Self:
        """Look like the parameter's gradient, without memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )

    def refusal(self, func: object) -> RuntimeError:
        """Return the error for what cannot be done."""
        raise NotImplementedError

    def share_memory_(self) -> NoReturn:
        """Refuse: torch's own would follow a pointer to nowhere."""
        raise self.refusal("share_memory_")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"{type(self).__name__}({tuple(self.shape)})"


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
