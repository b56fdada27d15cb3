"""What once went wrong beside the wire: combinations, errors that are caught, what is left over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    NotFinite,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    Strategy,
    attach,
    ddp,
    gradient_hook,
)
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.comm.reducers.nonfinite import all_finite
from loosestep.gradients.hook import GradientHook
from loosestep.gradients.plain import ToAll
from loosestep.gradients.reductions import Reductions
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    Reducer,
    SharedMemoryMean,
    TopK,
)
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot

pytestmark = pytest.mark.fast

# Averages under way.

CANNOT_OVERLAP: dict[str, tuple[dict[str, Any], str]] = {
    "state": ({"optimizer_state": "average"}, "use 'keep' or 'reset', or overlap_steps=0"),
    "skip": ({"reducer": TopK(0.5, on_nonfinite="skip")}, "use on_nonfinite='raise'"),
    "feedback": ({"reducer": ErrorFeedback(Int4(on_nonfinite="skip"))}, "on_nonfinite='raise'"),
    "resident": ({"reducer": SharedMemoryMean()}, r"use TwoLevel\(\) or Mean\(\)"),
}


@pytest.mark.parametrize("what", CANNOT_OVERLAP)
def test_what_cannot_overlap_is_refused(what: str) -> None:
    """A strategy says so at once, with the number and the way out; without overlap it may be."""
    options, way_out = CANNOT_OVERLAP[what]
    with pytest.raises(ValueError, match=f"overlap_steps=2 .*{way_out}"):
        Strategy(schedule=every(4), overlap_steps=2, **options)
    assert Strategy(schedule=every(4), **options).overlap_steps == 0


def averager_texts() -> list[str]:
    texts = []
    reducers: list[Reducer] = [TopK(0.5, on_nonfinite="skip"), SharedMemoryMean()]
    for reducer in reducers:
        try:
            PeriodicModelAverager(4, reducer=reducer, overlap_steps=2)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_averagers_refuse_it_too(pool: RankPool) -> None:
    """An averager that is made by hand knows the same rules."""
    for skipping, resident in pool.run(2, averager_texts):
        assert "use on_nonfinite='raise'" in skipping
        assert "use TwoLevel() or Mean()" in resident


# Checkpoints.


def load_nothing_kept() -> list[int]:
    """Return how many levels keep something before and after loading a state from before."""
    net = make_net()
    averager = PeriodicModelAverager(1, module=net, reducer=ErrorFeedback(Int8()))
    optimizer = PostLocalSGDOptimizer(sgd(net), averager)
    start, counts = optimizer.state_dict(), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()
    start.pop("averager", None)
    for _ in range(2):
        kept = averager.kept_state()
        counts.append(len(kept.get("kept", {})))
        optimizer.load_state_dict(start)
    return counts


def test_a_checkpoint_without_memory_clears_it(pool: RankPool) -> None:
    """What was kept belongs to the run that is left, so the loaded one starts without."""
    for before, after in pool.run(2, load_nothing_kept):
        assert before > 0
        assert after == 0


# Gradients by a reducer.


def skip_a_step(kind: str, num_bytes: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the steps that were skipped, and the parameters; all buckets of a step are small."""
    net: torch.nn.Module = make_net()
    net = DistributedDataParallel(net) if kind == "ddp" else net
    optimizer, skipped = sgd(net), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToAll, "bucket_bytes", num_bytes)
        with attach(net, optimizer, ddp(gradient_reducer=ErrorFeedback(Int8()))):
            for step in range(6):
                optimizer.zero_grad()
                bad = step in (1, 4) and dist.get_rank() == 1
                loss = loss_of(net, dist.get_rank(), step) * (float("nan") if bad else 1.0)
                try:
                    loss.backward()
                except NotFinite:
                    skipped.append(step)
                else:
                    optimizer.step()
    parameters = dict(getattr(net, "module", net).named_parameters())
    return skipped, {name: p.detach().clone() for name, p in parameters.items()}


@pytest.mark.parametrize("num_bytes", [64, 25 << 20])
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_step_that_is_not_finite_can_be_skipped(
    pool: RankPool, kind: str, num_bytes: int
) -> None:
    """All ranks hear of it, leave the step out and go on together."""
    (skipped, one), (also, other) = pool.run(2, skip_a_step, kind, num_bytes)
    assert skipped == also == [1, 4]
    assert equal(one, other)
    assert all(bool(tensor.isfinite().all()) for tensor in one.values())
    assert not torch.equal(one["last.bias"], snapshot(make_net())["last.bias"])


