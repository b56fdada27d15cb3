"""What is listed and bound once, and how a change is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from loosestep.sync.bound import Binder
from loosestep.sync.jobs import Job
from loosestep.sync.kept import References
from loosestep.sync.parts import ModuleTensors, Parts
from loosestep.sync.replica import Replica

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


class Block(torch.nn.Module):
    """A parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        Block(), Block(), torch.nn.Linear(1, 1, bias=False), torch.nn.Module()
    )


def add_parameter(net: torch.nn.Sequential) -> None:
    net[1].more = torch.nn.Parameter(torch.zeros(1))


def exchange_parameter(net: torch.nn.Sequential) -> None:
    net[0].weight = torch.nn.Parameter(torch.ones(2))


def drop_parameter(net: torch.nn.Sequential) -> None:
    del net[1].weight


def rename_parameter(net: torch.nn.Sequential) -> None:
    net[0].other = net[0].weight
    del net[0].weight


def move_parameter(net: torch.nn.Sequential) -> None:
    """Leave the same names and tensors in the same order, in another part."""
    net[3].register_parameter("weight", net[2]._parameters.pop("weight"))


def exchange_buffer(net: torch.nn.Sequential) -> None:
    net[0].mean = torch.ones(2)


def add_part(net: torch.nn.Sequential) -> None:
    net.append(torch.nn.Identity())


def exchange_part(net: torch.nn.Sequential) -> None:
    net[1] = Block()


def tie(net: torch.nn.Sequential) -> None:
    net[1].weight = net[0].weight


def exchange_table(net: torch.nn.Sequential) -> None:
    net[0]._parameters = {"weight": torch.nn.Parameter(torch.ones(2))}


MODULE_CHANGES: list[Callable[[torch.nn.Sequential], None]] = [
    add_parameter,
    exchange_parameter,
    drop_parameter,
    rename_parameter,
    move_parameter,
    exchange_buffer,
    add_part,
    exchange_part,
    tie,
    exchange_table,
]


def same(one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(one) == len(other) and all(a == b and x is y for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_a_changed_module_is_listed_anew(change: Callable[[torch.nn.Sequential], None]) -> None:
    """And one that is the same is not."""
    net = model()
    tensors = ModuleTensors(net)
    parameters, buffers = tensors.listed()
    assert tensors.listed()[0] is parameters
    assert tensors.listed()[1] is buffers
    change(net)
    parameters, buffers = tensors.listed()
    assert same(parameters, list(net.named_parameters()))
    assert same(buffers, [(f"buffer {name}", buffer) for name, buffer in net.named_buffers()])


class Other(torch.nn.Sequential):
    """Names its parameters in a way of its own, which its tables do not show."""

    def __init__(self, *parts: torch.nn.Module) -> None:
        super().__init__(*parts)
        self.extra = [torch.nn.Parameter(torch.zeros(1))]

    def named_parameters(self, *_: object) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield "extra", self.extra[0]


def test_a_module_with_its_own_way_of_naming_is_walked() -> None:
    """What it says is asked at every sync."""
    net = Other(Block())
    tensors = ModuleTensors(net)
    assert tensors.listed()[0][0][1] is net.extra[0]
    net.extra = [torch.nn.Parameter(torch.ones(1))]
    assert tensors.listed()[0][0][1] is net.extra[0]


def test_weights_are_put_together_once() -> None:
    """A thawed parameter and a buffer of another dtype are noticed."""
    net = model()
    net[1].weight.requires_grad_(False)
    replica = Replica(None, net)
    weights = replica.weights()
    assert replica.weights() is weights
    net[1].weight.requires_grad_(True)
    assert [name for name, _ in replica.weights().means][:2] == ["0.weight", "1.weight"]
    mean = net.get_buffer("0.mean")
    mean.data = mean.int()
    assert [name for name, _ in replica.weights().largest] == ["buffer 0.mean"]


def test_references_follow_the_jobs() -> None:
    """Values stay as long as the jobs are the same, and what is loaded is compared with them."""
    references = References()
    jobs: list[Job] = []
    references.follow(jobs)
    references.keep("slot", torch.zeros(1))
    references.follow(jobs)
    references.follow([])  # another list of the same
    assert references.nbytes == 4
    references.load_state_dict({"signature": "of others", "values": {"slot": torch.zeros(1)}})
    references.follow(jobs)
    assert references.nbytes == 0
