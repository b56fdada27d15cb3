"""Numbers as people say them: 21 s, 1.9 GB, 6.3 times, +0.3 %."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "\N{EN DASH}"  # where there is no number


def seconds(value: float | None) -> str:
    """Return a duration, with about two digits."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{value * 1000:.2g} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 599.5:
        return f"{value:.0f} s"
    if value < 35970:
        return "{} min {} s".format(*divmod(round(value), 60))
    return "{} h {} min".format(*divmod(round(value / 60), 60))


def size(value: float | None) -> str:
    """Return an amount of bytes in decimal units."""
    if value is None:
        return NONE
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "bytes" else f"{value:.0f} {unit}"


def loss(value: float | None) -> str:
    """Return a loss with three digits after the point, or three in all where it is far from 1."""
    if value is None:
        return NONE
    return f"{value:.3f}" if 0.1 <= abs(value) < 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a part of a whole in percent."""
    if value is None:
        return NONE
    if 0 < value < 0.001:
        return "under 0.1 %"
    return f"{value * 100:.1f} %" if 0 < value < 0.0995 else f"{value * 100:.0f} %"


def change(new: float, old: float) -> str:
    """Return how much a number differs from another: ``+0.3 %``."""
    if old == 0:
        return "the same" if new == 0 else f"{new - old:+.3g}"
    percent = (new - old) / abs(old) * 100
    return f"{percent:+.1f} %" if abs(percent) >= 0.05 else "the same to 0.1 %"


def times(ratio: float) -> str:
    """Return a ratio: ``6.3 times``."""
    return f"{ratio:.2f} times" if ratio < 1.95 else f"{ratio:.{1 if ratio < 9.95 else 0}f} times"


def listed(items: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def counted(number: int, noun: str) -> str:
    """Return ``1 step`` or ``200 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
