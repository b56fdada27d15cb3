"""The state of a sharded optimizer: collected, cut, saved and loaded, at any world size."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from loosestep import ZeroOptions, ZeroRedundancyOptimizer
from loosestep.testing import RankPool, run_ranks
from tests.support.memory import MB, extra_bytes
from tests.support.zero_case import OwnSign, Settings, loss_of, make_model, pair, same

optim = torch.optim
StateDict = dict[str, Any]

# name -> class, settings, model, ZeroOptions(elementwise=...)
KINDS: dict[str, tuple[type[torch.optim.Optimizer], Settings, str, bool | None]] = {
    "AdamW fused": (optim.AdamW, {"lr": 0.02, "fused": True, "amsgrad": True}, "odd", None),
    "AdamW whole": (optim.AdamW, {"lr": 0.02, "fused": True}, "odd", False),
    "AdamW mixed": (optim.AdamW, {"lr": 0.02}, "mixed", None),
    "SGD": (optim.SGD, {"lr": 0.02, "momentum": 0.9}, "odd", None),
    "Adafactor": (optim.Adafactor, {"lr": 0.02}, "odd", None),
    "Muon": (optim.Muon, {"lr": 0.02}, "matrices", None),
    "NAdam": (optim.NAdam, {"lr": 0.02}, "odd", None),
    "Rprop": (optim.Rprop, {"lr": 0.02}, "odd", None),
    "ASGD": (optim.ASGD, {"lr": 0.02, "t0": 1}, "odd", None),
    "Adagrad": (optim.Adagrad, {"lr": 0.02}, "odd", None),
    "own": (OwnSign, {"lr": 0.02}, "odd", True),
}


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("something was pickled")


def without_pickle(action: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in [
            (pickle, "dumps"),
            (pickle, "loads"),
            (distributed_c10d, "_object_to_tensor"),
            (distributed_c10d, "_tensor_to_object"),
        ]:
            patch.setattr(module, name, refuse)
        action()


def consolidated(to: int) -> list[str]:
    """Return the classes whose collected state is not that of the plain optimizer."""
    wrong = []
    for name, (kind, settings, model, elementwise) in KINDS.items():
        both = pair(kind, settings, model, ZeroOptions(elementwise=elementwise))
        trained = both.train(3)
        zero = both.zero
        assert isinstance(zero, ZeroRedundancyOptimizer)
        without_pickle(lambda zero=zero: zero.consolidate_state_dict(to=to))  # type: ignore[misc]
        if dist.get_rank() == to:
            saved = zero.state_dict()
            if not (trained and same(saved, both.plain.state_dict())):
                wrong.append(name)
            if not continues(both.plain, both.nets[0], kind, settings, saved):
                wrong.append(f"{name}, continued")
        else:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                zero.state_dict()
        both.step(3)
        if dist.get_world_size() > 1:
            with pytest.raises(RuntimeError, match="after the last step"):
                zero.state_dict()
    return wrong


def continues(
    plain: torch.optim.Optimizer,
    net: torch.nn.Module,
    kind: type[torch.optim.Optimizer],
    settings: Settings,
    saved: StateDict,
) -> bool:
    """Say whether a new plain optimizer with the saved state steps as the old one does."""
    old = list(net.parameters())
    new = [torch.nn.Parameter(p.detach().clone()) for p in old]
    kept = [p.detach().clone() for p in old], copy.deepcopy(plain.state_dict())
    loaded = kind(new, **settings)
    loaded.load_state_dict(copy.deepcopy(saved))
    for _ in range(2):
        for one, other in zip(old, new, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        plain.step()
        loaded.step()
    alike = all(map(torch.equal, old, new))
    for one, value in zip(old, kept[0], strict=True):
        one.data.copy_(value)
    plain.load_state_dict(kept[1])
    return alike


@pytest.mark.parametrize(("world_size", "to"), [(1, 0), (3, 2)])
def test_consolidated_state_is_the_plain_one(pool: RankPool, world_size: int, to: int) -> None:
    """Keys, settings and every bit are the plain optimizer's, which goes on from there."""
    assert pool.run(world_size, consolidated, to) == [[]] * world_size


def consolidated_in_subgroup() -> tuple[bool, str]:
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return True, "0 to 1, got 2"
    both = pair(optim.AdamW, {"lr": 0.02}, group=group)
    both.train(2)
    zero = both.zero
    assert isinstance(zero, ZeroRedundancyOptimizer)
    zero.consolidate_state_dict(to=1)
    with pytest.raises(ValueError, match="rank of the group") as error:
        zero.consolidate_state_dict(to=2)
    has = dist.get_rank() == 3
    return not has or same(zero.state_dict(), both.plain.state_dict()), str(error.value)


def test_to_is_a_rank_of_the_group(pool: RankPool) -> None:
    """In the group {2, 3} member 1 is rank 3, and there is no member 2."""
    for fine, message in pool.run(4, consolidated_in_subgroup):
        assert fine
        assert "0 to 1, got 2" in message


