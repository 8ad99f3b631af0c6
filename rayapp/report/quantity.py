"""Quantities as people read them."""

from __future__ import annotations

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COUNT_UNITS = ("", "k", "M", "B", "T")


def format_bytes(num_bytes: float) -> str:
    """Three digits and a binary unit: ``55.3 GiB``."""
    number, unit = _scale(num_bytes, 1024, BYTE_UNITS)
    return f"{number} {unit}"


def format_count(count: float) -> str:
    """Three digits and a decimal unit: ``12.3k``, ``1.24B`` (10^9)."""
    number, unit = _scale(count, 1000, COUNT_UNITS)
    return number + unit


def format_share(share: float) -> str:
    """A share of one as a percentage: ``41.2 %``."""
    return f"{100 * share:.1f} %"


def format_duration(seconds: float) -> str:
    """The two largest units: ``4.2s``, ``42s``, ``1m12s``, ``2h05m``, ``3d04h``."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_s}s"
    if minutes < 60:
        return f"{minutes}m{rest_s:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02d}h"


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[str, str]:
    """The value in the unit in which three digits say the most, and that unit."""
    index = 0
    while index < len(units) - 1 and abs(value) >= base - 0.5:
        value, index = value / base, index + 1
    if index == 0 and value == int(value):
        return str(int(value)), units[0]
    rounded = float(f"{abs(value):.3g}")
    decimals = max(0, 3 - len(str(int(rounded))))
    return f"{value:.{decimals}f}", units[index]
