"""Measured numbers, as short as they can be read."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Return a duration.

    >>> seconds(0.00012), seconds(0.25), seconds(12.34), seconds(6050)
    ('120 us', '250 ms', '12.3 s', '101 min')
    """
    if value >= 600:
        return f"{value / 60:.0f} min"
    if 0 < value < 0.001:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"


def size(num_bytes: float) -> str:
    """Return an amount of bytes in decimal units.

    >>> size(64_000), size(1_234_567)
    ('64 kB', '1.23 MB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def rate(bytes_per_second: float) -> str:
    """Return a rate as links are sold: in bits.

    >>> rate(12.5e6)
    '100 Mbit/s'
    """
    bits = bytes_per_second * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Gbit/s"


def share(value: float) -> str:
    """Return a part of a whole.

    >>> share(0.083), share(0.001)
    ('8 %', 'under 1 %')
    """
    return "under 1 %" if 0 < value < 0.005 else f"{value:.0%}".replace("%", " %")
