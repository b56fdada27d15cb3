"""Data-parallel training that does not wait for the network.

Choose what moves between workers, between whom, when and how, without rewriting the loop::

    from loosestep import attach, post_local_sgd

    with attach(model, optimizer, post_local_sgd(period=8)):
        ...  # the loop as it was

Beside the names here: ``loosestep.outer``, ``loosestep.reducers``, ``loosestep.schedules``,
``loosestep.testing``.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loosestep.attaching.attached import Attached, attach
    from loosestep.comm.reducers import NonFinite
    from loosestep.compat.averagers import (
        HierarchicalModelAverager,
        ModelAverager,
        PeriodicModelAverager,
    )
    from loosestep.compat.parameters import (
        average_parameters,
        average_parameters_or_parameter_groups,
        get_params_to_average,
    )
    from loosestep.compat.post_local_sgd_hook import PostLocalSGDState, post_localSGD_hook
    from loosestep.compat.post_local_sgd_optimizer import PostLocalSGDOptimizer
    from loosestep.errors import (
        LoosestepError,
        LoosestepWarning,
        NotAttachable,
        NotFinite,
        NotShardable,
        PeerLost,
        RankMismatch,
    )
    from loosestep.gradients.hook import GradientHook, gradient_hook
    from loosestep.sharding.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
    from loosestep.sharding.options import ZeroOptions
    from loosestep.strategy.clock import Clock
    from loosestep.strategy.policies import Buffers, Initial, OptimizerState, Sharding
    from loosestep.strategy.recipes import (
        ddp,
        desloc,
        diloco,
        hierarchical_sgd,
        muloco,
        noloco,
        post_local_sgd,
        slowmo,
        snoo,
        sparseloco,
        streaming_diloco,
        zero,
    )
    from loosestep.strategy.strategy import Strategy
    from loosestep.strategy.topology import Topology
    from loosestep.sync.averager import average_
    from loosestep.telemetry import JsonLines, Telemetry, TensorBoard

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "Buffers",
    "Clock",
    "GradientHook",
    "HierarchicalModelAverager",
    "Initial",
    "JsonLines",
    "LoosestepError",
    "LoosestepWarning",
    "ModelAverager",
    "NonFinite",
    "NotAttachable",
    "NotFinite",
    "NotShardable",
    "OptimizerState",
    "PeerLost",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "RankMismatch",
    "Sharding",
    "Strategy",
    "Telemetry",
    "TensorBoard",
    "Topology",
    "ZeroOptions",
    "ZeroRedundancyOptimizer",
    "attach",
    "average_",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "ddp",
    "desloc",
    "diloco",
    "get_params_to_average",
    "gradient_hook",
    "hierarchical_sgd",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "muloco",
    "noloco",
    "post_localSGD_hook",
    "post_local_sgd",
    "slowmo",
    "snoo",
    "sparseloco",
    "streaming_diloco",
    "zero",
]

# Where the public names live. Each is imported when it is first asked for, so that who needs no
# torch, such as a command line with a mistake in it, does not wait for it.
_HOMES = {
    "attaching.attached": "Attached attach",
    "comm.reducers": "NonFinite",
    "compat.averagers": "HierarchicalModelAverager ModelAverager PeriodicModelAverager",
    "compat.parameters": (
        "average_parameters average_parameters_or_parameter_groups get_params_to_average"
    ),
    "compat.post_local_sgd_hook": "PostLocalSGDState post_localSGD_hook",
    "compat.post_local_sgd_optimizer": "PostLocalSGDOptimizer",
    "errors": (
        "LoosestepError LoosestepWarning NotAttachable NotFinite NotShardable PeerLost RankMismatch"
    ),
    "gradients.hook": "GradientHook gradient_hook",
    "sharding.hooks": "hook_with_zero_step hook_with_zero_step_interleaved",
    "sharding.optimizer": "ZeroRedundancyOptimizer",
    "sharding.options": "ZeroOptions",
    "strategy.clock": "Clock",
    "strategy.policies": "Buffers Initial OptimizerState Sharding",
    "strategy.recipes": (
        "ddp desloc diloco hierarchical_sgd muloco noloco post_local_sgd slowmo snoo sparseloco "
        "streaming_diloco zero"
    ),
    "strategy.strategy": "Strategy",
    "strategy.topology": "Topology",
    "sync.averager": "average_",
    "telemetry": "JsonLines Telemetry TensorBoard",
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
