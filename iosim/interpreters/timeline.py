"""The timeline: a tile program as discrete events on a machine.

Two fidelities.  `chip` simulates every processor and every block.  `fair` simulates one processor for each class of
block at its fair share of the bandwidth that processors share, and places the blocks by their durations.  In both,
for every unit, busy time and stalls by cause add up to instances x makespan.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias, get_args

import simpy

from iosim.errors import InputError, nearest
from iosim.hardware import Hardware
from iosim.interpreters.blocks import Block, Floor, Iterations, Process, Processor, unroll
from iosim.interpreters.engine import CAUSES, Arbiter, Bucket, FairShare, Log, Script, Turns, Unit
from iosim.interpreters.model import Model, Shape
from iosim.memory.cache import DeviceTraffic
from iosim.memory.onchip import CapacityError, Footprint
from iosim.program import Program
from iosim.schedule import Schedule

Fidelity: TypeAlias = Literal["fair", "chip"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

SHARED = ("dram", "l2")
OWN = ("copy", "sram", "matrix", "exp", "vector")
import os
OUT_OF_STEP = float(os.environ.get('DEPTH','0.5'))
LIST_LIMIT = 200_000  # blocks that are placed one by one; for more, Graham's bound is tight enough


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Busy time and stalls of all instances of a unit, in ps; together they are instances x makespan."""

    instances: int
    busy_ps: int
    stalls_ps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's run, launch included.  `resident` blocks share a processor, of which `processors` get one."""

    name: str
    makespan_ps: int
    launch_ps: int
    blocks: int
    resident: int
    processors: int
    units: Mapping[str, UnitTime]
    footprint: Footprint
    spread: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A program's run on a machine.  Times are in ps; `moved` are bytes by (tensor, direction), as the blocks asked."""

    fidelity: Fidelity
    kernels: tuple[KernelTime, ...]
    moved: Mapping[tuple[str, str], int]
    script: Script | None = field(default=None, repr=False)

    @property
    def makespan_ps(self) -> int:
        return sum(k.makespan_ps for k in self.kernels)

    @property
    def seconds(self) -> float:
        return self.makespan_ps / 1e12

    @property
    def units(self) -> dict[str, UnitTime]:
        """Each unit over all kernels."""
        out = {}
        for name in self.kernels[0].units:
            parts = [k.units[name] for k in self.kernels]
            stalls: dict[str, int] = {cause: sum(p.stalls_ps[cause] for p in parts) for cause in CAUSES}
            out[name] = UnitTime(parts[0].instances, sum(p.busy_ps for p in parts), stalls)
        return out

    @property
    def bound(self) -> str:
        """The unit that is busy for the largest share of the run, or "launch" where launching takes longer."""
        shares = {name: u.busy_ps / u.instances for name, u in self.units.items()}
        shares["launch"] = sum(k.launch_ps for k in self.kernels)
        return max(shares, key=lambda name: shares[name])


def timeline(
    program: Program,
    schedule: Schedule,
    hardware: Hardware,
    traffic: DeviceTraffic,
    *,
    fidelity: Fidelity = "fair",
    record: bool = False,
    script: Script | None = None,
) -> Timeline:
    """Run `program` on `hardware`; `traffic` says how much of each load and store reaches DRAM.

    With `record` the result carries the order in which every unit served (`chip` only); with `script` that order is
    kept, which makes the run monotone in every rate.  Raises CapacityError for a block that does not fit, InputError
    for an unknown fidelity or a machine that lacks a number which time needs.
    """
    if fidelity not in FIDELITIES:
        raise InputError(f"fidelity: {fidelity!r} is not one of {', '.join(FIDELITIES)}{nearest(fidelity, FIDELITIES)}")
    if missing := hardware.missing_for_time():
        raise InputError(f"{hardware.name}: no time without {', '.join(missing)}, which the profile does not know")
    made = Script() if record else None
    moved: dict[tuple[str, str], int] = {}
    kernels = []
    for kernel in program.kernels:
        flows = tuple(f for f in traffic.flows if f.flow.kernel == kernel.name)
        model = Model(kernel, schedule, hardware, flows)
        if not model.footprint.resident:
            raise CapacityError(model.footprint.complaint(hardware))
        run = _Chip(model, made, script).run() if fidelity == "chip" else _Fair(model).run()
        kernels.append(run.time)
        for key, count in run.moved.items():
            moved[key] = moved.get(key, 0) + count
    return Timeline(fidelity, tuple(kernels), moved, made)


@dataclass(frozen=True, slots=True)
class _Run:
    time: KernelTime
    moved: Mapping[tuple[str, str], int]


