"""What the doctor finds on a machine and measures between ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import PeerLost
from loosestep.comm import native
from loosestep.comm.torch_versions import NEWEST, tested_range
from loosestep.lab.doctor import (
    Finding,
    Level,
    Links,
    inspect_machine,
    measure_links,
    recommend,
)
from loosestep.lab.emulation import EmulatedHosts, Link, missing
from loosestep.testing import RankPool
from tests.support.emulated import is_at, run_on


def found(name: str) -> Finding:
    return next(finding for finding in inspect_machine() if finding.name == name)


def test_the_machine_is_described() -> None:
    """Every part is there, once, and every problem says what to do."""
    findings = inspect_machine()
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    expected = "torch backends processors memory clock rendezvous rich".split()
    assert {*expected, "shared memory", "loops in C", "emulated hosts"} <= set(names)
    assert all(finding.value for finding in findings)
    assert "gloo" in found("backends").value
    assert json.loads(json.dumps([asdict(finding) for finding in findings]))


def clear_rendezvous(patch: pytest.MonkeyPatch) -> None:
    for key in "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split():
        patch.delenv(key, raising=False)


@pytest.mark.parametrize(
    ("variables", "level", "said"),
    [
        ("", Level.OK, ""),
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2", Level.OK, ""),
        ("RANK=0 WORLD_SIZE=2", Level.PROBLEM, "set MASTER_ADDR and MASTER_PORT too"),
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=1 RANK=2 WORLD_SIZE=2", Level.PROBLEM, "2 >= 2"),
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=x RANK=0 WORLD_SIZE=2", Level.PROBLEM, "got 'x'"),
        ("MASTER_ADDR=300.1.1.1.1 MASTER_PORT=1 RANK=0 WORLD_SIZE=2", Level.PROBLEM, "looked up"),
    ],
)
def test_rendezvous_variables(
    monkeypatch: pytest.MonkeyPatch, variables: str, level: Level, said: str
) -> None:
    """What cannot work is said before anybody waits for it."""
    clear_rendezvous(monkeypatch)
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    finding = found("rendezvous")
    assert finding.level is level, finding
    assert said in finding.advice


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    finding = found("GLOO_SOCKET_IFNAME")
    assert finding.level is Level.PROBLEM
    assert "there are lo" in finding.advice
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert found("GLOO_SOCKET_IFNAME").level is Level.OK
    assert "127.0.0.1" in found("interface lo").value


def test_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert found("processors").level is Level.NOTE
    assert "OMP_NUM_THREADS=1" in found("processors").advice


def test_slurm_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_rendezvous(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert found("Slurm").value == "SLURM_JOB_ID=7 SLURM_NTASKS=4"
    assert "RANK and WORLD_SIZE" in found("Slurm").advice


def test_loops_that_were_not_built_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way out, as a note: the result is the same."""
    monkeypatch.setattr(native.library, "_found", lambda: (None, "not built; install again"))
    loops = next(finding for finding in inspect_machine() if finding.name == "loops in C")
    assert (loops.value, loops.level) == ("none", Level.NOTE)
    assert loops.advice.endswith("with the same result: not built; install again")


