"""The machine of the timeline: units that serve in order, processes that say why they wait, exact books.

Time is integer picoseconds.  A unit's idle time is blamed on what the process that uses it next was doing in the
meantime, so that busy time and stalls by cause add up to the makespan without remainder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import simpy

Cause: TypeAlias = Literal["data", "buffer", "matrix", "vector", "barrier", "launch", "tail"]
CAUSES: tuple[Cause, ...] = ("data", "buffer", "matrix", "vector", "barrier", "launch", "tail")

PICO = 10**12


def duration(amount: int, rate: int) -> int:
    """Picoseconds that `amount` takes at `rate` a second, rounded up once."""
    return -(-amount * PICO // rate)


def later(env: simpy.Environment, delay: int, go: Callable[[], None], what: object = None) -> None:
    """Call `go` after `delay` ps; `what` is waited for."""
    timeout = env.timeout(delay, what)
    if timeout.callbacks is not None:  # None only once an event has been processed
        timeout.callbacks.append(lambda _: go())


class Who(NamedTuple):
    """Who asks a unit, for a script or a recording: piece `piece` of a phase's work in one iteration of one warp group.

    The phase is of segment number `part` in its iteration number `nth`; `turn` counts the iterations of all innermost
    loops that the block began before.
    """

    block: int
    role: str
    rank: int
    part: int
    phase: str
    nth: int
    turn: int
    piece: int


class Spell(NamedTuple):
    """A recorded span of time in ps.

    Of a unit: busy for `who`, or idle (`cause`) until `who` came.  Of a warp group: in a phase of `who`, or waiting
    (`who` is None); `cause` is then what others would wait for.
    """

    start: int
    end: int
    cause: Cause | None
    who: Who | None


@dataclass(slots=True)
class Log:
    """What one process did, as consecutive spans of time from 0 on, each with the cause that others would wait for.

    `state` is the cause of the span that is not closed yet, `who` the phase that the process is in.  A list in `spans`
    is what a recording gets.  `jumps` are times from which on more time passed than the clock shows, with its causes.
    """

    ends: list[int] = field(default_factory=lambda: [0])
    causes: list[Cause] = field(default_factory=lambda: ["launch"])
    state: Cause = "launch"
    who: Who | None = None
    spans: list[Spell] | None = None
    jumps: list[tuple[int, Mapping[Cause, int]]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """When the last span was closed, the time that was jumped over before included."""
        last = self.ends[-1]
        return last + sum(sum(causes.values()) for at, causes in self.jumps if at < last)

    def mark(self, now: int) -> None:
        """Close the open span at `now`."""
        if now == self.ends[-1]:
            return
        if self.spans is not None:
            self.spans.append(Spell(self.ends[-1], now, self.state, self.who))
        if self.causes[-1] == self.state:
            self.ends[-1] = now
        else:
            self.ends.append(now)
            self.causes.append(self.state)

    def between(self, start: int, end: int) -> Iterator[tuple[Cause, int]]:
        """The causes in [start, end) with their lengths; time beyond the last mark belongs to the open span."""
        n = bisect_right(self.ends, start)
        while start < end and n < len(self.ends):
            stop = min(end, self.ends[n])
            yield self.causes[n], stop - start
            start, n = stop, n + 1
        if start < end:
            yield self.state, end - start


@dataclass(slots=True)
class Script:
    """The order in which the units of a run served, and the blocks that each slot took."""

    served: dict[str, list[Who | None]] = field(default_factory=dict)
    placed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Turns:
    """Records the order in which a unit is asked, or hands the unit out in a recorded order."""

    order: list[Who | None]
    scripted: bool
    given: int = 0
    waiting: dict[Who | None, Callable[[], None]] = field(default_factory=dict)

    def ask(self, who: Who | None, go: Callable[[], None]) -> None:
        """Call `go` when it is `who`'s turn: at once, unless the script says that others come first."""
        if not self.scripted:
            self.order.append(who)
            go()
            return
        self.waiting[who] = go
        while self.given < len(self.order) and self.order[self.given] in self.waiting:
            ready = self.waiting.pop(self.order[self.given])
            self.given += 1
            ready()


