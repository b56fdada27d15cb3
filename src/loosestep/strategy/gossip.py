"""Gossip: a sync averages with one peer at a time, and who that is rotates.

    a power of two  partner = index ^ (1 << (sync mod log2 n)), so log2 n syncs mix completely
    other numbers   a tournament in which everyone meets everyone; of an odd number one sits out
                    in turn

Nobody waits for more than one other rank's bytes. The mean over all ranks stays what it is, and
replicas differ until all of them are averaged at the end.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

from loosestep.errors import check_instance, is_number

Pairs = tuple[tuple[int, ...], ...]  # of indices in a group; who sits out is alone
TRIAL_CYCLES = 40  # in which constants must bring replicas together, where nobody trains


@dataclass(frozen=True)
class NoLoCo:
    """The outer step of a worker in a pair: momentum, and a pull to the partner.

        Delta = slow - parameters, the worker's own pseudo-gradient
        delta <- alpha delta - beta mean(Delta) - gamma (slow - mean(slow))
        slow <- slow + delta,  parameters <- slow

    with means over the pair. ``gamma`` too large for ``alpha`` lets slow weights swing apart, and
    the more so the more ranks there are: ``attach`` tries that and refuses it. 0.5, 0.7 and 0.9
    hold for any number. NoLoCo, https://arxiv.org/abs/2506.10911.

    >>> NoLoCo(alpha=0.5)
    NoLoCo(alpha=0.5, beta=0.7, gamma=0.9)
    """

    alpha: float = 0.5  # momentum
    beta: float = 0.7  # the outer rate
    gamma: float = 0.9  # how far slow weights move to the pair's mean

    def __post_init__(self) -> None:
        """Refuse what does not settle in one pair."""
        if not (is_number(self.alpha) and 0.0 <= self.alpha < 1.0):
            raise ValueError(f"alpha must lie in [0, 1), got {self.alpha!r}; the paper has 0.5")
        if not (is_number(self.beta) and 0.0 <= self.beta < math.inf):
            raise ValueError(f"beta must be a number >= 0, got {self.beta!r}; the paper has 0.7")
        most = 2.0 * (1.0 + self.alpha)
        if not (is_number(self.gamma) and 0.0 < self.gamma < most):
            raise ValueError(
                f"gamma must lie in (0, {most:g}), beyond which a pair swings apart, got "
                f"{self.gamma!r}; use 0.9"
            )

    def settles(self, gossip: Gossip, num: int) -> bool:
        """Say whether that many replicas come together where nobody trains."""
        slow = [math.sin(index * index + 1.0) for index in range(num)]  # any that differ
        mean = sum(slow) / num
        slow = [value - mean for value in slow]
        delta, began = [0.0] * num, max(map(abs, slow))
        for sync in range(TRIAL_CYCLES * gossip.num_rounds(num)):
            for pair in gossip.pairs(num, sync):
                mean = sum(slow[index] for index in pair) / len(pair)
                for index in pair:
                    delta[index] = self.alpha * delta[index] - self.gamma * (slow[index] - mean)
            slow = [value + by for value, by in zip(slow, delta, strict=True)]
        return max(map(abs, [*slow, *delta])) <= began


@dataclass(frozen=True)
class Gossip:
    """Average with one peer at a time: ``Strategy(schedule=every(8), gossip=Gossip())``.

    Without ``step`` both take their mean. It is for whole replicas and one level.

    >>> [Gossip().pairs(4, sync) for sync in (0, 1)]
    [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    >>> Gossip().pairs(3, 0)
    ((0,), (1, 2))
    """

    step: NoLoCo | None = None  # what becomes of the pair's mean; None: parameters take it

    def __post_init__(self) -> None:
        """Refuse what is no step."""
        if self.step is not None:
            check_instance("step", self.step, NoLoCo, "NoLoCo(), or None")

    def num_rounds(self, num: int) -> int:
        """Return after how many syncs every pairing has come once."""
        if num & (num - 1) == 0:
            return max(1, num.bit_length() - 1)
        return num - 1 + num % 2

    def pairs(self, num: int, sync: int) -> Pairs:
        """Return who averages with whom among ``num``, at a sync counted from 0."""
        cycle, turn = divmod(sync, self.num_rounds(num))
        if num == 1:
            return ((0,),)
        if num & (num - 1) == 0:
            bit = 1 << turn
            return tuple((index, index ^ bit) for index in range(num) if not index & bit)
        return _tournament(num, _shuffled(self.num_rounds(num), cycle)[turn])


@functools.lru_cache(maxsize=256)
def _tournament(num: int, turn: int) -> Pairs:
    """Return a round by the circle method: index 0 stays, the others move on by one place.

    Where ``num`` is odd there is a place more, and who meets that sits out.
    """
    places = num + num % 2
    ring = [0, *((index + turn) % (places - 1) + 1 for index in range(places - 1))]
    met = ((ring[i], ring[-1 - i]) for i in range(places // 2))
    return tuple(sorted(tuple(sorted(i for i in pair if i < num)) for pair in met))


@functools.lru_cache(maxsize=64)
def _shuffled(num_rounds: int, cycle: int) -> tuple[int, ...]:
    """Return the rounds of a cycle in an order of its own, the same on all ranks.

    In the order of the ring a difference between replicas is carried round with it, and momentum
    lets it grow: with NoLoCo's constants replicas part from 9 ranks on.
    """
    marks = [hashlib.blake2b(f"{cycle} {turn}".encode()).digest() for turn in range(num_rounds)]
    return tuple(sorted(range(num_rounds), key=marks.__getitem__))
