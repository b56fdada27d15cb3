"""Two bits with and without error feedback: a byte-level language model on four workers.

Every worker trains on its own part of the Python standard library's sources and parameters are
averaged every 10 steps: exactly, by 2 bits, and by 2 bits with error feedback. What counts is the
loss of the averaged model on files that nobody trained on, after 600 steps, for three seeds.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.report import Row
from loosestep import attach, post_local_sgd
from loosestep.reducers import ErrorFeedback, Int2, Mean, Reducer
from loosestep.testing import run_ranks

WORKERS, STEPS, PERIOD, SEEDS = 4, 600, 10, (0, 1, 2)
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 2, 4, 64, 8
TEXT_BYTES, HELD_OUT_BYTES = 4 << 20, 256 << 10
LEARNING_RATE = 3e-3


def contenders() -> dict[str, Reducer]:
    return {"exact": Mean(), "2 bits": Int2(), "2 bits + feedback": ErrorFeedback(Int2())}


class ByteModel(torch.nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **layer)  # type: ignore[arg-type]
            for _ in range(LAYERS)
        )
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 256)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(text) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def text() -> torch.Tensor:
    """Return the standard library's sources, in the order of their paths."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    whole = bytearray()
    for path in files:
        whole += path.read_bytes()
        if len(whole) >= TEXT_BYTES + HELD_OUT_BYTES:
            break
    return torch.frombuffer(whole[: TEXT_BYTES + HELD_OUT_BYTES], dtype=torch.uint8).long()


def loss_of(model: ByteModel, source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(source) - CONTEXT - 1, (BATCH,), generator=generator)
    batch = torch.stack([source[start : start + CONTEXT + 1] for start in starts.tolist()])
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(name: str, seed: int) -> float:
    """Train all workers and return the averaged model's loss on what was held out."""
    whole, rank = text(), dist.get_rank()
    held_out, rest = whole[-HELD_OUT_BYTES:], whole[:-HELD_OUT_BYTES]
    part = rest.chunk(WORKERS)[rank]
    torch.manual_seed(seed)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * _cosine(step / STEPS)
    )
    strategy = post_local_sgd(PERIOD, warmup_steps=0, gradients=None, reducer=contenders()[name])
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    with attach(model, optimizer, strategy) as run:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part, generator).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        run.finalize()
    with torch.no_grad():
        fixed = torch.Generator().manual_seed(7)
        return statistics.mean(float(loss_of(model, held_out, fixed)) for _ in range(64))


def _cosine(progress: float) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def measure(names: list[str]) -> dict[str, list[float]]:
    return {name: [train(name, seed) for seed in SEEDS] for name in names}


def run(rounds: int) -> list[Row]:
    """Train; the seeds are the rounds."""
    names = list(contenders())
    losses = run_ranks(WORKERS, measure, names, timeout=3600, group_timeout=120)[0]
    numel = sum(p.numel() for p in ByteModel().parameters())
    exact = statistics.mean(losses["exact"])
    result = []
    for name in names:
        mean = statistics.mean(losses[name])
        condition = f"{numel / 1e3:.0f}k parameters, {STEPS} steps"
        spread = (min(losses[name]), max(losses[name]))
        result.append(Row(condition, name, mean, spread, {"exact's loss": mean / exact}, "nats"))
    return result