@dataclass(slots=True)
class Unit:
    """A server that works off requests in the order of their arrival, by arithmetic: no event of its own.

    A list in `spans` is what a recording gets.  `jumps` is the number of jumps over time that its books have.
    """

    name: str
    turns: Turns | None = None
    free: int = 0
    busy: int = 0
    stalls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    spans: list[Spell] | None = None
    jumps: int = 0

    def serve(
        self,
        env: simpy.Environment,
        who: Who | None,
        block: int,  # noqa: ARG002 - those that take turns by block need it
        length: int,
        log: Log,
        then: Callable[[int], None],
    ) -> None:
        """Serve `who`, of block number `block`, for `length` ps; `then` gets the end, as soon as it is known."""
        now = int(env.now)
        if self.turns is None:
            then(self.book(now, length, log, who))
        else:
            self.turns.ask(who, lambda: then(self.book(now, length, log, who)))

    def book(self, now: int, length: int, log: Log, who: Who | None = None) -> int:
        """Serve for `length` ps from `now` or when free; returns the end.  Idle time is blamed on `log`."""
        if now > self.free:
            self.idle(now, log, who)
        end = self.free + length
        if self.spans is None:  # the same as to occupy, without the cost of a call
            self.busy += length
            self.free = end
        else:
            self.occupy(end, length, who)
        return end

    def occupy(self, end: int, length: int, who: Who | None) -> None:
        """Be busy for the `length` ps before `end`."""
        if self.spans is not None and length:
            self.spans.append(Spell(end - length, end, None, who))
        self.busy += length
        self.free = end

    def idle(self, until: int, log: Log, who: Who | None = None) -> None:
        """Book the time from `free` until then, if any, to what `log` says its process did."""
        if until <= self.free:
            return
        for _, causes in log.jumps[self.jumps :]:
            for cause, length in causes.items():
                self.stalls[cause] += length
        self.jumps = len(log.jumps)
        if self.spans is None and log.ends[-1] <= self.free:  # all of it in the open span
            self.stalls[log.state] += until - self.free
            self.free = until
            return
        for cause, length in log.between(self.free, until):
            self.stalls[cause] += length
            if self.spans is not None:
                self.spans.append(Spell(self.free, self.free + length, cause, who))
            self.free += length


Request: TypeAlias = tuple[
    "Who | None", "Unit", int, Log, Callable[[int], None]
]  # who, of which unit, length, log, then


@dataclass(slots=True)
class Ring:
    """Requests for bandwidth of the chip: blocks take turns, one request each, so that none waits for another's
    whole queue."""

    queues: dict[int, deque[Request]] = field(default_factory=dict)
    blocks: deque[int] = field(default_factory=deque)

    def push(self, block: int, request: Request) -> None:
        queue = self.queues.setdefault(block, deque())
        if not queue:
            self.blocks.append(block)
        queue.append(request)

    def pop(self) -> Request | None:
        """The next request, None where there is none."""
        if not self.blocks:
            return None
        block = self.blocks.popleft()
        queue = self.queues[block]
        request = queue.popleft()
        if queue:
            self.blocks.append(block)
        else:
            del self.queues[block]
        return request


@dataclass(slots=True)
class Arbiter(Unit):
    """Bandwidth of the chip, given to blocks in turns."""

    ring: Ring = field(default_factory=Ring)
    serving: bool = False
    ready: dict[Who | None, Request] = field(default_factory=dict)

    def serve(
        self, env: simpy.Environment, who: Who | None, block: int, length: int, log: Log, then: Callable[[int], None]
    ) -> None:
        """Serve for `length` ps when the block's turn comes; `then` gets the end, when it is reached."""
        if self.turns is not None and self.turns.scripted:
            self.ready[who] = (who, self, length, log, then)
        else:
            self.ring.push(block, (who, self, length, log, then))
        if not self.serving:
            self._next(env)

    def _take(self) -> Request | None:
        if self.turns is None or not self.turns.scripted:
            request = self.ring.pop()
            if self.turns is not None and request is not None:
                self.turns.order.append(request[0])
            return request
        order, given = self.turns.order, self.turns.given
        if given == len(order) or order[given] not in self.ready:
            return None
        self.turns.given += 1
        return self.ready.pop(order[given])

    def _next(self, env: simpy.Environment) -> None:
        request = self._take()
        self.serving = request is not None
        if request is None:
            return
        who, _, length, log, then = request
        end = self.book(int(env.now), length, log, who)

        def finish() -> None:
            then(end)
            self._next(env)

        later(env, length, finish)


