"""Gradients of an FSDP2 module: FSDP reduces inside the shard mesh, we go on between meshes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loosestep.comm.peers import Peers
from loosestep.comm.sharded_types import is_fsdp
from loosestep.comm.tensors import shard_key
from loosestep.errors import NotAttachable
from loosestep.gradients.sharing import GradientSharing


class FSDPAdapter:
    """Connects an FSDP2 module through its all-reduce hook.

    ``wider`` gives, for every level beyond the shard mesh, the ranks that hold the same shard.
    """

    def __init__(
        self, module: torch.nn.Module, sharing: GradientSharing, wider: dict[str, Peers]
    ) -> None:
        self._module, self._sharing, self._wider, self._active = module, sharing, wider, True
        self._parts = [part for part in module.modules() if is_fsdp(part)]
        for part in self._parts:
            part.set_all_reduce_hook(self._share)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local, for all micro-batches but the last; FSDP keeps them unsharded."""
        for part in self._parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in self._parts:
                part.set_requires_gradient_sync(True, recurse=False)

    def broadcast_buffers(self, wanted: bool) -> None:
        """Do nothing: FSDP broadcasts no buffers."""

    def before_step(self) -> None:
        """Refuse parts that came later, where FSDP's sharing inside backward is not all."""
        if self._sharing.due.gradients not in self._wider:
            return
        for name, part in self._module.named_modules():
            if is_fsdp(part) and part not in self._parts:
                raise sharded_later(name)

    def close(self) -> None:
        """Leave the gradients to FSDP alone; its hook cannot be taken back, only silenced."""
        self._active = False

    def _share(self, reduced: torch.Tensor) -> None:
        level = self._sharing.due.gradients if self._active else None
        if level in self._wider:
            peers = self._wider[level]
            self._sharing.wait(self._sharing.share(reduced, peers), peers)


def sharded_later(name: str) -> RuntimeError:
    """Return the error for a part or a parameter whose gradients nobody shares between meshes."""
    return RuntimeError(
        f"{name!r} was given to fully_shard after attach, which knows only what was sharded before "
        "and would leave its gradients apart; detach(), make the optimizer of the new parameters "
        "and attach again"
    )


def mesh_ranks(module: torch.nn.Module) -> tuple[tuple[int, ...], str]:
    """Return the ranks that share the module's shards with this one, and this rank's shard."""
    for parameter in module.parameters():
        key = shard_key(parameter)
        if key:
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            return tuple(sorted(mesh.mesh.flatten().tolist())), key
    raise NotAttachable("this FSDP module has no sharded parameter; was fully_shard called?")
