"""Values for codecs, and what equal means of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

LARGEST = torch.finfo(torch.float32).max


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 2.0**-126, LARGEST, -LARGEST, 1e38, 1.0, 127.0]


@st.composite
def floats(draw: st.DrawFn) -> torch.Tensor:
    """Draw up to 5000 finite values: ordinary, tiny, huge, equal, or all of that at once."""
    numel = draw(st.one_of(st.integers(0, 70), st.integers(0, 5000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    values = torch.randn(numel, generator=generator)
    kind = draw(st.sampled_from(["plain", "mixed", "tiny", "huge", "equal", "steps", "special"]))
    if kind == "mixed":
        values *= torch.randn(numel, generator=generator).mul_(20).exp()
    elif kind == "tiny":
        values *= 10.0 ** draw(st.integers(-46, -36))
    elif kind == "huge":
        values *= 1e38
    elif kind == "equal":
        values.fill_(draw(st.sampled_from(SPECIAL)))
    elif kind == "steps":  # halves of a step, and many equal magnitudes
        values = torch.randint(-254, 255, (numel,), generator=generator) / 2
    if kind == "special" and numel:
        places = torch.randint(numel, (40,), generator=generator)
        values[places] = torch.tensor(SPECIAL)[torch.arange(40) % len(SPECIAL)]
    return values.clamp(-LARGEST, LARGEST)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
