"""Every optimizer class of torch, in every variant."""

from __future__ import annotations

import inspect
from typing import Any

import torch

SPECIAL = {
    "LBFGS",  # needs a closure: tested on its own
    "SparseAdam",  # needs sparse gradients: tested on its own
    "Muon",  # takes matrices only: tested on its own
}


def optimizer_classes() -> list[str]:
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    return [
        name
        for name, kind in classes
        if issubclass(kind, torch.optim.Optimizer) and name not in {"Optimizer", *SPECIAL}
    ]


def variants() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name in optimizer_classes():
        accepted = inspect.signature(getattr(torch.optim, name)).parameters
        found.append((name, {}))
        found += [(name, {flag: True}) for flag in ("foreach", "fused") if flag in accepted]
    return found


def supported(name: str, options: dict[str, Any]) -> bool:
    try:
        getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.01, **options)
    except (RuntimeError, ValueError):
        return False
    return True


VARIANTS = [(name, options) for name, options in variants() if supported(name, options)]


def build(name: str, options: dict[str, Any], net: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer with two parameter groups."""
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": weights}, {"params": others, "lr": 0.005}]
    return getattr(torch.optim, name)(groups, lr=0.01, **options)
