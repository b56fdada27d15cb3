"""Who averages with whom: named levels, from narrow to wide.

>>> host_pairs = Topology.from_sizes({"host": 2, "world": 4}, ranks=range(4))
>>> host_pairs.members("host", global_rank=3)
(2, 3)
>>> host_pairs.peers_across("world", within="host", global_rank=3)
(1, 3)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from loosestep.errors import check_instance, check_seconds, check_whole, is_number

Partition = tuple[tuple[int, ...], ...]  # of global ranks, into groups


class Topology:
    """Named levels, each a partition of the same ranks; every level contains the one before.

    Groups may be uneven and non-contiguous, and equal levels may nest. It is a value: comparable,
    printable, used for any number of models. ``attach`` makes process groups from it, so that
    averaging never mixes with DDP's traffic or a data loader's. ``timeout`` bounds the waits of
    those groups, in seconds.
    """

    def __init__(
        self,
        levels: Mapping[str, Iterable[Iterable[int]]],
        *,
        weights: Mapping[int, float] | Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.levels: Mapping[str, Partition] = MappingProxyType(_partitions(levels))
        self.timeout = check_seconds("timeout", timeout)
        self.ranks = _check_nesting(self.levels)
        self.weights = check_weights(weights, self.ranks)

    @classmethod
    def from_sizes(
        cls,
        sizes: Mapping[str, int],
        *,
        ranks: Iterable[int] | None = None,
        weights: Mapping[int, float] | Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> Topology:
        """Cut ``ranks`` (default: the world) into consecutive groups of each level's size."""
        members = list(_world_ranks() if ranks is None else ranks)
        if not isinstance(sizes, Mapping):
            raise TypeError(
                f"sizes must map levels to sizes, got {sizes!r}; give for example "
                "{'host': 4, 'world': 16}"
            )
        if not sizes:
            raise ValueError("sizes must not be empty; give for example {'host': 4, 'world': 16}")
        _check_sizes(sizes, len(members))
        cut = {
            name: [members[i : i + size] for i in range(0, len(members), size)]
            for name, size in sizes.items()
        }
        return cls(cut, weights=weights, timeout=timeout)

    @classmethod
    def from_hosts(
        cls,
        hosts: Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        weights: Mapping[int, float] | Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> Topology:
        """Make the levels ``host`` and ``world`` from one host name a rank.

        Without ``hosts`` every one of ``ranks`` (default: the world) tells its own when the
        topology is attached; ``run.topology`` then has the levels.
        """
        if hosts is None:
            return HostTopology(None if ranks is None else tuple(ranks), weights, timeout)
        if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts):
            raise TypeError(f"hosts must be one host name a rank, got {hosts!r}")
        if ranks is None and dist.is_initialized():
            ranks = list(_world_ranks())
        ranks = list(range(len(hosts))) if ranks is None else list(ranks)
        if len(hosts) != len(ranks):
            raise ValueError(f"give one host name a rank: got {len(hosts)} for {len(ranks)} ranks")
        by_host: dict[str, list[int]] = {}
        for rank, host in zip(ranks, hosts, strict=True):
            by_host.setdefault(host, []).append(rank)
        levels = {"host": by_host.values(), "world": [ranks]}
        return Topology(levels, weights=weights, timeout=timeout)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        weights: Mapping[int, float] | Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> Topology:
        """Make a level of every mesh dimension; each spans its dimension and all inner ones.

        A mesh ``(replicate=2, shard=4)`` gives ``shard`` (groups of 4) and ``replicate`` (all 8).
        """
        hint = "a DeviceMesh such as init_device_mesh('cpu', (2, 4), mesh_dim_names=(...))"
        check_instance("mesh", mesh, DeviceMesh, hint)
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError("the DeviceMesh needs mesh_dim_names: they become the level names")
        levels = {
            names[dim]: mesh.mesh.flatten(dim).reshape(-1, _inner_size(mesh, dim)).tolist()
            for dim in reversed(range(mesh.mesh.ndim))
        }
        return cls(levels, weights=weights, timeout=timeout)

    def __repr__(self) -> str:
        levels = ", ".join(f"{name!r}: {_text(groups)}" for name, groups in self.levels.items())
        weights = "" if self.weights is None else f", weights={self.weights}"
        timeout = "" if self.timeout is None else f", timeout={self.timeout:g}"
        return f"Topology({{{levels}}}{weights}{timeout})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(repr(self._value()))

    def _value(self) -> tuple[object, ...]:
        return tuple(self.levels.items()), self.weights, self.timeout

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles are made of; a view of a mapping has none."""
        return {**self.__dict__, "levels": dict(self.levels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.__dict__.update(state, levels=MappingProxyType(state["levels"]))

    @property
    def widest(self) -> str:
        """The name of the last level."""
        return list(self.levels)[-1]

    def members(self, level: str, global_rank: int | None = None) -> tuple[int, ...]:
        """Return the global ranks that share ``level`` with a rank (default: this one)."""
        rank = _my_rank() if global_rank is None else global_rank
        for group in self._partition(level):
            if rank in group:
                return group
        raise ValueError(f"rank {rank} is not part of this topology, which has {list(self.ranks)}")

    def peers_across(
        self, level: str, *, within: str, global_rank: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks at my place in every ``within`` group of my ``level`` group.

        Hosts of uneven size have no such place for all ranks and are refused.
        """
        rank = _my_rank() if global_rank is None else global_rank
        inside = set(self.members(level, rank))
        blocks = [group for group in self._partition(within) if set(group) <= inside]
        if sum(map(len, blocks)) != len(inside):
            raise ValueError(f"{within!r} must lie inside {level!r}; its groups cross it")
        if len({len(block) for block in blocks}) != 1:
            raise ValueError(
                f"peers across {level!r} need {within!r} groups of one size, got "
                f"{[len(block) for block in blocks]}; average over {level!r} directly"
            )
        place = self.members(within, rank).index(rank)
        return tuple(sorted(block[place] for block in blocks))

    def asked(self) -> tuple[int, ...]:
        """Return the ranks that must tell their hosts before the levels are known: none."""
        return ()

    def of(self, hosts: Sequence[str]) -> Topology:
        """Return the levels, now that every rank that was asked has told its host."""
        return self

    def process_group(self, level: str) -> dist.ProcessGroup:
        """Make a process group of the ranks that share ``level`` with this one; they all call this.

        It is the caller's to keep. A sharded optimizer takes it:
        ``process_group=topology.process_group("host")``.
        """
        from loosestep.comm.group import Group  # here alone: a partition needs no groups

        return Group.make(self.members(level), self.timeout).hand_over()

    def describe(self) -> str:
        """Return the levels and weights as one line, to be compared across ranks."""
        return f"{self.levels} weights={self.weights}"

    def _partition(self, level: str) -> Partition:
        if level not in self.levels:
            raise ValueError(f"unknown level {level!r}; this topology has {list(self.levels)}")
        return self.levels[level]


