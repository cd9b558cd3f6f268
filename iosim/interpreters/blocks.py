"""Blocks as simpy processes: warp groups that follow the order of their loop on the units of a processor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

from iosim.interpreters.engine import Arbiter, Cause, Log, Progress, Unit, Who, later
from iosim.interpreters.model import Action, Model, Task
from iosim.interpreters.recording import Recorder
from iosim.interpreters.shapes import Iteration, Lengths, Shape, Stretch, Transfer, Visit, Work

Process: TypeAlias = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Processor:
    """One processor's number and its units; those of the chip too, unless `Floor.shared` has them."""

    number: int
    units: Mapping[str, Unit]


@dataclass(slots=True)
class Floor:
    """What all blocks of a simulation share: the clock, the model, the shared units; and what became of the blocks.

    `scripted`: units serve in the order of a script, or make one.  `record` is told what happens, if it is wanted.
    `moved` are bytes by (tensor, direction), `ended` the times at which blocks ended, `open` the groups of those that
    have not.  `skipped` ps were jumped over, see jumps.py; `pulse` is the group that began an iteration of a loop last,
    `owners` says whose a simpy process is: these are what jumps need to know.
    """

    env: simpy.Environment
    model: Model
    shared: Mapping[str, Arbiter]
    scripted: bool
    record: Recorder | None = None
    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    open: dict[int, list[Group]] = field(default_factory=dict)
    skipped: int = 0
    pulse: Group | None = None
    owners: dict[simpy.Process, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, transfer: Transfer) -> None:
        """Count what a transfer moves."""
        key = (transfer.tensor, transfer.direction)
        self.moved[key] = self.moved.get(key, 0) + transfer.bytes


@dataclass(slots=True, eq=False)
class Stay:
    """A visit of segment number `part`, its iterations in stretches of alike ones.

    `before` has, for each segment, how many iterations the block ran before.
    """

    part: int
    stretches: tuple[Stretch, ...]
    before: Sequence[int]
    trips: int = 0

    def __post_init__(self) -> None:
        self.trips = sum(trips for trips, _ in self.stretches)

    def work(self, u: int) -> Iteration:
        """What the phases do in iteration u."""
        for trips, iteration in self.stretches:
            if u < trips:
                return iteration
            u -= trips
        raise IndexError(u)

    def shorten(self, stretch: int, trips: int) -> None:
        """Leave out so many iterations at the end of a stretch."""
        cut = tuple((n - trips * (i == stretch), iteration) for i, (n, iteration) in enumerate(self.stretches))
        self.stretches, self.trips = cut, self.trips - trips


@dataclass(slots=True)
class Frame:
    """Where a course is in a shape: at item number `at`, with `left` iterations of all of it to come, this one too."""

    shape: Shape
    left: int
    at: int = 0


class Course:
    """What a block does, visit by visit, made as far as its groups have come."""

    def __init__(self, shape: Shape, parts: int) -> None:
        self.stays: list[Stay] = []
        self.frames = [Frame(shape, 1)]
        self.before = [0] * parts

    def __call__(self, n: int) -> Stay | None:
        """Visit number n, None after the last."""
        while len(self.stays) <= n:
            visit = self._next()
            if visit is None:
                return None
            self.stays.append(Stay(visit.part, visit.stretches, tuple(self.before)))
            self.before[visit.part] += self.stays[-1].trips
        return self.stays[n]

    def _next(self) -> Visit | None:
        while self.frames:
            frame = self.frames[-1]
            if frame.at == len(frame.shape):
                frame.at, frame.left = 0, frame.left - 1
                if not frame.left:
                    self.frames.pop()
                continue
            item = frame.shape[frame.at]
            frame.at += 1
            if isinstance(item, Visit):
                return item
            self.frames.append(Frame(item.body, item.times))
        return None


@dataclass(slots=True, eq=False)
class Carried:
    """A transfer on its way: `missing` units have not said when they are done with it, the others will be by `last`.

    It is number `k` of what group `rank` moves in a phase, by number, of iteration `nth` of segment `part`.
    """

    block: Block
    part: int
    phase: int
    nth: int
    rank: int
    k: int
    latency: int
    done: Callable[[], None]
    missing: int
    last: int = 0

    def until(self, end: int) -> None:
        """A unit is done with it at `end`."""
        self.missing, self.last = self.missing - 1, max(self.last, end)
        if not self.missing:
            env = self.block.env
            later(env, self.last + self.latency - int(env.now), self.done, self)


@dataclass(slots=True, eq=False)
class Execution:
    """A phase that runs, by its number, and the number of the piece that it is in."""

    part: int
    phase: int
    nth: int
    work: Work
    piece: int = -1


