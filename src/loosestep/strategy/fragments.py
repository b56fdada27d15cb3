"""How parameters are split, so that each part is averaged at steps of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loosestep.errors import NotAttachable, check_whole

Sizes = Sequence[tuple[str, int]]  # names of parameters with their bytes, in the model's order


@dataclass(frozen=True)
class Fragments:
    """``num`` parts of about the same number of bytes, in the order of the model.

    With ``whole`` the modules of a list stay together: "layers" cuts nowhere inside ``layers.0``,
    ``layers.1``, ..., and "" nowhere inside the model's own modules. A list of your own is
    ``fragments_of``.

    >>> Fragments(2).split([("a", 8), ("b", 4), ("c", 4)])
    [('a',), ('b', 'c')]
    """

    num: int
    whole: str | None = None  # the path of a list of modules that are not cut

    def __post_init__(self) -> None:
        """Refuse what is no number of parts."""
        check_whole("the number of fragments", self.num, 1)
        if self.whole is not None and not isinstance(self.whole, str):
            raise TypeError(
                f"whole must be the path of a list of modules such as 'layers', got {self.whole!r}"
            )

    def split(self, sizes: Sizes) -> list[tuple[str, ...]]:
        """Return the names of every part's parameters."""
        blocks = [list(block) for _, block in itertools.groupby(sizes, self._block)]
        if len(blocks) < self.num:
            kind = "parameters" if not self.whole else f"modules of {self.whole!r} and parameters"
            raise NotAttachable(
                f"{len(blocks)} {kind} cannot be split into {self.num} fragments; give at most "
                f"{len(blocks)}"
            )
        total, before = sum(size for _, size in sizes) or 1, 0
        parts: list[list[str]] = [[] for _ in range(self.num)]
        at = 0
        for index, block in enumerate(blocks):
            size = sum(size for _, size in block)
            middle = before + size / 2  # a block belongs where its middle falls,
            wanted = min(int(middle * self.num / total), self.num - 1)
            least = self.num - (len(blocks) - index)  # and none may stay empty
            at = max(min(wanted, at + bool(parts[at])), least, 0)
            parts[at] += [name for name, _ in block]
            before += size
        return [tuple(part) for part in parts]

    def _block(self, item: tuple[str, int]) -> str:
        name = item[0]
        if self.whole is None:
            return name
        prefix = f"{self.whole}." if self.whole else ""
        if not name.startswith(prefix):
            return name
        return prefix + name.removeprefix(prefix).partition(".")[0]


@dataclass(frozen=True)
class ListedFragments(Fragments):
    """Parts by names of parameters or of modules, which hold theirs; every parameter once.

    >>> fragments_of([["embed", "layers.0"], ["layers.1"]]).split([
    ...     ("embed.weight", 4), ("layers.0.weight", 4), ("layers.1.weight", 4)])
    [('embed.weight', 'layers.0.weight'), ('layers.1.weight',)]
    """

    names: tuple[tuple[str, ...], ...] = ()

    def split(self, sizes: Sizes) -> list[tuple[str, ...]]:
        """Return the names of every part's parameters; raise where one is in none or in two."""
        parts: list[list[str]] = [[] for _ in self.names]
        for name, _ in sizes:
            within = [i for i, paths in enumerate(self.names) if any(_in(name, p) for p in paths)]
            if len(within) != 1:
                which = f"are in fragments {within}" if within else "are in none"
                raise NotAttachable(
                    f"every parameter must be in one fragment, and those of {name!r} {which}; "
                    f"the fragments are {[list(paths) for paths in self.names]}"
                )
            parts[within[0]].append(name)
        for paths, part in zip(self.names, parts, strict=True):
            if not part:
                raise NotAttachable(f"the fragment {list(paths)} holds no parameter of this model")
        return [tuple(part) for part in parts]


def fragments_of(names: Iterable[Iterable[str]]) -> ListedFragments:
    """Return fragments that hold the parameters and modules of these names."""
    listed = []
    for paths in names:
        if isinstance(paths, str):
            raise TypeError(
                f"a fragment must be a list of names, got {paths!r}; give [['embed'], ['layers']]"
            )
        listed.append(tuple(paths))
        for path in listed[-1]:
            if not isinstance(path, str) or not path:
                raise TypeError(f"a fragment must hold names of modules, got {path!r}")
    every = [path for paths in listed for path in paths]
    for one, other in itertools.permutations(every, 2):
        if _in(one, other):
            raise ValueError(f"fragments must not overlap: {one!r} is given, and is in {other!r}")
    return ListedFragments(len(listed), None, tuple(listed))


def _in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
