"""Run benchmarks: ``python -m benchmarks [averaging|codecs|link|zero ...]``.

Without names all of them run. Every one prints a table and writes a dated file below
``benchmarks/results``.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    averaging,
    codecs,
    family,
    feedback,
    gradients,
    growth,
    idle,
    link,
    many_tensors,
    nonfinite,
    outer,
    peers,
    training,
    training_losses,
    training_seeds,
    ways,
    zero,
    zero_link,
)
from benchmarks.report import write

BENCHMARKS = {
    "averaging": averaging.run,
    "codecs": codecs.run,
    "family": family.run,
    "feedback": feedback.run,
    "gradients": gradients.run,
    "growth": growth.run,
    "idle": idle.run,
    "link": link.run,
    "many_tensors": many_tensors.run,
    "nonfinite": nonfinite.run,
    "outer": outer.run,
    "peers": peers.run,
    "training": training.run,
    "training_losses": training_losses.run,
    "training_seeds": training_seeds.run,
    "ways": ways.run,
    "zero": zero.run,
    "zero_link": zero_link.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure loosestep and its peers in one run.",
        epilog="example: python -m benchmarks averaging --rounds 9",
    )
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each contender")
    arguments = parser.parse_args()
    for name in arguments.names or BENCHMARKS:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
        write(name, BENCHMARKS[name](arguments.rounds))


if __name__ == "__main__":
    main()
