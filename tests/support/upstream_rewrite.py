"""PyTorch's own tests of model averaging, read from the installed wheel and put on CPU and Gloo.

The tests ask for one GPU per rank. Only what names a device or a backend is rewritten, in the
syntax tree; `test_upstream.py` checks that every assertion stays as it was.
"""

import ast
import copy
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MODULE = "torch.testing._internal.distributed.distributed_test"

PATTERNS = [
    r"test_average_parameters",
    r"test_periodic_model_averager\w*",
    r"test_\w+_hierarchical_model_averager\w*",
    r"test_ddp_hook_parity_post_localSGD",
    r"test_post_localSGD_optimizer_\w+",
]

Methods = dict[str, ast.FunctionDef]


@cache
def source_path() -> Path:
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def read_methods() -> Methods:
    """Return the methods of PyTorch's distributed test class, by name, as in the wheel."""
    tree = ast.parse(source_path().read_text())
    outer = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DistributedTest"
    )
    inner = next(n for n in outer.body if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase")
    return {n.name: n for n in inner.body if isinstance(n, ast.FunctionDef)}


def wanted(methods: Methods, patterns: Sequence[str] = PATTERNS) -> list[str]:
    """Return the tests that are ours to pass, in the wheel's order."""
    return [name for name in methods if any(re.fullmatch(p, name) for p in patterns)]


def with_helpers(names: list[str], methods: Methods) -> Methods:
    """Return `names` and every method that they call on self, directly or not."""
    found: Methods = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in methods and name not in found:
            found[name] = methods[name]
            waiting += self_attributes(methods[name])
    return found


def self_attributes(function: ast.FunctionDef) -> list[str]:
    return [n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and is_self(n.value)]


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class OnCpu(ast.NodeTransformer):
    """Moves a test from CUDA and NCCL to the CPU and Gloo."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []  # they do nothing but skip where GPUs are missing
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """`torch.cuda.set_device(...)` -> `pass`."""
        if ast.unparse(node).startswith("torch.cuda.set_device("):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda(...)`, `x.to(rank)` -> `x.cpu()`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and moves_to_gpu(node, node.func.attr):
            node.func.attr = "cpu"
            node.args = []
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """`device_ids=[rank]` -> `device_ids=None`, `backend="nccl"` -> `backend="gloo"`."""
        self.generic_visit(node)
        if node.arg == "device_ids":
            node.value = ast.copy_location(ast.Constant(None), node.value)
        if node.arg == "backend" and ast.unparse(node.value) == "'nccl'":
            node.value = ast.copy_location(ast.Constant("gloo"), node.value)
        return node


def moves_to_gpu(call: ast.Call, method: str) -> bool:
    return method == "cuda" or (method == "to" and ast.unparse(call.args[0]) == "rank")


def on_cpu(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a rewritten copy of `function`, with the line numbers of the wheel."""
    moved = copy.deepcopy(function)
    OnCpu().visit(moved)
    return moved
