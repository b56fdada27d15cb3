"""Fixtures for all tests, and in CI the rule that nothing is skipped unseen."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded. Ranks are processes; thread pools in them would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from loosestep.testing import RankPool
from tests.support.result_file import ResultFile

ALLOWED_SKIPS = [r"no GPU"]

# No deadline for one example: other processes may take the processor meanwhile.
hypothesis.settings.register_profile("brief", deadline=None, max_examples=150)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=4000)
hypothesis.settings.load_profile("brief")

refused_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-file", type=Path, help="write what the run came to, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result-file")
    if path and not hasattr(config, "workerinput"):  # of those side by side, who collects writes
        config.pluginmanager.register(ResultFile(path))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that all tests share; they start when first used."""
    with RankPool(4) as ranks:
        yield ranks


@pytest.hookimpl(tryfirst=True)  # before xdist reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests together that share what a module makes; side by side they would make it again."""
    for item in items:
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
