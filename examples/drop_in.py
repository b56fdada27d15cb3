"""Post-local SGD as written for torch.distributed; only the import line is another.

torchrun --nproc-per-node 4 examples/drop_in.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train(arguments.steps)  # what has groups of its own is gone when it returns, as it should be
    dist.destroy_process_group()


def train(steps: int) -> None:
    torch.manual_seed(0)
    teacher, loss_fn = torch.randn(8, 4), torch.nn.CrossEntropyLoss()
    layers = [torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 4)))
    torch.manual_seed(1 + dist.get_rank())  # from here on every worker has data of its own

    # module= and clock= are the only new words: buffers are averaged too, and hook and averager
    # count the same steps.
    averager = PeriodicModelAverager(period=8, warmup_steps=20, module=model)
    state = PostLocalSGDState(None, None, 20, False, clock=averager.clock)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), averager)

    for _ in range(steps):
        inputs = torch.randn(32, 8)
        labels = (torch.sin(2 * inputs) @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
    optimizer.finalize()  # the steps since the last average

    if dist.get_rank() == 0:
        print(f"last loss of worker 0: {loss.item():.3f}")
        for level, totals in averager.telemetry.metrics().items():
            print(f"{level}: {totals['syncs']} syncs, {totals['seconds']:.3f} s")


if __name__ == "__main__":
    main()
