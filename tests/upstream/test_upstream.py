"""PyTorch's own tests of model averaging pass with loosestep in the place of torch."""

import ast
import difflib
from collections import Counter

import pytest

from loosestep.testing import RankPool, RanksFailed
from tests.support.upstream_case import run_upstream_test
from tests.support.upstream_rewrite import PATTERNS, on_cpu, read_methods, wanted, with_helpers

METHODS = read_methods()
NAMES = wanted(METHODS)

# Torch makes the subgroup in the backward pass and asks for a GPU there.
FAILS_IN_TORCH = "test_ddp_hook_parity_post_localSGD"


def test_no_upstream_test_is_missing():
    assert len(NAMES) == 11
    for pattern in PATTERNS:
        assert wanted(METHODS, [pattern]), pattern


@pytest.mark.parametrize("name", NAMES)
def test_loosestep_passes(pool: RankPool, name: str):
    assert pool.run(4, run_upstream_test, name, "loosestep") == [name] * 4


@pytest.mark.long  # what is tested here is the way to run them
@pytest.mark.parametrize("name", [name for name in NAMES if name != FAILS_IN_TORCH])
def test_torch_passes(pool: RankPool, name: str):
    """The adapter is faithful: what it makes of the tests still passes in torch."""
    assert pool.run(4, run_upstream_test, name, "torch") == [name] * 4


@pytest.mark.long
def test_torch_fails_where_it_wants_a_gpu(pool: RankPool):
    with pytest.raises(RanksFailed, match="new_subgroups"):
        pool.run(4, run_upstream_test, FAILS_IN_TORCH, "torch")


@pytest.mark.parametrize("name", with_helpers(NAMES, METHODS))
def test_assertions_are_untouched(name: str):
    assert assertions(on_cpu(METHODS[name])) == assertions(METHODS[name])


def test_there_are_assertions_to_compare():
    found = sum((assertions(m) for m in with_helpers(NAMES, METHODS).values()), Counter())
    assert found.total() > 20


@pytest.mark.parametrize("name", with_helpers(NAMES, METHODS))
def test_only_devices_and_backends_change(name: str):
    """Every line that is taken away speaks of a device or a backend."""
    before = ast.unparse(ast.Module(METHODS[name].body, [])).splitlines()
    after = ast.unparse(ast.Module(on_cpu(METHODS[name]).body, [])).splitlines()
    taken = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("- ")]
    for line in taken:
        assert any(word in line for word in ("cuda", "device_ids", "nccl", ".to(rank)")), line


def assertions(function: ast.FunctionDef) -> Counter[str]:
    """Count the assert statements and `self.assert...` calls of a method."""
    return Counter(ast.unparse(node) for node in ast.walk(function) if is_assertion(node))


def is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.assert")
    )
