"""How far a reader jumps: files of the package that one blocking sync enters, and calls between.

    python -m benchmarks.trace_sync           # two figures
    python -m benchmarks.trace_sync --calls   # and every call from one file into another

Traced is one `optimizer.step()` with its sync, on the first of 2 ranks, when two steps have been
taken before: what is made once is then there. Of eight such steps the one with the fewest calls is
shown: in the others one rank has waited for the other. A call counts where the nearest frame of
the package below it on the stack is in another file; the call from outside does not. Generator
expressions are read where they stand, and do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import loosestep
from loosestep.testing import run_ranks

PACKAGE = str(Path(loosestep.__file__).parent)
Jump = tuple[str, str, str]  # from a file, to a file, into a function


class Trace:
    """Files entered and calls between files, while it is on."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.jumps: list[Jump] = []

    def __enter__(self) -> Trace:
        """Begin."""
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        here = _file(frame)
        if event != "call" or here is None or frame.f_code.co_name == "<genexpr>":
            return
        self.files[here] += 1
        below = frame.f_back
        while below is not None and _file(below) is None:
            below = below.f_back
        if below is not None and (before := _file(below)) != here:
            self.jumps.append((str(before), here, frame.f_code.co_qualname))


def _file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    inside = name.startswith(PACKAGE) and not name.startswith(f"{PACKAGE}/testing/")
    return name.removeprefix(PACKAGE + "/") if inside else None


def trace() -> tuple[dict[str, int], list[Jump]]:
    """Return what one blocking sync enters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = loosestep.post_local_sgd(period=1, gradients=None)
    with loosestep.attach(model, optimizer, strategy) as run:
        traces = []
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            with Trace() as traced:
                optimizer.step()
            traces.append(traced)
        run.finalize()
    shown = min(traces[2:], key=lambda traced: sum(traced.files.values()))
    return dict(shown.files), shown.jumps


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="show every call between files")
    arguments = parser.parse_args()
    files, jumps = run_ranks(2, trace)[0]
    if arguments.calls:
        for before, here, function in jumps:
            print(f"{before:32} -> {here:32} {function}")
        for name, calls in sorted(files.items(), key=lambda pair: -pair[1]):
            print(f"{calls:5} calls  {name}")
    print(f"{len(files)} files, {len(jumps)} jumps between files, {sum(files.values())} calls")


if __name__ == "__main__":
    main()
