"""Train one small model under three strategies on worker processes of this machine, and compare.

It predicts the next byte of Python's own help texts; every worker sees another part of them.
Example: python examples/demo.py --steps 400 --workers 4
"""

import argparse
import tempfile
import time
from pydoc_data.topics import topics
from threading import Thread

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch.distributed import get_rank, get_world_size
from torch.nn import CrossEntropyLoss

from loosestep import Topology, attach, ddp, hierarchical_sgd, post_local_sgd
from loosestep.testing import RankPool

CONTEXT, BLOCK, BATCH = 16, 1024, 32  # bytes that the model sees; bytes in a block; samples
STRATEGIES = {
    "ddp": lambda: ddp(),
    "post_local_sgd": lambda: post_local_sgd(period=8, warmup_steps=16, gradients=None),
    "hierarchical_sgd": lambda: hierarchical_sgd(
        {"host": 4, "world": 16},  # two workers play a host
        topology=Topology.from_sizes({"host": 2, "world": get_world_size()}),
    ),
}
Result = tuple[float, float, dict[str, int]]  # held-out loss, steps a second, bytes by level


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples to train on and samples of the held-out blocks: a context and a next byte."""
    content = bytearray("".join(topics[name] for name in sorted(topics)), "utf-8")
    blocks = torch.frombuffer(content, dtype=torch.uint8)[: len(content) // BLOCK * BLOCK]
    windows = blocks.view(-1, BLOCK).unfold(1, CONTEXT + 1, 1)
    held_out = torch.arange(len(windows)) % 10 == 0
    return windows[~held_out].flatten(0, 1).long(), windows[held_out, ::8].flatten(0, 1).long()


def train(name: str, steps: int, progress_path: str) -> Result:
    """Train on one worker: the usual loop, with one line around it."""
    rank, workers = get_rank(), get_world_size()
    done = torch.from_file(progress_path, shared=True, size=workers, dtype=torch.int64)
    training, held_out = text()
    shard = training.chunk(workers)[rank]
    embedding, hidden = torch.nn.Embedding(256, 32), torch.nn.Linear(32 * CONTEXT, 512)
    parts = [embedding, torch.nn.Flatten(), hidden, torch.nn.ReLU(), torch.nn.Linear(512, 256)]
    model, loss_fn = torch.nn.Sequential(*parts), CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with attach(model, optimizer, STRATEGIES[name]()) as run:
        began = time.perf_counter()
        for step in range(steps):
            batch = shard[torch.randint(len(shard), (BATCH,))]
            optimizer.zero_grad()
            loss_fn(model(batch[:, :-1]), batch[:, -1]).backward()
            optimizer.step()
            done[rank] = step + 1
        run.finalize()  # the steps since the last average
        speed = steps / (time.perf_counter() - began)
        moved = {key: t["bytes_sent"] + t["bytes_copied"] for key, t in run.metrics().items()}
    with torch.no_grad():  # every worker has the same model now, so one of them can judge it
        judged = held_out if rank == 0 else held_out[:1]
        loss = loss_fn(model(judged[:, :-1]), judged[:, -1]).item()
    return loss, speed, moved


def follow(progress_path: str, workers: int, bars: Progress) -> None:
    """Move the newest bar with the slowest worker, until that one is through."""
    done = torch.from_file(progress_path, shared=True, size=workers, dtype=torch.int64)
    while not bars.finished:
        bars.update(bars.task_ids[-1], completed=int(done.min()))
        time.sleep(0.05)


def compare(console: Console, steps: int, workers: int) -> dict[str, Result]:
    """Train under one strategy after the other."""
    results = {}
    columns = ("{task.description:16}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RankPool(workers) as pool, Progress(*columns, console=console) as bars:
        for name in STRATEGIES:
            bars.add_task(name, total=steps)
            with tempfile.NamedTemporaryFile() as file:
                follower = Thread(target=follow, args=(file.name, workers, bars), daemon=True)
                follower.start()
                results[name] = pool.run(workers, train, name, steps, file.name, timeout=600)[0]
                follower.join()
    return results


def show(console: Console, results: dict[str, Result]) -> None:
    columns = ("strategy", "test loss", "steps/s", "moved by worker 0", "over world")
    table, baseline = Table(*columns), sum(results["ddp"][2].values())
    for name, (loss, speed, moved) in results.items():
        world = sum(count for key, count in moved.items() if key.endswith("/world"))
        shares = [f"{n / 1e6:5.1f} MB {n / baseline:4.0%}" for n in (sum(moved.values()), world)]
        table.add_row(name, f"{loss:.3f}", f"{speed:.0f}", *shares)
    console.print(table)
    console.print(
        "Next: change a period in STRATEGIES (examples/demo.py) and watch loss against bytes; "
        "docs/recipes.md says what else can be combined."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    parser.add_argument("--workers", type=int, default=4, choices=(2, 4, 6, 8), help="default: 4")
    options, console = parser.parse_args(), Console()
    if options.steps < 1:
        parser.error(f"--steps must be >= 1, got {options.steps}")
    try:
        show(console, compare(console, options.steps, options.workers))
    except KeyboardInterrupt:
        console.print("stopped")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
