"""Jumps over iterations of loops whose whole state recurs.

When a group begins an iteration, what is to come follows from the state relative to now: the events that are pending,
in their order, with what they are for; the backlog of every unit; how far each group, phase and transfer is; and the
idle time that is not booked to a cause yet, with what groups did in it.  Two equal states with p iterations between
them mean that every p further iterations do the same, as long as all that they reach is alike.  A jump leaves k times p
iterations out and adds k times what the counters grew by; nothing else changes, so that a run with jumps ends with
exactly what one without them does.  The idle time of units that nobody used in between stays open, and gets what was
jumped over when they are next used.

Where no state recurs in time the loop is taken to go on as it did last, which is not exact: see `Jumps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import simpy

from iosim.interpreters.blocks import Block, Carried, Course, Execution, Floor, Group, Processor, Stay
from iosim.interpreters.engine import CAUSES, Bucket, Cause, FairShare, Log, Progress, Request, Unit
from iosim.interpreters.shapes import Iteration

State: TypeAlias = tuple[Any, ...]
Phases: TypeAlias = tuple[tuple[int, int], ...]  # (segment, number of the phase)


PATIENCE = 4  # times the iterations after which a jump is due, until there is no hope for one


class NoJumpError(Exception):
    """A loop is long, and cannot be jumped over."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block is: visit and turn of its first group, the number of its stores, and what is left of its loops.

    `low` is the first iteration of the visit that anything under way belongs to.
    """

    visit: int
    turn: int
    low: int
    leaving: int
    made: int
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at a time, and where the blocks were, by number."""

    time: int
    skipped: int
    free: Sequence[int]
    busy: Sequence[int]
    stalls: Sequence[Mapping[str, int]]
    moved: Mapping[tuple[str, str], int]
    places: Mapping[int, Place]


@dataclass(slots=True)
class Scope:
    """The states seen in one visit of a loop, or in one loop around loops: the last of each, and all by their place."""

    where: tuple[Any, ...] = ()
    seen: dict[State, Snapshot] = field(default_factory=dict)
    trails: dict[State, list[Snapshot]] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, slots=True)
class Jump:
    """`times` periods of so many iterations of a loop were left out; `trips` are left of it then.

    `what` is iterated in it, None where it has loops inside.  `grown` is what each period adds: its ps, then stalls by
    unit and cause, then what each group did, by cause.
    """

    what: Iteration | None
    period: int
    times: int
    trips: int
    grown: tuple[int, ...]