class Block:
    """One block on one processor.

    Its workers run every segment; the other roles of an order (a producer, say) run their loop only.  A `warm` one
    follows another in a persistent kernel: its first copies were under way before, and only their bytes take time.
    """

    def __init__(self, floor: Floor, processor: Processor, course: Course, number: int, *, warm: bool = False) -> None:
        self.floor, self.processor, self.course, self.number, self.warm = floor, processor, course, number, warm
        self.env, self.model = floor.env, floor.model
        mine = floor.record is not None and floor.record.processor == processor.number
        self.record = floor.record if mine else None
        workers = range(self.model.workers)
        self.arrived = [[Progress() for _ in tasks] for tasks in self.model.tasks]
        self.done = [[[Progress() for _ in workers] for _ in tasks] for tasks in self.model.tasks]
        self.turns: dict[tuple[int, str, int], Progress] = {}
        self.leaving, self.left = 0, Progress()
        self.groups: list[Group] = []
        self.here: dict[str, Progress] = {}

    def run(self, logs: Mapping[tuple[str, int], Log]) -> Process:
        """Run the block to its end; `logs` has a log for each (role, rank)."""
        self.groups = groups = [Group(self, role, rank, log) for (role, rank), log in logs.items()]
        self.floor.open[self.number] = groups
        if self.model.cycles("enter"):
            yield self.env.timeout(self.model.cycles("enter"))
        processes = [self.env.process(group.run()) for group in groups]
        self.floor.owners.update(zip(processes, ((self.number, n) for n in range(len(groups))), strict=True))
        yield self.env.all_of(processes)
        for process in processes:
            del self.floor.owners[process]
        if self.model.cycles("leave"):
            yield self.env.timeout(self.model.cycles("leave"))
        now = int(self.env.now)
        for log in logs.values():  # groups that ended early waited for the last one
            log.state = "barrier"
            log.mark(now)
            log.state = "data"
        waited = self.leaving - self.leaving // 2 * self.model.schedule.ahead
        if waited > self.left.count:
            yield self.left.reach(self.env, waited)
        now = int(self.env.now)
        for log in logs.values():
            log.mark(now)
            log.state = "tail"
        del self.floor.open[self.number]
        self.floor.ended.append(now + self.floor.skipped)

    def turn(self, n: int, role: str, rank: int) -> Progress:
        """How often group `rank` of a role has been given the turn in segment n."""
        return self.turns.setdefault((n, role, rank), Progress())

    def move(self, transfer: Transfer, who: Who | None, log: Log, carried: Carried) -> None:
        """Carry a transfer out on all units it needs; `done` of `carried` is called when the bytes have arrived."""
        if not transfer.lengths:
            later(self.env, carried.latency, carried.done, carried)
        for name, length in transfer.lengths:
            unit = self.floor.shared.get(name) or self.processor.units[name]
            unit.serve(self.env, who, self.number, length, log, carried.until)


