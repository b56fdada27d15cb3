"""An optimizer that averages after its step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.distributed.optim as in_torch
from torch._compile import _disable_dynamo as untraced
from torch.utils.hooks import RemovableHandle

from loosestep.compat.model_averager import APART, ModelAverager
from loosestep.errors import LoosestepWarning
from loosestep.sharding.recognize import is_wrapper, only_creates_state
from loosestep.sync.owners import is_own

STEP = "averager_step"  # the key of the averager's step in every parameter group
KEPT = "averager"  # and of what it keeps beside that, in the whole


class PostLocalSGDOptimizer(in_torch.PostLocalSGDOptimizer):
    """Step the wrapped optimizer, then let the averager average if it is due.

    It is a full ``torch.optim.Optimizer``: closures, step and state_dict hooks, LR schedulers,
    GradScaler, deepcopy and pickle work, and ``state``, ``defaults`` and ``param_groups`` are the
    wrapped optimizer's own. A step that a GradScaler skips still counts, on this rank as on the
    others, so counters cannot part.

    Example::

        optimizer = PostLocalSGDOptimizer(
            optim=torch.optim.SGD(model.parameters(), lr=0.01),
            averager=PeriodicModelAverager(period=4, warmup_steps=100),
        )
    """

    optim: torch.optim.Optimizer
    averager: ModelAverager

    # A GradScaler then always calls step() and leaves skipping to us.
    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        if is_wrapper(optim):  # it does not step every time, but each time would count here
            raise TypeError(
                f"optim must be the optimizer inside {type(optim).__name__}, not the wrapper; make "
                "PostLocalSGDOptimizer(optim=...) first and hand that to the framework"
            )
        if not isinstance(averager, ModelAverager):
            raise TypeError(f"averager must be a ModelAverager, got {type(averager).__name__}")
        # Not Optimizer.__init__: it would build groups and state of its own beside optim's.
        self.__setstate__({"optim": optim, "averager": averager})
        self._note_step()

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optim.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's groups, also after they were loaded or added to."""
        return self.optim.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's defaults, which some LR schedulers look at."""
        return self.optim.defaults

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, *args: Any, **kwargs: Any) -> float | None:
        """Take one step, average if due, and return what the closure returned."""
        idle = only_creates_state(self.optim, kwargs)
        loss = self._inner_step(*args, **kwargs)
        if not idle:
            self._average()
        return loss

    def finalize(self) -> None:
        """Average the steps since the last average; call it once after training."""
        self.averager.finalize(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, the averager's step and what it keeps.

        That is an average under way, which is waited for, and the memory of a lossy reducer. In
        mid-period it says whose replica it belongs to.
        """
        self._note_step()
        kept = self.averager.kept_state()
        own = {"step": self.averager.step, KEPT: kept} if kept else {"step": self.averager.step}
        return {**self.optim.state_dict(), **own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; without a step the averager starts at 0.

        What was taken in mid-period is of one rank's replica, so each loads its own: where it is
        another's, as torch's allows, it is loaded with a warning.
        """
        kept = state_dict.get(KEPT, {})
        if kept.get(APART, 0) and not is_own(kept):
            warnings.warn(
                f"rank {dist.get_rank()}: this state was taken on rank {kept['rank']}, "
                f"{kept[APART]} local steps after the last average, when every rank had parameters "
                "of its own; those steps of all other ranks are lost. Save one file a rank, or "
                "model and state right after `finalize()`",
                LoosestepWarning,
                stacklevel=2,
            )
        rest = {key: value for key, value in state_dict.items() if key not in ("step", KEPT)}
        self.optim.load_state_dict(rest)
        step = _saved_step(state_dict)
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = step or 0
        self.averager.load_kept_state(kept)  # nothing kept: forget what is
        self._note_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the wrapped optimizer's gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; it takes part from the next average on."""
        self.optim.add_param_group(param_group)
        self._note_step()

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register with the wrapped optimizer, whose state it is."""
        return self.optim.register_state_dict_pre_hook(*args, **kwargs)

    def register_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register with the wrapped optimizer, whose state it is."""
        return self.optim.register_state_dict_post_hook(*args, **kwargs)

    def register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register with the wrapped optimizer, whose state it is."""
        return self.optim.register_load_state_dict_pre_hook(*args, **kwargs)

    def register_load_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register with the wrapped optimizer, whose state it is."""
        return self.optim.register_load_state_dict_post_hook(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of."""
        return {"optim": self.optim, "averager": self.averager}

    @untraced  # where step() is compiled: what travels is no part of its graph
    def _average(self) -> None:
        self.averager.average_parameters(self.param_groups)

    def _note_step(self) -> None:
        """Write the step into the groups: a distributed checkpoint drops what is beside them."""
        for group in self.param_groups:
            group[STEP] = self.averager.step

    def _inner_step(self, closure: Callable[[], float] | None = None) -> float | None:
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return self.optim.step(closure) if closure is not None else self.optim.step()
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            self._fused_step(scale, found_inf)
            return None
        if found_inf.item():
            return None
        if scale is not None:
            self._unscale(scale)
        self.optim.step()
        return None

    def _fused_step(self, scale: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """Hand the scaler's numbers on to an optimizer that skips and unscales by itself."""
        inner: Any = self.optim
        inner.grad_scale, inner.found_inf = scale, found_inf
        try:
            inner.step()
        finally:
            del inner.grad_scale, inner.found_inf

    @torch.no_grad()
    def _unscale(self, scale: torch.Tensor) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))


def _saved_step(state_dict: Mapping[str, Any]) -> int | None:
    """Return the averager's step, which a distributed checkpoint has in the groups alone.

    It is known by its parameters, which have names. Elsewhere a missing step is missing, as in
    torch: whoever took it out means to start at 0.
    """
    if "step" in state_dict:
        return int(state_dict["step"])
    groups = state_dict["param_groups"]
    by_name = any(isinstance(key, str) for group in groups for key in group["params"])
    return groups[0].get(STEP) if by_name else None
