"""Fixtures for all tests, and in CI the rule that nothing is skipped unseen."""

import gc
import multiprocessing.forkserver
import os
import re
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded. Ranks are processes; thread pools in them would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.distributed.optim compiles a dozen optimizers to TorchScript when it is imported: a second
# in every process, for what no test uses.
os.environ.setdefault("PYTORCH_JIT", "0")

import hypothesis
import pytest

from loosestep.testing import RankPool, forking
from tests.support.result_file import ResultFile

ALLOWED_SKIPS = [r"no GPU", r"(accelerate|lightning) is not installed"]
DEAR = {"lab", "project"}  # commands and processes of their own

# What test modules import and takes long, so that no rank has to: they are forked with it.
PRELOAD = """
    hypothesis hypothesis.strategies numpy pytest
    torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.optim
    torch.distributed.tensor.parallel
    loosestep.testing.rank_worker loosestep.lab.trainer.start
""".split()

# No deadline for one example: other processes may take the processor meanwhile.
hypothesis.settings.register_profile("brief", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=4000)
hypothesis.settings.load_profile("brief")

refused_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-file", type=Path, help="write what the run came to, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result-file")
    if path and not hasattr(config, "workerinput"):  # of those side by side, who collects writes
        config.pluginmanager.register(ResultFile(path))


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Start what forks all ranks: the first to ask for a process decides what it has loaded."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in request.session.items):
        forking.context(PRELOAD)
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that all tests share; they start when first used."""
    with RankPool(4) as ranks:
        yield ranks


# Tests that kill, stop and wait, or measure seconds, while others take the processors: one that
# fails is tried once more, and the last line says how many were. What is broken fails twice. All
# tests of the commands are such, too.
TIMED = frozenset(
    f"test_{name}.py"
    for name in """
    added_parameters blame bytes_on_the_wire division examples failures overlap shared_memory
    startup stuck_store testing zero_failures zero_regressions
    """.split()
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests together that share what a module makes; side by side they would make it again.

    Folders with tests that take long come first, so that no worker ends with one of them alone.
    """
    items.sort(key=lambda item: item.path.parent.name not in DEAR)
    for item in items:
        if "lab" in item.path.parts or item.path.name in TIMED:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if isinstance(item, pytest.Function) and _shares_with_its_module(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Let the collector leave alone what stays until the end: torch and the test modules."""
    gc.collect()
    gc.freeze()


def _shares_with_its_module(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope == "module" for several in definitions for fixture in several)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        note_skip(report)


def note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    if not any(re.search(allowed, reason) for allowed in ALLOWED_SKIPS):
        refused_skips.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and refused_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and refused_skips:
        terminalreporter.section("skipped for a reason that CI does not allow", red=True)
        for line in refused_skips:
            terminalreporter.line(line)
