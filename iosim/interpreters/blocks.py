"""Blocks as simpy processes: warp groups that follow the order of their loop on the units of a processor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

from iosim.interpreters.engine import Arbiter, Cause, Log, Progress, Unit, Who, later
from iosim.interpreters.model import Action, Model, Task
from iosim.interpreters.recording import Recorder
from iosim.interpreters.shapes import Iteration, Lengths, Shape, Transfer, Visit

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
    have not.
    """

    env: simpy.Environment
    model: Model
    shared: Mapping[str, Arbiter]
    scripted: bool
    record: Recorder | None = None
    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    open: dict[int, list[Group]] = field(default_factory=dict)

    def add(self, transfer: Transfer) -> None:
        """Count what a transfer moves."""
        key = (transfer.tensor, transfer.direction)
        self.moved[key] = self.moved.get(key, 0) + transfer.bytes


@dataclass(slots=True)
class Stay:
    """A visit of segment number `part`, iteration by iteration.

    `before` has, for each segment, how many iterations the block ran before.
    """

    part: int
    work: Sequence[Iteration]
    before: Sequence[int]


Stays: TypeAlias = Sequence[Stay]  # what a block does


def unroll(shape: Shape, parts: int) -> Stays:
    """The iterations of a shape of so many parts one by one."""
    out: list[Stay] = []
    before = [0] * parts

    def add(items: Shape) -> None:
        for item in items:
            if isinstance(item, Visit):
                out.append(Stay(item.part, [work for n, work in item.stretches for _ in range(n)], tuple(before)))
                before[item.part] += len(out[-1].work)
            else:
                for _ in range(item.times):
                    add(item.body)

    add(shape)
    return out


class Block:
    """One block on one processor.

    Its workers run every segment; the other roles of an order (a producer, say) run their loop only.  A `warm` one
    follows another in a persistent kernel: its first copies were under way before, and only their bytes take time.
    """

    def __init__(self, floor: Floor, processor: Processor, stays: Stays, number: int, *, warm: bool = False) -> None:
        self.floor, self.processor, self.stays, self.number, self.warm = floor, processor, stays, number, warm
        self.env, self.model = floor.env, floor.model
        mine = floor.record is not None and floor.record.processor == processor.number
        self.record = floor.record if mine else None
        workers = range(self.model.workers)
        self.arrived = [[Progress() for _ in tasks] for tasks in self.model.tasks]
        self.done = [[[Progress() for _ in workers] for _ in tasks] for tasks in self.model.tasks]
        self.turns: dict[tuple[int, str, int], Progress] = {}
        self.leaving, self.left = 0, Progress()
        self.here: dict[str, Progress] = {}

    def run(self, logs: Mapping[tuple[str, int], Log]) -> Process:
        """Run the block to its end; `logs` has a log for each (role, rank)."""
        groups = [Group(self, role, rank, log) for (role, rank), log in logs.items()]
        self.floor.open[self.number] = groups
        if self.model.cycles("enter"):
            yield self.env.timeout(self.model.cycles("enter"))
        yield self.env.all_of([self.env.process(group.run()) for group in groups])
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
        self.floor.ended.append(now)

    def turn(self, n: int, role: str, rank: int) -> Progress:
        """How often group `rank` of a role has been given the turn in segment n."""
        return self.turns.setdefault((n, role, rank), Progress())

    def move(self, transfer: Transfer, who: Who | None, log: Log, latency: int, done: Callable[[], None]) -> None:
        """Carry a transfer out on all units it needs; `done` is called when the bytes have arrived."""
        env = self.env
        missing, last = len(transfer.lengths), 0

        def part(end: int) -> None:
            nonlocal missing, last
            missing, last = missing - 1, max(last, end)
            if not missing:
                later(env, last + latency - int(env.now), done)

        if not missing:
            later(env, latency, done)
        for name, length in transfer.lengths:
            unit = self.floor.shared.get(name) or self.processor.units[name]
            unit.serve(env, who, self.number, length, log, part)


