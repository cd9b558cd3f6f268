"""The timeline: a tile program as discrete events on a machine.

Two fidelities.  `chip` simulates every processor and every block.  `fair` simulates one processor for each class of
block at its fair share of the bandwidth that processors share, and places the blocks by their durations.  In both,
for every unit, busy time and stalls by cause add up to instances x makespan.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, groupby
from math import ceil
from typing import Literal, TypeAlias, get_args

import simpy

from iosim.errors import InputError, nearest
from iosim.hardware import Hardware, Power
from iosim.interpreters.blocks import Block, Floor, Process, Processor, Stays, unroll
from iosim.interpreters.engine import CAUSES, Arbiter, Bucket, FairShare, Log, Script, Spell, Turns, Unit
from iosim.interpreters.model import Iteration, Model, Repeat, Shape, Visit, visits
from iosim.interpreters.recording import Recorder, Recording, Watch, lives
from iosim.memory.cache import DeviceTraffic, DramFlow
from iosim.memory.onchip import CapacityError, Footprint, on_matrix_unit
from iosim.program import Compute, Kernel, Program, walk
from iosim.schedule import Schedule

Fidelity: TypeAlias = Literal["fair", "chip"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

SHARED = ("dram", "l2")
OWN = ("copy", "sram", "matrix", "exp", "alu", "vector", "issue")
OUT_OF_STEP = (2, 5)  # of a request of all processors, see `_Fair.simulate`
LONG = 32  # alike iterations of a loop that `fair` simulates one by one; more are extrapolated from 16 and 32
LONG_OUTER = 8  # the same for a loop that has loops inside; more are extrapolated from 4 and 8
CLOCK_STEPS = 4  # at most, in search of the clock that the power limit allows
LIST_LIMIT = 200_000  # blocks that are placed one by one; for more, Graham's bound is tight enough


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Busy time and stalls of all instances of a unit, in ps; together they are instances x makespan."""

    instances: int
    busy_ps: int
    stalls_ps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's run, launch included.  `resident` blocks share a processor, of which `processors` get one.

    `spread_pct` says how far the `chip` fidelity may be from this time; 0 where this is it.
    """

    name: str
    makespan_ps: int
    launch_ps: int
    blocks: int
    resident: int
    processors: int
    units: Mapping[str, UnitTime]
    footprint: Footprint
    spread_pct: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A program's run on a machine.  Times are in ps; `moved` are bytes by (tensor, direction), as the blocks asked.

    `recordings` are by kernel, of what was watched.
    """

    fidelity: Fidelity
    kernels: tuple[KernelTime, ...]
    moved: Mapping[tuple[str, str], int]
    script: Script | None = field(default=None, repr=False)
    recordings: Mapping[str, Recording] = field(default_factory=dict, repr=False)

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
    watch: Watch | None = None,
) -> Timeline:
    """Run `program` on `hardware`; `traffic` says how much of each load and store reaches DRAM.

    With `record` the result carries the order in which every unit served (`chip` only); with `script` that order is
    kept, which makes the run monotone in every rate.  `watch` asks for recordings, which simulations of their own make:
    in `fair` of a processor full of alike blocks, the first that it gets.  Raises CapacityError for a block that does
    not fit, InputError for an unknown fidelity or a machine that lacks a number which time needs.
    """
    if fidelity not in FIDELITIES:
        raise InputError(f"fidelity: {fidelity!r} is not one of {', '.join(FIDELITIES)}{nearest(fidelity, FIDELITIES)}")
    if missing := hardware.with_units(schedule.units).missing_for_time():
        raise InputError(f"{hardware.name}: no time without {', '.join(missing)}, which the profile does not know")
    made = Script() if record else None
    moved: dict[tuple[str, str], int] = {}
    kernels = []
    recordings: dict[str, Recording] = {}
    for kernel in program.kernels:
        flows = tuple(f for f in traffic.flows if f.flow.kernel == kernel.name)
        own = schedule.of(kernel.name)
        attempts: list[Script] = []  # one for each clock that is tried

        def at(
            machine: Hardware,
            kernel: Kernel = kernel,
            own: Schedule = own,
            flows: tuple[DramFlow, ...] = flows,
            attempts: list[Script] = attempts,
        ) -> _Run:
            model = Model(kernel, own, machine, flows)
            if not model.footprint.resident:
                raise CapacityError(model.footprint.complaint(machine))
            if fidelity == "fair":
                return _Fair(model).run()
            if record:
                attempts.append(Script())
            return _Chip(model, attempts[-1] if record else None, script).run()

        run = _at_its_clock(kernel, hardware.with_units(own.units), at)
        kernels.append(run.time)
        if watch is not None and watch.kernel in (None, kernel.name):
            recordings[kernel.name] = (_Fair(run.model) if fidelity == "fair" else _Chip(run.model)).record(watch)
        if made is not None and attempts:
            made.served |= attempts[-1].served
            made.placed |= attempts[-1].placed
        for key, bytes_ in run.moved.items():
            moved[key] = moved.get(key, 0) + bytes_
    return Timeline(fidelity, tuple(kernels), moved, made, recordings)


