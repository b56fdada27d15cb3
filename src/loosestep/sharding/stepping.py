"""When a sharded optimizer steps: at ``step()``, or inside backward.

Two classes with the same methods, so that no method has to ask which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loosestep.comm.peers import Phase
from loosestep.errors import RankMismatch
from loosestep.sharding.options import ZeroOptions
from loosestep.sharding.prepare import ScalerLink, inverse_of, multiply_, scale_to_norm_, total_norm
from loosestep.sharding.recognize import only_creates_state
from loosestep.sharding.shard_set import Parts
from loosestep.sharding.wire import ShardWire

Closure = Callable[[], float]
FLAGS_TAG = 8  # below the tags that all members count together


@dataclass(frozen=True)
class Given:
    """Gradients for a step: of which parameters, the same on all ranks, and this rank's parts."""

    parameters: list[torch.Tensor]
    parts: Parts


class Gradients(Protocol):
    """Where the gradients of the next step are."""

    def given(self) -> Given:
        """Return what there is; all ranks of the group ask together."""

    def borrowed(self) -> Given:
        """Return this rank's part of the others', for a step for which it has no batch."""

    def held(self) -> list[torch.Tensor]:
        """Return every tensor on this rank that holds gradients, to be scaled."""

    def clear(self) -> None:
        """Forget them."""


class Sharded(Protocol):
    """What stepping needs of the optimizer."""

    options: ZeroOptions
    gradients: Gradients
    optim: torch.optim.Optimizer

    @property
    def wire(self) -> ShardWire:
        """The way to the other ranks."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""

    @property
    def joining(self) -> bool:
        """Whether ranks may run out of batches."""

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Their names."""

    def use_params(self, parts: Parts) -> bool:
        """Make gradients ready and set them; False: the step is to be skipped."""

    def step_params(self, parts: Parts) -> bool:
        """Step what this rank owns with these gradients; False: it was skipped."""

    def step_inner(self, closure: Closure | None = None, **kwargs: Any) -> float | None:
        """Step the shards with the gradients that they have."""


class Stepper(Protocol):
    """When the step happens."""

    @property
    def in_backward(self) -> InBackward:
        """The part that hooks talk to."""

    def step(self, closure: Closure | None, kwargs: dict[str, Any]) -> float | None:
        """Do what ``optimizer.step()`` is to do; ``kwargs`` are for the wrapped optimizer."""

    def shadow(self) -> None:
        """Do this rank's part of a step for which it has no batch."""

    def prepare(self, parts: Parts) -> bool:
        """Make gradients ready; False: skip the step."""

    def check_gradients_remain(self, verb: str) -> None:
        """Raise where gradients are gone when the user could use them."""

    def check_new_group(self) -> None:
        """Raise where parameters cannot be added any more."""


