"""run_ranks and RankPool on real processes: results, failures, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from loosestep.testing import RankPool, RanksFailed, run_ranks
from tests.support.lines import find_line
from tests.support.processes import eventually, running


def total(scale: float) -> tuple[int, float]:
    value = torch.full((1,), scale * dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")


def raise_while_others_wait(rank: int) -> None:
    raise_on(rank)
    dist.barrier()


def sleep_on(ranks: set[int]) -> None:
    if dist.get_rank() in ranks:
        time.sleep(600)


def signal_self(rank: int, number: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    return "survived"


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def leave_via_sys_exit() -> None:
    sys.exit(5)


def leave_groups_behind() -> int:
    dist.new_group([0, 1])
    dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=5))
    return dist.get_pg_count()


def count_groups() -> int:
    return dist.get_pg_count()


def surroundings() -> tuple[int, int, str | None]:
    before = os.environ.get("LOOSESTEP_LEAK")
    os.environ["LOOSESTEP_LEAK"] = "1"
    return torch.get_num_threads(), int(torch.randint(1 << 30, ()).item()), before


def time_out_in_collective() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(3)


def pid() -> int:
    return os.getpid()


def unpicklable() -> Callable[[], None]:
    return lambda: None


def session_members(session_id: int) -> set[int]:
    """Return the processes that run in a session, zombies left out."""
    members = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == session_id and state != "Z":
            members.add(int(path.parent.name))
    return members


def test_results_come_by_rank():
    """0 + 1 + 2 = 3, times two."""
    assert run_ranks(3, total, 2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_pool_runs_several_world_sizes(pool: RankPool):
    for world_size in (4, 1, 2, 4):
        want = sum(range(world_size))
        assert pool.run(world_size, total, 1.0) == [(rank, want) for rank in range(world_size)]


def test_pool_keeps_its_processes(pool: RankPool):
    assert pool.run(4, pid) == pool.run(4, pid)


def test_traceback_of_the_failing_rank_comes_back(pool: RankPool):
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed, in this order: 1") as caught:
        pool.run(3, raise_on, 1)
    assert list(caught.value.failures) == [1]
    assert "in raise_on" in str(caught.value)
    assert "ValueError: no luck on 1" in str(caught.value)
    assert pool.run(3, count_groups) == [1, 1, 1]


def test_every_failed_rank_is_told_and_the_first_comes_first(pool: RankPool):
    """Rank 2 raises; its peers, waiting for it, fail within moments and not by timeout."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, raise_while_others_wait, 2)
    assert time.monotonic() - start < 10
    assert next(iter(caught.value.failures)) == 2
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert pool.run(4, count_groups) == [1] * 4


def test_timeout_kills_and_names_the_ranks(pool: RankPool):
    pids = pool.run(3, pid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, sleep_on, {0, 2}, timeout=1.0)
    assert 1.0 <= time.monotonic() - start < 5.0
    assert sorted(caught.value.failures) == [0, 2]
    assert "rank 2: did not answer within 1 s and was killed" in str(caught.value)
    assert not any(running(process_id) for process_id in pids)
    assert pool.run(3, total, 1.0) == [(0, 3.0), (1, 3.0), (2, 3.0)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal_is_named(pool: RankPool, number: signal.Signals):
    with pytest.raises(RanksFailed, match=f"rank 1: died of {number.name}"):
        pool.run(3, signal_self, 1, int(number))
    assert pool.run(3, count_groups) == [1, 1, 1]


def test_death_by_exit_is_named(pool: RankPool):
    with pytest.raises(RanksFailed, match="rank 0: died with exit code 3"):
        pool.run(2, exit_on, 0)
    assert pool.run(2, count_groups) == [1, 1]


def test_sys_exit_is_a_failure(pool: RankPool):
    with pytest.raises(RanksFailed, match="SystemExit: 5"):
        pool.run(1, leave_via_sys_exit)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 2])
