"""Data-parallel training that does not wait for the network.

Choose what moves between workers, between whom, when and how, without rewriting the loop::

    from loosestep import attach, post_local_sgd

    with attach(model, optimizer, post_local_sgd(period=8)):
        ...  # the loop as it was
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loosestep.attaching import Attached, attach
    from loosestep.averagers import (
        HierarchicalModelAverager,
        ModelAverager,
        PeriodicModelAverager,
    )
    from loosestep.averaging import Averager, average_
    from loosestep.clock import Clock
    from loosestep.errors import (
        LoosestepError,
        LoosestepWarning,
        NotAttachable,
        NotFinite,
        PeerLost,
        RankMismatch,
    )
    from loosestep.hooks.compressed import GradientHook, gradient_hook
    from loosestep.hooks.post_local_sgd import PostLocalSGDState, post_localSGD_hook
    from loosestep.hooks.zero import hook_with_zero_step, hook_with_zero_step_interleaved
    from loosestep.optim.post_local_sgd import PostLocalSGDOptimizer
    from loosestep.optim.zero import ZeroRedundancyOptimizer
    from loosestep.optim.zero_options import ZeroOptions
    from loosestep.parameters import (
        average_parameters,
        average_parameters_or_parameter_groups,
        get_params_to_average,
    )
    from loosestep.policies import Buffers, Initial, OptimizerState, Sharding
    from loosestep.recipes import ddp, hierarchical_sgd, post_local_sgd, zero
    from loosestep.schedule import Schedule, Sync, after, always, every, levels
    from loosestep.strategy import Strategy
    from loosestep.telemetry import JsonLines, Telemetry, TensorBoard
    from loosestep.topology import Topology
    from loosestep.wire import (
        Cast,
        ErrorFeedback,
        Hosts,
        Int2,
        Int4,
        Int8,
        Mean,
        Native,
        NonFinite,
        Reducer,
        ReplicaFeedback,
        Resident,
        Rounding,
        Scaled,
        Ternary,
        TopK,
        TwoLevel,
    )

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "Averager",
    "Buffers",
    "Cast",
    "Clock",
    "ErrorFeedback",
    "GradientHook",
    "HierarchicalModelAverager",
    "Hosts",
    "Initial",
    "Int2",
    "Int4",
    "Int8",
    "JsonLines",
    "LoosestepError",
    "LoosestepWarning",
    "Mean",
    "ModelAverager",
    "Native",
    "NonFinite",
    "NotAttachable",
    "NotFinite",
    "OptimizerState",
    "PeerLost",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "RankMismatch",
    "Reducer",
    "ReplicaFeedback",
    "Resident",
    "Rounding",
    "Scaled",
    "Schedule",
    "Sharding",
    "Strategy",
    "Sync",
    "Telemetry",
    "TensorBoard",
    "Ternary",
    "TopK",
    "Topology",
    "TwoLevel",
    "ZeroOptions",
    "ZeroRedundancyOptimizer",
    "after",
    "always",
    "attach",
    "average_",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "ddp",
    "every",
    "get_params_to_average",
    "gradient_hook",
    "hierarchical_sgd",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "levels",
    "post_localSGD_hook",
    "post_local_sgd",
    "zero",
]

# Where the public names live. Each is imported when it is first asked for, so that who needs no
# torch, such as a command line with a mistake in it, does not wait for it.
_HOMES = {
    "attaching": "Attached attach",
    "averagers": "HierarchicalModelAverager ModelAverager PeriodicModelAverager",
    "averaging": "Averager average_",
    "clock": "Clock",
    "errors": "LoosestepError LoosestepWarning NotAttachable NotFinite PeerLost RankMismatch",
    "hooks.compressed": "GradientHook gradient_hook",
    "hooks.post_local_sgd": "PostLocalSGDState post_localSGD_hook",
    "hooks.zero": "hook_with_zero_step hook_with_zero_step_interleaved",
    "optim.post_local_sgd": "PostLocalSGDOptimizer",
    "optim.zero": "ZeroRedundancyOptimizer",
    "optim.zero_options": "ZeroOptions",
    "parameters": "average_parameters average_parameters_or_parameter_groups get_params_to_average",
    "policies": "Buffers Initial OptimizerState Sharding",
    "recipes": "ddp hierarchical_sgd post_local_sgd zero",
    "schedule": "Schedule Sync after always every levels",
    "strategy": "Strategy",
    "telemetry": "JsonLines Telemetry TensorBoard",
    "topology": "Topology",
    "wire": (
        "Cast ErrorFeedback Hosts Int2 Int4 Int8 Mean Native NonFinite Reducer ReplicaFeedback "
        "Resident Rounding Scaled Ternary TopK TwoLevel"
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # to a type checker it would say that there is any name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for."""
        if name not in _HOME:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; its public names are in "
                f"{__name__}.__all__",
                name=name,
                obj=sys.modules[__name__],
            )
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value  # so that it is asked for once
        return value


def __dir__() -> list[str]:
    """Return the public names, imported or not yet, and whatever else is here."""
    return sorted({*globals(), *__all__})