@dataclass(slots=True)
class Group:
    """One warp group of a block: follows the steps of its role."""

    block: Block
    role: str
    rank: int
    log: Log
    at: tuple[Stay, Action, int] | None = None  # visit, step and iteration that it is at
    visit: int = 0  # number of the visit
    turn: int = 0  # round of its steps: each is in the iteration that is so much ahead of it
    flight: simpy.Process | None = None  # the last phase that it issued
    running: list[Execution] = field(default_factory=list)  # phases that have not ended, in order
    synced: int = 0  # barriers that it has come to

    def run(self) -> Process:
        block = self.block
        leads = not self.rank and not self.role
        while (stay := block.course(self.visit)) is not None:
            steps = block.model.actions[stay.part].get(self.role, ())
            if not steps:
                self.visit += 1
                continue
            aheads = [step.ahead for step in steps]
            last, loop = min(aheads), block.model.parts[stay.part].loop is not None
            self.turn = -max(aheads)
            while self.turn < stay.trips - last:  # which a jump makes fewer
                if leads and loop:
                    block.floor.pulse = self
                for step in steps:
                    u = self.turn + step.ahead
                    if 0 <= u < stay.trips:
                        self.at = stay, step, u
                        yield from self.step(stay, step, u)
                self.turn += 1
            end = stay.before[stay.part] + stay.trips
            for step in steps:  # nothing is in flight when the group leaves a segment
                if step.verb == "issue" and step.task is not None and not step.task.phase.copy:
                    self.at = stay, step, stay.trips - 1
                    yield from self.reach(block.done[stay.part][step.task.number][self.rank], end, step.task.cause)
            self.visit += 1
        self.at = None

    # ------------------------------------------------------------------ steps

    def step(self, stay: Stay, step: Action, u: int) -> Process:
        """One step in iteration u of a visit."""
        block, task, n = self.block, step.task, stay.part
        nth = stay.before[n] + u  # of the iterations of all visits
        if step.verb == "sync":
            yield from self.sync(n)
        elif task is None:
            yield from self.pass_turn(n, step, nth)
        elif step.verb == "wait":
            table = block.arrived[n][task.number] if task.phase.copy else block.done[n][task.number][self.rank]
            yield from self.reach(table, nth + 1, task.cause)
            if task.phase.copy:
                yield from self.pause(block.model.hardware.arrival_ps, "data")
        elif task.phase.copy:
            if self.rank == 0:
                yield from self.copy(stay, step, task, u)
            elif step.verb == "run":
                yield from self.reach(block.arrived[n][task.number], nth + 1, "data")
        else:
            work = stay.work(u)[task.number]
            if work.lengths or work.moves:  # else its guards leave all of it out
                yield from self.ready(stay, task, nth)
            execution = Execution(n, task.number, nth, work)
            self.running.append(execution)
            if step.verb == "run":
                yield from self.execute(execution, stay, task, u, self.log)
            else:
                follows = self.after(self.flight, self.execute(execution, stay, task, u, None))
                self.flight = block.env.process(follows)
                block.floor.owners[self.flight] = (block.number, self.role, self.rank, execution)

    def after(self, before: simpy.Process | None, work: Process) -> Process:
        """`work` when `before` has ended: what a group issues is done in order."""
        if before is not None and before.is_alive:
            yield before
        yield from work
        if (own := self.block.env.active_process) is not None:
            del self.block.floor.owners[own]

    def pass_turn(self, n: int, step: Action, nth: int) -> Process:
        block = self.block
        if step.verb == "give":
            order = block.model.parts[n].order.roles
            count = next((r.count for r in order if r.name == self.role), order[-1].count)
            following = block.turn(n, self.role, (self.rank + 1) % count)
            following.end(following.count)
        else:  # group 0 holds the first turn without being given it
            yield from self.reach(block.turn(n, self.role, self.rank), nth + (self.rank > 0), "barrier")
            yield from self.pause(block.model.hardware.turn_ps, "barrier")

    def sync(self, n: int) -> Process:
        """Wait at a barrier of all groups of the role."""
        block = self.block
        order = block.model.parts[n].order.roles
        count = next((r.count for r in order if r.name == self.role), order[-1].count)
        here = block.here.setdefault(self.role, Progress())
        here.end(here.count)
        self.synced += 1
        yield from self.reach(here, self.synced * count, "barrier")
        yield from self.pause(block.model.barrier(count), "barrier")

    def copy(self, stay: Stay, step: Action, task: Task, u: int) -> Process:
        """Issue a copy once all groups have read what was in its buffer, and stored what it loads."""
        block, n = self.block, stay.part
        nth = stay.before[n] + u
        for need in task.needs:
            for freed in block.done[n][need.before]:
                if freed.count < nth - need.distance + 1:
                    yield from self.reach(freed, nth - need.distance + 1, need.cause)
        for part, number in task.freed:
            for freed in block.done[part][number]:
                if freed.count < stay.before[part]:
                    yield from self.reach(freed, stay.before[part], "buffer")
        self.log.mark(int(block.env.now))
        arrived = block.arrived[n][task.number]
        moves = stay.work(u)[task.number].moves
        early = block.warm and u < block.model.parts[n].order.slots.get(task.phase.name, 1)
        there = early and block.model.schedule.ahead
        for k, transfer in enumerate(moves):
            block.floor.add(transfer)
            latency = 0 if early else block.model.latency(transfer)
            done = (lambda: None) if there else (lambda: arrived.end(nth))
            self.move(transfer, self.name(stay, task, u), latency, done, (n, task.number, nth, k))
        if not moves or there:  # guarded out, or outside of its tensor
            arrived.end(nth)
        if step.verb == "run" or not block.model.hardware.copy.asynchronous:
            yield from self.reach(arrived, nth + 1, "data")

    def ready(self, stay: Stay, task: Task, nth: int) -> Process:
        """Wait until what the phase reads is there, and until what it overwrites has been read."""
        block, n = self.block, stay.part
        for need in task.needs:
            target = nth - need.distance + 1
            table = block.arrived[n][need.before] if need.copied else block.done[n][need.before][self.rank]
            if table.count < target:
                yield from self.reach(table, target, need.cause)
        for part, number in task.loaded:
            if block.arrived[part][number].count < stay.before[part]:
                yield from self.reach(block.arrived[part][number], stay.before[part], "data")

    def move(
        self,
        transfer: Transfer,
        who: Who | None,
        latency: int,
        done: Callable[[], None],
        what: tuple[int, int, int, int],
    ) -> None:
        """Carry a transfer out, as the block does, and have it recorded.

        `what` it is: segment, number of the phase, iteration and which of its transfers.
        """
        block = self.block
        if block.record is not None and who is not None:
            done = block.record.flight(block.env, who, transfer, done)
        part, phase, nth, k = what
        carried = Carried(block, part, phase, nth, self.rank, k, latency, done, len(transfer.lengths))
        block.move(transfer, who, self.log, carried)

    def execute(self, execution: Execution, stay: Stay, task: Task, u: int, log: Log | None) -> Process:
        """Book the phase's units, then send its stores on their way.

        `log` is the group's while it waits for the phase, None while the group goes on.  What it waits for comes piece
        by piece; what it has issued is in the queues of the units as a whole.
        """
        block, n = self.block, stay.part
        nth, work = execution.nth, execution.work
        env, units = block.env, block.processor.units
        who, start = self.name(stay, task, u), int(env.now)
        if log is not None:
            log.mark(start)
            log.state, log.who = task.cause, who
        for piece, (lengths, chain) in enumerate(block.model.cut(work, whole=log is None)):
            execution.piece = piece
            now = int(env.now)
            end = now + chain
            if block.floor.scripted:
                yield from self.piece(self.name(stay, task, u, piece), lengths)
            else:
                for name, length in lengths:
                    booked = units[name].book(now, length, self.log, who)
                    if booked > end:
                        end = booked
            yield env.timeout(max(0, end - int(env.now)))
        if work.cost.lag:
            execution.piece = -1
            yield env.timeout(work.cost.lag)
        self.running.remove(execution)
        if log is not None:
            log.mark(int(env.now))
            log.who = None
        if block.record is not None and who is not None:
            block.record.phase(who, start, int(env.now))
        for k, transfer in enumerate(work.moves):
            self.send(transfer, self.name(stay, task, u, k), (n, task.number, nth, k))
        block.done[n][task.number][self.rank].end(nth)

    def piece(self, who: Who | None, lengths: Lengths) -> Process:
        """Book units when the script, if there is one, says that it is `who`'s turn."""
        env = self.block.env
        ends: list[int] = []
        booked = env.event()

        def then(end: int) -> None:
            ends.append(end)
            if len(ends) == len(lengths):
                booked.succeed()

        for name, length in lengths:
            self.block.processor.units[name].serve(env, who, self.block.number, length, self.log, then)
        yield booked
        yield env.timeout(max(0, max(ends) - int(env.now)))

    def send(self, whole: Transfer, who: Who | None, what: tuple[int, int, int, int]) -> None:
        """This group's share of a store's bytes; the block's end waits for their arrival."""
        block = self.block
        part = whole.share(self.rank, block.model.workers)
        if part is not None:
            block.floor.add(part)
            block.leaving += 1
            self.move(part, who, 0, lambda: block.left.end(block.left.count), what)

    # ------------------------------------------------------------------ small parts

    def reach(self, progress: Progress, target: int, cause: Cause) -> Process:
        """Wait until `progress` has reached `target`."""
        if progress.count < target:
            self.log.mark(int(self.block.env.now))
            self.log.state = cause
            yield progress.reach(self.block.env, target)
            self.log.mark(int(self.block.env.now))

    def pause(self, length: int, cause: Cause) -> Process:
        """Do nothing for `length` ps."""
        if length:
            self.log.mark(int(self.block.env.now))
            self.log.state = cause
            yield self.block.env.timeout(length)
            self.log.mark(int(self.block.env.now))

    def name(self, stay: Stay, task: Task, u: int, piece: int = 0) -> Who | None:
        """What a script or a recording calls a request; None where there is none."""
        block, part = self.block, stay.part
        if not block.floor.scripted and block.record is None:
            return None
        turn = sum(n for n, other in zip(stay.before, block.model.parts, strict=True) if other.loop is not None)
        inside = u if block.model.parts[part].loop is not None else 0
        nth = stay.before[part] + u
        return Who(block.number, self.role, self.rank, part, task.phase.name, nth, turn + inside, piece)

    def where(self) -> str:
        """What the group waits for, for a message."""
        if self.at is None:
            return ""
        stay, step, u = self.at
        loop = self.block.model.parts[stay.part].loop
        what = step.verb if step.task is None else f"{step.verb} {step.task.phase.name}"
        of = "" if loop is None else f" of iteration {u} of loop {loop.index}"
        return f'group {self.rank} of role {self.role or "workers"} waits at "{what}"{of}'
