"""The public names, their signatures, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_levels
from torch.distributed.algorithms.model_averaging import utils as torch_utils
from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer

import loosestep

pytestmark = pytest.mark.fast

SOURCE = Path(loosestep.__file__).parent

PUBLIC = """
Attached Averager Buffers Cast Clock HierarchicalModelAverager Initial JsonLines LoosestepError
LoosestepWarning Mean ModelAverager Native NotAttachable OptimizerState PeerLost
PeriodicModelAverager PostLocalSGDOptimizer PostLocalSGDState RankMismatch Reducer Schedule
Strategy Sync Telemetry TensorBoard Topology after always attach average_ average_parameters
average_parameters_or_parameter_groups ddp every get_params_to_average hierarchical_sgd levels
post_localSGD_hook post_local_sgd
ZeroOptions ZeroRedundancyOptimizer hook_with_zero_step hook_with_zero_step_interleaved
Sharding zero Hosts Resident TwoLevel
ErrorFeedback ReplicaFeedback GradientHook
Int2 Int4 Int8 NonFinite NotFinite Rounding Scaled Ternary TopK gradient_hook
""".split()

# A module imports only what stands above it. Parameters go attach -> averagers -> averaging ->
# wire -> flat; gradients and shards go attach -> hooks -> optim -> wire -> flat.
FLOW = """
native.interface native.library native forking
checks errors torch_versions clock places sharded_types deadline blame groups schedule peers tensors
policies flat binding replicas topology
wire.exchange wire.reducer wire.sockets wire.kernel wire.segments wire.shelf wire.board
wire.pieces wire.memory wire.train wire.lending wire.links wire.mean wire.resident
wire.parcels wire.native
wire.rounding wire.codec_torch wire.codec_c wire.codec wire.codec_blocks wire.codec_topk
wire.codec_cast wire.codec_table wire.nonfinite wire.compressed
wire.quantize wire.topk wire.feedback wire.replica_feedback wire.scaled wire.cast
wire.host_pair wire.ways wire.division wire.two_level wire
telemetry.sinks telemetry.record telemetry
finite pipeline references work averaging flight overlap parameters periods model_averager averagers
optim optim.idle optim.post_local_sgd
optim.kinds optim.spent optim.zero_options optim.prepare optim.shards optim.shard_set
optim.shard_state optim.shard_checkpoint optim.shard_wire optim.stepping optim.zero
hooks hooks.adapters hooks.gradients hooks.ddp hooks.plain hooks.fsdp hooks.post_local_sgd
hooks.reductions hooks.compressed hooks.reduced hooks.resident
hooks.backward hooks.plans hooks.zero hooks.sharded
strategy recipes scaling replica syncing adapting announcing attaching
""".split()

# What is on top of it, and nothing of the above imports: the trainer, its reports, the commands.
ON_TOP = """
runs lab.link lab.hosts lab doctor.findings doctor.links doctor.words doctor.advice doctor.network
doctor.sharing doctor.machine doctor.pairs doctor.rates doctor.measuring doctor.symptoms
doctor.show doctor report.course report.differences report.facts report.drawing report.words
report.verdict report.page report trainer.mistakes trainer.wires trainer.reducers trainer.plans
trainer.specs trainer.settings trainer.contenders trainer.checkpoint trainer.saved trainer.parts
trainer.sharing trainer.in_tree trainer.connecting trainer.display trainer.tasks
trainer.images trainer.journal trainer.stopping trainer.loop trainer.orders
trainer.ranks trainer.saving trainer.transformer trainer.text trainer.worker
trainer.start trainer.forked trainer.launch trainer
cli.folders cli.given cli.comparison cli.train cli.hosts cli.table
cli.compare cli.doctor cli.report cli.commands cli.arguments cli __main__
""".split()
FLOW += ON_TOP

ASIDE = {"rank_worker", "testing", "__init__"}  # the door, and tools for tests


def test_the_public_names() -> None:
    """The names are these, sorted, and all of them exist."""
    assert sorted(PUBLIC) == sorted(loosestep.__all__)
    assert all(hasattr(loosestep, name) for name in PUBLIC)


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
    }


def known_parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of what a caller may pass by position."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind not in kinds
    ]


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


def imported(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [_imported_module(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.removeprefix("loosestep.") for name in names if "loosestep." in name}
    return found & set(FLOW)


def _imported_module(module: str, name: str) -> str:
    """Return the module that ``from module import name`` reads: a part of a package, or it."""
    part = f"{module}.{name}"
    return part if part.removeprefix("loosestep.") in FLOW else module


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_imports_follow_the_flow(path: Path) -> None:
    """A module imports only what lies before it in the flow of data."""
    name = module_name(path)
    if name in ASIDE:
        assert name == "__init__" or imported(path) <= {"checks", "forking", "peers", "wire"}
        return
    assert name in FLOW, f"say where {name} stands in the flow"
    allowed = set(FLOW[: FLOW.index(name)])
    if name in {"wire", "telemetry", "hooks", "optim"}:
        allowed |= {part for part in FLOW if part.startswith(f"{name}.")}
    assert imported(path) <= allowed, f"{name} imports against the flow"


def test_gradients_do_not_know_parameters() -> None:
    """Hooks never import averaging, and nothing imports attaching or strategies but the top."""
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        if name.startswith("hooks"):
            assert not imported(path) & {"averaging", "parameters", "averagers"}
        if name not in {
            "attaching",
            "adapting",
            "announcing",
            "replica",
            "recipes",
            "__init__",
            *ON_TOP,
        }:
            assert not imported(path) & {"attaching", "strategy", "recipes"}


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


def test_every_module_says_what_it_is() -> None:
    """Every file begins with a docstring."""
    for path in SOURCE.rglob("*.py"):
        name = f"loosestep.{module_name(path)}".removesuffix(".__init__")
        assert importlib.import_module(name).__doc__, path