def alone(name: str) -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    """Return a model without DDP: all ranks train on the same batches, at any world size."""
    kind, settings, model, elementwise = KINDS[name]
    module = make_model(model)
    options = ZeroOptions(elementwise=elementwise)
    params = module.named_parameters()
    return module, ZeroRedundancyOptimizer(params, kind, zero_options=options, **settings)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(module, 0, number).backward()
        optimizer.step()


def saved_states(names: list[str]) -> dict[str, StateDict]:
    """Return the states after two steps, from the last rank."""
    states = {}
    for name in names:
        module, zero = alone(name)
        train(module, zero, range(2))
        zero.consolidate_state_dict(to=dist.get_world_size() - 1)
        if dist.get_rank() == dist.get_world_size() - 1:
            states[name] = zero.state_dict()
    return states


def plain_of(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    kind, settings, model, _ = KINDS[name]
    module = make_model(model)
    return module, kind(module.named_parameters(), **settings)


def resumed(states: dict[str, StateDict]) -> list[str]:
    """Return where going on from a state differs from having gone on."""
    wrong = []
    for name, state in states.items():
        plain_module, plain = plain_of(name)
        train(plain_module, plain, range(2))
        module, zero = alone(name)
        module.load_state_dict(plain_module.state_dict())
        before = copy.deepcopy(state)
        zero.load_state_dict(state)
        for number in range(2, 5):
            train(plain_module, plain, range(number, number + 1))
            train(module, zero, range(number, number + 1))
            if not all(map(torch.equal, plain_module.parameters(), module.parameters())):
                wrong.append(f"{name} at step {number}")
        if not same(state, before):
            wrong.append(f"{name} changed the caller's state")
        zero.consolidate_state_dict()
        if dist.get_rank() == 0 and not same(zero.state_dict(), plain.state_dict()):
            wrong.append(f"{name} has another state")
    return wrong


@pytest.mark.parametrize(
    ("size_before", "size_after"),
    [(4, 2), pytest.param(4, 3, marks=pytest.mark.long), (2, 4), (1, 3)],
)
def test_resuming_at_another_world_size(pool: RankPool, size_before: int, size_after: int) -> None:
    """A collected state goes on to the bit on any number of ranks, and stays the caller's."""
    names = list(KINDS) if size_after == 3 else ["AdamW fused", "Adafactor", "own"]
    states = pool.run(size_before, saved_states, names)[-1]
    assert pool.run(size_after, resumed, states) == [[]] * size_after


def test_resuming_from_a_plain_optimizer(pool: RankPool) -> None:
    """A plain optimizer's checkpoint is a checkpoint of the sharded one."""
    states = {}
    for name in KINDS:
        module, plain = plain_of(name)
        train(module, plain, range(2))
        states[name] = plain.state_dict()
    assert pool.run(2, resumed, states) == [[], []]


def kept_dtypes(saved: StateDict) -> tuple[set[torch.dtype], set[torch.dtype]]:
    module = make_model().bfloat16()
    zero = ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, lr=0.1, fused=True)
    zero.load_state_dict(saved)
    states = zero.state.values()
    assert all(state["step"].shape == () for state in states)
    return {s["exp_avg"].dtype for s in states}, {s["step"].dtype for s in states}


def test_loading_keeps_dtypes(pool: RankPool) -> None:
    """A float32 state of bfloat16 parameters stays float32, and so do step counts."""
    module, plain = plain_of("AdamW mixed")
    module.float()
    train(module, plain, range(1))
    for state in plain.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    assert pool.run(2, kept_dtypes, plain.state_dict()) == [({torch.float32}, {torch.float32})] * 2


