"""Errors say in a few words why a peer was lost, whatever the backend and the futures say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    PeerLost,
    PostLocalSGDState,
    ZeroOptions,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    ddp,
    hook_with_zero_step,
    post_localSGD_hook,
)
from loosestep.comm.failure import reason_of
from loosestep.reducers import AllReduce
from loosestep.testing import RankPool
from tests.support.faults import FAULTS, settle, use

TIMEOUT = 1.0  # seconds for every wait on a rank that hangs

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
CLOSED = GLOO + "Connection closed by peer [127.0.0.1]:34210. This is typically caused by a remote "
CLOSED += "worker hanging or bugs in the application. GLHF! 🏖️"
RESET = GLOO + "Read error [fe80::1%eth0]:3421: Connection reset by peer. This is typically caused"
TIMED_OUT = GLOO + "Timed out waiting 2500ms for recv operation to complete"
CALLBACK = "Got the following error when running the callback: "
LAMBDA = "\n\nAt:\n  /torch/ddp_comm_hooks/default_hooks.py(31): <lambda>\n"
STORE = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
FRAMES = "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 "
FRAMES += "(most recent call first):\nframe #0: c10::Error::Error(...) + 0x9d (0x7f in libc10.so)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CLOSED, "connection closed by peer"),
        (RESET, "connection reset by peer"),
        (GLOO + "writev [::1]:4: Broken pipe", "connection closed by peer"),
        (TIMED_OUT, "no answer within 2.5 s"),
        (GLOO + "Application timeout caused pair closure", "no answer in time"),
        ("Operation timed out!", "no answer in time"),
        ("wait timeout after 2000ms, keys: /default_pg/0//x/0/rank_1", "no answer within 2 s"),
        (f"{CALLBACK}RuntimeError: {CLOSED}{LAMBDA}", "connection closed by peer"),
        (f"{2 * (CALLBACK + 'RuntimeError: ')}{TIMED_OUT}{2 * LAMBDA}", "no answer within 2.5 s"),
        (f"{STORE}\n{FRAMES}", "connection closed by peer"),
        (f"{FRAMES}\nSome {GLOO}text. More of it.", "Some text"),
        (GLOO + "Cannot reach [::1]:80. Sorry", "Cannot reach"),
        (f"{CALLBACK}ValueError: a bug{LAMBDA}", "ValueError: a bug"),
        (LAMBDA, "RuntimeError without a text"),
        ("", "RuntimeError without a text"),
    ],
)
def test_texts_are_made_words(text: str, words: str) -> None:
    """No paths in torch's sources, no addresses, no prefixes, no lines of a traceback."""
    assert reason_of(RuntimeError(text)) == words


class Net(NamedTuple):
    """A model, and how one step of it is taken."""

    module: torch.nn.Module
    finish: Callable[[], object]

    def step(self) -> None:
        self.module(torch.ones(2, 8)).sum().backward()
        self.finish()


def attached(module: Any, **options: Any) -> Net:
    optimizer = torch.optim.SGD(module.parameters())
    attach(module, optimizer, ddp(**options), timeout=TIMEOUT)
    return Net(module, optimizer.step)


def by_post_local_hook(module: Any) -> Net:
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(PostLocalSGDState(None, None, 100), post_localSGD_hook)
    return Net(wrapped, lambda: None)


def by_zero_hook(module: Any) -> Net:
    wrapped = DistributedDataParallel(module)
    options = ZeroOptions(timeout=TIMEOUT)
    zero = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.SGD, overlap_with_ddp=True, zero_options=options, lr=0.1
    )
    wrapped.register_comm_hook(None, hook_with_zero_step(fp16_compress_hook, wrapped, zero))
    return Net(wrapped, zero.step)


def by_average(module: Any) -> Net:
    return Net(module, lambda: average_(module.parameters(), timeout=TIMEOUT))


WAYS: dict[str, Callable[[Any], Net]] = {
    "average": by_average,
    "plain": attached,
    "reducer": lambda module: attached(module, gradient_reducer=AllReduce()),
    "ddp": lambda module: attached(DistributedDataParallel(module)),
    "post local": by_post_local_hook,
    "zero hook": by_zero_hook,
}


def lose_rank_1(way: str, fault: str) -> tuple[tuple[int, ...], str]:
    """Train until rank 1 is struck; return who is named, and why."""
    use("network")
    settle()
    net = WAYS[way](torch.nn.Linear(8, 8))
    net.step()
    net.step()
    if dist.get_rank() == 1:
        FAULTS[fault]()
    with pytest.raises(PeerLost) as failed:
        net.step()
    found = re.search(r"\(ranks \[0, 1, 2\]\): (.*)\. Parameters may", str(failed.value))
    assert found, failed.value
    return failed.value.ranks, found[1]


CUT = {"connection closed by peer", "connection reset by peer"}
SILENT = {f"no answer within {TIMEOUT:g} s", "no answer in time"}


@pytest.mark.parametrize(
    ("way", "fault"),
    [*((way, "kill") for way in WAYS), ("plain", "sleep"), ("ddp", "sleep"), ("reducer", "sleep")],
)
def test_the_reason_is_words(pool: RankPool, way: str, fault: str) -> None:
    """A lost rank is named, with a reason for people, wherever the backend's error comes from."""
    results = pool.run(3, lose_rank_1, way, fault, allow_dead=[1], group_timeout=TIMEOUT * 4)
    for ranks, reason in (results[0], results[2]):
        assert ranks == (1,)
        assert reason in (CUT if fault == "kill" else SILENT | CUT)
