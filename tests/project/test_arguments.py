"""Nonsense is refused where it is given, with an error that says what was given."""

from __future__ import annotations

import contextlib
import inspect
import math
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

import loosestep
import loosestep.outer
import loosestep.reducers
import loosestep.schedules
import loosestep.testing
from loosestep import (
    Clock,
    GradientHook,
    HierarchicalModelAverager,
    JsonLines,
    NotAttachable,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    Sharding,
    Strategy,
    Telemetry,
    TensorBoard,
    Topology,
    ZeroOptions,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    average_parameters,
    average_parameters_or_parameter_groups,
    ddp,
    desloc,
    diloco,
    get_params_to_average,
    gradient_hook,
    hierarchical_sgd,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    muloco,
    noloco,
    post_local_sgd,
    schedules,
    slowmo,
    snoo,
    sparseloco,
    streaming_diloco,
    zero,
)
from loosestep.compat.averagers import Options
from loosestep.outer import Delta, Gate, Gossip, Mix, NoLoCo, Outer, nesterov
from loosestep.reducers import (
    AllReduce,
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    Place,
    RandomMask,
    ReplicaFeedback,
    SharedMemoryMean,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.schedules import (
    Due,
    Fragments,
    adacomm,
    after,
    always,
    drift,
    every,
    fragments_of,
    levels,
    qsr,
    streaming,
)
from loosestep.sync.averager import Averager
from loosestep.sync.connected import ConnectedTopology
from loosestep.testing import RankPool, RecordingReducer, run_ranks

Case = tuple[Callable[..., Any], dict[str, Any]]


def no_ranks(**arguments: Any) -> None:
    """Call ``run_ranks`` where that starts no process: what is sensible is refused at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankPool, "_ready", nobody)
        run_ranks(**arguments)


def nobody(*_: object) -> list[Any]:
    raise ValueError("no processes for this test")


def written(sink: Callable[[Any], JsonLines | TensorBoard]) -> Callable[..., None]:
    """Return what makes a sink in a folder of its own; the system's word about a path may stand."""

    def make(**arguments: Any) -> None:
        inside, system = contextlib.chdir, contextlib.suppress(OSError)
        with tempfile.TemporaryDirectory() as folder, inside(folder), system:
            sink(*arguments.values()).close()

    return make


OUTER_RECIPE: dict[str, Any] = {
    "outer": None,
    "warmup_steps": 0,
    "gradients": None,
    "topology": None,
    "reducer": None,
    "gradient_reducer": None,
    "overlap_steps": 0,
    "on_nonfinite": "raise",
}

# Public constructors that need no process group, with arguments that make sense.
PURE: dict[str, Case] = {
    "Topology": (Topology, {"levels": {"world": [[0, 1]]}, "weights": [1, 2], "timeout": 3}),
    "Topology.from_sizes": (
        Topology.from_sizes,
        {"sizes": {"host": 1, "world": 2}, "ranks": [0, 1], "weights": None, "timeout": None},
    ),
    "Topology.from_hosts": (
        Topology.from_hosts,
        {"hosts": ["a", "b"], "ranks": [0, 1], "weights": None, "timeout": None},
    ),
    "Strategy": (
        Strategy,
        {
            "schedule": every(8),
            "topology": None,
            "reducer": Mean(),
            "buffers": "mean",
            "optimizer_state": "keep",
            "initial": "refuse",
            "sharding": None,
            "gradient_reducer": None,
            "outer": None,
            "gate": None,
            "gossip": None,
            "fragments": None,
            "overlap_steps": 0,
            "arrival": Delta(),
            "on_nonfinite": "raise",
        },
    ),
    "ddp": (ddp, {"topology": None, "gradient_reducer": None}),
    "post_local_sgd": (
        post_local_sgd,
        {
            "period": 4,
            "warmup_steps": 0,
            "gradients": "host",
            "topology": None,
            "reducer": None,
            "gradient_reducer": None,
            "overlap_steps": 0,
            "on_nonfinite": "raise",
        },
    ),
    "hierarchical_sgd": (
        hierarchical_sgd,
        {
            "periods": {"world": 4},
            "warmup_steps": 0,
            "gradients": None,
            "topology": None,
            "reducer": None,
            "gradient_reducer": None,
            "overlap_steps": 0,
            "on_nonfinite": "raise",
        },
    ),
    "zero": (
        zero,
        {
            "period": 4,
            "gradients": None,
            "stage": 1,
            "topology": None,
            "reducer": None,
            "on_nonfinite": "raise",
        },
    ),
    "diloco": (diloco, {"period": 4, **OUTER_RECIPE, "gate": None, "optimizer_state": "keep"}),
    "streaming_diloco": (
        streaming_diloco,
        {"period": 4, "num_fragments": 2, **OUTER_RECIPE, "fragments": None, "arrival": None},
    ),
    "slowmo": (slowmo, {"period": 4, **OUTER_RECIPE}),
    "snoo": (
        snoo,
        {
            "period": 4,
            "outer": None,
            "topology": None,
            "gradient_reducer": None,
            "on_nonfinite": "raise",
        },
    ),
    "sparseloco": (
        sparseloco,
        {
            "period": 4,
            "outer": None,
            "warmup_steps": 0,
            "topology": None,
            "reducer": None,
            "overlap_steps": 0,
            "on_nonfinite": "raise",
        },
    ),
    "muloco": (
        muloco,
        {
            "period": 4,
            "outer": None,
            "warmup_steps": 0,
            "topology": None,
            "reducer": None,
            "overlap_steps": 0,
            "on_nonfinite": "raise",
        },
    ),
    "desloc": (
        desloc,
        {
            "period": 4,
            "optimizer_state": {"exp_avg": 3},
            "warmup_steps": 0,
            "gradients": None,
            "topology": None,
            "on_nonfinite": "raise",
        },
    ),
    "noloco": (
        noloco,
        {
            "period": 4,
            "alpha": 0.5,
            "beta": 0.7,
            "gamma": 0.9,
            "warmup_steps": 0,
            "topology": None,
            "on_nonfinite": "raise",
        },
    ),
    "outer.Outer": (
        Outer,
        {"optimizer": torch.optim.SGD, "scheduler": None, "device": None, "lr": 0.7},
    ),
    "outer.Gate": (Gate, {"z": 3.0, "clip": 1.0, "weigh": None, "history": 100}),
    "outer.Gossip": (Gossip, {"step": None}),
    "outer.NoLoCo": (NoLoCo, {"alpha": 0.5, "beta": 0.7, "gamma": 0.9}),
    "outer.Mix": (Mix, {"alpha": 0.5}),
    "outer.nesterov": (nesterov, {"lr": 0.7, "momentum": 0.9}),
    "outer.slowmo": (loosestep.outer.slowmo, {"lr": 1.0, "momentum": 0.5}),
    "every": (every, {"period": 4, "level": "world", "gradients": None}),
    "levels": (levels, {"periods": {"world": 4}, "gradients": None}),
    "always": (always, {"gradients": None, "parameters": None}),
    "after": (after, {"start": 3, "then": every(4), "before": None}),
    "streaming": (
        streaming,
        {"period": 4, "num_fragments": 2, "level": "world", "gradients": None},
    ),
    "qsr": (qsr, {"h_base": 4, "alpha": 0.1}),
    "adacomm": (adacomm, {"period": 4, "interval": 2, "shrink": 0.5}),
    "drift": (drift, {"target": 0.1, "start": 2, "least": 1, "most": 8}),
    "Fragments": (Fragments, {"num": 2, "whole": None}),
    "fragments_of": (fragments_of, {"names": [["a"], ["b"]]}),
    "Due": (Due, {"gradients": None, "parameters": "world", "fragment": None}),
    "Clock": (Clock, {"step": 0}),
    "AllReduce": (AllReduce, {"op": torch.distributed.ReduceOp.SUM}),
    "Int8": (
        Int8,
        {"block": 256, "rounding": "nearest", "seed": 0, "on_nonfinite": "raise"},
    ),
    "Int4": (
        Int4,
        {"block": 256, "rounding": "nearest", "seed": 0, "on_nonfinite": "raise"},
    ),
    "Int2": (
        Int2,
        {"block": 256, "rounding": "nearest", "seed": 0, "on_nonfinite": "raise"},
    ),
    "Ternary": (
        Ternary,
        {"block": 256, "rounding": "nearest", "seed": 0, "on_nonfinite": "raise"},
    ),
    "RandomMask": (RandomMask, {"density": 0.1, "seed": 0}),
    "TopK": (
        TopK,
        {"density": 0.1, "chunk": 4096, "bits": 2, "gather": True, "on_nonfinite": "raise"},
    ),
    "Cast": (Cast, {"dtype": torch.bfloat16, "inner": None}),
    "ErrorFeedback": (ErrorFeedback, {"inner": Int4(), "decay": 0.9}),
    "ReplicaFeedback": (ReplicaFeedback, {"inner": Int4(), "decay": 1.0}),
    "TwoLevel": (
        TwoLevel,
        {"inner": None, "ranks_of_host": "differ", "inside": None, "ranks_per_host": 2},
    ),
    "Sharding": (Sharding, {"stage": 1}),
    "ZeroOptions": (
        ZeroOptions,
        {
            "elementwise": None,
            "clip_norm": 1.0,
            "norm_type": 2.0,
            "scaler": None,
            "timeout": 1.0,
        },
    ),
    "Telemetry": (Telemetry, {"sinks": []}),
    "RankPool": (RankPool, {"size": 2}),
    "RecordingReducer": (RecordingReducer, {"inner": None}),
    "run_ranks": (
        no_ranks,
        {"world_size": 1, "body": len, "timeout": 60.0, "group_timeout": 30.0},
    ),
    "Place": (Place, {"name": "gradients 0", "runs": ()}),
    "JsonLines": (written(JsonLines), {"path": "run.jsonl"}),
    "TensorBoard": (written(TensorBoard), {"log_dir": "runs"}),
    "get_params_to_average": (get_params_to_average, {"params": []}),
}

CLASSES = [Int8, Mean, Topology, Telemetry, torch.nn.Linear, dict]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([*CLASSES, object(), torch.float32, torch.zeros(2), Mean(), every(3), len]),
    st.sampled_from(["host", "world", "mean", math.nan, math.inf, -1]),
)
NONSENSE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(), st.none()), inner, max_size=3
        ),
    ),
    max_leaves=4,
)


