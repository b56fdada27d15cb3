"""Compare short trainings with what they gave before, or record them anew.

    python -m tests.recorded            # compare; exit code 1 and a line for each that differs
    python -m tests.recorded --record   # write tests/recorded.json

A change that is not meant to touch the maths leaves every hash as it is. One that is records them
anew, and says of each that changed why it did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from loosestep.testing import RankPool
from tests.support.trainings import CASES, result_of

FILE = Path(__file__).with_suffix(".json")

# Wider vectors cut loops elsewhere, and the rest of a loop rounds differently.
SAME_EVERYWHERE = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}


def train_all() -> dict[str, str]:
    """Return the hashes of every case: of parameters and of buffers, of ranks that differ."""
    with RankPool(4) as pool:
        found = {name: pool.run(case.ranks, result_of, name) for name, case in CASES.items()}
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
    record = parser.parse_args().record
    if any(os.environ.get(name) != value for name, value in SAME_EVERYWHERE.items()):
        # Read when torch is loaded, which it is by now.
        again = [sys.executable, "-m", "tests.recorded", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | SAME_EVERYWHERE)
    found = train_all()
    if record:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    told = differences(found, json.loads(FILE.read_text()))
    print(*told, f"{len(found)} trainings, {len(told)} differ", sep="\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
