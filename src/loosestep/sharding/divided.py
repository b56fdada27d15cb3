"""What ``param.grad`` holds between backward and step where every rank has a part of gradients.

Torch's own ``clip_grad_norm_``, ``clip_grad_value_`` and norms then do what they do with whole
gradients: a norm is one over all ranks' parts, and what is done to every element alike is done to
the part. As with any collective, all ranks must ask for a norm.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch

from loosestep.comm.peers import Peers, Phase
from loosestep.sharding.prepare import check_norm_type
from loosestep.sharding.shard_set import Parts
from loosestep.sharding.stand_in import GradientStandIn

aten = torch.ops.aten

# Every element is changed by numbers that all elements have in common.
ELEMENTWISE = frozenset(
    {
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.div_.Tensor,
        aten.div_.Scalar,
        aten.clamp_.default,
        aten.clamp_min_.default,
        aten.clamp_max_.default,
        aten.zero_.default,
        aten._foreach_mul_.Scalar,
        aten._foreach_mul_.Tensor,
        aten._foreach_div_.Scalar,
        aten._foreach_div_.Tensor,
        aten._foreach_clamp_min_.Scalar,
        aten._foreach_clamp_max_.Scalar,
        aten._foreach_zero_.default,
    }
)

TWICE = (
    "backward ran twice without a step in between, but gradients have gone to their owners and do "
    "not add up; accumulate inside `with run.no_sync():` (all micro-batches but the last), or call "
    "optimizer.zero_grad() to drop a batch. Checkpoints with use_reentrant=True run backward "
    "several times: use False"
)
REFUSED = (
    "every rank has only the part that it owns of this gradient, so {} cannot be done with it; "
    "clip_grad_norm_, clip_grad_value_, norm(), mul_ and div_ by a number can, on all ranks "
    "alike. A GradScaler is to be given: attach(..., scaler=scaler). Within a backward this means: "
    + TWICE
)


class Divided:
    """The gradients of one backward: this rank's parts, and norms that all ranks take together.

    ``parameters``, the same on all ranks, and ``parts`` grow while backward runs.
    """

    def __init__(
        self, parameters: list[torch.Tensor], parts: Parts, peers: Callable[[], Peers]
    ) -> None:
        self._parameters, self._parts, self._peers = parameters, parts, peers
        self._norms: dict[float, dict[torch.Tensor, float]] = {}
        self._closed = False

    def show(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let ``param.grad`` stand for what has come."""
        self.forget_norms()
        for parameter in parameters:
            parameter.grad = DividedGradient(parameter, self)

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient, which may have no elements."""
        if self._closed:
            raise RuntimeError(
                "this gradient was used or dropped by the optimizer, which has its memory back; "
                "look at gradients between backward and step"
            )
        return self._parts[parameter] if parameter in self._parts else parameter.new_empty(0)

    def norm(self, parameter: torch.Tensor, norm_type: float) -> float:
        """Return the norm of a whole gradient; the first that is asked for brings all of them."""
        self.part(parameter)
        if norm_type not in self._norms:
            self._norms[norm_type] = self._exchange_norms(check_norm_type(norm_type))
        return self._norms[norm_type][parameter]

    def forget_norms(self) -> None:
        """Take norms anew when they are asked for: parts get other values."""
        self._norms.clear()

    def close(self) -> None:
        """Take the stand-ins away; who has kept one can do nothing with it."""
        self._closed = True
        for parameter in self._parameters:
            if isinstance(parameter.grad, DividedGradient):
                parameter.grad = None

    def _exchange_norms(self, norm_type: float) -> dict[torch.Tensor, float]:
        """Return (sum over members of norm^p)^(1/p) of every gradient; the largest for p = inf."""
        own = [_norm(self.part(parameter), norm_type) for parameter in self._parameters]
        layout = f"<{len(own)}d"
        peers = self._peers().during(Phase("agreeing on the norms of the gradients"))
        payloads = peers.exchange_fixed(struct.pack(layout, *own))
        of_members = [struct.unpack(layout, payload) for payload in payloads]
        table = torch.tensor(of_members, dtype=torch.float64)
        norms = torch.linalg.vector_norm(table, norm_type, dim=0).tolist()
        return dict(zip(self._parameters, norms, strict=True))


class DividedGradient(GradientStandIn):
    """Stands for a gradient of which this rank has a part."""

    def __init__(self, parameter: torch.Tensor, divided: Divided) -> None:
        self._parameter, self._divided = parameter, divided

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what can be done with parts, and refuse the rest."""
        kwargs = kwargs or {}
        order = args[1] if len(args) > 1 else 2.0  # of a norm; torch leaves the default out
        if func is aten.detach.default:  # also ``param.grad.data``
            gradient: DividedGradient = args[0]
            return DividedGradient(gradient._parameter, gradient._divided)
        if func is aten.linalg_vector_norm.default and _is_whole(*args, **kwargs):
            return _norm_of(args[0], order, kwargs.get("dtype"))
        if func is aten._foreach_norm.Scalar:
            return [_norm_of(gradient, order, kwargs.get("dtype")) for gradient in args[0]]
        if func in ELEMENTWISE and all(map(_is_number, args[1:])):
            return _change(func, *args, **kwargs)
        raise RuntimeError(REFUSED.format(func))

    def refusal(self, func: object) -> RuntimeError:
        """Return the error for what cannot be done."""
        return RuntimeError(REFUSED.format(func))


def _change(func: Any, target: Any, *numbers: Any, **options: Any) -> Any:
    """Change a gradient, or a list of gradients, in place; return what ``func`` is to return."""
    if isinstance(target, (list, tuple)):
        func([_part_of(gradient) for gradient in target], *numbers, **options)
        return None
    func(_part_of(target), *numbers, **options)
    return target


def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, to be changed; other tensors as they are."""
    if not isinstance(tensor, DividedGradient):
        return tensor
    tensor._divided.forget_norms()
    return tensor._divided.part(tensor._parameter)


def _norm_of(tensor: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a norm as torch would: with the dtype of the tensor, if none is asked for."""
    if not isinstance(tensor, DividedGradient):
        whole: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        return whole
    norm = tensor._divided.norm(tensor._parameter, float(order))
    return torch.tensor(norm, dtype=dtype or tensor.dtype.to_real(), device=tensor.device)


def _norm(part: torch.Tensor, norm_type: float) -> float:
    if not part.numel():  # of which torch knows no largest element
        return 0.0
    wide = torch.promote_types(part.dtype, torch.float32)
    return float(torch.linalg.vector_norm(part, norm_type, dtype=wide))


def _is_whole(
    tensor: torch.Tensor, _: float = 2.0, dim: Any = None, keepdim: bool = False, **__: Any
) -> bool:
    """Say whether a norm is one number for the whole tensor."""
    every = dim is None or len({d % max(1, tensor.ndim) for d in dim}) == tensor.ndim
    return every and not keepdim


def _is_number(value: object) -> bool:
    return not isinstance(value, (torch.Tensor, list, tuple)) or (
        isinstance(value, torch.Tensor) and value.ndim == 0
    )
