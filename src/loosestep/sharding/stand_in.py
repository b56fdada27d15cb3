"""What ``param.grad`` holds where this rank has no gradient that a user could read."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch


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
