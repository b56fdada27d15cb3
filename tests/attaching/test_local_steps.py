"""Steps that are in one rank's replica only: counted, told at the end, and not mixed up on disk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from loosestep import (
    HierarchicalModelAverager,
    LoosestepWarning,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    RankMismatch,
    Strategy,
    attach,
    ddp,
    post_local_sgd,
)
from loosestep.reducers import ErrorFeedback, Int8
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.oracle import Net, equal, exact_mean, loss_of, make_net, sgd, snapshot

EVERY_4 = Strategy(schedule=every(4))
LATE = Strategy(schedule=every(4), overlap_steps=2)
WARM = post_local_sgd(period=4, warmup_steps=3, gradients=None)


def go(net: Net, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def counted(strategy: Strategy) -> list[int]:
    """Return the local steps after each of nine steps, and after ``finalize``."""
    net = make_net()
    optimizer, counts = sgd(net), []
    with attach(net, optimizer, strategy) as run:
        for step in range(9):
            go(net, optimizer, step, step + 1)
            counts.append(run.local_steps)
        with run.averaged():
            assert run.local_steps == 0
        run.finalize()
        return [*counts, run.local_steps]


def count_all() -> list[list[int]]:
    return [counted(strategy) for strategy in (EVERY_4, LATE, WARM, ddp())]


def test_local_steps_are_counted(pool: RankPool) -> None:
    """From the last step of which all replicas have a part."""
    for told in pool.run(2, count_all):
        assert told == [
            [1, 2, 3, 0, 1, 2, 3, 0, 1, 0],
            # Launched after 4 and 8 steps; what comes at 6 has nothing of steps 5 and 6.
            [1, 2, 3, 4, 5, 2, 3, 4, 5, 0],
            [0, 0, 0, 1, 2, 3, 0, 1, 2, 0],  # 3 steps of warm-up, then syncs after 7, 11, ...
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]


def left(strategy: Strategy, steps: int, *, finalize: bool = False, fail: bool = False) -> str:
    """Return what leaving the block warns of."""
    net = make_net()
    optimizer = sgd(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with attach(net, optimizer, strategy) as run:
                go(net, optimizer, 0, steps)
                if finalize:
                    run.finalize()
                if fail:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    said = [w for w in caught if w.category is LoosestepWarning and "finalize" in str(w.message)]
    assert all(w.filename == __file__ for w in said)
    return "".join(str(w.message) for w in said)


def leave_all() -> tuple[list[str], list[str]]:
    warned = [left(EVERY_4, 3), left(EVERY_4, 5), left(LATE, 4)]
    silent = [
        left(EVERY_4, 4),
        left(EVERY_4, 3, finalize=True),
        left(EVERY_4, 3, fail=True),
        left(ddp(), 3),
        left(WARM, 3),
    ]
    return warned, silent


def test_leaving_without_finalize_warns(pool: RankPool) -> None:
    """With the number of steps; not after an error, and not where nothing is lost."""
    for rank, (warned, silent) in enumerate(pool.run(2, leave_all)):
        for text, steps in zip(warned, ["3 steps", "1 step ", "4 steps"], strict=True):
            assert f"rank {rank}: {steps}" in text
            assert "run.finalize()" in text
        assert silent == [""] * 5


def loaded_everywhere() -> list[str]:
    """Load rank 0's state of some steps on all ranks; return the errors."""
    errors = []
    for strategy, steps in ((EVERY_4, 3), (LATE, 5), (EVERY_4, 4)):
        net = make_net()
        optimizer = sgd(net)
        with attach(net, optimizer, strategy) as run:
            go(net, optimizer, 0, steps)
            held: list[Any] = [run.state_dict()]
            dist.broadcast_object_list(held, 0)
            run.finalize()
        with attach(net, optimizer, strategy) as run:
            try:
                run.load_state_dict(held[0])
                errors.append(f"at step {run.clock.step}")
            except RankMismatch as error:
                errors.append(str(error))
            run.finalize()
    return errors


def test_one_ranks_state_is_not_taken_for_all(pool: RankPool) -> None:
    """In mid-period all ranks refuse it; after a sync it stands for all."""
    for rank, (early, under_way, synced) in enumerate(pool.run(2, loaded_everywhere)):
        for text in (early, under_way):
            assert text.startswith(f"rank {rank}: ")
            assert "rank 0 of 2" in text
            assert "ranks [1]" in text
            assert "run.averaged()" in text
        assert synced == "at step 4"


def loaded_by_averagers() -> list[str]:
    """Load rank 0's state of some calls into averagers on all ranks; return what came of it."""
    told = []
    makers: list[Callable[[], ModelAverager]] = [
        lambda: PeriodicModelAverager(4),
        lambda: PeriodicModelAverager(4, warmup_steps=3),
        lambda: HierarchicalModelAverager({2: 1, 4: 2}),
        lambda: PeriodicModelAverager(4, overlap_steps=2),
    ]
    for make in makers:
        for calls in (3, 5, 8):
            parameter, averager = torch.nn.Parameter(torch.zeros(2)), make()
            for _ in range(calls):
                averager.average_parameters([parameter])
            held: list[Any] = [averager.state_dict()]
            make().load_state_dict(held[0])  # every rank its own
            dist.broadcast_object_list(held, 0)
            averager.finalize([parameter])
            try:
                make().load_state_dict(held[0])
                told.append("taken")
            except RankMismatch as error:
                words = ("rank 0 of 2", "ranks [1]", "finalize")
                told.append("refused" if all(word in str(error) for word in words) else str(error))
            after: list[Any] = [averager.state_dict()]
            dist.broadcast_object_list(after, 0)
            make().load_state_dict(after[0])
    return told