class WholeGradients:
    """Gradients in ``param.grad``, whole and equal on all ranks, as DDP leaves them."""

    def __init__(self, zero: Sharded) -> None:
        self._zero = zero
        self._lent: list[torch.Tensor] | None = None

    def given(self) -> Given:
        """Return this rank's part of ``param.grad``, once all have the same ones."""
        whole = self._present()
        parameters = self._zero.parameters
        said = self._say(b"\1" + bytes(parameter in whole for parameter in parameters))
        active = [member for member, flags in enumerate(said) if flags[0]]
        self._check_same(said, active)
        if len(active) < len(said):
            self._lend(whole, said, active[0])
        return Given(list(whole), self._zero.wire.own_parts(whole))

    def borrowed(self) -> Given:
        """Return this rank's part of the others' gradients: it has none of its own any more."""
        said = self._say(bytes(1 + len(self._zero.parameters)))
        active = [member for member, flags in enumerate(said) if flags[0]]
        self._check_same(said, active)
        flags = zip(self._zero.parameters, said[active[0]][1:], strict=True)
        used = [parameter for parameter, flag in flags if flag]
        parts = self._borrow(used, active[0])
        self._lent = list(parts.values())
        return Given(used, parts)

    def held(self) -> list[torch.Tensor]:
        """Return every gradient: those of ``param.grad``, or those that the others have lent."""
        return list(self._present().values()) if self._lent is None else self._lent

    def clear(self) -> None:
        """Forget what was lent; ``zero_grad`` forgets the rest."""
        self._lent = None

    def _present(self) -> Parts:
        return {p: p.grad for p in self._zero.parameters if p.grad is not None}

    def _say(self, flags: bytes) -> list[bytes]:
        # A tag of its own: a rank that was given more parameters is busy agreeing on those, and
        # messages of other lengths under one tag end the process.
        peers = self._zero.wire.parameter_peers
        phase = Phase("agreeing which gradients there are")
        return peers.during(phase).exchange_fixed(flags, FLAGS_TAG)

    def _check_same(self, said: list[bytes], active: list[int]) -> None:
        for index, parameter in enumerate(self._zero.parameters, start=1):
            flags = {member: said[member][index] for member in active}
            if len(set(flags.values())) > 1:
                ranks = self._zero.wire.parameter_peers.global_ranks
                missing = [ranks[member] for member, flag in flags.items() if not flag]
                raise RankMismatch(
                    f"parameter {self._zero.names[parameter]!r} has a gradient on some ranks and "
                    f"none on ranks {missing}; share gradients before step(): wrap the model with "
                    "DistributedDataParallel, or use attach(model, optimizer, zero())"
                )

    def _lend(self, whole: Parts, said: list[bytes], lender: int) -> None:
        """Send those that have no batch any more their parts of my gradients."""
        wire = self._zero.wire
        if wire.group_rank != lender:
            return
        for member in [m for m, flags in enumerate(said) if not flags[0]]:
            for gradient in wire.own_parts(whole, member).values():
                wire.send(gradient, member)

    def _borrow(self, used: list[torch.Tensor], lender: int) -> Parts:
        wire = self._zero.wire
        parts = wire.own_parts({p: torch.empty_like(p) for p in used})
        for gradient in parts.values():
            wire.receive(gradient, lender)
        return parts


class AtStep:
    """``optimizer.step()`` steps, with the gradients that are there by then."""

    def __init__(self, zero: Sharded) -> None:
        self._zero = zero

    @property
    def in_backward(self) -> InBackward:
        """Raise: no hook steps."""
        raise ValueError(
            "this ZeroRedundancyOptimizer steps at step(), not inside backward; make it with "
            "overlap_with_ddp=True"
        )

    def step(self, closure: Closure | None, kwargs: dict[str, Any]) -> float | None:
        """Step this rank's shard, then gather."""
        zero = self._zero
        if callable(closure):
            return self._step_with(closure, kwargs)
        loss = None
        if not self._skipped_by_scaler():
            loss = self._step(zero.gradients.given(), closure, kwargs)
        zero.gradients.clear()
        return loss

    def shadow(self) -> None:
        """Step with the others' gradients."""
        gradients = self._zero.gradients
        self._step(gradients.borrowed(), None, {})
        gradients.clear()

    def prepare(self, parts: Parts) -> bool:
        """Clip, if the options say so; a scaler has done its part before ``step()``."""
        held = self._zero.gradients.held()
        # A gradient with other strides than its parameter's was copied on the way to its part.
        kept = {gradient.untyped_storage().data_ptr() for gradient in held}
        copies = [p for p in parts.values() if p.untyped_storage().data_ptr() not in kept]
        _clip(self._zero, parts, [*held, *copies])
        return True

    def check_gradients_remain(self, verb: str) -> None:
        """Do nothing: they remain until ``zero_grad``."""

    def check_new_group(self) -> None:
        """Do nothing: a group may be added at any time."""

    def _step(self, given: Given, closure: Closure | None, kwargs: dict[str, Any]) -> float | None:
        if not self._zero.use_params(given.parts):
            return None
        loss = self._zero.step_inner(closure, **kwargs)
        self._zero.wire.start_gather(given.parameters).wait()
        return loss

    def _step_with(self, closure: Closure, kwargs: dict[str, Any]) -> float | None:
        """Let the inner optimizer call the closure, as often as it likes."""
        zero = self._zero
        moved: list[torch.Tensor] = []
        losses: list[float] = []

        def evaluate() -> float:
            if moved:  # since the last call: the others need them too
                zero.wire.start_gather(moved).wait()
            with torch.enable_grad():
                losses.append(closure())
            given = zero.gradients.given()
            moved[:] = given.parameters
            zero.use_params(given.parts)
            return losses[-1]

        loss = zero.step_inner(evaluate, **kwargs)
        if not losses:
            raise RuntimeError(
                f"{type(zero.optim).__name__}.step never called its closure, which would have set "
                "the gradients, so nothing was stepped; call backward, then step() without one"
            )
        zero.wire.start_gather(moved).wait()
        zero.gradients.clear()
        return loss

    def _skipped_by_scaler(self) -> bool:
        """Obey a GradScaler, which leaves its findings on the optimizer."""
        found = getattr(self._zero, "found_inf", None)
        if found is None:
            return False
        if self._zero.joining:
            raise RuntimeError(
                "a GradScaler cannot be used under Join: ranks without batches do not know its "
                "scale; give all ranks the same number of batches"
            )
        mine = bool(found)
        verb = "agreeing whether gradients are finite"
        if all(self._zero.wire.any_of([mine, not mine], verb)):
            raise RankMismatch(
                f"a GradScaler found infinite gradients on some ranks and none on others ("
                f"{'some' if mine else 'none'} here), so the gradients are not the same on all "
                "ranks; hand the scaler to the optimizer: ZeroOptions(scaler=scaler) makes ranks "
                "agree"
            )
        scale = getattr(self._zero, "grad_scale", None)
        if not mine and scale is not None:
            multiply_(self._zero.gradients.held(), inverse_of(scale))
        return mine


