"""Numbers as people read them: decimal bytes by name, times, shares.  MB is 10^6 bytes, MiB 2^20."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size(count: int) -> str:
    """Bytes in decimal units, three digits: 67108864 -> "67.1 MB"."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{digits(value)} {UNITS[unit]}"


def kib(count: int) -> str:
    """Bytes in KiB, as SRAM is sized: 163840 -> "160 KiB"."""
    return f"{count / 1024:.4g} KiB"


def duration(seconds: float) -> str:
    """Seconds with a unit, three digits: 6.43e-05 -> "64.3 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def joules(value: float) -> str:
    """Joules with a unit, three digits: 0.0186 -> "18.6 mJ"."""
    for unit, scale in (("J", 1.0), ("mJ", 1e-3), ("uJ", 1e-6), ("nJ", 1e-9)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-12)} pJ"


def digits(value: float) -> str:
    """Three significant digits, never in exponent form; whole numbers above 1000 with separators."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share of one: 0.4567 -> "46 %"; below 1 % with one significant digit."""
    if share >= 0.00995 or share == 0:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.1g} %" if share >= 1e-6 else f"{100 * share:.0e} %"


def count(number: int, one: str, many: str) -> str:
    """ "1 query", "2 queries"."""
    return f"{number:,} {one if number == 1 else many}"


def ratio(a: float, b: float) -> str:
    """How many times a is of b: "2.04x"; "-" where one of them is 0."""
    return "-" if not a or not b else f"{digits(a / b)}x"
