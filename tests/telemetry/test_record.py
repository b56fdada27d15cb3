"""What is recorded of a run, and where it goes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from loosestep import JsonLines, Telemetry, TensorBoard, attach, post_local_sgd
from loosestep.telemetry import Sink
from loosestep.telemetry.traffic import Traffic
from loosestep.testing import RankPool
from tests.support.oracle import loss_of, make_net, sgd

pytestmark = pytest.mark.fast


def write_telemetry(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    net = make_net()
    optimizer = sgd(net)
    sinks: list[Sink] = [JsonLines(f"{folder}/{rank}.jsonl"), TensorBoard(f"{folder}/tb{rank}")]
    telemetry = Telemetry(sinks=sinks)
    strategy = post_local_sgd(2, warmup_steps=1, gradients=None)
    with attach(net, optimizer, strategy, telemetry=telemetry) as run:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
        metrics = run.metrics()
    telemetry.close()
    return metrics


def test_a_run_is_recorded(pool: RankPool) -> None:
    """Bytes, seconds and drift reach the totals, the JSON lines and TensorBoard."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, _ = pool.run(2, write_telemetry, folder)
        lines = [json.loads(line) for line in Path(folder, "0.jsonl").read_text().splitlines()]
        events = list(Path(folder, "tb0").glob("events*"))
        assert events
        assert events[0].stat().st_size > 100
    numel = sum(p.numel() for p in make_net().parameters())
    floats = numel + 16  # BatchNorm's running mean and variance
    world = metrics["parameters/world"]
    assert world["syncs"] == 2
    assert world["seconds"] > 0
    assert 0 < world["last_drift"] < 1
    # Two ranks: half goes to the other and the other half comes back; counters beside it.
    assert world["bytes_copied"] == 2 * floats * 4
    assert metrics["gradients/world"]["syncs"] == 1
    assert [(line["step"], line["kind"]) for line in lines] == [
        (0, "gradients"),
        (3, "parameters"),
        (5, "parameters"),
    ]


def test_traffic_adds_up() -> None:
    """Every figure of two buffers is the sum of both."""
    both = Traffic(1, 2, 3.0, 4.0, 5)
    both.add(Traffic(10, 20, 30.0, 40.0, 50))
    assert both == Traffic(11, 22, 33.0, 44.0, 55)


def test_json_has_no_infinity(tmp_path: Path) -> None:
    """What is not finite is written as null, and each line can be read at once."""
    path = tmp_path / "run.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 0, "drift": float("inf")})
    sink.write({"step": 1, "drift": 0.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 0, "drift": None}, {"step": 1, "drift": 0.5}]
    sink.close()
