"""DDP with a sharded optimizer that steps inside backward.

torchrun --nproc-per-node 4 examples/zero.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import ZeroOptions, ZeroRedundancyOptimizer, hook_with_zero_step_interleaved


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


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
    layers = [torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(1 + dist.get_rank())  # from here on every worker has data of its own

    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        overlap_with_ddp=True,
        zero_options=ZeroOptions(timeout=60),  # clip_norm=1.0 goes here too
        lr=0.01,
    )
    hook = hook_with_zero_step_interleaved(allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for _ in range(steps):
        inputs = torch.randn(32, 8)
        labels = (torch.sin(2 * inputs) @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()  # parameters are final when this returns
        optimizer.step()  # fires hooks and lets the schedule count
        schedule.step()

    if dist.get_rank() == 0:
        whole = 2 * sum(p.nbytes for p in model.parameters())
        share = state_bytes(optimizer) / whole
        print(f"last loss of worker 0: {loss.item():.3f}")
        print(f"optimizer state: {share:.0%} of what one worker would hold without shards")
    optimizer.consolidate_state_dict(to=0)  # in torch's format, for any number of workers
    if dist.get_rank() == 0:
        print(f"consolidated: {len(optimizer.state_dict()['state'])} parameters")


if __name__ == "__main__":
    main()
