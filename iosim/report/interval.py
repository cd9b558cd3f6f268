"""The range of predicted time that the ranges of a profile's numbers make: words, JSON and CSV columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iosim.report.layout import paragraph
from iosim.study.interval import METHOD, Effect, Interval
from iosim.words import count, duration

if TYPE_CHECKING:
    from iosim.study.run import Run


def interval_lines(runs: Sequence[Run]) -> list[str]:
    """A paragraph a run that has an interval, and one on what they are."""
    out: list[str] = []
    several = len({r.hardware.name for r in runs}) > 1
    ranges = [(r, r.interval) for r in runs if r.interval is not None]
    for r, found in ranges:
        name = (r.parts[0] if r.parts else r).dataflow.name
        out += paragraph(f"Range of {name}{f' on {r.hardware.name}' if several else ''}: {_words(found)}.")
    if any(found.effects for _, found in ranges):
        numbers = max(len(found.effects) + len(found.unmoved) for _, found in ranges)
        out += paragraph(
            f"A range has all numbers of the profile that are known as ranges ({numbers}) at their faster, and at "
            "their slower ends at once, the schedule held: about the widest that they can make it. It is no "
            "confidence interval, and the error of the model itself comes on top."
        )
    return out


def _words(found: Interval) -> str:
    moved = sum(e.swing(found.expected) > 0 for e in found.effects)
    unfit = "".join(f"; a block may not fit: {_ends(e)}" for e in found.unfit)
    if not moved:
        return f"none, as no number with a range in the profile moves its {duration(found.expected)}{unfit}"
    names = " and ".join(map(_ends, found.dominant))
    others = moved - len(found.dominant)
    more = f"; {count(others, 'other', 'others')} matter{'s' if others == 1 else ''}" if others else ""
    more += unfit
    times = f"{duration(found.low)} to {duration(found.high)}, expected {duration(found.expected)}"
    return f"{times}; most of it from {names}{more}"


def _ends(effect: Effect) -> str:
    """A number with the times at its ends: "l2.latency_cycles (200: 66.0 us, 350: 71.2 us)"."""
    ends = (effect.fact.low, effect.seconds_at_low), (effect.fact.high, effect.seconds_at_high)
    words = ", ".join(f"{end:g}: {'does not fit' if s is None else duration(s)}" for end, s in ends if end is not None)
    return f"{effect.fact.name} ({words})"


def interval_fields(found: Interval) -> dict[str, Any]:
    """For JSON, all numbers that matter."""
    return {
        "low_seconds": found.low,
        "expected_seconds": found.expected,
        "high_seconds": found.high,
        "dominant": [e.fact.name for e in found.dominant],
        "parameters": [
            {
                "name": e.fact.name,
                "unit": e.fact.unit,
                "confidence": e.fact.confidence,
                "value": e.fact.value,
                "low": e.fact.low,
                "high": e.fact.high,
                "seconds_at_low": e.seconds_at_low,
                "seconds_at_high": e.seconds_at_high,
            }
            for e in found.effects
        ],
        "unmoved": list(found.unmoved),
        "method": METHOD,
    }


def interval_columns(found: Interval) -> dict[str, Any]:
    """For CSV."""
    return {
        "seconds_low": found.low,
        "seconds_high": found.high,
        "interval_dominant": " ".join(e.fact.name for e in found.dominant),
    }
