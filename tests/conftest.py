"""Fixtures for all tests, and in CI the rule that nothing is skipped unseen."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from loosestep.testing import RankPool
from tests.support.result_file import ResultFile

ALLOWED_SKIPS = [r"no GPU"]

# An example's first run may compile loops, and other processes may take the processor meanwhile.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

refused_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-file", type=Path, help="write what the run came to, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--result-file"):
        config.pluginmanager.register(ResultFile(path))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that all tests share; they start when first used."""
    with RankPool(4) as ranks:
        yield ranks


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