class HostTopology(Topology):
    """The levels ``host`` and ``world`` by the names of hosts that the ranks will tell."""

    def __init__(
        self,
        ranks: tuple[int, ...] | None,
        weights: Mapping[int, float] | Sequence[float] | None,
        timeout: float | None,
    ) -> None:
        self.timeout, self._given, self._weights = check_seconds("timeout", timeout), ranks, weights
        if ranks is not None:
            for rank in ranks:
                check_whole("a rank", rank)
            check_weights(weights, ranks)

    def __repr__(self) -> str:
        given = {"ranks": self._given, "weights": self._weights, "timeout": self.timeout}
        said = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"Topology.from_hosts({said})"

    @property
    def levels(self) -> Mapping[str, Partition]:  # type: ignore[override]
        """Raise: they are not known yet."""
        raise self._not_yet("levels")

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Raise: they are not known yet."""
        raise self._not_yet("ranks")

    @property
    def weights(self) -> dict[int, float] | None:  # type: ignore[override]
        """Raise: they are not known yet."""
        raise self._not_yet("weights")

    def _not_yet(self, name: str) -> ValueError:
        return ValueError(
            f"{self!r} has no {name} yet: who is on which host is found out when it is "
            "attached; run.topology has them then"
        )

    def _value(self) -> tuple[object, ...]:
        return self._given, repr(self._weights), self.timeout

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles are made of."""
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.__dict__.update(state)

    @property
    def widest(self) -> str:
        """The name of the last level."""
        return "world"

    def describe(self) -> str:
        """Return what it is as one line."""
        return "the levels 'host' and 'world', by host name"

    def asked(self) -> tuple[int, ...]:
        """Return the ranks that are to tell their hosts."""
        return tuple(_world_ranks()) if self._given is None else self._given

    def of(self, hosts: Sequence[str]) -> Topology:
        """Return the levels, now that every rank has told its host."""
        weights, timeout = self._weights, self.timeout
        return Topology.from_hosts(hosts, ranks=self.asked(), weights=weights, timeout=timeout)


def _text(groups: Partition) -> str:
    """Return groups as one reads them, runs of ranks in short: ``[0-7] [8-15]``."""
    return " ".join(f"[{', '.join(_runs(group))}]" for group in groups)


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        yield str(first) if not rest else f"{first}{'-' if len(rest) > 1 else ', '}{rest[-1]}"


