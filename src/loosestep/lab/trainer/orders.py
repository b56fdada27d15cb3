"""What a worker is told to do: settings, a folder, and what the run is called."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import loosestep
from loosestep.lab.runs import RunInfo
from loosestep.lab.trainer.settings import Settings

if TYPE_CHECKING:
    from loosestep.lab.trainer.loop import Worker
    from loosestep.strategy.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Orders:
    """A run, as every worker of it is told."""

    settings: Settings
    folder: Path
    name: str  # as reports show it
    command: list[str] = field(default_factory=list)
    link: dict[str, Any] | None = None  # emulated: rate, hosts, workers_per_host

    def to_json(self) -> str:
        """Return it as a worker reads it."""
        return json.dumps(
            {**vars(self), "settings": asdict(self.settings), "folder": str(self.folder)}
        )

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """Read what ``to_json`` wrote."""
        found = json.loads(text)
        given = found.pop("settings")
        settings = Settings(**{**given, "data": tuple(given["data"])})
        return cls(**{**found, "settings": settings, "folder": Path(found["folder"])})

    def write_info(self, worker: Worker, model: torch.nn.Module, topology: Topology) -> None:
        """Write what is run into the run's folder."""
        settings, samples = self.settings, worker.settings.batch * worker.settings.accumulate
        num_workers = len(topology.ranks)
        RunInfo(
            name=self.name,
            strategy=str(settings.spec),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            num_workers=num_workers,
            topology={
                level: [list(group) for group in groups]
                for level, groups in topology.levels.items()
            },
            num_parameters=sum(p.numel() for p in model.parameters()),
            tokens_per_step=num_workers * samples * worker.task.units_per_sample,
            steps=worker.num_steps,
            config=asdict(settings),
            data=worker.task.describe(),
            environment=environment(),
            link=self.link,
        ).write(self.folder)


def environment() -> dict[str, Any]:
    """Return what may explain a run's speed."""
    return {
        "loosestep": loosestep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "executable": Path(sys.executable).name,
    }