def refused() -> list[str]:
    module, zero = alone("SGD")
    train(module, zero, range(1))
    one_less = optim.SGD(list(module.parameters())[1:], lr=0.1).state_dict()
    two = optim.SGD([{"params": [p]} for p in module.parameters()], lr=0.1).state_dict()
    messages = []
    for action in [
        lambda: zero.load_state_dict(one_less),
        lambda: zero.load_state_dict(two),
        lambda: zero.consolidate_state_dict(to=-1),
        lambda: zero.consolidate_state_dict(to="0"),  # type: ignore[arg-type]
        lambda: pickle.dumps(zero),
        lambda: copy.deepcopy(zero),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            action()
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_refused(pool: RankPool) -> None:
    """States of other models, ranks that are not there, and pickling."""
    for one_less, two, negative, text, pickled, copied in pool.run(2, refused):
        assert "[8]" in one_less
        assert "[9]" in one_less
        assert "build the same model" in two
        assert "0 to 1, got -1" in negative
        assert "got '0'" in text
        assert pickled.startswith("TypeError: a ZeroRedundancyOptimizer belongs to its process")
        assert "sharded_state()" in copied


def save(folder: str, names: list[str]) -> None:
    for name in names:
        module, zero = alone(name)
        train(module, zero, range(2))
        state = {"model": module.state_dict(), "optimizer": zero.sharded_state()}
        state_dict_saver.save(state, checkpoint_id=f"{folder}/{name}")


def load(folder: str, names: list[str], stepped: bool) -> list[str]:
    """Return where going on from a checkpoint differs from having gone on."""
    wrong = []
    for name in names:
        plain_module, plain = plain_of(name)
        train(plain_module, plain, range(2))
        module, zero = alone(name)
        zero.param_groups[0]["lr"] = 7.0
        if stepped:
            train(module, zero, range(5, 6))
        state = {"model": module.state_dict(), "optimizer": zero.sharded_state()}
        state_dict_loader.load(state, checkpoint_id=f"{folder}/{name}")
        for number in range(2, 5):
            train(plain_module, plain, range(number, number + 1))
            train(module, zero, range(number, number + 1))
            if not all(map(torch.equal, plain_module.parameters(), module.parameters())):
                wrong.append(f"{name} at step {number}")
    return wrong


@pytest.mark.parametrize(
    ("size_before", "size_after", "stepped"),
    [(4, 4, True), (4, 2, False), pytest.param(2, 4, False, marks=pytest.mark.long)],
)
def test_distributed_checkpoint(
    pool: RankPool, tmp_path: Path, size_before: int, size_after: int, stepped: bool
) -> None:
    """Every rank saves its own part, and any number of ranks goes on from there to the bit."""
    names = list(KINDS) if size_before == size_after else ["AdamW fused", "Adafactor", "own"]
    pool.run(size_before, save, str(tmp_path), names)
    assert pool.run(size_after, load, str(tmp_path), names, stepped) == [[]] * size_after


def save_large(folder: str) -> int:
    """Save 24 MB of state; return the bytes that this rank holds."""
    model = torch.nn.Linear(1500, 2000)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    state_dict_saver.save({"optimizer": zero.sharded_state()}, checkpoint_id=folder)
    return sum(value.nbytes for state in zero.state.values() for value in state.values())


def test_every_rank_writes_only_its_part(pool: RankPool, tmp_path: Path) -> None:
    """The files of 4 ranks are a quarter of the state each."""
    held = pool.run(4, save_large, str(tmp_path))
    written = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert len(written) == 4
    assert sum(written) == pytest.approx(24e6, rel=0.02)
    assert max(written) == pytest.approx(max(held), rel=0.05)


def frozen_loaded(folder: str) -> bool:
    """Save and load with a frozen layer, of which there is no state."""
    modules, zeros = [], []
    for _ in range(2):
        module = make_model()
        module.wide.requires_grad_(False)
        modules.append(module)
        zeros.append(ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, lr=0.1))
    train(modules[0], zeros[0], range(2))
    state_dict_saver.save({"optimizer": zeros[0].sharded_state()}, checkpoint_id=folder)
    modules[1].load_state_dict(modules[0].state_dict())
    state_dict_loader.load({"optimizer": zeros[1].sharded_state()}, checkpoint_id=folder)
    for module, zero in zip(modules, zeros, strict=True):
        train(module, zero, range(2, 4))
    return all(map(torch.equal, *(module.parameters() for module in modules)))


def test_a_checkpoint_of_a_partly_frozen_model(pool: RankPool, tmp_path: Path) -> None:
    """An optimizer that has not stepped asks for no state of frozen parameters."""
    assert pool.run(2, frozen_loaded, str(tmp_path)) == [True, True]


def added_after_loading(saved: StateDict) -> bool:
    """Load a state into optimizers with names, add a group to each, and train."""
    results = []
    for make in (optim.AdamW, lambda p, **s: ZeroRedundancyOptimizer(p, optim.AdamW, **s)):
        module = make_model()
        named = list(module.named_parameters())
        optimizer = make(named[:5], lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(saved))  # the plain one keeps what it is given
        optimizer.add_param_group({"params": named[5:], "lr": 0.2})
        train(module, optimizer, range(1, 3))
        results.append(list(module.parameters()))
    return all(map(torch.equal, *results))


def test_groups_can_be_added_after_loading(pool: RankPool) -> None:
    """Names survive a load, so that a named group can follow."""
    module = make_model()
    plain = optim.AdamW(list(module.named_parameters())[:5], lr=0.1)
    train(module, plain, range(1))
    assert pool.run(2, added_after_loading, plain.state_dict()) == [True, True]


def memory_of_consolidating() -> tuple[int, int]:
    """Consolidate 128 MB of state on rank 0 of 4; return this rank's growth and its shard."""
    dist.all_reduce(torch.ones(1))
    model = torch.nn.ParameterList([torch.zeros(1000, 1000 + i) for i in range(16)])
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    shard = sum(value.nbytes for state in zero.state.values() for value in state.values())
    return extra_bytes(zero.consolidate_state_dict), shard


def test_memory_of_consolidating() -> None:
    """One rank holds the result and at most a shard beside it, all others nothing more."""
    (taken, shard), *others = run_ranks(4, memory_of_consolidating)
    assert 4 * shard <= taken + MB
    assert taken < 5 * shard
    assert all(extra < 4 * MB for extra, _ in others)