def makes_sense_or_is_refused(make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Anything may be returned; only these two errors may be raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(**arguments)
    except (ValueError, TypeError):
        pass


@pytest.mark.parametrize("name", PURE)
@given(data=st.data())
def test_any_nonsense_is_a_value_or_type_error(name: str, data: st.DataObject) -> None:
    """Whatever one argument of a constructor is, nothing but these two errors comes of it."""
    make, sensible = PURE[name]
    which = data.draw(st.sampled_from(sorted(sensible)))
    makes_sense_or_is_refused(make, {**sensible, which: data.draw(NONSENSE)})


def cases_in_a_job() -> dict[str, Case]:
    """Return the same for those that need a process group."""
    model = torch.nn.Linear(2, 2)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def attached(**arguments: Any) -> None:
        attach(**arguments).detach()

    def hooked(**arguments: Any) -> None:
        GradientHook(**arguments).close()

    averager, connected = PeriodicModelAverager(4), ConnectedTopology(Topology({"world": [[0]]}))
    options = {
        "module": None,
        "clock": None,
        "reducer": None,
        "buffers": "mean",
        "telemetry": None,
        "timeout": None,
        "overlap_steps": 0,
        "on_nonfinite": "raise",
    }
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("world",))
    return {
        "Topology.from_mesh": (
            Topology.from_mesh,
            {"mesh": mesh, "weights": None, "timeout": None},
        ),
        "attach": (
            attached,
            {
                "model": model,
                "optimizer": optimizer(),
                "strategy": ddp(),
                "scaler": None,
                "telemetry": None,
                "timeout": None,
            },
        ),
        "PeriodicModelAverager": (
            PeriodicModelAverager,
            {"period": 4, "warmup_steps": 0, "process_group": None, **options},
        ),
        "HierarchicalModelAverager": (
            HierarchicalModelAverager,
            {
                "period_group_size_dict": {4: 1},
                "warmup_steps": 0,
                "process_group": None,
                **options,
            },
        ),
        "PostLocalSGDState": (
            PostLocalSGDState,
            {
                "process_group": None,
                "subgroup": None,
                "start_localSGD_iter": 3,
                "post_local_gradient_allreduce": False,
                "clock": Clock(),
            },
        ),
        "PostLocalSGDOptimizer": (
            PostLocalSGDOptimizer,
            {"optim": optimizer(), "averager": averager},
        ),
        "average_": (
            average_,
            {
                "tensors": [torch.zeros(2)],
                "group": None,
                "reducer": None,
                "weights": None,
                "timeout": None,
            },
        ),
        "Averager": (Averager, {"peers": connected.peers("world"), "reducer": None}),
        "gradient_hook": (
            gradient_hook,
            {"reducer": Int8(), "process_group": None, "timeout": None},
        ),
        "GradientHook": (
            hooked,
            {"reducer": Int8(), "peers": connected.peers("world")},
        ),
        "hook_with_zero_step": (
            hook_with_zero_step,
            {"hook": allreduce_hook, "ddp": None, "zero": None, "shard_buckets": False},
        ),
        "hook_with_zero_step_interleaved": (
            hook_with_zero_step_interleaved,
            {"hook": allreduce_hook, "ddp": None, "zero": None, "shard_buckets": False},
        ),
        "average_parameters": (
            average_parameters,
            {"params": [torch.nn.Parameter(torch.zeros(2))], "process_group": None},
        ),
        "average_parameters_or_parameter_groups": (
            average_parameters_or_parameter_groups,
            {"params": [torch.nn.Parameter(torch.zeros(2))], "process_group": None},
        ),
        "ZeroRedundancyOptimizer": (
            ZeroRedundancyOptimizer,
            {
                "params": list(model.parameters()),
                "optimizer_class": torch.optim.SGD,
                "process_group": None,
                "parameters_as_bucket_view": False,
                "overlap_with_ddp": False,
                "zero_options": None,
                "lr": 0.1,
            },
        ),
    }


