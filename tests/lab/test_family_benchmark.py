"""The benchmark of the family: which rates it tries, what it goes on with, what it concludes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import family, family_page, family_picture
from benchmarks.family_page import Direction, Run, verdict
from benchmarks.family_training import Outcome

CLAIM = Direction("one beats the other", "DiLoCo, H=30", "local SGD, H=30")


class Pool:
    """Stands in for ranks: the loss is least at a rate of 1e-3, and so many runs may be asked."""

    def __init__(self, most: int) -> None:
        self.left = most

    def run(self, workers: int, body: Any, name: str, seed: int, rate: float, *_: Any, **__: Any):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return [Outcome(2.0 + abs(rate - 1e-3) + seed / 100, 1000)] * workers


def trained(name: str, *losses: float, sent: int = 1000) -> list[Run]:
    """Return runs of the seeds 1, 2, ..."""
    return [
        Run(
            contender=name,
            strategy="",
            seed=seed,
            rate=1e-3,
            steps=10,
            loss=loss,
            bytes_sent=sent,
            seconds=1.0,
        )
        for seed, loss in enumerate(losses, start=1)
    ]


def concluded(claim: Direction, *runs: list[Run]) -> str:
    return verdict(claim, family_page.reported([run for some in runs for run in some]))


def measured(pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> family.Bench:
    class Opened:
        def __enter__(self) -> Pool:
            return pool

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(family, "RankPool", lambda size: Opened())
    return family.measure(family.Plan(steps=10, tuning_steps=5, seeds=(1, 2)), folder)


def test_rates_are_tried_until_the_best_has_neighbours():
    """Of 2, 4 and 8 the smallest is best, then 1, and 0.5 is worse: five in all."""
    losses: dict[float, float] = {}
    while (rate := family.next_rate(losses)) is not None:
        losses[rate] = abs(rate - 1e-3)
    assert sorted(losses) == [0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3]


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path, monkeypatch):
    """Five families of five rates, then 14 contenders with two seeds: 53 runs, stopped after 30."""
    with pytest.raises(KeyboardInterrupt):
        measured(Pool(30), tmp_path, monkeypatch)
    rest = Pool(1000)
    bench = measured(rest, tmp_path, monkeypatch)
    assert 1000 - rest.left == 23
    assert len(list(tmp_path.iterdir())) == 1
    assert len(family_page.read(bench.path)) == 53
    assert {run.rate for run in bench.runs if run.seed} == {1e-3}


def test_claims_are_judged_by_pairs_of_a_seed():
    """Gaps of -0.1, -0.1 and -0.13 have a mean of -0.11, and 4.30 standard errors are 0.043."""
    other = trained("local SGD, H=30", 2.0, 3.0, 4.0)
    better, worse = (trained("DiLoCo, H=30", *at) for at in ((1.9, 2.9, 3.87), (2.1, 3.1, 4.13)))
    noisy = trained("DiLoCo, H=30", 1.9, 3.1, 3.87)
    assert concluded(CLAIM, other, better) == "reproduced"
    assert concluded(CLAIM, other, worse) == "not reproduced"
    assert concluded(CLAIM, other, noisy) == "not told apart"
    assert concluded(CLAIM, other, better[:1]) == "too few seeds"
    assert concluded(CLAIM, other) == "not run"


def test_a_claim_of_fewer_bytes_needs_them():
    claim = Direction("as good by a tenth", CLAIM.better, CLAIM.than, margin=0.1, share=0.1)
    dense = trained(CLAIM.than, 2.0, 2.1)
    for sent, said in ((100, "reproduced"), (101, "not reproduced: sends too much")):
        assert concluded(claim, dense, trained(CLAIM.better, 2.0, 2.1, sent=sent)) == said


def test_labels_of_points_keep_apart():
    """Twelve points at three places."""
    points = [
        family_picture.Point(f"contender {i}", "outer", 10.0 ** (5 + i % 3), 2.0 + i / 1000, 0.01)
        for i in range(12)
    ]
    drawn = ElementTree.fromstring(family_picture.picture(points))
    texts = [t for t in drawn.iter() if (t.text or "").startswith("contender")]
    at = [(float(t.attrib["x"]), float(t.attrib["y"])) for t in texts]
    assert len(at) == 12
    width = family_picture.LETTER * len("contender 1")
    for (x, y), (other_x, other_y) in combinations(at, 2):
        assert abs(x - other_x) >= width or abs(y - other_y) >= family_picture.LINE - 0.11
