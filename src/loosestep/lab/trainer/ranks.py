"""Who a worker is: told by ``loosestep`` itself, by torchrun or by SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from loosestep.lab.trainer.mistakes import BadInput

FIRST_PORT, NUM_PORTS = 20_000, 20_000


@dataclass(frozen=True)
class Rank:
    """One of several workers, and where they meet."""

    rank: int
    num_workers: int
    address: str
    port: int
    local_rank: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables that ``init_process_group`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def rank_from(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return who this process is by its environment; None: nobody has started it as a worker."""
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _from_torchrun(environment)
    if {"SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys() and _in_step(environment):
        return _from_slurm(environment)
    return None


def _in_step(environment: Mapping[str, str]) -> bool:
    """Say whether srun started this: a batch script itself has the job's variables too."""
    return environment.get("SLURM_STEP_ID", "") not in ("", "4294967291", "batch")


def _from_torchrun(environment: Mapping[str, str]) -> Rank:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise BadInput(f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not; use torchrun")
    return Rank(
        rank=_number(environment, "RANK"),
        num_workers=_number(environment, "WORLD_SIZE"),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
    )


def _from_slurm(environment: Mapping[str, str]) -> Rank:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = _number(environment, "SLURM_JOB_ID", 0)
    return Rank(
        rank=_number(environment, "SLURM_PROCID"),
        num_workers=_number(environment, "SLURM_NTASKS"),
        address=environment.get("MASTER_ADDR") or first_node(nodes),
        port=_number(environment, "MASTER_PORT", FIRST_PORT + job % NUM_PORTS),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
    )


def first_node(nodes: str) -> str:
    """Return the first of SLURM's list of nodes.

    >>> first_node("gpu[07-09,12],big1"), first_node("a1,a2"), first_node("r[1-2]n[3,4]")
    ('gpu07', 'a1', 'r1n3')
    """
    depth, first = 0, ""
    for character in nodes:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            break
        first += character
    if not first:
        raise BadInput("SLURM did not say which nodes there are; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise BadInput(f"{name} must be a whole number, got {text!r}")
    return int(text)
