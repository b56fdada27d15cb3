"""Who owns which elements of which parameter. Pure bookkeeping: no process group, no optimizer.

Elements are counted in memory order, so that a range of them is one piece of memory whatever the
strides. Optimizers that treat every element alike let every parameter be cut into one slice a
member; all others get whole parameters, the largest first, each to whoever has least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from loosestep.comm.flat.cuts import Bounds, Range, following

# Slices begin at multiples of this: a vector register of the widest kind. Fused kernels round the
# last few elements of a tensor differently, and so do it to the same ones, sliced or not.
UNIT_BYTES = 64


class Ownership:
    """Divides parameters among the members of a group; ``bytes_owned`` counts what each got.

    ``shares`` has what each member owns of a parameter, by group rank.
    """

    def __init__(self, group_size: int, *, whole: bool) -> None:
        self.group_size, self.whole = group_size, whole
        self.bytes_owned = [0] * group_size
        self.shares: dict[torch.Tensor, Bounds] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide more parameters; what has been divided before stays as it is."""
        new = list(parameters)
        if self.whole:  # the largest first, as far as equal ones in the order given
            for parameter in sorted(new, key=lambda p: -p.nbytes):
                self.shares[parameter] = self._give(parameter)
            return
        for parameter in new:
            self.shares[parameter] = self._cut(parameter)

    def ranges(self, parameters: Sequence[torch.Tensor]) -> list[list[Range]]:
        """Return, by member, what it owns of a flat buffer that holds parameters in order."""
        owned: list[list[Range]] = [[] for _ in range(self.group_size)]
        bounds = following(parameter.numel() for parameter in parameters)
        for parameter, (at, _) in zip(parameters, bounds, strict=True):
            for ranges, (start, stop) in zip(owned, self.shares[parameter], strict=True):
                if start < stop:
                    ranges.append((at + start, at + stop))
        return owned

    def part(self, tensor: torch.Tensor, parameter: torch.Tensor, group_rank: int) -> torch.Tensor:
        """Return a member's elements of a tensor laid out like a parameter, as a flat view."""
        start, stop = self.shares[parameter][group_rank]
        return memory_of(tensor)[start:stop]

    def view(
        self, tensor: torch.Tensor, parameter: torch.Tensor, group_rank: int
    ) -> torch.Tensor | None:
        """Return the same as its optimizer sees it; None: the member has none."""
        start, stop = self.shares[parameter][group_rank]
        if start == stop:
            return None
        return self.shaped(parameter, self.part(tensor, parameter, group_rank))

    def shaped(self, parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a part's elements as its optimizer sees them: whole parameters with their shape.

        So are single numbers, whose state could not be told from a step count otherwise.
        """
        return laid_out_like(parameter, part) if self.whole or parameter.ndim == 0 else part

    def _give(self, parameter: torch.Tensor) -> Bounds:
        """Give a whole parameter to the member that owns least."""
        owner = self.bytes_owned.index(min(self.bytes_owned))
        self.bytes_owned[owner] += parameter.nbytes
        return following(parameter.numel() * (m == owner) for m in range(self.group_size))

    def _cut(self, parameter: torch.Tensor) -> Bounds:
        """Cut a parameter evenly; units that are left over go to those that own least."""
        unit = max(1, UNIT_BYTES // parameter.element_size())
        each, left_over = divmod(-(-parameter.numel() // unit), self.group_size)
        poorest = sorted(range(self.group_size), key=lambda m: (self.bytes_owned[m], m))
        sizes = [unit * (each + (m in poorest[:left_over])) for m in range(self.group_size)]
        most = parameter.numel()  # the last unit may have less
        bounds = [(min(start, most), min(stop, most)) for start, stop in following(sizes)]
        for member, (start, stop) in enumerate(bounds):
            self.bytes_owned[member] += (stop - start) * parameter.element_size()
        return bounds


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the tensor's elements fill one piece of memory without gaps or repeats."""
    if tensor.numel() == 0:
        return True
    at = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != at:
            return False
        at *= size
    return True


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as a flat view, in memory order.

    >>> memory_of(torch.tensor([[1, 2], [3, 4]]).t())
    tensor([1, 2, 3, 4])
    """
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_like(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return flat elements in memory order as a view with the parameter's shape and strides."""
    return memory.as_strided(parameter.shape, parameter.stride(), memory.storage_offset())


def as_laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in the parameter's memory order; a copy if need be."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