def with_a_process_group(examples: int) -> None:
    for make, sensible in cases_in_a_job().values():
        for which in sensible:

            @settings(max_examples=examples, deadline=None)
            @given(NONSENSE)
            def one(nonsense: Any) -> None:
                makes_sense_or_is_refused(make, {**sensible, which: nonsense})  # noqa: B023

            one()


def test_any_nonsense_in_a_job_is_a_value_or_type_error(pool: RankPool) -> None:
    """The same for constructors that need a process group."""
    pool.run(1, with_a_process_group, settings().max_examples // 5, timeout=600)


# What the tables need not have, and why.
LEFT_OUT = {
    "Attached": "made by attach",
    "ModelAverager": "abstract; its two kinds are there",
    "post_localSGD_hook": "called by DDP",
    "Schedule": "a base class",
    "Rule": "a base class",
    "Observed": "handed to a rule",
    "check": "its functions run in processes of their own; tests/testing has what it refuses",
    "train_replicas": "likewise, in this one",
    "outer.Arrival": "takes no arguments",
    "outer.InverseNorm": "takes no arguments",
    "Reducer": "abstract, without arguments",
    "Handle": "abstract, without arguments",
    "State": "takes no arguments",
    "Rounding": "an enum",
    "RanksOfHost": "an enum",
    "Buffers": "an enum",
    "Initial": "an enum",
    "NonFinite": "an enum",
    "OptimizerState": "an enum",
    "NOTHING": "a constant",
    "Named": "a name for a type",
    "Peers": "handed to a reducer",
    "Message": "a record that a reducer makes of tensors of its own",
    "Transfer": "returned by Peers.post",
    "Traffic": "a record of counts",
    "outer.Outer.options": "the optimizer's; lr stands for them",
    "outer.nesterov.more": "those of Outer",
    "outer.slowmo.more": "those of Outer",
    "Telemetry.totals": "a field of its own, which begins empty",
    "run_ranks.args": "whatever the body takes",
    "ZeroRedundancyOptimizer.defaults": "the wrapped optimizer's; lr stands for them",
    "PeriodicModelAverager.options": "each of them is there by name",
    "HierarchicalModelAverager.options": "each of them is there by name",
}


def covered_in_a_job() -> dict[str, list[str]]:
    return {name: list(sensible) for name, (_, sensible) in cases_in_a_job().items()}


def test_every_public_argument_is_tried(pool: RankPool) -> None:
    """All arguments of what the public modules hold are in a table, or left out with a reason."""
    covered = {name: list(sensible) for name, (_, sensible) in PURE.items()}
    covered |= pool.run(1, covered_in_a_job)[0]
    missing = []
    doors = loosestep, loosestep.reducers, loosestep.schedules, loosestep.testing
    names = [(name, getattr(module, name)) for module in doors for name in module.__all__]
    names += [(f"outer.{name}", getattr(loosestep.outer, name)) for name in loosestep.outer.__all__]
    names += [pair for name, public in names for pair in classmethods(name, public)]
    for name, public in names:
        if name in LEFT_OUT or not callable(public) or is_error(public):
            continue
        for argument in inspect.signature(public).parameters:
            given = argument in covered.get(name, [])
            if not given and f"{name}.{argument}" not in LEFT_OUT:
                missing.append(f"{name}.{argument}")
    assert missing == []
    for name in ("PeriodicModelAverager", "HierarchicalModelAverager"):
        assert set(Options.__annotations__) <= set(covered[name])


def classmethods(name: str, public: object) -> list[tuple[str, Any]]:
    """Return the other constructors of a public class, but those that it has of torch's."""
    kinds = public.__mro__ if isinstance(public, type) else ()
    own = [kind for kind in kinds if kind.__module__.startswith("loosestep.")]
    found = {key for kind in own for key, is_ in vars(kind).items() if isinstance(is_, classmethod)}
    return [(f"{name}.{key}", getattr(public, key)) for key in sorted(found) if key[0] != "_"]


def is_error(public: object) -> bool:
    return isinstance(public, type) and issubclass(public, BaseException)


REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "a time-out of 0": (lambda: Topology({"w": [[0]]}, timeout=0), ["timeout", "> 0", "got 0"]),
    "one below 0": (lambda: ZeroOptions(timeout=-1.0), ["timeout", "-1.0"]),
    "one of ages": (lambda: Topology({"w": [[0]]}, timeout=1e300), ["timeout", "at most 1000000"]),
    "one that is none": (lambda: Topology({"w": [[0]]}, timeout=math.nan), ["timeout", "nan"]),
    "one in words": (lambda: Topology({"w": [[0]]}, timeout="3"), ["timeout", "'3'"]),  # type: ignore[arg-type]
    "hosts of 0 ranks": (lambda: TwoLevel(ranks_per_host=0), ["ranks_per_host", ">= 1", "got 0"]),
    "a stage of two numbers": (
        lambda: Sharding(stage=torch.zeros(2)),  # type: ignore[arg-type]
        ["stage must be 1", "tensor"],
    ),
    "bits of two numbers": (lambda: TopK(0.1, bits=torch.zeros(2)), ["bits must be 2", "tensor"]),  # type: ignore[arg-type]
    "a stage of True": (lambda: zero(stage=True), ["stage must be 1", "True"]),
    "hosts of True ranks": (lambda: TwoLevel(ranks_per_host=True), ["ranks_per_host", "True"]),
    "a reducer's class": (lambda: post_local_sgd(reducer=Int8), ["reducer", "Int8"]),  # type: ignore[arg-type]
    "the same for gradients": (
        lambda: ddp(gradient_reducer=Int8),  # type: ignore[arg-type]
        ["gradient_reducer", "Int8()"],
    ),
    "the same inside": (lambda: Cast(torch.bfloat16, Mean), ["inner", "Mean()"]),  # type: ignore[arg-type]
    "a mesh that is a number": (
        lambda: Topology.from_mesh(3),  # type: ignore[arg-type]
        ["mesh", "DeviceMesh", "3"],
    ),
    "a topology's levels": (lambda: ddp(topology={"world": [[0]]}), ["topology", "Topology"]),  # type: ignore[arg-type]
    "a level that is a number": (lambda: post_local_sgd(gradients=3), ["gradients", "'host'", "3"]),  # type: ignore[arg-type]
    "one in what is due": (lambda: Due(gradients=3), ["gradients", "'host'", "3"]),  # type: ignore[arg-type]
    "an operation in words": (lambda: AllReduce("sum"), ["op", "ReduceOp.SUM", "'sum'"]),  # type: ignore[arg-type]
    "rooms inside a cast": (
        lambda: Cast(torch.bfloat16, TwoLevel(Ternary(), inside=SharedMemoryMean())),
        ["Cast", "TwoLevel(Cast(...), inside=SharedMemoryMean())"],
    ),
    "levels in a list": (lambda: Topology([[0, 1]]), ["levels", "from_sizes"]),  # type: ignore[arg-type]
    "groups of one rank each": (lambda: Topology({"w": [0, 1]}), ["list of groups", "[[0, 1]"]),  # type: ignore[list-item]
    "ranks in words": (lambda: Topology({"w": [["0"]]}), ["a rank of level 'w'", "'0'"]),  # type: ignore[list-item]
    "half a rank": (lambda: Topology({"w": [[0.5]]}), ["a rank of level 'w'", "0.5"]),  # type: ignore[list-item]
    "a rank below 0": (lambda: Topology({"w": [[-1, 0]]}), ["a rank of level 'w'", "-1"]),
    "a schedule's class": (lambda: Strategy(schedule=schedules.Schedule), ["schedule"]),  # type: ignore[arg-type]
    "a file of no name": (lambda: JsonLines(""), ["path", "''", "run-0.jsonl"]),
    "a file that is a number": (lambda: JsonLines(3), ["path", "got 3", "run-0.jsonl"]),  # type: ignore[arg-type]
    "a folder of no name": (lambda: TensorBoard(""), ["log_dir", "''", "runs/first"]),
    "a sink's class": (lambda: Telemetry(sinks=[JsonLines]), ["sink", "JsonLines(path)"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rule_the_value_and_the_way_out_are_said(case: str) -> None:
    """An error says what was given and what may be."""
    make, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def of_another_model() -> str:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(NotAttachable) as error:
        attach(model, torch.optim.SGD(other.parameters(), lr=0.1), ddp())
    with pytest.raises(ValueError, match="timeout must be a number of seconds > 0"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), ddp(), timeout=0)
    with pytest.raises(ValueError, match="timeout must be a number of seconds > 0"):
        PeriodicModelAverager(4, timeout="3")  # type: ignore[arg-type]
    return str(error.value)


def test_an_optimizer_of_another_model_is_refused(pool: RankPool) -> None:
    """Its steps would say nothing about the model."""
    assert "SGD has none of the parameters of this Linear" in pool.run(2, of_another_model)[1]
