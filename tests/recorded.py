"""Compare short trainings with what they gave before, or record them anew.

    python -m tests.recorded            # compare; exit code 1 and a line for each that differs
    python -m tests.recorded "ddp, 2"   # compare these only
    python -m tests.recorded --record   # write tests/recorded.json

A change that is not meant to touch the maths leaves every hash as it is. One that is records them
anew, and says of each that changed why it did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from loosestep.testing import RankPool
from tests.support.trainings import CASES, result_of

FILE = Path(__file__).with_suffix(".json")

# Wider vectors cut loops elsewhere, and the rest of a loop rounds differently.
SAME_EVERYWHERE = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}


def train_all(names: Iterable[str]) -> dict[str, str]:
    """Return the hashes of every case: of parameters and of buffers, of ranks that differ."""
    with RankPool(4) as pool:
        found = {name: pool.run(CASES[name].ranks, result_of, name) for name in names}
    return {name: " ".join(dict.fromkeys(by_rank)) for name, by_rank in found.items()}


def differences(found: dict[str, str], recorded: dict[str, str]) -> list[str]:
    """Return a line for every case that is not as it was."""
    names = dict.fromkeys([*recorded, *found])
    return [
        f"{name}: was {recorded.get(name, 'not there')}, is {found.get(name, 'not there')}"
        for name in names
        if found.get(name) != recorded.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the file anew")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a training; all of them")
    given = parser.parse_args()
    names, recorded = given.names or [*CASES], json.loads(FILE.read_text())
    if given.record and given.names:
        parser.error("the file is written as a whole: record all trainings, or compare some")
    if strange := sorted({*names} - {*CASES}):
        parser.error(f"there is no training {strange[0]!r}; there are {', '.join(CASES)}")
    if any(os.environ.get(name) != value for name, value in SAME_EVERYWHERE.items()):
        # Read when torch is loaded, which it is by now.
        again = [sys.executable, "-m", "tests.recorded", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | SAME_EVERYWHERE)
    found = train_all(names)
    if given.record:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        recorded = found
    if given.names:
        recorded = {name: recorded[name] for name in names if name in recorded}
    told = differences(found, recorded)
    print(*told, f"{len(found)} trainings, {len(told)} differ", sep="\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