def test_what_is_switched_off_is_told() -> None:
    """Said as a note, in a process of its own since the answer is kept."""
    code = (
        "from loosestep.lab.doctor.machine import *; print(*map(str, inspect_machine()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LOOSESTEP_NATIVE": "0", "LOOSESTEP_SHARED_MEMORY": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "unset LOOSESTEP_NATIVE" in done.stdout
    assert "unset LOOSESTEP_SHARED_MEMORY" in done.stdout


def measure(budget_seconds: float) -> dict[str, Any]:
    told: list[str] = []
    links = measure_links(budget_seconds=budget_seconds, timeout=20, tell=told.append)
    return asdict(links) | {"told": told, "groups": dist.distributed_c10d.get_pg_count()}


def test_links_of_one_host(pool: RankPool) -> None:
    """All ranks get the same: three pairs, and both methods at three sizes."""
    results = pool.run(3, measure, 3.0)
    groups = {result.pop("groups") for result in results}
    told = results[0].pop("told")
    for result in results[1:]:
        result.pop("told")
    assert results[0] == results[1] == results[2]
    assert groups == {1}  # those that were made have been freed
    assert told == ["ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2", "level host"]
    links = Links.from_dict(json.loads(json.dumps(results[0])))
    assert links.hosts == ((0, 1, 2),)
    assert not links.is_sample
    for pair in links.pairs:
        assert pair.same_host
        assert 1e-6 < pair.round_trip_seconds < 0.5
        assert pair.forth_bytes_per_second > 1e7
        assert pair.back_bytes_per_second > 1e7
        assert abs(pair.clock_offset_seconds) < 0.1
    for method in ("all_reduce", "average"):
        sizes = [rate.num_bytes for rate in links.rates if rate.method == method]
        assert sizes[:2] == [64_000, 1_000_000]
    assert {rate.level for rate in links.rates} == {"host"}


def test_one_rank_has_no_links(pool: RankPool) -> None:
    links = Links.from_dict(pool.run(1, measure, 1.0)[0])
    assert (links.pairs, links.rates) == ((), ())
    advice = recommend([], links, num_parameters=10, step_seconds=1.0)
    assert (advice.strategy, advice.costs[0].seconds_waited) == ("ddp", 0.0)


def measure_without_one() -> tuple[list[int], float, str]:
    """Measure while the last rank does not take part, though it is alive."""
    began = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(30)
    try:
        measure_links(timeout=2.0)
    except PeerLost as error:
        return list(error.ranks), time.monotonic() - began, str(error)
    return [], 0.0, ""


def test_a_rank_that_does_not_come_is_named(pool: RankPool) -> None:
    for ranks, seconds, text in pool.run(3, measure_without_one, allow_dead=[2])[:2]:
        assert ranks == [2]
        assert seconds < 10
        assert "2" in text


def measure_and_die() -> tuple[list[int], str]:
    """Measure while the last rank dies at its second pair."""

    def die_at(text: str) -> None:
        if dist.get_rank() == 2 and text == "ranks 1 and 2":
            os._exit(1)

    try:
        measure_links(timeout=5.0, budget_seconds=1.0, tell=die_at)
    except PeerLost as error:
        return list(error.ranks), str(error)
    return [], ""


def test_a_rank_that_dies_is_named(pool: RankPool) -> None:
    """Also to the rank that was not talking to it."""
    for ranks, text in pool.run(3, measure_and_die, allow_dead=[2])[:2]:
        assert ranks == [2]
        assert "while measuring the link between ranks 1 and 2" in text


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_links_between_emulated_hosts() -> None:
    """Between hosts the link's rate, inside them far more; the advice follows from that."""
    with EmulatedHosts(2, Link("100mbit")) as hosts:
        result = run_on(hosts, measure, 2, 6.0, timeout=100)[0]
    links = Links.from_dict(result)
    assert links.hosts == ((0, 1), (2, 3))
    assert links.widest == "world"
    for pair in links.pairs:
        rates = (pair.forth_bytes_per_second, pair.back_bytes_per_second)
        if pair.same_host:
            assert max(rates) > 5 * 12.5e6  # one way may have been measured while others computed
        else:
            assert all(is_at(rate, 12.5e6) for rate in rates), pair
    # A ring of four sends 1.5 times a buffer over each uplink, two levels send it once.
    for method, copies in (("all_reduce", 1.5), ("average", 1.0)):
        seconds = links.seconds_for("world", method, 12.5e6)
        assert is_at(copies * 12.5e6 / seconds, 12.5e6), (method, seconds)
    assert links.seconds_for("host", "average", 12.5e6) < 0.3
    assert max(r.seconds for r in links.rates) < 4.0
    slow = recommend([], links, num_parameters=10_000_000, step_seconds=0.3)
    assert slow.strategy.startswith("post_local_sgd:period=")
    assert recommend([], links, num_parameters=1_000, step_seconds=0.3).strategy == "ddp"


def test_bad_times_are_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be > 0, got 0"):
        measure_links(timeout=0)
    with pytest.raises(ValueError, match="budget_seconds must be > 0, got -1"):
        measure_links(budget_seconds=-1)


def test_the_doctor_knows_the_tested_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the range there is a note, inside it the range is named."""
    monkeypatch.setattr(torch, "__version__", f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev20260101")
    finding = found("torch")
    assert finding.level is Level.NOTE
    assert tested_range() in finding.advice
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    finding = found("torch")
    assert finding.level is Level.OK
    assert f"within the tested {tested_range()}" in finding.value