def test_averagers_do_not_take_one_ranks_state_for_all(pool: RankPool) -> None:
    """In mid-period; in a warm-up, after an average and after ``finalize`` it stands for all."""
    refused, taken = "refused", "taken"
    for told in pool.run(2, loaded_by_averagers):
        assert told == [
            *(refused, taken, refused),  # averages at calls 0, 4, 8, ...
            *(taken, refused, taken),  # at 3 and 7
            *(refused, taken, refused),  # over both ranks at 0, 4, ...
            *(refused, refused, refused),  # what comes has nothing of the calls since
        ]


def loaded_by_optimizers() -> list[tuple[str, list[int]]]:
    """Do the same with optimizers that average, and load an own state too.

    Return what came of rank 0's, and the steps apart that are saved right after an own state is
    loaded, after one step and after two.
    """
    told = []
    makers: list[Callable[[], ModelAverager]] = [
        lambda: PeriodicModelAverager(4),
        lambda: PeriodicModelAverager(4, warmup_steps=3),
        lambda: PeriodicModelAverager(4, reducer=ErrorFeedback(Int8())),
        lambda: PeriodicModelAverager(4, overlap_steps=2),
    ]
    for make in makers:
        for steps in (3, 5):
            net = make_net()
            optimizer = PostLocalSGDOptimizer(sgd(net), make())
            go(net, optimizer, 0, steps)
            own = optimizer.state_dict()
            held: list[Any] = [own]
            dist.broadcast_object_list(held, 0)
            other = PostLocalSGDOptimizer(sgd(net), make())
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always", LoosestepWarning)
                other.load_state_dict(held[0])
            texts = [str(w.message) for w in seen if w.category is LoosestepWarning]
            said = (
                "warned" if any("those steps of all other ranks" in t for t in texts) else "taken"
            )
            other.load_state_dict(own)
            apart = [other.averager.state_dict()["steps_apart"]]
            for step in (steps, steps + 1):
                go(net, other, step, step + 1)
                apart.append(other.averager.state_dict()["steps_apart"])
            told.append((said, apart))
            optimizer.finalize()
            other.finalize()
            held = [other.state_dict()]
            dist.broadcast_object_list(held, 0)
            PostLocalSGDOptimizer(sgd(net), make()).load_state_dict(held[0])
    return told


def test_optimizers_that_average_say_what_is_lost_with_anothers_state(pool: RankPool) -> None:
    """In mid-period, to who loads it; an own state is known to be of mid-period still."""
    at_0 = [("warned", [2, 3, 0]), ("taken", [0, 1, 2])]  # averages at steps 0 and 4
    at_3 = [("taken", [0, 0, 1]), ("warned", [1, 2, 3])]
    late = [("warned", [2, 3, 4]), ("warned", [4, 5, 2])]  # launched at 0 and 4, lands at 2 and 6
    own, other = pool.run(2, loaded_by_optimizers)
    assert other == [*at_0, *at_3, *at_0, *late]
    assert own == [("taken", apart) for _, apart in other]


def saved_inside_averaged(strategy: Strategy) -> bool:
    """Resume from one rank's file; return whether all ranks go on from the average, in step."""
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, 0, 5)
        with run.averaged():
            held: list[Any] = [copy.deepcopy((snapshot(net), run.state_dict()))]
        dist.broadcast_object_list(held, 0)
        run.finalize()
    weights, state = held[0]
    with attach(net, optimizer, strategy) as run:
        net.load_state_dict(weights)
        run.load_state_dict(state)
        assert run.local_steps == 0
        go(net, optimizer, 5, 8)
        run.finalize()
    same: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(same, snapshot(net))
    return run.clock.step == 8 and all(equal(same[0], other) for other in same)


def save_all() -> list[bool]:
    return [saved_inside_averaged(strategy) for strategy in (EVERY_4, LATE)]


def test_a_state_of_the_average_is_taken_by_all(pool: RankPool) -> None:
    """Saved inside ``averaged``, also with an average under way."""
    assert pool.run(2, save_all) == [[True, True]] * 2


def with_ema() -> tuple[bool, bool, str]:
    """Return whether a module and tensors have become the mean, and what one rank alone gets."""
    net = make_net()
    optimizer, rank = sgd(net), dist.get_rank()
    ema, shadow = AveragedModel(net), torch.full((3,), float(rank))
    with attach(net, optimizer, EVERY_4) as run:
        for step in range(4):  # the last step is a sync: the model is clean, the copy is not
            go(net, optimizer, step, step + 1)
            ema.update_parameters(net)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, snapshot(ema))
        run.finalize(also=ema)
        floats = [name for name, value in held[0].items() if value.is_floating_point()]
        means = {name: exact_mean([replica[name] for replica in held]) for name in floats}
        after = snapshot(ema)
        is_mean = all(torch.equal(after[name], means[name]) for name in floats)
        run.finalize(also={"shadow": shadow})
        try:
            run.finalize(also=[shadow] if rank else [])
        except RankMismatch as error:
            return is_mean, shadow.tolist() == [0.5] * 3, str(error)
        return is_mean, False, ""


def test_copies_are_averaged_with_the_model(pool: RankPool) -> None:
    """``finalize(also=...)`` takes modules and tensors, on all ranks or on none."""
    for module, tensors, text in pool.run(2, with_ema):
        assert (module, tensors) == (True, True)
        assert "ranks [0] gave none" in text
