"""What is known of an optimizer class: how finely its work can be divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

# Every element's update depends on that element's gradient and state and on nothing else.
ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adadelta,
        optim.Adagrad,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)
# Every parameter's update depends on that parameter alone (row and column means, matrix products).
BY_PARAMETER = ELEMENTWISE | {optim.Muon, optim.Adafactor}

REFUSED: dict[type[torch.optim.Optimizer], str] = {
    optim.LBFGS: "its directions come from the history of all parameters together",
    optim.SparseAdam: "it wants sparse gradients, which cannot be divided by position",
}


@dataclass(frozen=True)
class Kind:
    """How an optimizer's work may be divided."""

    elementwise: bool  # any slice of a parameter can be stepped alone
    by_parameter: bool  # any parameter can be stepped alone, at its own time


def kind_of(optimizer_class: object, elementwise: bool | None = None) -> Kind:
    """Return what is known of a class; ``elementwise`` is the user's word for their own.

    Only the classes themselves are known: a subclass of Adam may do anything.

    >>> kind_of(torch.optim.AdamW)
    Kind(elementwise=True, by_parameter=True)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise TypeError(
            f"optimizer_class must be a subclass of torch.optim.Optimizer, got "
            f"{optimizer_class!r}; give the class and its arguments, such as "
            "(params, torch.optim.AdamW, lr=1e-3)"
        )
    for refused, reason in REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(
                f"{optimizer_class.__name__} cannot be sharded: {reason}; use it unsharded, or "
                "another optimizer"
            )
    if elementwise is not None:
        if elementwise and optimizer_class in BY_PARAMETER - ELEMENTWISE:
            raise ValueError(
                f"{optimizer_class.__name__} is not elementwise: it looks at whole matrices; "
                "leave ZeroOptions(elementwise=...) out"
            )
        # Not at its own time: a class of the user's may count its steps.
        return Kind(elementwise, optimizer_class in BY_PARAMETER)
    return Kind(optimizer_class in ELEMENTWISE, optimizer_class in BY_PARAMETER)


def acceptance_of(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
) -> Callable[[list[dict[str, Any]]], None]:
    """Return a check that raises for parameters that the class refuses: then on all ranks.

    Without it only the rank would raise that is to own such a parameter. Elementwise classes take
    any parameter.
    """

    def check(groups: list[dict[str, Any]]) -> None:
        if optimizer_class in BY_PARAMETER - ELEMENTWISE:
            optimizer_class([dict(group) for group in groups], **defaults)

    return check