@dataclass(slots=True)
class Group:
    """One warp group of a block: follows the steps of its role."""

    block: Block
    role: str
    rank: int
    log: Log
    at: tuple[Stay, Action, int] | None = None  # visit, step and iteration that it is at
    flight: simpy.Process | None = None  # the last phase that it issued
    synced: int = 0  # barriers that it has come to

    def run(self) -> Process:
        for stay in self.block.stays:
            steps = self.block.model.actions[stay.part].get(self.role, ())
            trips = len(stay.work)
            aheads = [step.ahead for step in steps] or [0]
            for t in range(-max(aheads), trips - min(aheads)):
                for step in steps:
                    u = t + step.ahead
                    if 0 <= u < trips:
                        self.at = stay, step, u
                        yield from self.step(stay, step, u)
            end = stay.before[stay.part] + trips
            for step in steps:  # nothing is in flight when the group leaves a segment
                if step.verb == "issue" and step.task is not None and not step.task.phase.copy:
                    self.at = stay, step, trips - 1
                    yield from self.reach(self.block.done[stay.part][step.task.number][self.rank], end, step.task.cause)
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
            work = stay.work[u][task.number]
            if work.lengths or work.moves:  # else its guards leave all of it out
                yield from self.ready(stay, task, nth)
            if step.verb == "run":
                yield from self.execute(stay, task, u, self.log)
            else:
                self.flight = block.env.process(self.after(self.flight, self.execute(stay, task, u, None)))

    @staticmethod
    def after(before: simpy.Process | None, work: Process) -> Process:
        """`work` when `before` has ended: what a group issues is done in order."""
        if before is not None and before.is_alive:
            yield before
        yield from work

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
        moves = stay.work[u][task.number].moves
        early = block.warm and u < block.model.parts[n].order.slots.get(task.phase.name, 1)
        there = early and block.model.schedule.ahead
        for transfer in moves:
            block.floor.add(transfer)
            latency = 0 if early else block.model.latency(transfer)
            done = (lambda: None) if there else (lambda: arrived.end(nth))
            self.move(transfer, self.name(stay, task, u), latency, done)
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

    def move(self, transfer: Transfer, who: Who | None, latency: int, done: Callable[[], None]) -> None:
        """Carry a transfer out, as the block does, and have it recorded."""
        block = self.block
        if block.record is not None and who is not None:
            done = block.record.flight(block.env, who, transfer, done)
        block.move(transfer, who, self.log, latency, done)

    def execute(self, stay: Stay, task: Task, u: int, log: Log | None) -> Process:
        """Book the phase's units, then send its stores on their way.

        `log` is the group's while it waits for the phase, None while the group goes on.  What it waits for comes piece
        by piece; what it has issued is in the queues of the units as a whole.
        """
        block, n = self.block, stay.part
        nth, work = stay.before[n] + u, stay.work[u][task.number]
        env, units = block.env, block.processor.units
        who, start = self.name(stay, task, u), int(env.now)
        if log is not None:
            log.mark(start)
            log.state, log.who = task.cause, who
        for piece, (lengths, chain) in enumerate(block.model.cut(work, whole=log is None)):
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
            yield env.timeout(work.cost.lag)
        if log is not None:
            log.mark(int(env.now))
            log.who = None
        if block.record is not None and who is not None:
            block.record.phase(who, start, int(env.now))
        for k, transfer in enumerate(work.moves):
            self.send(transfer, self.name(stay, task, u, k))
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

    def send(self, whole: Transfer, who: Who | None) -> None:
        """This group's share of a store's bytes; the block's end waits for their arrival."""
        block = self.block
        part = whole.share(self.rank, block.model.workers)
        if part is not None:
            block.floor.add(part)
            block.leaving += 1
            self.move(part, who, 0, lambda: block.left.end(block.left.count))

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
