"""What is bound once, and how a change is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loosestep.sync.bound import Binder
from loosestep.sync.parts import Parts

pytestmark = pytest.mark.fast


HELD: list[torch.Tensor] = []


def named() -> list[tuple[str, torch.Tensor]]:
    return [(f"p{index}", torch.nn.Parameter(torch.randn(2, 3))) for index in range(3)]


def test_the_same_tensors_are_bound_once() -> None:
    """Other lists of the same names and tensors are known again."""
    tensors, binder = named(), Binder()
    bound = binder.bind(Parts(tensors))
    assert binder.bind(Parts(tensors)) is bound
    assert binder.bind(Parts([(name, tensor) for name, tensor in tensors])) is bound
    assert bound.statement(("one",)) is bound.statement(("one",))


def repoint(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def transpose(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(3, 2)


def reinterpret(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32).view(torch.float32).double()


def resize(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    HELD.append(torch.empty(size, dtype=torch.uint8))  # takes the place
    storage.resize_(size)


@pytest.mark.parametrize("change", [repoint, transpose, reinterpret, resize])
def test_a_change_is_noticed(change: Callable[[torch.Tensor], None]) -> None:
    """What lies elsewhere, or otherwise, is bound anew, and its memory is the new one."""
    tensors, binder = named(), Binder()
    bound = binder.bind(Parts(tensors))
    change(tensors[1][1])
    anew = binder.bind(Parts(tensors))
    assert anew is not bound
    assert dict(anew.parts)["p1"].data_ptr() == tensors[1][1].data_ptr()
    assert dict(anew.parts)["p1"].shape == tensors[1][1].shape


def test_another_name_or_tensor_is_noticed() -> None:
    """Renamed, exchanged and missing tensors are bound anew."""
    tensors, binder = named(), Binder()
    bound = binder.bind(Parts(tensors))
    for other in (
        [("q", tensors[0][1]), *tensors[1:]],
        [*tensors[:2], ("p2", torch.nn.Parameter(torch.randn(2, 3)))],
        tensors[:2],
    ):
        assert binder.bind(Parts(other)) is not bound
        bound = binder.bind(Parts(tensors))
