"""The public names, their signatures, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_levels
from torch.distributed.algorithms.model_averaging import utils as torch_utils
from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import loosestep
from loosestep import outer, reducers, schedules

SOURCE = Path(loosestep.__file__).parent

PUBLIC = """
Attached Buffers Clock GradientHook HierarchicalModelAverager Initial JsonLines LoosestepError
LoosestepWarning ModelAverager NonFinite NotAttachable NotFinite NotShardable OptimizerState
PeerLost PeriodicModelAverager PostLocalSGDOptimizer PostLocalSGDState RankMismatch Sharding
Strategy Telemetry TensorBoard Topology ZeroOptions ZeroRedundancyOptimizer attach average_
average_parameters average_parameters_or_parameter_groups ddp desloc diloco get_params_to_average
gradient_hook hierarchical_sgd hook_with_zero_step hook_with_zero_step_interleaved muloco noloco
post_localSGD_hook post_local_sgd slowmo snoo sparseloco streaming_diloco zero
""".split()
OUTER = "Arrival Delta Eager Gate Gossip InverseNorm Mix NoLoCo Outer nesterov slowmo".split()
REDUCERS = """
AllReduce Cast ErrorFeedback Handle Int2 Int4 Int8 Mean Message NOTHING Named Peers Place RandomMask
RanksOfHost Reducer ReplicaFeedback Rounding SharedMemoryMean State Ternary TopK Traffic Transfer
TwoLevel
""".split()
SCHEDULES = """
Due Fragments Observed Rule Schedule adacomm after always drift every fragments_of levels qsr
streaming
""".split()

# A package imports only those that stand before it; nobody imports the last one.
PACKAGES = """
errors telemetry comm strategy gradients sharding sync compat attaching testing lab
""".split()


@pytest.mark.fast
def test_the_public_names() -> None:
    """The names are these, sorted, and all of them exist."""
    doors = (loosestep, PUBLIC), (outer, OUTER), (reducers, REDUCERS), (schedules, SCHEDULES)
    for module, names in doors:
        assert sorted(names) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in names)


def torch_names() -> dict[str, Any]:
    return {
        "ModelAverager": torch_averagers.ModelAverager,
        "PeriodicModelAverager": torch_averagers.PeriodicModelAverager,
        "HierarchicalModelAverager": torch_levels.HierarchicalModelAverager,
        "average_parameters": torch_utils.average_parameters,
        "get_params_to_average": torch_utils.get_params_to_average,
        "average_parameters_or_parameter_groups": (
            torch_utils.average_parameters_or_parameter_groups
        ),
        "PostLocalSGDState": torch_hook.PostLocalSGDState,
        "post_localSGD_hook": torch_hook.post_localSGD_hook,
        "PostLocalSGDOptimizer": TorchOptimizer,
        "ZeroRedundancyOptimizer": TorchZero,
    }


def known_parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of what a caller may pass by position."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind not in kinds
    ]


@pytest.mark.fast
@pytest.mark.parametrize("name", torch_names())
def test_signatures_are_those_of_torch(name: str) -> None:
    """Arguments, their order and defaults are torch's; what is new is by keyword only."""
    theirs, ours = torch_names()[name], getattr(loosestep, name)
    assert known_parameters(theirs) == known_parameters(ours)
    new = [
        p
        for p in inspect.signature(ours).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert all(p.default is not inspect.Parameter.empty for p in new)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("PeriodicModelAverager", "average_parameters"),
        ("HierarchicalModelAverager", "average_parameters"),
        ("PostLocalSGDState", "maybe_increase_iter"),
        ("PostLocalSGDOptimizer", "state_dict"),
        ("PostLocalSGDOptimizer", "load_state_dict"),
        ("PostLocalSGDOptimizer", "zero_grad"),
        ("PostLocalSGDOptimizer", "add_param_group"),
    ],
)
def test_methods_are_those_of_torch(name: str, method: str) -> None:
    """So are the methods' arguments."""
    theirs = getattr(torch_names()[name], method)
    assert known_parameters(theirs) == known_parameters(getattr(getattr(loosestep, name), method))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, wherever in the file.

    What only type checkers read does not count: a base class may name what is made of it.
    """
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not is_for_types(node)]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {_imported_module(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("loosestep.") for name in found if name.startswith("loosestep.")}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imported_module(module: str, name: str) -> str:
    """Return the module that ``from module import name`` reads: a part of a package, or it."""
    part = f"{module}.{name}"
    return part if part.removeprefix("loosestep.") in MODULES else module


@pytest.mark.fast
def test_packages_import_only_those_before_them() -> None:
    """Data flows one way."""
    doors = {"__init__", "__main__", "outer", "reducers", "schedules"}
    for name, path in MODULES.items():
        if name in doors:
            continue
        package = name.partition(".")[0]
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        against = {other for other in imported(path) if other.partition(".")[0] not in allowed}
        assert not against, f"{name} imports {sorted(against)}, against the flow"


@pytest.mark.fast
def test_modules_import_each_other_in_no_circle() -> None:
    """Whoever reads a module has read, or may read, all that it needs before it."""
    waiting = {name: imported(path) - {name} for name, path in MODULES.items()}
    for name in waiting:  # a package's door shows what is inside
        waiting[name] = {other for other in waiting[name] if other in MODULES}
    while waiting:
        ready = {name for name, needed in waiting.items() if not needed & set(waiting)}
        assert ready, f"a circle among {sorted(waiting)}"
        waiting = {name: needed for name, needed in waiting.items() if name not in ready}


@pytest.mark.fast
def test_a_stem_has_one_place() -> None:
    """No two files are called alike, but for the public doors, which show what is behind them."""
    doors = {SOURCE / f"{name}.py" for name in ("outer", "reducers", "schedules")}
    inside = Counter(path.stem for path in SOURCE.rglob("*.py") if path not in doors)
    twice = {stem for stem, times in inside.items() if times > 1}
    assert twice == {"__init__"}


@pytest.mark.fast
def test_no_private_name_of_a_neighbour_is_touched() -> None:
    """No module imports an underscored name from another."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loosestep"):
                assert not [a.name for a in node.names if a.name.startswith("_")], path


def test_the_core_needs_torch_only() -> None:
    """Importing all of the package's names loads none of the extras."""
    code = (
        "import sys; from loosestep import *; "
        "print([m for m in ('rich', 'tensorboard', 'pytest') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.fast
def test_every_module_says_what_it_is() -> None:
    """Every file begins with a docstring."""
    for path in SOURCE.rglob("*.py"):
        name = f"loosestep.{module_name(path)}".removesuffix(".__init__")
        assert importlib.import_module(name).__doc__, path