def kernel_at_its_clock(
    kernel: Kernel,
    hardware: Hardware,
    at: Callable[[Hardware], Model],
    samples: Samples | None = None,
    long: int = LONG,
    fidelity: Fidelity = "fair",
    first: int | None = None,
    step_hz: int = 10**6,
) -> tuple[KernelTime, Mapping[tuple[str, str], int]]:
    """The time of a kernel, and the bytes that its blocks ask for, by (tensor, direction).

    `at` makes its model for a machine at a clock; a body like that of `kernel` is what it runs.  `samples` keeps what
    was simulated for further kernels with the same phases and tiles, one and the same `long`: see LONG.  Clocks below
    the ceiling are multiples of `step_hz`, and the search for the one that power allows begins with `first`.
    """

    def run(machine: Hardware) -> _Run:
        model = at(machine)
        if fidelity == "chip":
            return _Chip(model).run()
        fair = _Fair(model, long)
        if samples is not None:
            key = (machine.clock_hz, model.schedule.persistent, model.footprint.resident, len(fair.alike) > 1)
            fair.known = samples.setdefault(key, fair.known)
        return fair.run()

    done = _at_its_clock(kernel, hardware, run, first=first, step_hz=step_hz)
    return done.time, done.moved


def _at_its_clock(
    kernel: Kernel,
    hardware: Hardware,
    at: Callable[[Hardware], _Run],
    first: int | None = None,
    step_hz: int = 10**6,
) -> _Run:
    """The run of a kernel at the clock that it can hold, a multiple of `step_hz`; `first` is one to begin with.

    Processors that execute matrix instructions have a ceiling of their own, and board power grows with the cube of the
    clock and with the share of the matrix unit that is at work, which depends on the clock in turn.
    """
    products = any(isinstance(n, Compute) and n.op == "matmul" and on_matrix_unit(n) for n, _ in walk(kernel.body))
    ceiling = (hardware.matrix_hz if products else hardware.boost_hz) or hardware.clock_hz or 0
    clock = min(first or ceiling, ceiling)
    run = at(hardware.at_clock(clock))
    power = hardware.power
    for _ in range(CLOCK_STEPS):
        if power is None or not products:
            break
        watts = _watts_per_ghz3(run, hardware.at_clock(clock), power)
        ghz = (power.limit_w / watts) ** (1 / 3)
        new = min(ceiling, round(ghz * 1000 * 10**6 / step_hz) * step_hz)
        if abs(new - clock) < clock / 200:
            break
        clock = new
        run = at(hardware.at_clock(clock))
    return run


def _watts_per_ghz3(run: _Run, hardware: Hardware, power: Power) -> float:
    """Board power of a run, for a clock of 1 GHz."""
    units, time = run.time.units, run.time.makespan_ps - run.time.launch_ps
    matrix, issue = (units[name].busy_ps / (time * units[name].instances) for name in ("matrix", "issue"))
    main, own = (unit.rates.get("fp16", 1) for unit in (hardware.matrices[0], hardware.matrix))
    moved = sum(bytes_ * (1 + (direction == "add")) for (_, direction), bytes_ in run.moved.items())  # an add is two
    clocks = time * units["issue"].instances * (hardware.clock_hz or 1) / 10**12
    return (
        power.idle_w_per_ghz3
        + power.matrix_w_per_ghz3 * matrix * own / main * hardware.matrix.power_factor
        + power.vector_w_per_ghz3 * (issue - matrix * hardware.matrix.issue_share)
        + power.l2_w_per_ghz3 * moved / clocks
    )


@dataclass(frozen=True, slots=True)
class _Run:
    model: Model
    time: KernelTime
    moved: Mapping[tuple[str, str], int]


def _kernel_time(
    model: Model, makespan: int, processors: int, units: Mapping[str, UnitTime], spread_pct: int = 0
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
        spread_pct=spread_pct,
    )


def _logs(model: Model, watched: bool = False) -> dict[tuple[str, int], Log]:
    return {key: Log(spans=[] if watched else None) for key in model.groups}


