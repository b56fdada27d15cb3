"""A few parameters at a time, drawn anew at every sync; all others stay as they are.

    mask = the ceil(density * n) of every chunk of n values that chance likes best
    p[mask] = mean of p[mask] over the group,  all others are the replica's own

All ranks draw one mask, from (seed, level, tensor, number of the sync, offset in the tensor), so no
places travel. What travels is averaged exactly: there is no error to keep, and nothing to take
differences to. Between syncs replicas differ, each parameter by what it has learnt since it was
drawn last, 1 / density syncs ago in the mean. (SPARTA, Beton et al. 2025, "Improving the efficiency
of distributed training using sparse parameter averaging", has densities of 0.0005 to 0.005, and
averages after every step.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from loosestep.comm.codecs.largest import Largest
from loosestep.comm.codecs.rounding import draw_of, uniform_in
from loosestep.comm.flat.cuts import Runs
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.compressed import Calls
from loosestep.comm.reducers.mean import Mean
from loosestep.comm.reducers.reducer import NOTHING, Around, Done, Handle, Place, Reducer
from loosestep.comm.tensors import Named
from loosestep.errors import check_whole


@dataclass(frozen=True)
class RandomMask(Reducer):
    """Average a random ``density`` of the parameters at every sync, exactly; leave the others.

    For parameters that are averaged often, as by ``post_local_sgd(1, gradients=None, ...)``.
    Replicas are not equal after a sync; ``finalize`` and ``averaged`` take exact means of all.

    >>> RandomMask(0.005).bytes_on_wire(numel=40960, dtype=torch.float32, group_size=2)
    840
    """

    density: float  # larger: replicas stay closer, more traffic
    seed: int = 0  # of the masks

    lossy = True
    leaves_apart = True
    sends_differences = False

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        check_whole("seed", self.seed)
        _ = self._places  # which refuses its own

    @cached_property
    def _places(self) -> Largest:
        """What finds the places of a mask."""
        return Largest(self.density)

    @property
    def block(self) -> int:
        """A chunk, of which so many are drawn."""
        return self._places.block

    def init(self, tensors: Sequence[Named], peers: Peers) -> Syncs:
        """Return that nothing was drawn yet."""
        return Syncs()

    def start(self, buffer: torch.Tensor, peers: Peers, state: Syncs, place: Place) -> Handle:
        """Launch the mean of what the mask has."""
        if peers.size == 1:
            return Done()
        runs = place.holds(buffer.numel())
        calls = {run.tensor: state.by_tensor.get(run.tensor, 0) for run in runs.each}
        mask = self.mask(runs, peers.level, calls, buffer.device)
        some = buffer[mask]
        if peers.weights is not None and peers.weights[peers.group_rank] == 0.0:
            some.zero_()  # it has no say, and its values may be anything
        handle = Mean().start(some, peers, NOTHING, Place(place.name))
        return _Masked(handle, buffer, mask, some, state, calls)

    def mask(
        self, runs: Runs, level: str, calls: dict[str, int], device: torch.device
    ) -> torch.Tensor:
        """Return where in a buffer the values are that travel."""
        names = [run.tensor for run in runs.each]
        draws = [draw_of(self.seed, level, name, calls[name], "mask") for name in names]
        _, places = self._places.select(uniform_in(runs, draws, device), runs)
        return self._places.indices(places, runs, self._places.kept(runs))

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what the exact mean of the values sends: places need no bytes."""
        count = self._places.kept(Runs.of(numel))
        return Mean().bytes_on_wire(count, dtype, group_size, group_rank)


class Syncs(Calls):
    """How often each tensor has had a mask drawn."""

    def describe(self) -> str:
        """Return how often, which must be the same on all ranks, or their masks differ."""
        return f"masks of {max(self.by_tensor.values())} syncs" if self.by_tensor else ""


class _Masked(Around):
    """A mean of some values under way, and where they belong."""

    def __init__(
        self,
        handle: Handle,
        buffer: torch.Tensor,
        mask: torch.Tensor,
        some: torch.Tensor,
        state: Syncs,
        calls: dict[str, int],
    ) -> None:
        super().__init__(handle)
        self._buffer, self._mask, self._some = buffer, mask, some
        self._state, self._calls = state, calls

    def wait(self) -> None:
        """Put the means where they belong."""
        super().wait()
        self._buffer[self._mask] = self._some

    def commit(self) -> None:
        """Count the sync, once for all buffers that hold parts of a tensor."""
        self._state.by_tensor.update({name: call + 1 for name, call in self._calls.items()})
