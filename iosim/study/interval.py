"""How far predicted time may be off because numbers of the profile are known as ranges only.

Each number with a low and a high end is put at either end alone, all else held: program, schedule, fidelity.  Those
whose ends move the time are the parameters that matter.  The range is then the time with all numbers at their slower
ends at once, and with all at their faster ends.  Which end is slower is seen where the number moves the time alone
(a slower copy can make a run shorter, as it changes who waits for whom), and follows from what it is (a rate, a
latency) where it does not: in company it may.  Where both differ, the wider is taken.

That is about the widest that independent numbers can make it (random mixes of them lie inside, or within 1 % of it,
in the tests), so it is no confidence interval, and the error of the model itself is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from iosim.errors import InputError
from iosim.hardware import Fact, Hardware
from iosim.memory.cache import DeviceTraffic, behind_caches, depends_on
from iosim.memory.onchip import footprints
from iosim.program import tiles, walk

if TYPE_CHECKING:
    from iosim.study.layers import ModelComparison
    from iosim.study.run import Comparison, Note, Run

    Compared = TypeVar("Compared", Comparison, ModelComparison)

METHOD = "all ranged numbers at their slower, or all at their faster ends at once; schedule and fidelity held"
NAMED = 2  # parameters that are said to dominate
_RATES = ("/s", "/clock", "TFLOPS", "MHz")  # ends of units that more of is faster
_TIMES = ("cycles", "us")


@dataclass(frozen=True, slots=True)
class Effect:
    """One number of the profile, and the predicted time, in seconds, with it alone at its ends.

    None for an end where a block of the schedule would not fit on the machine.
    """

    fact: Fact
    seconds_at_low: float | None
    seconds_at_high: float | None

    def swing(self, expected: float) -> float:
        """Seconds between the fastest and the slowest of both ends and the expected time."""
        known = [s for s in (self.seconds_at_low, self.seconds_at_high) if s is not None]
        return max(*known, expected) - min(*known, expected) if known else 0.0

    def ends(self, *, seen: bool) -> tuple[float, float] | None:
        """The faster and the slower end: as `seen` where it moves time alone, else by what it is; None if unknown."""
        fact, low, high = self.fact, self.seconds_at_low, self.seconds_at_high
        if low is None or high is None or fact.low is None or fact.high is None:
            return None
        upwards = (fact.low, fact.high)
        if low != high and (seen or not _nature(fact)):
            return upwards if low < high else upwards[::-1]
        return {"time": upwards, "rate": upwards[::-1]}.get(_nature(fact))


@dataclass(frozen=True, slots=True)
class Interval:
    """Low, expected and high time of a run in seconds; `effects` of the numbers that move it, the largest first.

    `unmoved` are names of numbers with a range that moves nothing alone.
    """

    low: float
    expected: float
    high: float
    effects: tuple[Effect, ...]
    unmoved: tuple[str, ...]

    @property
    def dominant(self) -> tuple[Effect, ...]:
        """The two that move time most."""
        return tuple(e for e in self.effects[:NAMED] if e.swing(self.expected))

    @property
    def unfit(self) -> tuple[Effect, ...]:
        """Those at an end of which a block would not fit."""
        return tuple(e for e in self.effects if None in (e.seconds_at_low, e.seconds_at_high))


def with_intervals(comparison: Compared, note: Note = lambda _: None) -> Compared:
    """The comparison with the interval of each run that has a time."""

    def one(run: Run) -> Run:
        note(f"range of {run.dataflow.name} on {run.hardware.name}")
        return replace(run, interval=interval(run))

    return comparison.each(one)


def interval(run: Run) -> Interval | None:
    """The interval of one run; None where its machine has no time."""
    if run.timeline is None:
        return None
    times = _Times(run)
    effects = [Effect(f, times.at({f.name: low}), times.at({f.name: high})) for f, low, high in ranged(run.hardware)]
    expected = run.timeline.seconds
    corners = []
    for seen in (True, False):
        ends = {e.fact.name: pair for e in effects if (pair := e.ends(seen=seen))}
        corners += [times.at({name: pair[n] for name, pair in ends.items()}) for n in range(2)]
    alone = [s for e in effects for s in (e.seconds_at_low, e.seconds_at_high)]
    found = [s for s in (expected, *corners, *alone) if s is not None]
    moving = sorted((e for e in effects if _matters(e, expected)), key=lambda e: -e.swing(expected))
    unmoved = tuple(e.fact.name for e in effects if e not in moving)
    return Interval(min(found), expected, max(found), tuple(moving), unmoved)


def ranged(machine: Hardware) -> Iterator[tuple[Fact, float, float]]:
    """The numbers that time may depend on and whose low and high ends differ, with these."""
    for fact in machine.fields():
        if not fact.name.startswith("energy.") and (fact.low or 0) < (fact.high or 0):
            yield fact, fact.low or 0, fact.high or 0


def _nature(fact: Fact) -> str:
    """Whether more of a number is faster (a "rate") or slower (a "time"); empty for counts."""
    if fact.unit in _TIMES:
        return "time"
    return "rate" if fact.unit.endswith(_RATES) or fact.name.endswith("_efficiency") else ""


def _matters(effect: Effect, expected: float) -> bool:
    return effect.swing(expected) > 0 or None in (effect.seconds_at_low, effect.seconds_at_high)


class _Times:
    """Predicted time of a run's program and schedule on its machine with other numbers."""

    def __init__(self, run: Run) -> None:
        self.run, self.parts = run, run.parts or (run,)
        kernels = [kernel for part in self.parts for kernel in part.program.kernels]
        self.dtypes = {tile.dtype for k in kernels for node, _ in walk(k.body) for tile in tiles(node)}
        self.known: list[tuple[Hardware, float]] = [(self.felt(run.hardware), run.seconds or 0.0)]

    def at(self, values: Mapping[str, float]) -> float | None:
        """Seconds with these numbers; None where a block does not fit, or the profile refuses them together."""
        machine = self.run.hardware
        try:
            for name, value in values.items():
                machine = machine.with_value(name, value)
        except InputError:
            return None
        felt = self.felt(machine)
        for other, seconds in self.known:
            if felt == other:
                return seconds
        parts = [_seconds(part, machine) for part in self.parts]
        if None in parts:
            return None
        total = sum(s for s in parts if s is not None)
        self.known.append((felt, total))
        return total

    def felt(self, machine: Hardware) -> Hardware:
        """The machine without what the program cannot feel: rates of dtypes that it has no tiles of."""
        units = tuple(
            replace(unit, rates={name: rate for name, rate in unit.rates.items() if name in self.dtypes})
            for unit in machine.matrices
        )
        return replace(machine, profile_hash="", matrices=units, matrix=units[0])


def _seconds(run: Run, machine: Hardware) -> float | None:
    """Time of the run's program and schedule on another machine; None where a block does not fit there."""
    from iosim.interpreters.timeline import timeline

    prints = footprints(run.program, run.schedule, machine)
    if run.timeline is None or not all(f.fits or not run.footprints[name].fits for name, f in prints.items()):
        return None
    resident = {name: f.resident * (machine.processors or 1) for name, f in prints.items()}
    device = _traffic(run, machine, resident)
    return timeline(run.program, run.schedule, machine, device, fidelity=run.timeline.fidelity).seconds


def _traffic(run: Run, machine: Hardware, resident: Mapping[str, int]) -> DeviceTraffic:
    """What is left behind the caches: as in the run where that depends on nothing that differs."""
    here = {name: f.resident * (run.hardware.processors or 1) for name, f in run.footprints.items()}
    if resident == here and depends_on(machine) == depends_on(run.hardware):
        return run.device
    multicast = {name: run.schedule.of(name).multicast for name in resident}
    return behind_caches(run.program, run.ledger, machine, resident, run.schedule.descending, multicast)
