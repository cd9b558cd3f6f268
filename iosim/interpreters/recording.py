"""What a simulation is asked to remember: the spans of the units and warp groups of one processor.

Nothing is kept unless it is asked for, and what is kept changes nothing: the recorded spells of a unit follow one
another from time 0 on and add up to its busy time and to its stalls by cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from iosim.interpreters.engine import Spell, Who

if TYPE_CHECKING:
    import simpy

    from iosim.interpreters.model import Model
    from iosim.interpreters.shapes import Transfer
    from iosim.pipeline import Phase

FURTHER = 2  # iterations after the last one wanted, by the end of which all of that one is done


@dataclass(frozen=True, slots=True)
class Watch:
    """What is to be recorded: the processor on which block number `block` runs, or the one called `processor`.

    `kernel` is the one of the program, None for all.  The simulation stops once the iterations before number `until`
    of all its blocks are through, counted over the innermost loops.
    """

    kernel: str | None = None
    block: int | None = None
    processor: int | None = None
    until: int | None = None


class Ran(NamedTuple):
    """A phase of one iteration of one warp group, from its start to its end in ps."""

    who: Who
    start: int
    end: int


class Flight(NamedTuple):
    """A load from its issue to its arrival, or a store from its sending to its landing; None: not by the end."""

    who: Who
    tensor: str
    direction: str
    bytes: int
    sent: int
    arrived: int | None


class Life(NamedTuple):
    """Bytes of a tile in SRAM, from the issue of the load or the phase that fills them to the last use.

    `flight` is the load, `first` its first use.
    """

    block: int
    tile: str
    bytes: int
    start: int
    end: int
    flight: Flight | None
    first: Ran | None


@dataclass(slots=True)
class Recorder:
    """Collects what happens to the blocks of processor number `processor`.

    `enough` once all its `groups` workers have gone `FURTHER` than iteration `until`.
    """

    processor: int
    groups: int
    until: int | None
    phases: list[Ran] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    through: set[tuple[int, int]] = field(default_factory=set)

    @property
    def enough(self) -> bool:
        return len(self.through) >= self.groups

    def phase(self, who: Who, start: int, end: int) -> None:
        """A phase has ended."""
        if end > start:
            self.phases.append(Ran(who, start, end))
        if self.until is not None and who.turn >= self.until + FURTHER:
            self.through.add((who.block, who.rank))

    def flight(
        self, env: simpy.Environment, who: Who, transfer: Transfer, done: Callable[[], None]
    ) -> Callable[[], None]:
        """A load or store is on its way; gives what to call in place of `done` when it has arrived."""
        number = len(self.flights)
        self.flights.append(Flight(who, transfer.tensor, transfer.direction, transfer.bytes, int(env.now), None))

        def arrive() -> None:
            self.flights[number] = self.flights[number]._replace(arrived=int(env.now))
            done()

        return arrive


@dataclass(frozen=True)
class Recording:
    """One processor's run of a kernel, in ps from the start of its first block; the launch comes before.

    `units` are spans by unit; `chip` says when the bandwidth of the chip is taken, by anyone, and `weight` for how many
    processors this one stands.  `groups` are spans by (slot, role, rank), workers have the role "".  `end` is where the
    recording stops, which is the end of the run if it is `whole`.  `turns` are the iterations of the innermost loops of
    each of its `blocks`.  `lives` say what is in SRAM, of which each block takes `sram_bytes` of `sram_capacity`.
    """

    kernel: str
    processor: int
    weight: int
    clock_hz: int
    launch_ps: int
    end: int
    whole: bool
    turns: int
    blocks: tuple[int, ...]
    units: Mapping[str, tuple[Spell, ...]]
    chip: Mapping[str, tuple[tuple[int, int], ...]]
    groups: Mapping[tuple[int, str, int], tuple[Spell, ...]]
    phases: tuple[Ran, ...]
    flights: tuple[Flight, ...]
    lives: tuple[Life, ...]
    sram_bytes: int
    sram_capacity: int

    def window(self, first: int, last: int) -> tuple[int, int]:
        """When the iterations from number `first` to before number `last` run; what is before and after the loops
        belongs to the first and the last one."""
        starts = [r.start for r in self.phases if r.who.turn >= first] + [
            f.sent for f in self.flights if f.who.turn >= first and f.direction == "read"
        ]
        ends = [r.end for r in self.phases if r.who.turn < last]
        start = 0 if first == 0 else min(starts, default=self.end)
        end = self.end if last >= self.turns and self.whole else max(ends, default=self.end)
        return start, max(end, start)

    def sram(self) -> list[tuple[int, int]]:
        """(time, bytes in use from then on), in order of time."""
        changes: dict[int, int] = {0: 0}
        for life in self.lives:
            changes[life.start] = changes.get(life.start, 0) + life.bytes
            changes[life.end] = changes.get(life.end, 0) - life.bytes
        out: list[tuple[int, int]] = []
        held = 0
        for time in sorted(changes):
            held += changes[time]
            if not out or held != out[-1][1]:
                out.append((time, held))
        return out


def merged(spells: Sequence[Spell]) -> list[Spell]:
    """Spells of one phase and iteration, or of idling for one cause, that follow one another, as one."""
    out: list[Spell] = []
    for spell in spells:
        last = out[-1] if out else None
        same = last is not None and last.end == spell.start and last.cause == spell.cause
        if last is not None and same and (last.who == spell.who or (spell.cause and not (spell.who and last.who))):
            out[-1] = last._replace(end=spell.end)
        else:
            out.append(spell)
    return out


def use_of(intervals: Sequence[tuple[int, int]], start: int, end: int, bins: int) -> list[float]:
    """The share of each of so many equal bins from `start` to `end` that the intervals, which are disjoint, cover."""
    width = (end - start) / bins
    covered = [0.0] * bins
    for first, last in intervals:
        a, b = float(max(first, start)), min(last, end)
        while a < b:
            n = min(bins - 1, int((a - start) / width))
            stop = b if n == bins - 1 else min(b, start + (n + 1) * width)
            covered[n] += max(0.0, stop - a)
            a = stop if stop > a else b
    return [min(1.0, c / width) for c in covered]


def shares(spans: Sequence[Spell], start: int, end: int) -> dict[str, int]:
    """Ps from `start` to `end` for which spans are busy ("busy") or idle, by cause."""
    out: dict[str, int] = {}
    for span in spans:
        if (length := min(span.end, end) - max(span.start, start)) > 0:
            name = "busy" if span.cause is None else span.cause
            out[name] = out.get(name, 0) + length
    return out


def lives(model: Model, recorder: Recorder, end: int, whole: bool) -> Iterator[Life]:
    """What is in SRAM, tile by tile, of each block that was recorded; what is still in use lives until `end`."""
    for block in dict.fromkeys(r.who.block for r in recorder.phases):
        phases = [r for r in recorder.phases if r.who.block == block]
        flights = [f for f in recorder.flights if f.who.block == block and f.direction == "read"]
        for tile, bytes_ in _in_sram(model).items():
            touching = {(p.number, q.name) for p in model.parts for q in p.phases if _touches(q, tile) and not q.copy}
            uses = [r for r in phases if (r.who.part, r.who.phase) in touching]
            fills = [f for f in flights if _fills(model, f.who, tile)]
            if fills:
                yield from _loaded(fills, uses, tile, bytes_, end, whole)
            elif uses:
                yield from _made(uses, tile, bytes_, len({part for part, _ in touching}) == 1)


def _in_sram(model: Model) -> dict[str, int]:
    """Bytes of each tile in SRAM, of one buffer."""
    from iosim.program import tiles

    nodes = (node for part in model.parts for phase in part.phases for node in phase.nodes)
    return {t.name: t.bytes for node in nodes for t in tiles(node) if model.places[t.name] == "sram"}


def _touches(phase: Phase, tile: str) -> bool:
    return tile in phase.reads | phase.writes


def _fills(model: Model, who: Who, tile: str) -> bool:
    return any(p.copy and p.name == who.phase and tile in p.writes for p in model.parts[who.part].phases)


def _loaded(
    fills: Sequence[Flight], uses: Sequence[Ran], tile: str, bytes_: int, end: int, whole: bool
) -> Iterator[Life]:
    """The lives of a tile that is loaded: each load to its last use, in its own iteration or before the next load."""
    own: dict[tuple[int, int], list[Ran]] = {}
    for use in uses:
        own.setdefault((use.who.part, use.who.nth), []).append(use)
    parts = {use.who.part for use in uses}
    for n, fill in enumerate(fills):
        users = list(own.get((fill.who.part, fill.who.nth), []))
        until = fills[n + 1].sent if n + 1 < len(fills) else end
        if parts - {fill.who.part}:
            users += [u for u in uses if u.who.part != fill.who.part and fill.sent <= u.start < until]
        known = users and (whole or n + 1 < len(fills) or not parts - {fill.who.part})
        last = max(u.end for u in users) if known else end
        first = min(users, key=lambda use: use.start, default=None)
        yield Life(fill.who.block, tile, bytes_, fill.sent, last, fill, first)


def _made(uses: Sequence[Ran], tile: str, bytes_: int, each: bool) -> Iterator[Life]:
    """The lives of a tile that is computed: one in `each` iteration, or one for the block."""
    runs: dict[int, list[Ran]] = {}
    for use in uses:
        runs.setdefault(use.who.nth if each else 0, []).append(use)
    for run in runs.values():
        yield Life(run[0].who.block, tile, bytes_, min(u.start for u in run), max(u.end for u in run), None, None)