class Failing(Mean):
    """Fails with what it is told."""

    errors: list[Exception]

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        raise self.errors.pop(0)

    def __repr__(self) -> str:
        return "Failing()"


def fail_twice() -> list[str]:
    reducer = Failing()
    reducer.errors = [KeyError("one"), OSError("two")]
    reductions = Reductions(reducer)
    launched = [
        reductions.share(torch.ones(2), peers_of(world_group()), Place("x")) for _ in range(2)
    ]
    texts = []
    for shared in launched:
        try:
            shared.wait()
        except (KeyError, OSError) as error:
            texts.append(repr(error))
    reductions.close()
    return texts


def test_every_buffer_has_its_own_error(pool: RankPool) -> None:
    """An error is not replaced by one of before."""
    assert pool.run(1, fail_twice) == [["KeyError('one')", "OSError('two')"]]


def attach_with_scaler() -> list[str]:
    texts = []
    reducers: list[Reducer | None] = [Int8(), ErrorFeedback(Int4()), Cast(torch.bfloat16), None]
    for reducer in reducers:
        net, scaler = make_net(), torch.amp.GradScaler("cpu")
        try:
            attach(net, sgd(net), ddp(gradient_reducer=reducer), scaler=scaler).detach()
            texts.append("")
        except NotAttachable as error:
            texts.append(str(error))
    return texts


def test_a_scaler_needs_to_see_infinities(pool: RankPool) -> None:
    """A reducer that stops them is refused, with the way out; one that lets them through is not."""
    for int8, feedback, cast, none in pool.run(2, attach_with_scaler):
        assert "Int8(" in int8
        assert "gradient_reducer=Cast(torch.bfloat16) or none, or no scaler" in feedback
        assert (cast, none) == ("", "")


# What a refused attach leaves.


def left_over(why: str) -> tuple[str, int, int]:
    """Return the error and how many process groups and threads are left of a refused attach."""
    net = DistributedDataParallel(make_net())
    strategy, attached = ddp(gradient_reducer=Int8()), None
    if why == "attached":
        attached = attach(net, sgd(net), strategy)
    else:
        net.register_comm_hook(None, allreduce_hook)
        with pytest.raises(NotAttachable):  # what is made once in a process is made now
            attach(net, sgd(net), strategy)
    groups, threads, text = len(_world.pg_map), threading.active_count(), ""
    for _ in range(2):
        try:
            attach(net, sgd(net), strategy)
        except NotAttachable as error:
            text = str(error)
    patience = time.monotonic() + 5.0
    while threading.active_count() > threads and time.monotonic() < patience:
        time.sleep(0.05)
    left = len(_world.pg_map) - groups, threading.active_count() - threads
    if attached is not None:
        attached.detach()
    return text, *left


@pytest.mark.parametrize(("why", "said"), [("attached", "attached already"), ("hook", "hook al")])
def test_a_refused_attach_leaves_nothing(pool: RankPool, why: str, said: str) -> None:
    """Neither process groups nor threads."""
    for text, groups, threads in pool.run(2, left_over, why):
        assert said in text
        assert (groups, threads) == (0, 0)


# Bad input.

NO_REDUCERS: dict[str, Callable[[], object]] = {
    "hook": lambda: gradient_hook("x"),  # type: ignore[arg-type]
    "class": lambda: gradient_hook(Int8),  # type: ignore[arg-type]
    "state": lambda: GradientHook("x", None),  # type: ignore[arg-type]
    "thread": lambda: Reductions(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("way", NO_REDUCERS)
def test_what_is_no_reducer_is_refused(way: str) -> None:
    """At once, with what was given and what is taken; no thread is started."""
    threads = threading.active_count()
    with pytest.raises(TypeError, match=r"reducer must be a reducer such as Int8\(\).*, got "):
        NO_REDUCERS[way]()
    assert threading.active_count() == threads


def test_what_is_no_process_group_is_refused() -> None:
    """A level's name alone is none."""
    with pytest.raises(TypeError, match=r"topology.process_group\('host'\), or None, got 'host'"):
        gradient_hook(Int8(), "host")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("at", [0, 1, 62, 63])
def test_infinities_of_any_dtype_are_seen(dtype: torch.dtype, at: int) -> None:
    """Values were read as float32s: some infinities were not, and what lies behind the end was."""
    values = torch.ones(65, dtype=dtype)
    values[64] = float("nan")
    assert all_finite(values[:64])
    values[at] = float("inf")
    assert not all_finite(values[:64])