def _kernel_time(
    model: Model, makespan: int, processors: int, units: Mapping[str, UnitTime], spread: str = ""
) -> KernelTime:
    """Add the launch, during which every unit stands still."""
    launch = model.hardware.launch_ps
    with_launch = {
        name: UnitTime(u.instances, u.busy_ps, {**u.stalls_ps, "launch": u.stalls_ps["launch"] + launch * u.instances})
        for name, u in units.items()
    }
    return KernelTime(
        name=model.kernel.name,
        makespan_ps=makespan + launch,
        launch_ps=launch,
        blocks=model.kernel.blocks,
        resident=model.footprint.resident,
        processors=processors,
        units=with_launch,
        footprint=model.footprint,
        spread=spread,
    )


def _logs(model: Model) -> dict[tuple[str, int], Log]:
    return {key: Log() for key in model.groups}


def _finish(floor: Floor, scripted: bool = False) -> int:
    """Run all events; returns the end in ps.  Raises InputError where blocks wait for each other, or for a script."""
    floor.env.run()
    if floor.open:
        number, groups = next(iter(floor.open.items()))
        waits = "; ".join(text for group in groups if (text := group.where()))
        why = "the script is of another run" if scripted else "the order never ends"
        raise InputError(f"kernel {floor.model.kernel.name}: {why}: in block {number} {waits}")
    return int(floor.env.now)


def _unit_time(units: Sequence[Unit]) -> UnitTime:
    stalls: dict[str, int] = {cause: sum(u.stalls[cause] for u in units) for cause in CAUSES}
    return UnitTime(len(units), sum(u.busy for u in units), stalls)


# ---------------------------------------------------------------- every processor


class _Chip:
    """All processors and all blocks, the memory served in turns."""

    def __init__(self, model: Model, made: Script | None, script: Script | None) -> None:
        self.model, self.made, self.script = model, made, script
        self.count = model.hardware.processors or 0
        self.named = made is not None or script is not None

    def turns(self, unit: str) -> Turns | None:
        name = f"{self.model.kernel.name}/{unit}"
        if self.script is not None:
            return Turns(list(self.script.served.get(name, [])), scripted=True)
        if self.made is not None:
            return Turns(self.made.served.setdefault(name, []), scripted=False)
        return None

    def run(self) -> _Run:
        model = self.model
        env = simpy.Environment()
        shared = {name: Arbiter(name, self.turns(name)) for name in SHARED}
        floor = Floor(env, model, shared, self.named)
        processors = [
            Processor(n, {name: Unit(name, self.turns(f"{name}{n}")) for name in OWN}) for n in range(self.count)
        ]
        queue: Iterator[int] = iter(range(model.kernel.blocks))
        iterations = [unroll(kind.shape) for kind in model.classes]
        kinds = [iterations[c] for c in model.class_of_blocks().tolist()]
        logs = []
        for slot in range(model.footprint.resident):
            for processor in processors:
                own = _logs(model)
                logs.append(own)
                take = self.blocks_of(f"{model.kernel.name}/{processor.number}.{slot}", queue)
                env.process(_slot(floor, processor, ((n, kinds[n]) for n in take), own))
        end = _finish(floor, self.script is not None)
        return self.books(end, processors, shared, logs, floor)

    def blocks_of(self, slot: str, queue: Iterator[int]) -> Iterator[int]:
        """The blocks that a slot takes: the next of the grid, or those of the script."""
        if self.script is not None:
            yield from self.script.placed.get(slot, [])
            return
        for block in queue:
            if self.made is not None:
                self.made.placed.setdefault(slot, []).append(block)
            yield block

    def books(
        self,
        end: int,
        processors: Sequence[Processor],
        shared: Mapping[str, Arbiter],
        logs: Sequence[Mapping[tuple[str, int], Log]],
        floor: Floor,
    ) -> _Run:
        first = [next(iter(own.values())) for own in logs]  # one worker of each slot, slot by slot
        for processor in processors:
            for unit in processor.units.values():
                unit.idle(end, first[processor.number])
        busiest = max(first, key=lambda log: log.ends[-1] if log.causes[-1] != "tail" else 0)
        for unit in shared.values():
            unit.idle(end, busiest)
        units = {name: _unit_time([u]) for name, u in shared.items()}
        units |= {name: _unit_time([p.units[name] for p in processors]) for name in OWN}
        used = min(self.count, self.model.kernel.blocks)
        return _Run(_kernel_time(self.model, end, used, units), floor.moved)


# ---------------------------------------------------------------- one processor for each class


Kinds: TypeAlias = tuple[tuple[int, int], ...]  # (processors, resident blocks of each)