def test_allowed_death_leaves_the_survivors_results(pool: RankPool, number: int, rank: int):
    pids = pool.run(3, pid)
    results = pool.run(3, signal_self, rank, int(number), allow_dead={rank})
    assert results == [None if r == rank else "survived" for r in range(3)]
    assert not running(pids[rank])
    assert pool.run(3, count_groups) == [1, 1, 1]


def test_exception_on_a_rank_allowed_to_die_still_fails(pool: RankPool):
    with pytest.raises(RanksFailed, match="no luck on 1"):
        pool.run(2, raise_while_others_wait, 1, allow_dead={1})


def test_group_timeout_reaches_the_collectives(pool: RankPool):
    """Rank 0 gives up after half a second, long before its peer is awake."""
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, time_out_in_collective, group_timeout=0.5)
    assert next(iter(caught.value.failures)) == 0


def test_undestroyed_groups_do_not_reach_the_next_run(pool: RankPool):
    assert pool.run(4, leave_groups_behind) == [3] * 4
    assert pool.run(4, count_groups) == [1] * 4


def test_runs_start_alike(pool: RankPool):
    """One thread, the same seed on every rank and in every run, and the environment restored."""
    first = pool.run(2, surroundings)
    assert first == pool.run(2, surroundings)
    assert first[0] == first[1]
    assert first[0][0] == 1
    assert first[0][2] is None


def test_result_that_does_not_pickle_is_a_failure(pool: RankPool):
    with pytest.raises(RanksFailed, match="lambda"):
        pool.run(1, unpicklable)


def test_lambda_is_refused(pool: RankPool):
    with pytest.raises(TypeError, match="body must be a top-level function of a module"):
        pool.run(1, lambda: None)


def test_arguments_that_do_not_pickle_are_refused(pool: RankPool):
    with pytest.raises(TypeError, match="the arguments of body must pickle"):
        pool.run(1, total, lambda: None)


def test_bad_sizes_are_refused(pool: RankPool):
    with pytest.raises(ValueError, match=r"world_size must lie in 1\.\.4"):
        pool.run(5, pid)
    with pytest.raises(ValueError, match=r"allow_dead has ranks \[2\] outside 0..1"):
        pool.run(2, pid, allow_dead={2})
    with pytest.raises(ValueError, match="the size of a pool must be a whole number >= 1, got 0"):
        RankPool(0)


def test_closed_pool_is_refused():
    with pytest.raises(RuntimeError, match="with RankPool"):
        RankPool(1).run(1, pid)


def test_run_ranks_leaves_no_process():
    pids = run_ranks(2, pid)
    assert not any(running(process_id) for process_id in pids)


PARENT = """
import sys
from loosestep.testing import RankPool
from tests.testing.test_testing import pid, signal_self, sleep_on
import signal

if __name__ == "__main__":
    with RankPool(3) as pool:
        print(*pool.run(3, pid), flush=True)
        {last_run}
"""


@pytest.mark.parametrize(
    "last_run",
    [
        pytest.param("sys.stdin.read()", marks=pytest.mark.long),
        pytest.param("pool.run(3, sleep_on, {0, 1, 2}, timeout=600)", marks=pytest.mark.long),
        "pool.run(3, signal_self, 1, int(signal.SIGSTOP), timeout=600)",
    ],
    ids=["idle", "busy", "stopped"],
)
def test_workers_die_with_their_parent(tmp_path: Path, last_run: str):
    """After a SIGKILL to the parent nothing it started runs on, the forkserver included."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(last_run=last_run))
    parent = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdin
    assert parent.stdout
    with parent, parent.stdin, parent.stdout:
        pids = {int(word) for word in find_line(parent.stdout, r"\d+ \d+ \d+").split()}
        assert len(pids) == 3
        assert pids < session_members(parent.pid)
        time.sleep(0.3)  # for the last run to begin
        parent.kill()
        parent.wait()
        assert eventually(lambda: not session_members(parent.pid)), session_members(parent.pid)
