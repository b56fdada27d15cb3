"""A worker's part in checkpoints: what it saves, and how it goes on from one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loosestep.groups import world_group
from loosestep.peers import Phase, peers_of
from loosestep.trainer import checkpoint
from loosestep.trainer.checkpoint import Manifest
from loosestep.trainer.loop import Worker, inner
from loosestep.trainer.mistakes import BadInput

Part = dict[str, Any]


def save(worker: Worker, run: Path) -> Path | None:
    """Write a checkpoint; all workers call it. Return its folder, on rank 0."""
    folder, model = checkpoint.partial_folder(run, worker.step), inner(worker.sharing.model)
    optimizer = worker.sharing.optimizer_state()
    state: Part = {
        "model": model.state_dict(),
        "optimizer": optimizer,
        "sharing": worker.sharing.state_dict(),
        "seconds": worker.journal.now,
    }
    said = _written(folder, state)
    problems = [text for text in said if text.startswith("!")]
    if problems:
        raise BadInput(f"the checkpoint cannot be written: {problems[0][1:]}")
    if dist.get_rank():
        dist.barrier()
        return None
    manifest = Manifest(
        step=worker.step,
        num_workers=dist.get_world_size(),
        model=checkpoint.shapes_of(model),
        strategy=str(worker.settings.spec),
        seed=worker.settings.seed,
        samples=worker.feed.position,
        files={f"rank-{rank}.pt": digest for rank, digest in enumerate(said)},
        settings=asdict(worker.settings),
    )
    whole = checkpoint.complete(run, manifest, worker.settings.keep)
    dist.barrier()
    return whole


def _written(folder: Path, state: Part) -> list[str]:
    """Write this worker's part; return all workers' hashes, or ! and what went wrong."""
    try:
        mine = checkpoint.write_part(folder, dist.get_rank(), state)
    except OSError as error:
        mine = f"!{folder}: {error.strerror}"
    except RuntimeError as error:  # torch's writer wraps what the system says
        mine = f"!{folder}: {str(error).splitlines()[0]}"
    peers = peers_of(world_group()).during(Phase("writing a checkpoint"))
    return [text.decode() for text in peers.exchange(mine.encode())]


def resume(worker: Worker, place: str) -> None:
    """Go on from a checkpoint, with as many workers or another number of them."""
    folder = checkpoint.find(place)
    manifest = checkpoint.read_manifest(folder)
    checkpoint.check_model(folder, manifest, inner(worker.sharing.model))
    if manifest.seed != worker.settings.seed:
        raise BadInput(
            f"{folder}: its data is in the order of --seed {manifest.seed}, not of "
            f"{worker.settings.seed}"
        )
    same = manifest.num_workers == dist.get_world_size()
    part = _own_part(folder, manifest) if same else _mean_part(folder, manifest)
    inner(worker.sharing.model).load_state_dict(part["model"])
    worker.sharing.optimizer.load_state_dict(part["optimizer"])
    if same and manifest.strategy == str(worker.settings.spec):
        worker.sharing.load_state_dict(part["sharing"])
    else:
        worker.sharing.start_at(manifest.step)
    worker.step, worker.feed.position = manifest.step, manifest.samples
    worker.journal.inherit(checkpoint.run_of(folder), manifest.step, part["seconds"])


def _own_part(folder: Path, manifest: Manifest) -> Part:
    rank = dist.get_rank()
    part = checkpoint.read_part(folder, manifest, rank)
    while part["optimizer"] is None:  # the first of a group keeps a sharded one for the others
        rank -= 1
        part["optimizer"] = checkpoint.read_part(folder, manifest, rank)["optimizer"]
    return part


def _mean_part(folder: Path, manifest: Manifest) -> Part:
    parts = [checkpoint.read_part(folder, manifest, r) for r in range(manifest.num_workers)]
    optimizers = [part["optimizer"] for part in parts if part["optimizer"] is not None]
    return {
        "model": checkpoint.mean_state([part["model"] for part in parts]),
        "optimizer": checkpoint.mean_state(optimizers),
        "seconds": parts[0]["seconds"],
    }
