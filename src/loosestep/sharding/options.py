"""The settings of a sharded optimizer that torch's does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loosestep.errors import check_seconds, is_number


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """How a ``ZeroRedundancyOptimizer`` divides and prepares its steps.

    One argument, so that no name here can be one that the wrapped optimizer takes.

    Example::

        ZeroRedundancyOptimizer(params, AdamW, zero_options=ZeroOptions(clip_norm=1.0), lr=1e-3)
    """

    elementwise: bool | None = None  # your word for your own class: cut parameters, or keep whole
    clip_norm: float | None = None  # clip the norm of all gradients together before every step
    norm_type: float = 2.0  # of that norm; inf: the largest element
    scaler: torch.amp.GradScaler | None = None  # unscale, and skip what is infinite anywhere
    timeout: float | None = None  # seconds for every wait; None: the process group's own

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not isinstance(self.elementwise, bool | None):
            raise TypeError(f"elementwise must be True, False or None, got {self.elementwise!r}")
        norm = self.clip_norm
        if norm is not None and not (is_number(norm) and 0 < norm < math.inf):
            raise ValueError(f"clip_norm must be finite and > 0, got {norm!r}; None: none")
        check_seconds("timeout", self.timeout)
        if not (is_number(self.norm_type) and self.norm_type > 0):
            raise ValueError(f"norm_type must be > 0 (inf is allowed), got {self.norm_type!r}")
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a GradScaler, got {type(self.scaler).__name__}")

    @property
    def needs_all_gradients(self) -> bool:
        """Whether no step can begin before the last gradient is there."""
        return self.clip_norm is not None or (self.scaler is not None and self.scaler.is_enabled())

    def describe(self) -> str:
        """Return what must be equal on all ranks as one line."""
        scaled = self.scaler is not None and self.scaler.is_enabled()
        return f"clip_norm={self.clip_norm} norm_type={self.norm_type} scaler={scaled}"