class InBackward:
    """A hook steps while backward runs; ``optimizer.step()`` finds the step taken."""

    def __init__(self, zero: Sharded, scaler: ScalerLink | None) -> None:
        self._zero, self._scaler = zero, scaler
        self._stepped = False
        self.shadowed: Callable[[], None] | None = None  # what is left when no backward runs

    @property
    def in_backward(self) -> InBackward:
        """Itself."""
        return self

    def finished(self) -> None:
        """Say that a backward has stepped."""
        self._stepped = True

    def step(self, closure: Closure | None, kwargs: dict[str, Any]) -> float | None:
        """Check that backward has stepped."""
        if kwargs:
            raise RuntimeError(
                f"with overlap_with_ddp=True the step has been taken inside backward, so "
                f"{sorted(kwargs)} come too late; use overlap_with_ddp=False, or parameter groups"
            )
        if closure is not None:
            raise RuntimeError(
                "with overlap_with_ddp=True the step is taken inside backward, so a closure that "
                "runs backward itself cannot be used; call backward, then step()"
            )
        if not self._stepped and not self._only_creates_state():
            raise RuntimeError(
                "no backward has stepped since the last step(): register a hook, "
                "ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero)), and "
                "call backward outside no_sync()"
            )
        self._stepped = False
        return None

    def shadow(self) -> None:
        """Finish what DDP's own shadow of a backward has begun."""
        if self.shadowed is not None:
            self.shadowed()

    def prepare(self, parts: Parts) -> bool:
        """Unscale and clip, if the options say so."""
        gradients = list(parts.values())
        if self._scaler is not None and self._scaler.unscale_(gradients):
            return False
        _clip(self._zero, parts, gradients)
        return True

    def _only_creates_state(self) -> bool:
        """Say whether a distributed checkpoint wants the state to be there, and make it."""
        zero = self._zero
        assert isinstance(zero, torch.optim.Optimizer)
        if not only_creates_state(zero, {"closure": None}):
            return False
        zero.step_params(zero.gradients.given().parts)
        return True

    def check_gradients_remain(self, verb: str) -> None:
        """Raise: the step has been taken with them."""
        raise RuntimeError(
            f"{verb} comes too late: with overlap_with_ddp=True backward takes the step; declare "
            "it when the optimizer is made: ZeroOptions(clip_norm=...)"
        )

    def check_new_group(self) -> None:
        """Raise: DDP would not reduce their gradients."""
        raise ValueError(
            "parameters cannot be added with overlap_with_ddp=True: DDP reduces the gradients of "
            "those it was made with only; make the DDP module and this optimizer anew"
        )


def _clip(zero: Sharded, parts: Parts, gradients: list[torch.Tensor]) -> None:
    options = zero.options
    if options.clip_norm is not None:
        norm = total_norm(parts.values(), options.norm_type, zero.wire.parameter_peers)
        scale_to_norm_(gradients, norm, options.clip_norm)