@dataclass(slots=True)
class Bucket:
    """Bandwidth of the chip where each processor simulated stands for several: a leaky bucket, poured into in turns.

    `level` is the time up to which the chip has work, in ps at the full rate, if all processors that one stands for
    ask the same at the same time.  They do not quite: of the time that the unit stood idle, up to `depth` ps are made
    up for.  A list in `spans` is what a recording gets: when the chip is busy, in ps.
    """

    depth: int
    level: int
    spans: list[tuple[int, int]] | None = None
    ring: Ring = field(default_factory=Ring)
    serving: bool = False

    def ask(self, env: simpy.Environment, block: int, request: Request) -> None:
        """Serve a request of a FairShare when the block's turn comes and the work before it is done."""
        self.ring.push(block, request)
        if not self.serving:
            self._next(env)

    def _next(self, env: simpy.Environment) -> None:
        now = int(env.now)
        self.serving = False
        while not self.serving and (request := self.ring.pop()) is not None:
            who, unit, length, log, then = request
            end = unit.book(now, length, log, who)
            self.serving = self.level > now
            then(end)
        if self.serving:
            later(env, self.level - now, lambda: self._next(env), self)


@dataclass(slots=True, kw_only=True)
class FairShare(Unit):
    """Bandwidth of the chip as a processor sees it that stands for `weight` of them, all doing the same.

    A request takes its time at the full rate, but ends no earlier than the chip could have carried all requests so
    far, had each of the processors made them.  `alone`: no other block asks, so that turns need no events.
    """

    bucket: Bucket
    weight: int
    alone: bool

    def serve(
        self, env: simpy.Environment, who: Who | None, block: int, length: int, log: Log, then: Callable[[int], None]
    ) -> None:
        """Serve for `length` ps when the block's turn comes; `then` gets the end, as soon as it is known."""
        if self.alone:
            then(self.book(int(env.now), length, log, who))
        else:
            self.bucket.ask(env, block, (who, self, length, log, then))

    def book(self, now: int, length: int, log: Log, who: Who | None = None) -> int:
        bucket = self.bucket
        bucket.level = max(bucket.level, now - bucket.depth) + length * self.weight
        if bucket.spans is not None:
            bucket.spans.append((bucket.level - length * self.weight, bucket.level))
        end = max(max(now, self.free) + length, bucket.level)
        self.idle(end - length, log, who)
        self.occupy(end, length, who)
        return end


@dataclass(slots=True)
class Progress:
    """How many iterations of a phase have ended, all before the first that has not, and who waits for more."""

    count: int = 0
    early: set[int] = field(default_factory=set)
    waiters: list[tuple[int, simpy.Event]] = field(default_factory=list)

    def end(self, iteration: int) -> None:
        """Iteration number `iteration` has ended; one that overtook others counts when they have ended too."""
        if iteration != self.count:
            self.early.add(iteration)
            return
        self.count += 1
        while self.early and self.count in self.early:
            self.early.remove(self.count)
            self.count += 1
        if self.waiters:
            ready = [event for target, event in self.waiters if target <= self.count]
            self.waiters = [(target, event) for target, event in self.waiters if target > self.count]
            for event in ready:
                event.succeed()

    def reach(self, env: simpy.Environment, target: int) -> simpy.Event:
        """An event that occurs once `target` iterations have ended (they have not yet)."""
        event = env.event()
        self.waiters.append((target, event))
        return event