class Jumps:
    """Runs a simulation with jumps.

    After `long` iterations of a loop without loops inside, or `outer` of one with some, in which no state recurred, the
    loop goes on as in the later half of them; `exact` says that this never was.  Where it cannot, as blocks do not move
    through their loops together, `refused` says so, and after PATIENCE times as many iterations NoJumpError is raised;
    if `strict` at once, for any loop without loops inside that is not jumped over exactly.
    """

    def __init__(
        self,
        floor: Floor,
        processors: Sequence[Processor],
        logs: Iterable[Log],
        long: int,
        outer: int,
        *,
        strict: bool = False,
    ) -> None:
        self.floor, self.env = floor, floor.env
        self.units: list[Unit] = [unit for processor in processors for unit in processor.units.values()]
        self.buckets = list({id(u.bucket): u.bucket for u in self.units if isinstance(u, FairShare)}.values())
        self.logs = list(logs)
        self.long, self.outer, self.strict = long, outer, strict
        self.visit = Scope()
        self.around: dict[State, Scope] = {}  # by block and loops
        self.made: list[Jump] = []
        self.exact, self.refused = True, False

    def run(self) -> None:
        """Run all events; raises NoJumpError for a loop that cannot be jumped over."""
        env, floor = self.env, self.floor
        while (now := env.peek()) < float("inf"):
            while env.peek() == now:
                env.step()
            if floor.pulse is not None:
                group, floor.pulse = floor.pulse, None
                self.look(group)

    def look(self, lead: Group) -> None:
        """Jump if the state recurs, when a group has begun an iteration."""
        block = lead.block
        if next(iter(self.floor.open)) != block.number or lead.at is None:
            return
        stay = lead.at[0]
        if block.course.stays[lead.visit] is not stay:
            return
        place, bounds = (block.number, lead.visit), _stretch(stay, lead.turn)
        if bounds is None:
            return
        first = self.visit.where[:2] != place
        if self.visit.where != (*place, bounds[0]):
            self.visit = Scope((*place, bounds[0]))
        around = first and any(frame.left > 1 for frame in block.course.frames)
        loops = (block.number, *(id(frame.shape) for frame in block.course.frames))
        outer = self.around.setdefault(loops, Scope()) if around else None
        inside = not self.visit.over and bounds[1] - lead.turn > 1
        if outer is not None and not outer.over:
            where = tuple(self.inside(groups[0]) for groups in self.floor.open.values())
            self.try_to(outer, self.snapshot(), (*self.state(), where), where[0], self.outer)
        elif inside:
            self.try_to(self.visit, self.snapshot(), self.state(), (), self.long)

    def try_to(self, scope: Scope, now: Snapshot, state: State, place: State, budget: int) -> None:
        """Jump if `state` was there before, or if it is time to give up waiting for one that was.

        `place` is where in the loops around it the first block is.
        """
        leap = self.over_trips if scope is self.visit else self.over_visits
        before, trail = scope.seen.get(state), scope.trails.setdefault(place, [])
        if before is not None and self.recurs(before, now):
            scope.over = leap(before, now, exact=True)
        elif len(trail) >= budget:
            if self.strict and scope is self.visit:
                raise NoJumpError
            scope.over = leap(trail[-(budget // 2)], now, exact=False)
        if not scope.over and len(trail) >= budget:
            self.refused = True
            if len(trail) >= PATIENCE * budget:
                raise NoJumpError
        scope.seen[state] = now
        trail.append(now)

    # ------------------------------------------------------------------ states

    def snapshot(self) -> Snapshot:
        return Snapshot(
            time=int(self.env.now),
            skipped=self.floor.skipped,
            free=[unit.free for unit in self.units],
            busy=[unit.busy for unit in self.units],
            stalls=[dict(unit.stalls) for unit in self.units],
            moved=dict(self.floor.moved),
            places={number: self.place(groups) for number, groups in self.floor.open.items()},
        )

    def place(self, groups: Sequence[Group]) -> Place:
        lead, block = groups[0], groups[0].block
        course = block.course
        low = lead.turn
        if lead.at is not None:
            stay = lead.at[0]
            under_way = [(e.part, e.nth) for group in groups for e in group.running] + [
                (c.part, c.nth) for c in self.carried() if c.block is block
            ]
            low = min(
                [group.at[2] for group in groups if group.at is not None and group.at[0] is stay]
                + [nth - stay.before[part] for part, nth in under_way if part == stay.part]
            )
        return Place(
            lead.visit, lead.turn, low, block.leaving, len(course.stays), tuple(frame.left for frame in course.frames)
        )

    @cached_property
    def copies(self) -> tuple[Phases, Phases]:
        """The phases that are copies, and those that are not."""
        phases = [(n, task.number, task.phase.copy) for n, tasks in enumerate(self.floor.model.tasks) for task in tasks]
        return tuple((n, k) for n, k, copy in phases if copy), tuple((n, k) for n, k, copy in phases if not copy)

    def carried(self) -> Iterator[Carried]:
        """All transfers that are on their way."""
        for _, _, _, event in self.env._queue:  # simpy has no other way to ask what is pending
            if isinstance(event, simpy.Timeout) and isinstance(event.value, Carried):
                yield event.value
        for bucket in self.buckets:
            for queue in bucket.ring.queues.values():
                yield from map(_carried, queue)

    def state(self) -> State:
        """All that the future follows from, relative to now and to where the first group of each block is."""
        now = int(self.env.now)
        bases = {number: _base(groups[0]) for number, groups in self.floor.open.items()}
        none = [0] * len(self.floor.model.parts)
        copies, others = self.copies

        def carried(c: Carried) -> State:
            nth = c.nth - bases.get(c.block.number, none)[c.part]
            return c.block.number, c.part, c.phase, nth, c.rank, c.k, c.latency, c.missing, max(c.last - now, 0)

        def execution(e: Execution, number: int) -> State:
            return e.part, e.phase, e.nth - bases[number][e.part], e.piece, id(e.work)

        def owner(event: simpy.Event) -> State:
            wakes: Any = event.callbacks and event.callbacks[0]  # transfers apart, processes wait for events
            process = wakes.__self__
            number, *rest = self.floor.owners[process]
            return (number, *(execution(one, number) if isinstance(one, Execution) else one for one in rest))

        def pending(event: simpy.Event) -> State:
            if isinstance(event, simpy.Timeout) and event.value is not None:
                what = event.value
                return carried(what) if isinstance(what, Carried) else (self.buckets.index(what),)
            return owner(event)

        def progress(p: Progress, base: int) -> State:
            early = tuple(sorted(n - base for n in p.early)) if p.early else ()
            return p.count - base, early, tuple((n - base, owner(event)) for n, event in p.waiters)

        def group(g: Group) -> State:
            lead = g.block.groups[0]
            number, at, same = g.block.number, None, g.visit == lead.visit
            if g.at is not None:
                stay, step, u = g.at
                at = stay.part, id(step), u - lead.turn if same else u
            turn = g.turn - lead.turn if same else g.turn
            return g.visit - lead.visit, at, turn, g.synced - lead.synced, *(execution(e, number) for e in g.running)

        def block(b: Block) -> State:
            base = bases[b.number]
            return (
                b.number,
                b.leaving - b.left.count,
                progress(b.left, b.left.count),
                tuple((key, progress(p, base[key[0]])) for key, p in b.turns.items()),
                tuple((key, progress(p, b.groups[0].synced)) for key, p in b.here.items()),
                tuple(progress(b.arrived[n][k], base[n]) for n, k in copies),
                tuple(progress(p, base[n]) for n, k in others for p in b.done[n][k]),
                tuple(map(group, b.groups)),
            )

        return (
            tuple((time - now, first, pending(event)) for time, first, _, event in sorted(self.env._queue)),
            tuple(max(unit.free - now, 0) for unit in self.units),
            tuple(_bucket(b, now, carried) for b in self.buckets),
            tuple(log.state for log in self.logs),
            tuple(block(groups[0].block) for groups in self.floor.open.values()),
        )

    @staticmethod
    def inside(lead: Group) -> State:
        """Where a block is in the visit that it makes now, and in the loops around that."""
        course = lead.block.course
        stays = tuple((stay.part, stay.stretches) for stay in course.stays[lead.visit :])
        return lead.turn, stays, tuple((id(frame.shape), frame.at) for frame in course.frames)

    def recurs(self, before: Snapshot, now: Snapshot) -> bool:
        """Whether two states with one key agree in the idle time that is not booked yet as well."""
        window = 0
        for old, free in zip(before.free, now.free, strict=True):
            if old == free <= before.time:
                continue  # nobody used it in between
            if old - before.time != free - now.time:
                return False
            window = max(window, now.time - free)
        return not window or all(_did(log, before.time, window) == _did(log, now.time, window) for log in self.logs)

    # ------------------------------------------------------------------ jumps

    def over_trips(self, before: Snapshot, now: Snapshot, *, exact: bool) -> bool:
        """Leave out iterations of the visits that blocks are in; whether that is possible."""
        if before.places.keys() != now.places.keys():
            return False
        moved: list[tuple[Stay, Course, int, int]] = []  # with the number of the stretch and the period
        times: int | None = None
        for number, groups in self.floor.open.items():
            old, new, block = before.places[number], now.places[number], groups[0].block
            if old == new:
                continue
            at = groups[0].at
            period = new.turn - old.turn
            if at is None or old.visit != new.visit or period < 1 or new.made != new.visit + 1:
                return False
            stay = at[0]
            if any(group.visit != new.visit for group in groups) or self._uneven(block, old, new):
                return False
            aheads = [step.ahead for steps in block.model.actions[stay.part].values() for step in steps]
            slots = max(block.model.parts[stay.part].order.slots.values(), default=0) if block.warm else 0
            bounds = _stretch(stay, old.low)
            if bounds is None or old.low < max(bounds[0], slots):
                return False
            room = bounds[1] - 1 - (max(group.turn for group in groups) + max(aheads))
            times = room // period if times is None else min(times, room // period)
            moved.append((stay, block.course, bounds[2], period))
        if not times or times < 1 or not moved:
            return False
        grown = self.leap(before, now, times, exact=exact)
        for stay, course, stretch, period in moved:
            stay.shorten(stretch, times * period)
            course.before[stay.part] -= times * period
        stay, _, stretch, period = moved[0]
        trips, what = stay.stretches[stretch]
        self.made.append(Jump(what, period, times, trips, grown))
        return True

    def over_visits(self, before: Snapshot, now: Snapshot, *, exact: bool) -> bool:
        """Leave out iterations of the loops around those that blocks are in; whether that is possible."""
        if before.places.keys() != now.places.keys():
            return False
        moved: list[tuple[Any, int]] = []
        times: int | None = None
        for number, groups in self.floor.open.items():
            old, new, block = before.places[number], now.places[number], groups[0].block
            if old == new:
                continue
            periods = [a - b for a, b in zip(old.left, new.left, strict=False)]
            places = [n for n, period in enumerate(periods) if period]
            if len(old.left) != len(new.left) or len(places) != 1 or periods[places[0]] < 1:
                return False
            if self._uneven(block, old, new) or (block.warm and old.visit < len(block.model.parts)):
                return False
            frame, period = block.course.frames[places[0]], periods[places[0]]
            times = (frame.left - 1) // period if times is None else min(times, (frame.left - 1) // period)
            moved.append((frame, period))
        if not times or times < 1 or not moved:
            return False
        grown = self.leap(before, now, times, exact=exact)
        for frame, period in moved:
            frame.left -= times * period
        frame, period = moved[0]
        self.made.append(Jump(None, period, times, frame.left, grown))
        return True

    @staticmethod
    def _uneven(block: Block, old: Place, new: Place) -> bool:
        """A persistent block waits at its end for half of its stores, which is not the same for any number of them."""
        return bool(block.model.schedule.ahead) and old.leaving != new.leaving

    def leap(self, before: Snapshot, now: Snapshot, times: int, *, exact: bool) -> tuple[int, ...]:
        """Count what happened between two states so many times more; returns what that was, see Jump."""
        self.exact &= exact
        causes = [_causes(log, before.time, now.time) for log in self.logs]
        for log, own in zip(self.logs, causes, strict=True):
            log.jumps.append((now.time, {cause: length * times for cause, length in own.items()}))
        for n, unit in enumerate(self.units):
            unit.busy += times * (unit.busy - before.busy[n])
            for cause, length in unit.stalls.items():
                unit.stalls[cause] = length + times * (length - before.stalls[n][cause])
            if not before.free[n] == unit.free <= before.time:
                unit.jumps = len(self.logs[0].jumps)
        for key, bytes_ in self.floor.moved.items():
            self.floor.moved[key] = bytes_ + times * (bytes_ - before.moved.get(key, 0))
        passed = now.time + now.skipped - before.time - before.skipped
        self.floor.skipped += times * passed
        stalls = (
            new[cause] - old[cause] for old, new in zip(before.stalls, now.stalls, strict=True) for cause in CAUSES
        )
        return passed, *stalls, *(own.get(cause, 0) for own in causes for cause in CAUSES)


def _carried(request: Request) -> Carried:
    """What a request waiting for a bucket is for: a method of it gets the end."""
    carried: Carried = request[-1].__self__  # type: ignore[attr-defined]
    return carried


def _bucket(b: Bucket, now: int, carried: Callable[[Carried], State]) -> State:
    """The state of a bucket with those that wait for it."""
    waiting = tuple(
        (n, tuple((request[1].name, request[2], carried(_carried(request))) for request in queue))
        for n, queue in b.ring.queues.items()
    )
    return max(b.level - now, -b.depth), b.depth, b.serving, tuple(b.ring.blocks), waiting


def _stretch(stay: Stay, u: int) -> tuple[int, int, int] | None:
    """First iteration, end and number of the stretch that an iteration is in."""
    start = 0
    for n, (trips, _) in enumerate(stay.stretches):
        if start <= u < start + trips:
            return start, start + trips, n
        start += trips
    return None


def _base(lead: Group) -> list[int]:
    """For each segment, which iteration the first group of a block is at, counted through all visits."""
    course = lead.block.course
    if lead.visit >= len(course.stays):
        return list(course.before)
    stay = course.stays[lead.visit]
    return [n + lead.turn * (part == stay.part) for part, n in enumerate(stay.before)]


def _did(log: Log, now: int, window: int) -> list[tuple[Any, int]]:
    """What a group did in the `window` ps before `now`, jumps of then with their places."""
    out: list[tuple[Any, int]] = []
    for cause, length in log.between(now - window, now):
        if out and out[-1][0] == cause:
            out[-1] = cause, out[-1][1] + length
        else:
            out.append((cause, length))
    return out + [(tuple(causes.items()), now - at) for at, causes in log.jumps if now - window < at <= now]


def _causes(log: Log, start: int, end: int) -> dict[Cause, int]:
    """The causes of a span of time with their lengths, jumps over time included."""
    out: dict[Cause, int] = {}
    for cause, length in log.between(start, end):
        out[cause] = out.get(cause, 0) + length
    for at, causes in log.jumps:
        if start < at <= end:
            for cause, length in causes.items():
                out[cause] = out.get(cause, 0) + length
    return out