def _my_rank() -> int:
    _check_world()
    return dist.get_rank()


def _world_ranks() -> Iterable[int]:
    _check_world()
    return range(dist.get_world_size())


def _check_world() -> None:
    from loosestep.comm.group import require_process_group

    require_process_group()


def _inner_size(mesh: DeviceMesh, dim: int) -> int:
    size = 1
    for length in mesh.mesh.shape[dim:]:
        size *= length
    return size


def _partitions(levels: Mapping[str, Iterable[Iterable[int]]]) -> dict[str, Partition]:
    """Return every level's groups as tuples; raise for what is no partition of ranks."""
    if not isinstance(levels, Mapping):
        raise TypeError(
            f"levels must map names to groups of ranks, got {levels!r}; give for example "
            "{'world': [[0, 1]]}, or Topology.from_sizes({'host': 2, 'world': 4})"
        )
    if not levels:
        raise ValueError("levels must not be empty; give for example {'world': [[0, 1]]}")
    made: dict[str, Partition] = {}
    for name, groups in levels.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a level must have a name such as 'host' or 'world', got {name!r}")
        lists = isinstance(groups, Iterable) and not isinstance(groups, (str, bytes))
        listed = list(groups) if lists else []
        if not lists or any(
            isinstance(g, (str, bytes)) or not isinstance(g, Iterable) for g in listed
        ):
            raise TypeError(
                f"level {name!r} must be a list of groups, each a list of ranks, got {groups!r}; "
                "give for example [[0, 1], [2, 3]]"
            )
        made[name] = tuple(
            tuple(sorted(check_whole(f"a rank of level {name!r}", rank) for rank in group))
            for group in listed
        )
    return made


def _check_sizes(sizes: Mapping[str, int], total: int) -> None:
    for name, size in sizes.items():
        check_whole(f"the size of {name!r}", size, 1)
    for (narrow, small), (wide, large) in itertools.pairwise(sizes.items()):
        if large % small:
            fits = next(n for n in range(small, 0, -1) if large % n == 0)
            raise ValueError(
                f"levels must nest: {wide!r} has {large} ranks, not a multiple of {narrow!r} "
                f"({small}); give {narrow}={fits} or give rank lists"
            )
    name, last = list(sizes.items())[-1]
    if last != total:
        raise ValueError(
            f"the widest level must hold all {total} ranks: {name!r} has {last}; "
            f"give {name}={total}"
        )


def _check_nesting(levels: Mapping[str, Partition]) -> tuple[int, ...]:
    """Return the ranks, the same in every level; raise where the levels do not nest."""
    ranks: tuple[int, ...] | None = None
    for name, groups in levels.items():
        flat = sorted(itertools.chain.from_iterable(groups))
        if not flat or any(not group for group in groups):
            raise ValueError(f"level {name!r} has an empty group: {groups}")
        if len(set(flat)) != len(flat):
            raise ValueError(f"level {name!r} names a rank twice: {groups}")
        if ranks is not None and tuple(flat) != ranks:
            raise ValueError(
                f"all levels must hold the same ranks: {name!r} has {flat}, not {list(ranks)}"
            )
        ranks = tuple(flat)
    for (narrow, small), (wide, large) in itertools.pairwise(levels.items()):
        for group in small:
            if not any(set(group) <= set(outer) for outer in large):
                raise ValueError(
                    f"levels must nest: the {narrow!r} group {list(group)} lies in no {wide!r} "
                    f"group of {[list(outer) for outer in large]}"
                )
    assert ranks is not None
    return ranks


def check_topology(topology: object) -> None:
    """Raise where this is no topology."""
    check_instance(
        "topology", topology, Topology, "a Topology such as Topology.from_sizes({'host': 4, ...})"
    )


def check_weights(
    weights: Mapping[int, float] | Sequence[float] | None, ranks: tuple[int, ...]
) -> dict[int, float] | None:
    """Return one weight a rank, by rank; raise for what cannot be one."""
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        given = dict(weights)
    else:
        if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
            raise TypeError(
                f"weights must be one number a rank, as a list or by rank, got {weights!r}"
            )
        if len(weights) != len(ranks):
            raise ValueError(f"give one weight a rank: got {len(weights)} for {len(ranks)} ranks")
        given = dict(zip(ranks, weights, strict=True))
    if set(given) != set(ranks):
        raise ValueError(f"give one weight a rank: got {list(given)} for ranks {list(ranks)}")
    for rank, weight in given.items():
        if not (is_number(weight) and 0 < weight < float("inf")):
            raise ValueError(f"the weight of rank {rank} must be finite and > 0, got {weight!r}")
    return {rank: float(weight) for rank, weight in given.items()}
