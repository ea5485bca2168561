"""Amounts in words."""

from __future__ import annotations


def human(amount: float, unit: str = "B", base: int = 1024) -> str:
    """An amount with a readable prefix: 1536 -> '1.5 KiB'."""
    infix = "i" if base == 1024 else ""
    if amount < base:
        return f"{amount:.0f} {unit}"
    for prefix in "KMGTPE":
        amount /= base
        if amount < base:
            return f"{amount:.1f} {prefix}{infix}{unit}"
    return f"{amount:.1f} E{infix}{unit}"


def human_us(time_us: float) -> str:
    """A time with a readable unit: 1500 -> '1.5 ms'."""
    for factor, unit in ((1e-6, "s"), (1e-3, "ms")):
        if time_us * factor >= 1:
            return f"{time_us * factor:.3g} {unit}"
    return f"{time_us:.3g} us"