@dataclass(frozen=True, slots=True)
class _Sample:
    """How `blocks` alike blocks run on the chip, one processor simulated of each kind.

    `first` is how long one round of them takes, `steady` how long a further one, in ps.  `occupied` is the time, summed
    over processors, for which they have a block in a round; the last blocks of the slots simulated end at `ends`.
    `stalls` of each unit are sums over processors.
    """

    blocks: int
    first: int
    steady: int
    occupied: int
    ends: tuple[int, ...]
    stalls: Mapping[str, Mapping[str, int]]


class _Fair:
    """One processor of each kind, at its fair share of the memory."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.count = model.hardware.processors or 0
        self.known: dict[tuple[Shape, Kinds, int, bool], _Sample] = {}

    def run(self) -> _Run:
        kernel = self.model.kernel
        active = min(self.count, kernel.blocks)
        resident = min(self.model.footprint.resident, -(-kernel.blocks // active))
        place = self.waves if len(self.model.classes) == 1 else self.mixed
        parts, makespan, occupied = place(active, resident)
        busy: dict[str, int] = dict.fromkeys((*SHARED, *OWN), 0)
        moved: dict[tuple[str, str], int] = {}
        for kind in self.model.classes:
            one = self.model.totals(kind.shape)
            for name, length in one.busy.items():
                busy[name] += length * kind.count
            for key, bytes_ in one.moved.items():
                moved[key] = moved.get(key, 0) + bytes_ * kind.count
        units = {name: self.books(name, busy[name], parts, makespan, occupied) for name in busy}
        return _Run(_kernel_time(self.model, makespan, active, units), moved)

    def waves(self, active: int, resident: int) -> tuple[list[tuple[_Sample, int]], int, int]:
        """Alike blocks run in waves; the last one spreads over the processors.

        Returns the samples with their numbers of blocks, the makespan, and the time that processors have a block.
        """
        kind = self.model.classes[0]
        full, rest = divmod(kind.count, active * resident)
        parts, makespan, occupied = [], 0, 0
        kinds = spread(rest, self.count)
        if full:
            sample = self.sample(kind.shape, ((active, resident),), min(full, 2))
            kinds = spread_after(rest, active, sample.ends, request(self.model, kind.shape))
            parts.append((sample, full * active * resident))
            makespan = sample.first + (full - 1) * sample.steady
            occupied = makespan * active
        if rest:
            sample = self.sample(kind.shape, kinds, 1, fresh=not full)
            parts.append((sample, rest))
            makespan += sample.first
            occupied += sample.occupied
        return parts, makespan, occupied

    def mixed(self, active: int, resident: int) -> tuple[list[tuple[_Sample, int]], int, int]:
        """Blocks of several classes are placed in launch order, each on the slot that is free first."""
        slots, blocks = active * resident, self.model.kernel.blocks
        rounds = 2 if blocks > slots else 1
        samples = [self.sample(kind.shape, ((active, resident),), rounds) for kind in self.model.classes]
        parts = [(s, kind.count) for s, kind in zip(samples, self.model.classes, strict=True)]
        start = max(s.first - s.steady for s in samples)
        total = sum(s.steady * number for s, number in parts)
        if blocks <= LIST_LIMIT:
            spans = [s.steady for s in samples]
            makespan = list_schedule([spans[c] for c in self.model.class_of_blocks().tolist()], slots)
        else:
            makespan = -(-total // slots) + max(s.steady for s in samples)
        return parts, start + makespan, start * active + total // resident

    def sample(self, shape: Shape, kinds: Kinds, rounds: int, *, fresh: bool = True) -> _Sample:
        """Simulate `rounds` rounds of blocks on one processor of each kind; `fresh`: nothing ran before them."""
        key = (shape, kinds, rounds, fresh)
        if key not in self.known:
            self.known[key] = self.simulate(shape, kinds, rounds, fresh)
        return self.known[key]

    def simulate(self, shape: Shape, kinds: Kinds, rounds: int, fresh: bool) -> _Sample:
        env = simpy.Environment()
        floor = Floor(env, self.model, {}, named=False)
        deep = int(request(self.model, shape) * sum(weight * resident for weight, resident in kinds) * OUT_OF_STEP)
        buckets = {name: Bucket(deep, 0 if fresh else -deep) for name in SHARED}
        alone = len(kinds) == 1 and kinds[0][1] == 1
        processors: list[Processor] = []
        for n, (weight, _) in enumerate(kinds):
            units: dict[str, Unit] = {name: Unit(name) for name in OWN}
            for name in SHARED:
                units[name] = FairShare(name, bucket=buckets[name], weight=weight, alone=alone)
            processors.append(Processor(n, units))
        logs: list[list[Mapping[tuple[str, int], Log]]] = [[] for _ in kinds]
        iterations, numbers = unroll(shape), count()
        for slot in range(max(resident for _, resident in kinds)):  # as the hardware launches: first one for each
            for processor, (_, resident) in zip(processors, kinds, strict=True):
                if slot < resident:
                    own = _logs(self.model)
                    logs[processor.number].append(own)
                    env.process(_slot(floor, processor, ((next(numbers), iterations) for _ in range(rounds)), own))
        end = _finish(floor)
        return self.summary(kinds, rounds, end, floor, processors, logs)

    def summary(
        self,
        kinds: Kinds,
        rounds: int,
        end: int,
        floor: Floor,
        processors: Sequence[Processor],
        logs: Sequence[Sequence[Mapping[tuple[str, int], Log]]],
    ) -> _Sample:
        """What a simulation showed; a round takes no less than its units are busy."""
        slots = sum(resident for _, resident in kinds)
        stalls: dict[str, dict[str, int]] = {name: dict.fromkeys(CAUSES, 0) for name in (*SHARED, *OWN)}
        busy = dict.fromkeys(SHARED, 0)
        least = occupied = 0
        for processor, own, (weight, _) in zip(processors, logs, kinds, strict=True):
            worker = next(iter(own[0].values()))
            occupied += weight * max(log.ends[-1] for slot in own for log in slot.values())
            for name, unit in processor.units.items():
                unit.idle(end, worker)
                if name in SHARED:
                    busy[name] += unit.busy * weight
                else:
                    least = max(least, unit.busy)
                for cause, length in unit.stalls.items():
                    stalls[name][cause] += length * weight
        least = -(-max(least, *busy.values()) // rounds)
        first = floor.ended[slots - 1]
        return _Sample(
            blocks=rounds * sum(weight * resident for weight, resident in kinds),
            first=max(first, least),
            steady=max(end - first, least) if rounds > 1 else end,
            occupied=occupied // rounds,
            ends=tuple(floor.ended[-slots:]),
            stalls=stalls,
        )

    def books(
        self, name: str, busy: int, parts: Sequence[tuple[_Sample, int]], makespan: int, occupied: int
    ) -> UnitTime:
        """Busy time is counted; idle time while processors have a block goes to the causes that the samples saw, in
        their proportion; the rest is the tail of the grid."""
        instances = 1 if name in SHARED else self.count
        idle = instances * makespan - busy
        seen = {cause: sum(s.stalls[name][cause] * number // s.blocks for s, number in parts) for cause in CAUSES}
        total = sum(seen.values())
        inside = idle * occupied // (self.count * makespan) if name in SHARED else max(0, occupied - busy)
        stalls: dict[str, int] = {
            cause: min(inside, idle) * time // total if total else 0 for cause, time in seen.items()
        }
        stalls["tail"] += idle - sum(stalls.values())
        return UnitTime(instances, busy, stalls)


def spread(blocks: int, processors: int) -> Kinds:
    """How many processors get how many of `blocks`, at most one more than others."""
    each, more = divmod(blocks, processors)
    return tuple(kind for kind in ((more, each + 1), (processors - more, each)) if kind[0] and kind[1])


def spread_after(blocks: int, processors: int, ends: Sequence[int], step: int) -> Kinds:
    """How many processors get how many of `blocks`, fewer than there are slots, if slots take them as they get free.

    The slots of a processor get free at `ends`, those of the next one `step` ps later.
    """
    free = sorted((end + n * step, n) for n in range(processors) for end in ends)
    each = Counter(Counter(n for _, n in free[:blocks]).values())
    return tuple((each[number], number) for number in sorted(each, reverse=True))


def request(model: Model, shape: Shape) -> int:
    """What one iteration of a loop of one block asks of the busiest shared unit, in ps; of the block without loops.

    Requests that processors make at one time are served one after another, so that they fall out of step by as much.
    """
    loops = [stretches for part, stretches in zip(model.parts, shape, strict=True) if part.loop is not None]
    asked = [
        sum(length for work in iteration for move in work.moves for name, length in move.lengths if name == unit)
        for unit in SHARED
        for stretches in loops or shape
        for _, iteration in stretches
    ]
    return max(asked, default=0)


def _slot(
    floor: Floor,
    processor: Processor,
    take: Iterable[tuple[int, Iterations]],
    logs: Mapping[tuple[str, int], Log],
) -> Process:
    """A place for one block on a processor: runs the blocks it takes one after another."""
    for log in logs.values():
        log.state = "tail"
    yield floor.env.timeout(0)  # all slots exist before the first takes a block
    for number, iterations in take:
        for log in logs.values():
            log.mark(int(floor.env.now))
            log.state = "data"
        yield from Block(floor, processor, iterations, number).run(logs)


def list_schedule(spans: Sequence[int], slots: int) -> int:
    """Makespan of jobs taken in order, each by the slot that is free first."""
    free = [0] * min(slots, len(spans))
    for span in spans:
        heapq.heapreplace(free, free[0] + span)
    return max(free)