def _finish(floor: Floor, scripted: bool = False) -> int:
    """Run all events, or those that a recording wants; returns the end in ps.

    Raises InputError where blocks wait for each other, or for a script.
    """
    while floor.record is not None and not floor.record.enough and floor.env.peek() < float("inf"):
        floor.env.step()
    if floor.record is not None and floor.record.enough:
        return int(floor.env.now)
    floor.env.run()
    if floor.open:
        number, groups = next(iter(floor.open.items()))
        waits = "; ".join(text for group in groups if (text := group.where()))
        why = "the script is of another run" if scripted else "the order never ends"
        raise InputError(f"kernel {floor.model.kernel.name}: {why}: in block {number} {waits}")
    return int(floor.env.now)


def _recording(
    model: Model,
    recorder: Recorder,
    turns: int,
    weight: int,
    end: int,
    units: Mapping[str, Unit],
    chip: Mapping[str, Sequence[tuple[int, int]]],
    logs: Sequence[Mapping[tuple[str, int], Log]],
) -> Recording:
    """What a recorder and the units and logs of its processor have seen until `end`; `logs` are those of each slot."""
    whole = not recorder.enough
    for own in logs:
        for log in own.values():
            log.mark(end)
    return Recording(
        kernel=model.kernel.name,
        processor=recorder.processor,
        weight=weight,
        clock_hz=model.hardware.clock_hz or 0,
        launch_ps=model.hardware.launch_ps,
        end=end,
        whole=whole,
        turns=turns,
        blocks=tuple(dict.fromkeys(r.who.block for r in recorder.phases)),
        units={name: tuple(unit.spans or ()) for name, unit in units.items()},
        chip={name: tuple(spans) for name, spans in chip.items()},
        groups={(slot, *key): tuple(log.spans or ()) for slot, own in enumerate(logs) for key, log in own.items()},
        phases=tuple(recorder.phases),
        flights=tuple(recorder.flights),
        lives=tuple(lives(model, recorder, end, whole)),
        sram_bytes=model.footprint.sram_bytes,
        sram_capacity=model.hardware.sram.capacity_bytes,
    )


def _unit_time(units: Sequence[Unit]) -> UnitTime:
    stalls: dict[str, int] = {cause: sum(u.stalls[cause] for u in units) for cause in CAUSES}
    return UnitTime(len(units), sum(u.busy for u in units), stalls)


# ---------------------------------------------------------------- every processor


class _Chip:
    """All processors and all blocks, the memory served in turns."""

    def __init__(self, model: Model, made: Script | None = None, script: Script | None = None) -> None:
        self.model, self.made, self.script = model, made, script
        self.count = model.hardware.processors or 0
        self.scripted = made is not None or script is not None

    def turns(self, unit: str) -> Turns | None:
        name = f"{self.model.kernel.name}/{unit}"
        if self.script is not None:
            return Turns(list(self.script.served.get(name, [])), scripted=True)
        if self.made is not None:
            return Turns(self.made.served.setdefault(name, []), scripted=False)
        return None

    def run(self) -> _Run:
        floor, processors, logs = self.start(None)
        end = _finish(floor, self.script is not None)
        return self.books(end, processors, floor.shared, [own for slot in logs for own in slot], floor)

    def start(
        self, recorder: Recorder | None
    ) -> tuple[Floor, Sequence[Processor], Sequence[Sequence[Mapping[tuple[str, int], Log]]]]:
        """All processors with their slots, ready to run; the logs of each slot of each processor, slot by slot."""
        model = self.model
        env = simpy.Environment()
        watched = None if recorder is None else recorder.processor
        shared = {name: Arbiter(name, self.turns(name), spans=None if recorder is None else []) for name in SHARED}
        floor = Floor(env, model, shared, self.scripted, recorder)
        processors = [
            Processor(
                n, {name: Unit(name, self.turns(f"{name}{n}"), spans=[] if n == watched else None) for name in OWN}
            )
            for n in range(self.count)
        ]
        queue: Iterator[int] = iter(range(model.kernel.blocks))
        stays = [unroll(kind.shape, len(model.parts)) for kind in model.classes]
        kinds = [stays[c] for c in model.class_of_blocks().tolist()]
        logs: list[list[Mapping[tuple[str, int], Log]]] = []
        for slot in range(model.footprint.resident):
            logs.append([])
            for processor in processors:
                own = _logs(model, processor.number == watched)
                logs[-1].append(own)
                take = self.blocks_of(f"{model.kernel.name}/{processor.number}.{slot}", queue)
                start = model.hardware.start_ps * (slot * self.count + processor.number)
                env.process(_slot(floor, processor, ((n, kinds[n]) for n in take), own, start))
        return floor, processors, logs

    def record(self, watch: Watch) -> Recording:
        """One processor among all: the one asked for, or that of a block among the first that start.

        Raises InputError for a processor or block that is none of them.
        """
        first = min(self.count * self.model.footprint.resident, self.model.kernel.blocks)
        block = watch.processor if watch.block is None else watch.block
        block = block or 0
        if watch.block is not None and not 0 <= block < first:
            raise InputError(f"block: {block} is not one of 0 to {first - 1}, which kernel {self.model.kernel.name} "
                             "starts with; the fidelity chip shows those")  # fmt: skip
        if watch.block is None and not 0 <= block < min(self.count, first):
            raise InputError(f"processor: {block} is not one of 0 to {min(self.count, first) - 1}, which have blocks")
        number = block % self.count
        recorder = Recorder(number, self.model.workers * len(range(number, first, self.count)), watch.until)
        floor, processors, logs = self.start(recorder)
        end = _finish(floor)
        if not recorder.enough:
            self.books(end, processors, floor.shared, [own for slot in logs for own in slot], floor)
        units = {**floor.shared, **processors[number].units}
        chip = {
            name: [(s.start, s.end) for s in unit.spans or () if s.cause is None] for name, unit in floor.shared.items()
        }
        kinds, classes = self.model.class_of_blocks().tolist(), self.model.classes
        turns = max(self.model.iterations(classes[kinds[n]].shape) for n in range(number, first, self.count))
        return _recording(self.model, recorder, turns, 1, end, units, chip, [slot[number] for slot in logs])

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
        return _Run(self.model, _kernel_time(self.model, end, used, units), floor.moved)


