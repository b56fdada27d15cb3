"""The usual training loop, with one line around it that says what the workers share.

torchrun --nproc-per-node 4 examples/attach.py
"""

import argparse

import torch
import torch.distributed as dist

from loosestep import attach, post_local_sgd


def batches(steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return points and the labels that a fixed random network gives them."""
    teacher = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    points = torch.randn(steps, 32, 8, generator=torch.Generator().manual_seed(seed))
    return [(x, (torch.sin(2 * x) @ teacher).argmax(dim=1)) for x in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_fn = torch.nn.CrossEntropyLoss()

    # On one machine the level "host" is everybody, so gradients=None is what keeps them local.
    strategy = post_local_sgd(period=8, warmup_steps=20, gradients=None)
    with attach(model, optimizer, strategy) as run:
        for inputs, labels in batches(steps, seed=1 + dist.get_rank()):
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
        run.finalize()
        metrics = run.metrics()

    if dist.get_rank() == 0:
        (inputs, labels), *_ = batches(1, seed=0)
        print(f"loss on new points: {loss_fn(model(inputs), labels).item():.3f}")
        for level, totals in metrics.items():
            print(f"{level}: {totals['syncs']} syncs, {totals['seconds']:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
