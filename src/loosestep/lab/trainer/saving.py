"""A worker's part in checkpoints: what it saves, and how it goes on from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.group import peers_of, world_group
from loosestep.comm.peers import Phase
from loosestep.comm.tensors import Named
from loosestep.errors import NotFinite
from loosestep.lab.trainer import checkpoint
from loosestep.lab.trainer.checkpoint import Manifest, complete
from loosestep.lab.trainer.loop import Worker, inner
from loosestep.lab.trainer.mistakes import BadInput, one_line
from loosestep.lab.trainer.part_files import mean_state, read_part, write_part
from loosestep.lab.trainer.saved import check_settings
from loosestep.sync.finite import batches, first_nonfinite

Part = dict[str, Any]

MEASURED = ("running_mean", "running_var")  # by BatchNorm and its kin


def save(worker: Worker, run: Path) -> Path | None:
    """Write a checkpoint; all workers call it. Return its folder, on rank 0.

    Nothing is written, and no older one goes, where model or optimizer are not finite.
    """
    optimizer = worker.sharing.optimizer_state()
    check_finite(worker, optimizer)
    folder = checkpoint.partial_folder(run, worker.step)
    state: Part = {
        "model": inner(worker.sharing.model).state_dict(),
        "optimizer": optimizer,
        "sharing": worker.sharing.state_dict(),
        "seconds": worker.journal.now,
    }
    hashes = _agreed(run, worker, lambda: write_part(folder, dist.get_rank(), state))
    manifest = _manifest(worker, hashes)
    keep = worker.settings.keep
    _agreed(run, worker, lambda: "" if dist.get_rank() else str(complete(run, manifest, keep)))
    return None if dist.get_rank() else checkpoint.whole_folder(run, worker.step)


def check_finite(worker: Worker, optimizer: Part | None = None) -> None:
    """Raise on all workers if the model, or an optimizer's state, of one is not finite.

    All call it.
    """
    named = [*_to_be_finite(inner(worker.sharing.model)), *_tensors_of(optimizer or {})]
    mine = first_nonfinite(batches(named), encoded=False)
    said = _exchanged(mine, "looking for what is not finite")
    bad = {rank: name for rank, name in enumerate(said) if name}
    if bad:
        told = ", ".join(f"{name!r} of worker {rank}" for rank, name in bad.items())
        raise NotFinite(
            f"a model and its optimizer must be finite, and after step {worker.step} there is an "
            f"infinity or NaN in {told}; that is not saved: go on from an earlier checkpoint with "
            "a lower --lr, or with --clip",
            ranks=tuple(bad),
            tensor=next(iter(bad.values())),
        )


def _to_be_finite(model: torch.nn.Module) -> list[Named]:
    """Return parameters, and what layers measure to normalise by; a mask may hold infinities."""
    measured = [(n, b) for n, b in model.named_buffers() if n.rpartition(".")[2] in MEASURED]
    return [*model.named_parameters(), *measured]


def _tensors_of(optimizer: Part) -> list[Named]:
    """Return what an optimizer's state has of tensors that may be infinite, by name."""
    return [
        (f"{key} of parameter {number} in the optimizer", value)
        for number, state in optimizer.get("state", {}).items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def _manifest(worker: Worker, hashes: list[str]) -> Manifest:
    return Manifest(
        step=worker.step,
        num_workers=dist.get_world_size(),
        model=checkpoint.shapes_of(inner(worker.sharing.model)),
        strategy=str(worker.settings.spec),
        seed=worker.settings.seed,
        data=worker.task.describe(),
        samples=worker.feed.position,
        files={f"rank-{rank}.pt": digest for rank, digest in enumerate(hashes)},
        settings=asdict(worker.settings),
        layout=worker.layout,
        warm_samples=worker.warm_samples,
    )


def _agreed(run: Path, worker: Worker, write: Callable[[], str]) -> list[str]:
    """Return what writing has given on all workers; raise on all where one could not write."""
    try:
        mine = write()
    except (OSError, RuntimeError) as error:  # torch's writer wraps what the system says
        mine = f"!{getattr(error, 'strerror', None) or one_line(error)}"
    said = _exchanged(mine, "writing a checkpoint")
    problems = [text[1:] for text in said if text.startswith("!")]
    if problems:
        checkpoint.discard(run, worker.step)
        raise BadInput(
            f"the checkpoint of step {worker.step} cannot be written into {run}: {problems[0]}"
        )
    return said


def _exchanged(mine: str, doing: str) -> list[str]:
    peers = peers_of(world_group()).during(Phase(doing))
    return [text.decode() for text in peers.exchange(mine.encode())]


def resume(worker: Worker, place: str) -> None:
    """Go on from a checkpoint; with other workers, hosts or strategy, from the replicas' mean."""
    folder = checkpoint.find(place)
    manifest = checkpoint.read_manifest(folder)
    check_settings(folder, manifest, worker.settings)
    model = inner(worker.sharing.model)
    check_fits(folder, manifest, model, worker.task.describe(), worker.settings.seed)
    # With another strategy replicas must be equal at first: it may never average them.
    same = manifest.num_workers == dist.get_world_size()
    same = same and manifest.strategy == str(worker.settings.spec)
    same = same and manifest.layout == worker.layout  # workers of a host may have to be equal
    part = _read(folder, manifest, _own_part if same else _mean_part)
    inner(worker.sharing.model).load_state_dict(part["model"])
    _load_optimizer(worker.sharing.optimizer, part["optimizer"])
    if same:
        worker.sharing.load_state_dict(part["sharing"])
    else:
        worker.sharing.start_at(manifest.step)
    worker.step, worker.feed.position = manifest.step, manifest.samples
    worker.warm_samples = manifest.warm_samples
    worker.journal.inherit(checkpoint.run_of(folder), manifest.step, part["seconds"])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Part) -> None:
    """Take the state back; weight decay is a setting, and may have been given anew."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def check_fits(
    folder: Path, manifest: Manifest, model: torch.nn.Module, data: dict[str, Any], seed: int
) -> None:
    """Raise unless a run can go on from a checkpoint; needs no workers."""
    checkpoint.check_model(folder, manifest, model)
    if manifest.data["sha256"] != data["sha256"]:
        raise BadInput(
            f"{folder}: its data is {manifest.data['name']}, {manifest.data['bytes']} bytes, and "
            f"this is {data['name']}, {data['bytes']} bytes of other content; give the same data"
        )
    if manifest.seed != seed:
        raise BadInput(
            f"{folder}: its data is in the order of --seed {manifest.seed}, not of {seed}"
        )


def _read(folder: Path, manifest: Manifest, read: Callable[[Path, Manifest], Part]) -> Part:
    """Read a part; raise on all workers where one could not, before any has written anything."""
    part: Part = {}
    problem = ""
    try:
        part = read(folder, manifest)
    except BadInput as error:
        problem = str(error)
    for text in filter(None, _exchanged(problem, "reading a checkpoint")):
        raise BadInput(text)
    return part


def _own_part(folder: Path, manifest: Manifest) -> Part:
    rank = dist.get_rank()
    part = read_part(folder, manifest, rank)
    while part["optimizer"] is None:  # the first of a group keeps a sharded one for the others
        rank -= 1
        part["optimizer"] = read_part(folder, manifest, rank)["optimizer"]
    return part


def _mean_part(folder: Path, manifest: Manifest) -> Part:
    parts = [read_part(folder, manifest, r) for r in range(manifest.num_workers)]
    optimizers = [part["optimizer"] for part in parts if part["optimizer"] is not None]
    return {
        "model": mean_state([part["model"] for part in parts]),
        "optimizer": mean_state(optimizers),
        "seconds": parts[0]["seconds"],
    }