# ---------------------------------------------------------------- one processor for each class


Kinds: TypeAlias = tuple[tuple[int, int], ...]  # (processors, resident blocks of each)
Profile: TypeAlias = tuple[object, ...]  # of a shape, see `profile`
Span: TypeAlias = Callable[[int, int], float]  # ps by busy processors, blocks on one
_Asked: TypeAlias = tuple[Shape, Kinds, int, bool]
# By clock, persistence, resident blocks and whether several classes run: samples are alike only where these are.
Samples: TypeAlias = "dict[tuple[int | None, bool, int, bool], dict[_Asked, _Sample]]"
_Placed: TypeAlias = "tuple[list[tuple[_Sample, int]], int, int]"  # samples with their blocks, makespan, occupied time


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

    def __init__(self, model: Model, long: int | None = None) -> None:
        self.model = model
        self.long = LONG if long is None else long
        self.count = model.hardware.processors or 0
        self.known: dict[_Asked, _Sample] = {}

    def run(self) -> _Run:
        kernel = self.model.kernel
        active = min(self.count, kernel.blocks)
        resident = min(self.model.footprint.resident, -(-kernel.blocks // active))
        busy: dict[str, int] = dict.fromkeys((*SHARED, *OWN), 0)
        moved: dict[tuple[str, str], int] = {}
        for kind in self.model.classes:
            one = self.model.totals(kind.shape)
            for name, length in one.busy.items():
                busy[name] += length * kind.count
            for key, bytes_ in one.moved.items():
                moved[key] = moved.get(key, 0) + bytes_ * kind.count
        place = self.waves if len(self.alike) == 1 else self.mixed
        parts, makespan, occupied = place(active, resident)
        least = max(length if name in SHARED else -(-length // active) for name, length in busy.items())
        makespan = max(makespan, least)
        units = {name: self.books(name, busy[name], parts, makespan, occupied) for name in busy}
        return _Run(self.model, _kernel_time(self.model, makespan, active, units, self.spread_pct(resident)), moved)

    @cached_property
    def alike(self) -> dict[Profile, Shape]:
        """Classes by what they do on their own units, each with the shape that moves most: ragged ends take less."""
        out: dict[Profile, Shape] = {}
        for kind in self.model.classes:
            key = profile(kind.shape)
            out[key] = max(out.get(key, kind.shape), kind.shape, key=self.bytes_of)
        return out

    def bytes_of(self, shape: Shape) -> int:
        return sum(self.model.totals(shape).moved.values())

    def spread_pct(self, resident: int) -> int:
        """How far `chip` may be from `fair`, in percent: measured on random machines (tests/unit/test_fidelity.py)."""
        shape = next(iter(self.alike.values()))
        loops = [(part, visit) for _, visit in visits(shape) if (part := self.model.parts[visit.part]).loop]
        trips = [sum(trips for trips, _ in visit.stretches) for _, visit in loops]
        slots = resident * min(self.count, self.model.kernel.blocks)
        if any(part.around for part in self.model.parts):  # long outer loops are extrapolated too
            return 30
        if len(self.alike) > 1:
            return 20
        if min(trips, default=0) < 16:
            return 30
        if any(part.order.slots.get(copy.name, 1) < 2 for part, _ in loops for copy in part.copies):
            return 15
        if resident > 1:
            return 30 if self.model.kernel.blocks % slots and self.model.kernel.blocks > slots else 10
        return 5

    def waves(self, active: int, resident: int) -> _Placed:
        """Alike blocks run in waves; the last one spreads over the processors."""
        (shape,) = self.alike.values()
        full, rest = divmod(self.model.kernel.blocks, active * resident)
        parts, makespan, occupied = [], 0, 0
        kinds = deal(rest, self.count)
        if full:
            sample = self.sample(shape, ((active, resident),), 1 if self.in_step(resident) else min(full, 2))
            if self.in_step(resident):
                sample = replace(sample, steady=sample.first + self.model.hardware.block_ps)
            kinds = deal_after(rest, active, sample.ends, request(self.model, shape))
            parts.append((sample, full * active * resident))
            makespan = sample.first + (full - 1) * sample.steady
            occupied = makespan * active
        if rest:
            sample = self.sample(shape, kinds, 1, fresh=not full)
            parts.append((sample, rest))
            makespan += sample.first
            occupied += sample.occupied
        return parts, makespan, occupied

    def in_step(self, resident: int) -> bool:
        """Whether the blocks of a processor begin and end together, wave by wave.

        Alike blocks that share the matrix unit do, as measured kernels show: what they load and store at their ends is
        not hidden under the products of others.  Blocks that mostly wait for memory take each other's place one by one.
        """
        return resident > 1 and self.model.has_products

    def mixed(self, active: int, resident: int) -> _Placed:
        """Blocks of several classes are placed in launch order, each on the slot that is free first.

        A block takes as long as alike blocks would: on one processor or on all, alone there or with as many as there is
        room for; in between, its time is a straight line.
        """
        slots, blocks = active * resident, self.model.kernel.blocks
        shapes = [self.alike[profile(kind.shape)] for kind in self.model.classes]
        rounds = 2 if blocks > slots and not self.in_step(resident) else 1
        full = [self.sample(shape, ((active, resident),), rounds) for shape in shapes]
        parts = [(s, kind.count) for s, kind in zip(full, self.model.classes, strict=True)]
        start = max(s.first - s.steady for s in full)
        if blocks > LIST_LIMIT:
            total = sum(s.steady * number for s, number in parts)
            return parts, start - (-total // slots) + max(s.steady for s in full), start * active + total // resident
        spans = [self.span(shape, active, resident, rounds) for shape in shapes]
        makespan, occupied = place_blocks(self.model.class_of_blocks().tolist(), spans, active, resident)
        return parts, start + makespan, start * active + occupied

    def span(self, shape: Shape, active: int, resident: int, rounds: int) -> Span:
        """How long a block takes, by how many processors are busy and how many blocks share its own."""
        corners: list[list[int]] = [
            [self.sample(shape, ((processors, each),), rounds).steady for each in (1, resident)]
            for processors in (1, active)
        ]

        def at(processors: int, each: int) -> float:
            x = (processors - 1) / max(1, active - 1)
            y = (each - 1) / max(1, resident - 1)
            alone: float
            shared: float
            alone, shared = (few + (many - few) * x for few, many in zip(*corners, strict=True))
            return alone + (shared - alone) * y

        return at

    def sample(self, shape: Shape, kinds: Kinds, rounds: int, *, fresh: bool = True) -> _Sample:
        """How `rounds` rounds of blocks run on one processor of each kind; `fresh`: nothing ran before them.

        A loop goes on as it does between its iterations 16 and 32, one with loops inside as between 4 and 8: its time
        is a straight line.
        """
        key = (shape, kinds, rounds, fresh)
        if key not in self.known:
            if (longest := longest_run(shape, self.long)) is None:
                found = self.simulate(shape, kinds, rounds, fresh)
            else:
                what, trips = longest
                shapes = shape, shorten(shape, what, trips), shorten(shape, what, trips // 2)
                counts = [sum(n * times for n, _, one, times in runs(s) if one == what) for s in shapes]
                long, short = (self.sample(s, kinds, rounds, fresh=fresh) for s in shapes[1:])
                found = extrapolate(short, long, counts[0] - counts[1], counts[1] - counts[2])
            least = self.least(shape, kinds)
            self.known[key] = replace(found, first=max(found.first, least), steady=max(found.steady, least))
        return self.known[key]

    def least(self, shape: Shape, kinds: Kinds) -> int:
        """A round takes no less than its units are busy."""
        busy = self.model.totals(shape).busy
        blocks, resident = sum(weight * each for weight, each in kinds), max(each for _, each in kinds)
        return max(length * (blocks if name in SHARED else resident) for name, length in busy.items())

    def simulate(self, shape: Shape, kinds: Kinds, rounds: int, fresh: bool) -> _Sample:
        """One processor of each kind.

        Alike blocks run nearly in step.  That two fifths of a request are made up for agrees best with `chip`
        (tests/unit/test_fidelity.py); with nothing `fair` is up to 11 % slow, with a whole request up to 6 % fast.
        From the second round on their beginnings and ends are out of step as well.  Blocks of several classes are so
        altogether.
        """
        floor, processors, logs = self.start(shape, kinds, rounds, fresh)
        return summary(kinds, rounds, _finish(floor), floor.ended, processors, logs)

    def start(
        self,
        shape: Shape,
        kinds: Kinds,
        rounds: int,
        fresh: bool,
        recorder: Recorder | None = None,
        numbers: Iterator[int] | None = None,
    ) -> tuple[Floor, Sequence[Processor], Sequence[Sequence[Mapping[tuple[str, int], Log]]]]:
        """One processor of each kind with its slots, ready to run; the logs of each slot of each.

        Blocks have the `numbers` 0, 1, 2 and so on where others are not given.
        """
        env = simpy.Environment()
        watched = recorder is not None
        floor = Floor(env, self.model, {}, scripted=False, record=recorder)
        blocks = sum(weight * resident for weight, resident in kinds)
        share, of = OUT_OF_STEP
        depth, later = (n * blocks * share // of for n in (request(self.model, shape), largest_request(shape)))
        if len(self.alike) > 1:
            depth = later = blocks * max(self.model.totals(shape).busy.get(name, 0) for name in SHARED)
            fresh = False
        buckets = {name: Bucket(depth, 0 if fresh else -depth, [] if watched else None) for name in SHARED}
        stays, numbers = unroll(shape, len(self.model.parts)), count() if numbers is None else numbers

        def take() -> Iterator[tuple[int, Stays]]:
            for n in range(rounds):
                for bucket in buckets.values():
                    bucket.depth = max(bucket.depth, later if n else depth)
                yield next(numbers), stays

        alone = len(kinds) == 1 and kinds[0][1] == 1
        processors: list[Processor] = []
        for n, (weight, _) in enumerate(kinds):
            units: dict[str, Unit] = {name: Unit(name, spans=[] if watched else None) for name in OWN}
            for name in SHARED:
                spans: list[Spell] | None = [] if watched else None
                units[name] = FairShare(name, spans=spans, bucket=buckets[name], weight=weight, alone=alone)
            processors.append(Processor(n, units))
        logs: list[list[Mapping[tuple[str, int], Log]]] = [[] for _ in kinds]
        for slot in range(max(resident for _, resident in kinds)):  # as the hardware launches: first one for each
            for processor, (_, resident) in zip(processors, kinds, strict=True):
                if slot < resident:
                    own = _logs(self.model, watched)
                    logs[processor.number].append(own)
                    start = self.model.hardware.start_ps * slot * self.count
                    env.process(_slot(floor, processor, take(), own, start))
        return floor, processors, logs

    def record(self, watch: Watch) -> Recording:
        """A processor with as many blocks like the one asked for (by default, one of the longest) as it gets at first.

        Raises InputError for a block that the kernel has not, and for one processor: they are all alike.
        """
        model, blocks = self.model, self.model.kernel.blocks
        if watch.processor is not None:
            raise InputError("processor: all are alike in the fidelity fair; --fidelity chip tells them apart")
        if watch.block is not None and not 0 <= watch.block < blocks:
            raise InputError(
                f"block: {watch.block} is not one of 0 to {blocks - 1}, which kernel {model.kernel.name} has"
            )
        shapes, of = [kind.shape for kind in model.classes], model.class_of_blocks().tolist()
        longest = max(range(len(shapes)), key=lambda n: model.iterations(shapes[n]))
        block = of.index(longest) if watch.block is None else watch.block
        shape = shapes[of[block]]
        active = min(self.count, blocks)
        resident = min(model.footprint.resident, -(-blocks // active))
        kinds = ((active, resident),)
        recorder = Recorder(0, model.workers * resident, watch.until)
        floor, processors, logs = self.start(shape, kinds, 1, True, recorder, count(block, active))
        end = _finish(floor)
        if not recorder.enough:
            summary(kinds, 1, end, floor.ended, processors, logs)
        units = processors[0].units
        chip = {name: unit.bucket.spans or [] for name, unit in units.items() if isinstance(unit, FairShare)}
        return _recording(model, recorder, model.iterations(shape), active, end, units, chip, logs[0])

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


def profile(shape: Shape) -> Profile:
    """What a shape does on the units of a processor: runs of alike iterations, whatever they move."""
    out: list[object] = []
    for item in shape:
        todo: Iterable[tuple[int, Profile]]
        if isinstance(item, Visit):
            todo = ((trips, tuple(work.cost for work in iteration)) for trips, iteration in item.stretches)
        else:
            todo = ((item.times, profile(item.body)),)
        merged = groupby(todo, lambda run: run[1])
        out.append(tuple((sum(trips for trips, _ in group), what) for what, group in merged))
    return tuple(out)


def deal(blocks: int, processors: int) -> Kinds:
    """How many processors get how many of `blocks`, at most one more than others."""
    each, more = divmod(blocks, processors)
    return tuple(kind for kind in ((more, each + 1), (processors - more, each)) if kind[0] and kind[1])


def summary(
    kinds: Kinds,
    rounds: int,
    end: int,
    ended: Sequence[int],
    processors: Sequence[Processor],
    logs: Sequence[Sequence[Mapping[tuple[str, int], Log]]],
) -> _Sample:
    """What a simulation showed; `ended` are the ends of its blocks, `logs` those of each slot of each processor."""
    slots = sum(resident for _, resident in kinds)
    stalls: dict[str, dict[str, int]] = {name: dict.fromkeys(CAUSES, 0) for name in (*SHARED, *OWN)}
    occupied = 0
    for processor, own, (weight, _) in zip(processors, logs, kinds, strict=True):
        worker = next(iter(own[0].values()))
        occupied += weight * max(log.ends[-1] for slot in own for log in slot.values())
        for name, unit in processor.units.items():
            unit.idle(end, worker)
            for cause, length in unit.stalls.items():
                stalls[name][cause] += length * weight
    first = ended[slots - 1] + (end - ended[-1])  # stores on their way when the last block has ended
    return _Sample(
        blocks=rounds * sum(weight * resident for weight, resident in kinds),
        first=first,
        steady=end - first if rounds > 1 else end,
        occupied=occupied // rounds,
        ends=tuple(ended[-slots:]),
        stalls=stalls,
    )


def runs(shape: Shape, times: int = 1, long: int = LONG) -> Iterator[tuple[int, int, Iteration | Shape, int]]:
    """All runs of alike iterations: trips, how many `fair` simulates, what each does, how often the run comes."""
    for item in shape:
        if isinstance(item, Visit):
            yield from ((trips, long, work, times) for trips, work in item.stretches)
        else:
            yield item.times, LONG_OUTER, item.body, times
            yield from runs(item.body, times * item.times, long)


def longest_run(shape: Shape, long: int = LONG) -> tuple[Iteration | Shape, int] | None:
    """What the iterations of the longest run do, and how many are enough; None where all runs are short enough.

    Loops without loops inside come first: that makes iterations around them alike that differ in their trips only.
    """
    most = [(enough, trips, what) for trips, enough, what, _ in runs(shape, long=long) if trips > enough]
    if not most:
        return None
    enough, _, what = max(most, key=lambda run: run[:2])
    return what, enough


def shorten(shape: Shape, what: Iteration | Shape, most: int) -> Shape:
    """The shape with no run of more than `most` iterations that do `what`."""
    out: list[Visit | Repeat] = []
    for item in shape:
        if isinstance(item, Visit):
            stretches = tuple((min(n, most) if work == what else n, work) for n, work in item.stretches)
            out.append(Visit(item.part, stretches))
            continue
        times, body = min(item.times, most) if item.body == what else item.times, shorten(item.body, what, most)
        if out and isinstance(before := out[-1], Repeat) and before.body == body:
            out.pop()
            times += before.times
        out.append(Repeat(times, body))
    return tuple(out)


def extrapolate(short: _Sample, long: _Sample, more: int, step: int) -> _Sample:
    """What `long` becomes with `more` further iterations, if `step` ones are what sets it apart from `short`."""

    def line(a: int, b: int) -> int:
        return max(0, b + (b - a) * more // step)

    return _Sample(
        blocks=long.blocks,
        first=line(short.first, long.first),
        steady=line(short.steady, long.steady),
        occupied=line(short.occupied, long.occupied),
        ends=long.ends,
        stalls={
            name: {cause: line(short.stalls[name][cause], time) for cause, time in causes.items()}
            for name, causes in long.stalls.items()
        },
    )


def deal_after(blocks: int, processors: int, ends: Sequence[int], step: int) -> Kinds:
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
    loops = tuple(visit for _, visit in visits(shape) if model.parts[visit.part].loop is not None and visit.stretches)
    return largest_request(loops or shape)


def largest_request(shape: Shape) -> int:
    """The most that one iteration, or the code outside loops, asks of a shared unit, in ps."""
    iterations = dict.fromkeys(iteration for _, visit in visits(shape) for _, iteration in visit.stretches)
    asked = [
        sum(length for work in iteration for move in work.moves for name, length in move.lengths if name == unit)
        for unit in SHARED
        for iteration in iterations
    ]
    return max(asked, default=0)


def _slot(
    floor: Floor,
    processor: Processor,
    take: Iterable[tuple[int, Stays]],
    logs: Mapping[tuple[str, int], Log],
    start: int,
) -> Process:
    """A place for one block on a processor: from `start` on runs the blocks it takes, one after another."""
    for log in logs.values():
        log.state = "launch" if start else "tail"
    yield floor.env.timeout(start)  # all slots exist before the first takes a block
    for n, (number, stays) in enumerate(take):
        if n and not floor.model.schedule.persistent and floor.model.hardware.block_ps:
            for log in logs.values():
                log.mark(int(floor.env.now))
                log.state = "launch"
            yield floor.env.timeout(floor.model.hardware.block_ps)
        for log in logs.values():
            log.mark(int(floor.env.now))
            log.state = "data"
        warm = n > 0 and floor.model.schedule.persistent
        yield from Block(floor, processor, stays, number, warm=warm).run(logs)


def place_blocks(order: Sequence[int], spans: Sequence[Span], processors: int, resident: int) -> tuple[int, int]:
    """Makespan of blocks taken in order, each by the slot that is free first, and the time, summed over processors,
    for which they have a block.  `order` names the class of each block, `spans` the time that each class takes.
    """
    if resident == 1:
        return _place_alone(order, spans, processors)
    running: list[list[tuple[int, float]]] = [[] for _ in range(processors)]  # class, part that is left
    since = [0.0] * processors
    now = occupied = 0.0
    queue = iter(order)
    for n, c in zip(range(processors * resident), queue, strict=False):
        running[n % processors].append((c, 1.0))
    busy = sum(map(bool, running))

    def catch_up(p: int) -> None:
        """Work off the time since the processor was last looked at."""
        passed, beside = now - since[p], len(running[p])
        running[p] = [(c, left - passed / spans[c](busy, beside)) for c, left in running[p]]
        since[p] = now

    def plan(p: int) -> tuple[float, int]:
        """When the next block of a processor ends."""
        return now + min(left * spans[c](busy, len(running[p])) for c, left in running[p]), p

    ends = sorted(plan(p) for p in range(busy))
    while ends:
        end, p = heapq.heappop(ends)
        occupied += (end - now) * busy
        now = end
        catch_up(p)
        left = [block for block in running[p] if block[1] > 1e-9]
        taken = [(c, 1.0) for _, c in zip(range(len(running[p]) - len(left)), queue, strict=False)]
        running[p] = left + taken
        if running[p]:
            heapq.heappush(ends, plan(p))
        else:  # the others go faster from now on
            for _, other in ends:
                catch_up(other)
            busy -= 1
            ends = sorted(plan(other) for _, other in ends)
    return ceil(now), ceil(occupied)


def _place_alone(order: Sequence[int], spans: Sequence[Span], processors: int) -> tuple[int, int]:
    """`place_blocks` where a processor has room for one block: times change only when no block is left to start."""
    import numpy as np

    busy = min(processors, len(order))
    each = [span(busy, 1) for span in spans]
    ends = [(each[c], c) for c in order[:busy]]
    heapq.heapify(ends)
    now = occupied = 0.0
    for c in order[busy:]:
        end, _ = ends[0]
        occupied += (end - now) * busy
        now = end
        heapq.heapreplace(ends, (now + each[c], c))
    kinds = np.array([c for _, c in ends])
    left = np.array([(end - now) / each[c] for end, c in ends])  # parts of the blocks that run
    while left.size:
        times = {c: spans[c](left.size, 1) for c in set(kinds.tolist())}
        rest = left * np.array([times[c] for c in kinds.tolist()])
        first = int(rest.argmin())
        occupied += float(rest[first]) * left.size
        now += float(rest[first])
        left = np.delete(left * (1 - rest[first] / np.where(rest > 0, rest, 1)), first)
        kinds = np.delete(kinds, first)
    return ceil(now), ceil(occupied)
