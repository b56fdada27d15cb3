"""Runs one rewritten test on this rank, against loosestep or against torch itself."""

import ast
import importlib
import os
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from tests.support.upstream_rewrite import MODULE, on_cpu, read_methods, source_path, with_helpers

# Names of the wheel's test module that stand for a module under test.
SUBJECTS = [
    "averagers",
    "hierarchicalSGD",
    "model_averaging_utils",
    "post_localSGD",
    "post_localSGD_optimizer",
]


def run_upstream_test(name: str, contender: str) -> str:
    """Run the test and return its name; a skip is an error like any other."""
    namespace = build_namespace(contender)
    methods = {key: compile_method(f, namespace) for key, f in with_helpers_of(name).items()}
    case_class = type("UpstreamCase", (base_class(),), methods)
    case = case_class(name)
    case.rank = dist.get_rank()
    # PyTorch's harness has a string here, so that `self.world_size == dist.get_world_size()`
    # is never true; as a number it lets test_ddp_hook_parity_post_localSGD run in full.
    case.world_size = dist.get_world_size()
    case.debug()
    return name


def with_helpers_of(name: str) -> dict[str, ast.FunctionDef]:
    return with_helpers([name], read_methods())


def build_namespace(contender: str) -> dict[str, Any]:
    """Return the globals of the wheel's test module, pointed at the contender."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    namespace = dict(vars(importlib.import_module(MODULE)))
    namespace["init_multigpu_helper"] = one_device_per_rank
    namespace["_rank_temp_file"] = patient(namespace["_rank_temp_file"])
    if contender != "torch":
        subject = importlib.import_module(contender)
        namespace.update(dict.fromkeys(SUBJECTS, subject))
    return namespace


def one_device_per_rank(world_size: int, backend: str) -> dict[int, list[int]]:
    """Stand in for the helper that deals out GPUs; the ids it gives are used no more."""
    return {rank: [rank] for rank in range(world_size)}


def patient(
    temporary_file: Callable[[], AbstractContextManager[str]],
) -> Callable[[], AbstractContextManager[str]]:
    """Let a file be removed when all ranks have read it: the wheel's first rank does not wait."""

    @contextmanager
    def file_of_all() -> Iterator[str]:
        with temporary_file() as name:
            yield name
            dist.barrier()

    return file_of_all


def compile_method(function: ast.FunctionDef, namespace: dict[str, Any]) -> types.FunctionType:
    """Compile a rewritten method; its tracebacks show the lines of the wheel."""
    tree = ast.Module([on_cpu(function)], type_ignores=[])
    methods: dict[str, Any] = {}
    exec(compile(tree, str(source_path()), "exec"), namespace, methods)
    method = methods[function.name]
    assert isinstance(method, types.FunctionType)
    return method


def base_class() -> type[Any]:
    """Return PyTorch's TestCase, whose assertEqual compares tensors."""
    utils = importlib.import_module("torch.testing._internal.common_utils")
    case_class: type[Any] = utils.TestCase
    return case_class
