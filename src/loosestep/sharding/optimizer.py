"""An optimizer whose state is divided among the ranks of a group.

Ownership belongs to parameters, or to slices of them, and is settled when the optimizer is made.
This file knows nothing of DDP. Whoever has gradients calls its verbs:

    wire.start_reduce   launch gradients on the way to their owners
    step_params         step what this rank owns of these parameters with these gradients
    wire.start_gather   launch parameters on the way back
    finish              the iteration's parameters are final
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.optim as in_torch
from torch._compile import _disable_dynamo as untraced
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from loosestep.comm.agreement import agree, state
from loosestep.comm.group import Group, peers_of, require_process_group, world_group
from loosestep.comm.peers import Peers, Phase
from loosestep.errors import check_instance
from loosestep.sharding.kinds import acceptance_of, kind_of
from loosestep.sharding.options import ZeroOptions
from loosestep.sharding.ownership import Ownership
from loosestep.sharding.prepare import ScalerLink, scale_to_norm_, total_norm
from loosestep.sharding.shard_set import (
    ParamGroup,
    Parts,
    ShardSet,
    StateByParameter,
    check_devices,
    check_parameters,
    copy_settings,
    names_of,
    settings_of,
)
from loosestep.sharding.stand_in import forget_spent
from loosestep.sharding.state import (
    check_groups,
    consolidate,
    cut_state,
    keep_dtypes,
    numbered_groups,
)
from loosestep.sharding.stepping import AtStep, Gradients, InBackward, Stepper, WholeGradients
from loosestep.sharding.wire import ShardWire

if TYPE_CHECKING:
    from loosestep.sharding.checkpoint_parts import ShardedState


class ZeroRedundancyOptimizer(in_torch.ZeroRedundancyOptimizer):
    """Wraps any optimizer class and keeps 1/n of its state on each of n ranks.

    Update rule, for the elements E_r that rank r owns: E_r <- optimizer(E_r, mean gradient), then
    all ranks gather all E_r. ZeRO, https://arxiv.org/abs/1910.02054.

    With ``overlap_with_ddp`` the step happens inside DDP's backward, by one of the hooks in
    ``loosestep.sharding.hooks``; ``step()`` then only fires hooks and satisfies LR schedulers, and
    may be left out. ``parameters_as_bucket_view`` is accepted and changes nothing: parameters stay
    where they are, and travel in few messages in any case. It is a subclass of torch's for whoever
    asks; nothing of that one's inside is here.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_fn(model(inputs), labels).backward()
        optimizer.step()
    """

    process_group: dist.ProcessGroup

    # A GradScaler then calls step() also when it found an inf, so that no rank waits for another.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        zero_options: ZeroOptions | None = None,
        **defaults: Any,
    ) -> None:
        require_process_group()
        if zero_options is not None:
            check_instance("zero_options", zero_options, ZeroOptions, "ZeroOptions(...)")
        self.options = ZeroOptions() if zero_options is None else zero_options
        self.kind = kind_of(optimizer_class, self.options.elementwise)
        self.process_group = _checked_group(process_group)
        self.world_size, self.rank = self.process_group.size(), self.process_group.rank()
        self.global_rank = dist.get_rank()
        self.overlap_with_ddp = overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view
        groups = _groups_of(params)
        check_parameters(groups)
        check_devices(groups, self.process_group)
        self._check_accepted = acceptance_of(optimizer_class, defaults)
        self._check_accepted(groups)
        ownership = Ownership(
            dist.get_world_size(self.process_group), whole=not self.kind.elementwise
        )
        self.shards = ShardSet(ownership, dist.get_rank(self.process_group))
        self.shards.add(groups)
        self.optim = optimizer_class([self.shards.group(group) for group in groups], **defaults)
        # Not torch's ZeRO's __init__: it would divide the parameters in its own way.
        torch.optim.Optimizer.__init__(self, groups, self.optim.defaults)
        Joinable.__init__(self)
        self._follow_state()
        copy_settings(self.optim.param_groups, self.param_groups)
        self._timeout = self.options.timeout
        self._peers: tuple[Peers, Peers] | None = None
        self._wire: ShardWire | None = None
        self._consolidated: dict[str, Any] | None = None
        self.gradients: Gradients = WholeGradients(self)
        self._stepper: Stepper = self._choose_stepper(overlap_with_ddp)
        self.initialized = True

    # What users call.

    @untraced  # messages cannot be traced; compile ``optim.step``, which this calls
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Step this rank's shard and gather the others'; all ranks of the group call it.

        ``kwargs`` are handed to the wrapped optimizer.
        """
        Join.notify_join_context(self)
        return self._stepper.step(closure, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        forget_spent(self.parameters)
        self.gradients.clear()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Shard more parameters; all ranks of the group must do so."""
        torch.optim.Optimizer.add_param_group(self, param_group)
        if len(self.param_groups) <= len(self.optim.param_groups):
            return  # one of those that the optimizer was made with
        group = self.param_groups[-1]
        try:
            self._stepper.check_new_group()
            check_parameters([group])
            check_devices([group], self.process_group)
            self._check_accepted([group])
        except (ValueError, TypeError):
            self.param_groups.pop()
            raise
        self.shards.add([group])
        self.optim.add_param_group(self.shards.group(group))
        copy_settings(self.optim.param_groups, self.param_groups)
        self._wire = self._consolidated = None  # the ranks have agreed on less than there is

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, taken over the shards; return it.

        What ``torch.nn.utils.clip_grad_norm_`` does with whole gradients, but every rank looks at
        its own part only.
        """
        self._stepper.check_gradients_remain("clip_grad_norm_")
        if self.joining:
            raise RuntimeError(
                "clip_grad_norm_ cannot be called under Join, where ranks without batches do not "
                "call it; declare it when the optimizer is made: ZeroOptions(clip_norm=...)"
            )
        parts = self.gradients.given().parts
        norm = total_norm(parts.values(), norm_type, self.wire.parameter_peers)
        if error_if_nonfinite and not abs(norm) < float("inf"):
            raise RuntimeError(
                f"the gradients' norm of order {norm_type} is {norm}, so they cannot be clipped; "
                "error_if_nonfinite=False lets them pass"
            )
        scale_to_norm_(self.gradients.held(), norm, max_norm)
        return torch.tensor(norm)

    # Verbs for those that have gradients.

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Every parameter's name, or its number."""
        return names_of(self.param_groups)

    @property
    def wire(self) -> ShardWire:
        """The way to the other ranks; the first use compares what they have and is collective."""
        if self._wire is None:
            self._wire = self._bind()
        return self._wire

    def limit_waits(self, seconds: float) -> None:
        """Bound every wait, unless the options say how long; all ranks of the group must do so."""
        if self.options.timeout is None:
            self._timeout, self._wire = seconds, None

    @torch.no_grad()
    def step_params(self, parts: Parts) -> bool:
        """Step what this rank owns of these parameters with its parts of their gradients.

        False: the step was skipped, on all ranks, because of an infinite gradient.
        """
        if not self.use_params(parts):
            return False
        self.step_inner()
        return True

    def use_params(self, parts: Parts) -> bool:
        """Make gradients ready as the options say, and set them; False: skip the step."""
        if not self._stepper.prepare(parts):
            return False
        self.shards.follow()
        self.shards.set_gradients(parts)
        return True

    def step_inner(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Step the shards with the gradients that they have, or that the closure sets."""
        copy_settings(self.param_groups, self.optim.param_groups)
        given = () if closure is None else (closure,)
        try:
            loss: float | None = self.optim.step(*given, **kwargs)
        finally:
            self.shards.set_gradients({})
        copy_settings(self.optim.param_groups, self.param_groups)
        self._consolidated = None
        return loss

    def finish(self) -> None:
        """Say that all parameters of an iteration are final."""
        self.in_backward.finished()

    @property
    def in_backward(self) -> InBackward:
        """The part that hooks talk to; an error where the optimizer was not made for them."""
        return self._stepper.in_backward

    # State.

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on group rank ``to``; all ranks of the group call it."""
        size = self.shards.ownership.group_size
        if not (isinstance(to, int) and 0 <= to < size):
            raise ValueError(f"to must be a rank of the group, 0 to {size - 1}, got {to!r}")
        self._consolidated = None
        peers = self.wire.parameter_peers.during(Phase("consolidating the optimizer's state"))
        states = consolidate(self.shards, self.parameters, self.optim.state, peers, to)
        if peers.group_rank == to:
            groups = numbered_groups(self.param_groups, self.parameters)
            self._consolidated = {"state": states, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's format, on the rank that it was consolidated to."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None and self.shards.ownership.group_size == 1:
            self.consolidate_state_dict()
        if self._consolidated is None:
            raise RuntimeError(
                "every rank holds a part of the state only: call consolidate_state_dict(to=rank) "
                "on all ranks, after the last step(), then state_dict() on that rank; or save "
                "sharded_state() with torch.distributed.checkpoint"
            )
        state_dict = dict(self._consolidated)
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state: of any world size, or of a plain optimizer."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, dict(state_dict)) or state_dict
        check_groups(self.param_groups, state_dict["param_groups"])
        cut = cut_state(state_dict, self.shards, self.param_groups, self.optim.param_groups)
        self.optim.load_state_dict(cut)
        keep_dtypes(self.optim, cut["state"])
        self._state_replaced()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def sharded_state(self) -> ShardedState:
        """Return the state for ``torch.distributed.checkpoint``, every rank writing its own part.

        Example::

            dcp.save({"optimizer": optimizer.sharded_state()}, checkpoint_id=folder)
        """
        # Not above: it loads parts of torch that nobody needs who saves otherwise.
        from loosestep.sharding.checkpoint_parts import ShardedState

        copy_settings(self.param_groups, self.optim.param_groups)
        return ShardedState(self.optim, self.shards, self.names, self._state_replaced)

    if not TYPE_CHECKING:  # to a type checker it would say that there is any name

        def __getattr__(self, name: str) -> Any:
            """Say what there is in the place of names inside torch's class."""
            if not name.startswith("_"):
                return super().__getattribute__(name)  # fails again, for the reason it has
            raise AttributeError(
                f"loosestep's ZeroRedundancyOptimizer has no {name!r}: it has the public names of "
                "torch's, not its inside; under DDP use loosestep.hook_with_zero_step",
                name=name,
                obj=self,
            )

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a ZeroRedundancyOptimizer belongs to its process group and cannot be pickled or "
            "copied; save consolidate_state_dict() and state_dict(), or sharded_state()"
        )

    # Uneven inputs.

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without batches does while the others train."""
        return _Shadow(self._stepper)

    @property
    def joining(self) -> bool:
        """Whether this runs inside ``torch.distributed.algorithms.Join``."""
        return bool(self._join_config.enable)

    @property
    def join_device(self) -> torch.device:
        """The device that the join context talks on."""
        return self.parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """The ranks that train together."""
        return self.process_group

    # Inside.

    def _follow_state(self) -> None:
        """Let the inner optimizer's state be found by parameters too, and be this one's."""
        state = StateByParameter(self.optim.state, self.shards)
        # Not a defaultdict, as torch has it: a subclass of that can be neither copied nor pickled.
        self.optim.state = self.state = state  # type: ignore[assignment]

    def _state_replaced(self) -> None:
        self._follow_state()
        copy_settings(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    def _choose_stepper(self, overlap: bool) -> Stepper:
        scaler = self.options.scaler
        link = None
        if scaler is not None and scaler.is_enabled():
            link = ScalerLink(scaler, self, lambda: self.wire.parameter_peers)
        if overlap:
            return InBackward(self, link)
        if link is not None:
            link.take_over(lambda: self.gradients.held())
        return AtStep(self)

    def _bind(self) -> ShardWire:
        """Make process groups of our own, once, and compare what the ranks are to shard."""
        if self._peers is None:
            self._peers = self._own_peers(), self._own_peers()
        gradients, parameters = (replace(peers, timeout=self._timeout) for peers in self._peers)
        trained = {True: "trained", False: "frozen"}
        layouts = [
            (f"{name} with strides {p.stride()}, {trained[p.requires_grad]}", p)
            for p, name in self.names.items()
        ]
        statement = state(
            layouts,
            f"{type(self.optim).__name__} {self.kind} {self.options.describe()} "
            f"overlap_with_ddp={self.overlap_with_ddp}",
            *settings_of(self.param_groups),
        )
        agree(parameters.during(Phase("agreeing what to shard")), statement, about="shard")
        return ShardWire(
            self.shards.ownership,
            gradients,
            parameters,
            self.names,
            recycles=self.kind.by_parameter,
        )

    def _own_peers(self) -> Peers:
        ranks = tuple(dist.get_process_group_ranks(self.process_group))
        if len(ranks) == 1:
            return Peers(Group.alone(ranks[0]), "zero")
        group = Group.make(ranks, self._timeout, self.process_group)
        weakref.finalize(self, group.close).atexit = False
        return peers_of(group, level="zero")


class _Hidden:
    """Hides a name of torch's class, so that asking for it ends in ``__getattr__``."""

    def __get__(self, instance: object, owner: type) -> Any:
        """Be found in the class, and not in its instances."""
        if instance is None:
            return self
        raise AttributeError


for _name in set(vars(in_torch.ZeroRedundancyOptimizer)) - set(vars(ZeroRedundancyOptimizer)):
    if _name.startswith("_") and not _name.startswith("__"):
        setattr(ZeroRedundancyOptimizer, _name, _Hidden())


class _Shadow(JoinHook):
    """Takes part in the others' steps."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    @torch.no_grad()
    def main_hook(self) -> None:
        """Do this rank's part of one step."""
        self._stepper.shadow()


def _groups_of(params: Any) -> list[ParamGroup]:
    """Return parameters as groups, in all forms that torch takes."""
    try:
        return torch.optim.Optimizer(params, {}).param_groups
    except KeyError:  # torch's own word for it
        raise ValueError(f"a parameter group must have 'params', got {params!r}") from None


def _checked_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = world_group() if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"process_group must be a group that this rank is in, got {group!r} on rank "
            f"{dist.get_rank()}; only its members make the optimizer"
        )
    return group
