"""How fast each codec encodes and decodes on one thread, and up to which link it pays.

Sending a byte of float32 takes 1 / link; with a codec it takes ratio / link and the time to encode
and decode that byte. So a codec pays while

    link < (1 - ratio) / (1 / encoded a second + 1 / decoded a second)

whatever else is sent. Rates count bytes of float32, of a slice as it comes from a window.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.report import Row
from loosestep.comm.codecs.all_codecs import CODECS, codec
from loosestep.comm.flat.cuts import Runs

NUMEL = 1 << 18  # elements at a time: half a window
RUNS = Runs.of(NUMEL)
REPEATS = 8  # of them in one measurement


def run(rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: list[Row] = []
    for name in CODECS:
        ratio = codec(name).nbytes(RUNS) / (4 * NUMEL)
        for loops in ("c", "torch"):
            if loops == "c" and not needs_loops(name):
                continue
            encode, decode = contenders(name, loops)
            rates = [_rate(encode, rounds), _rate(decode, rounds)]
            both = [_row(name, f"{verb}, {loops}", r) for verb, r in zip(VERBS, rates, strict=True)]
            one_way = sum(1 / statistics.median(rate) for rate in rates)
            link = 8 * (1 - ratio) / one_way  # GB/s to Gbit/s
            pays = Row(name, f"pays up to, {loops}", link, (link, link), {}, "Gbit/s")
            result += [*both, pays]
        result.append(Row(name, "size", 100 * ratio, (100 * ratio,) * 2, {}, "% of float32"))
    return result


VERBS = ("encode", "decode")


def needs_loops(name: str) -> bool:
    """Say whether a codec has loops of its own in C; narrowing is torch's."""
    return "float" not in name


def contenders(name: str, loops: str) -> tuple[Callable[[], object], Callable[[], object]]:
    chosen, values = codec(name, loops), torch.randn(NUMEL)
    message = torch.empty(chosen.nbytes(RUNS), dtype=torch.uint8)
    out = torch.empty(NUMEL)
    chosen.encode(values, RUNS, message, None)
    return (
        lambda: chosen.encode(values, RUNS, message, None),
        lambda: chosen.decode(message, RUNS, out),
    )


def _rate(work: Callable[[], object], rounds: int) -> list[float]:
    """Return gigabytes of float32 a second."""
    work()
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        rates.append(REPEATS * 4 * NUMEL / (time.perf_counter() - began) / 1e9)
    return rates


def _row(condition: str, contender: str, rates: list[float]) -> Row:
    low, _, high = statistics.quantiles(rates, n=4)
    return Row(condition, contender, statistics.median(rates), (low, high), {}, "GB/s")
