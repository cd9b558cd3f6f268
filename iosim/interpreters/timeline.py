"""The timeline: a tile program as discrete events on a machine.

Two fidelities.  `chip` simulates every processor and every block.  `fair` simulates one processor for each class of
block at its fair share of the bandwidth that processors share, and places the blocks by their durations.  In both,
for every unit, busy time and stalls by cause add up to instances x makespan.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import ceil, lcm
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import simpy

from iosim.errors import InputError, nearest
from iosim.hardware import Hardware, Power
from iosim.interpreters.blocks import Block, Course, Floor, Process, Processor
from iosim.interpreters.engine import CAUSES, Arbiter, Bucket, FairShare, Log, Script, Spell, Turns, Unit
from iosim.interpreters.jumps import Jump, Jumps, NoJumpError
from iosim.interpreters.ledger import Ledger
from iosim.interpreters.model import Model
from iosim.interpreters.recording import Recorder, Recording, Watch, lives
from iosim.interpreters.shapes import Cost, Iteration, Repeat, Shape, Visit, visits
from iosim.memory.cache import DeviceTraffic, DramFlow
from iosim.memory.onchip import CapacityError, Footprint, on_matrix_unit
from iosim.program import Compute, Kernel, Program, walk
from iosim.schedule import Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]

Fidelity: TypeAlias = Literal["fair", "chip"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

SHARED = ("dram", "l2")
OWN = ("copy", "sram", "matrix", "exp", "alu", "vector", "issue")
OUT_OF_STEP = (2, 5)  # of a request of all processors, see `_Fair.simulate`
LONG = 128  # iterations of a loop in which its state must recur to be jumped over exactly, see jumps.py
LONG_OUTER = 8  # the same for a loop that has loops inside
SHORT = 32  # the same where that has to be found out often: in loops inside, and for blocks of many lengths
LONG_PATTERN = 4  # loops in turn that come again and again
LONG_PERIOD = 8  # iterations, at most, after which it does so, where blocks of many lengths have to share simulations
FEW_SHAPES, FEW_ITEMS = 4, 32  # that are simulated each for itself
CLOCK_STEPS = 4  # at most, in search of the clock that the power limit allows
LIST_LIMIT = 200_000  # blocks that are placed one by one; for more, Graham's bound is tight enough


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Busy time and stalls of all instances of a unit, in ps; together they are instances x makespan."""

    instances: int
    busy_ps: int
    stalls_ps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Wave:
    """`times` rounds of `blocks` blocks each that add `each_ps` to the makespan."""

    what: Literal["first", "further", "last"]
    blocks: int
    times: int
    each_ps: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's run, launch included.  `resident` blocks share a processor, of which `processors` get one.

    `waves` and the launch add up to the makespan where alike blocks run in waves (`fair` only); empty elsewhere.

    `spread_pct` says how far the `chip` fidelity may be from this time; 0 where this is it.  `extrapolated` says that
    the state of a long loop did not recur in time, so that the loop was taken to go on as it had done last.
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
    waves: tuple[Wave, ...] = ()
    extrapolated: bool = False


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
    def extrapolated(self) -> bool:
        """Whether some kernel is, see KernelTime."""
        return any(k.extrapolated for k in self.kernels)

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
    enough_ps: int | None = None,
    jump: bool = True,
) -> Timeline:
    """Run `program` on `hardware`; `traffic` says how much of each load and store reaches DRAM.

    With `record` the result carries the order in which every unit served (`chip` only); with `script` that order is
    kept, which makes the run monotone in every rate.  `watch` asks for recordings, which simulations of their own make:
    in `fair` of a processor full of alike blocks, the first that it gets.  Of a kernel that takes more than `enough_ps`
    at its highest clock nobody wants to know how much more a lower one takes.  Without `jump`, `fair` simulates every
    iteration of every loop: the same unless `extrapolated`, later.  Raises CapacityError for a block that does not fit,
    InputError for an unknown fidelity or a machine that lacks a number which time needs.
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
                fair = _Fair(model, jump=jump)
                return fair.with_waves(fair.run())
            if record:
                attempts.append(Script())
            return _Chip(model, attempts[-1] if record else None, script).run()

        run = _at_its_clock(kernel, hardware.with_units(own.units), at, enough_ps)
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
    enough_ps: int | None = None,
    first: int | None = None,
    step_hz: int = 10**6,
) -> _Run:
    """The run of a kernel at the clock that it can hold, a multiple of `step_hz`; `first` is one to begin with.

    Processors that execute matrix instructions have a ceiling of their own, and board power grows with the cube of the
    clock and with the share of the matrix unit that is at work, which depends on the clock in turn.
    """
    products = _has_products(kernel)
    ceiling = _ceiling(kernel, hardware)
    clock = min(first or ceiling, ceiling)
    run = at(hardware.at_clock(clock))
    power = hardware.power
    for _ in range(CLOCK_STEPS):
        if power is None or not products or (enough_ps is not None and run.time.makespan_ps > enough_ps):
            break
        watts = _watts_per_ghz3(run, hardware.at_clock(clock), power)
        ghz = (power.limit_w / watts) ** (1 / 3)
        new = min(ceiling, round(ghz * 1000 * 10**6 / step_hz) * step_hz)
        if abs(new - clock) < clock / 200:
            break
        clock = new
        run = at(hardware.at_clock(clock))
    return run


def _has_products(kernel: Kernel) -> bool:
    return any(isinstance(n, Compute) and n.op == "matmul" and on_matrix_unit(n) for n, _ in walk(kernel.body))


def _ceiling(kernel: Kernel, hardware: Hardware) -> int:
    """The highest clock at which a kernel's processors run, in Hz."""
    return (hardware.matrix_hz if _has_products(kernel) else hardware.boost_hz) or hardware.clock_hz or 0


def least_ps(program: Program, counted: Ledger, schedule: Schedule, hardware: Hardware) -> int:
    """What no `fair` run of the program falls below, in ps: launches, and the busiest unit at the highest clock.

    DRAM is left out, so that no cache need be simulated; `counted` is the program's ledger.
    """
    total = 0
    for kernel in program.kernels:
        own = schedule.of(kernel.name)
        machine = hardware.with_units(own.units)
        flows = tuple(DramFlow(f, 0, 0, 0) for f in counted.flows if f.kernel == kernel.name)
        model = Model(kernel, own, machine.at_clock(_ceiling(kernel, machine)), flows)
        total += machine.launch_ps + _Fair(model).at_least()
    return total


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


def _finish(floor: Floor, scripted: bool = False, jumps: Jumps | None = None) -> int:
    """Run all events, or those that a recording wants; returns the end in ps.

    Raises InputError where blocks wait for each other, or for a script.
    """
    while floor.record is not None and not floor.record.enough and floor.env.peek() < float("inf"):
        floor.env.step()
    if floor.record is not None and floor.record.enough:
        return int(floor.env.now)
    if jumps is None:
        floor.env.run()
    else:
        jumps.run()
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
        courses = [Course(kind.shape, len(model.parts)) for kind in model.classes]
        kinds = [courses[c] for c in model.class_of_blocks().tolist()]
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
_Stalls: TypeAlias = Mapping[str, Mapping[str, int]]  # ps by unit and cause
_Placed: TypeAlias = tuple[_Stalls, int, int]  # stalls that samples saw, makespan, occupied time
_Asked: TypeAlias = tuple[Shape, Kinds, int, bool, int]  # see `simulated`
# By clock, persistence, resident blocks and whether several classes run: samples are alike only where these are.
Samples: TypeAlias = "dict[tuple[int | None, bool, int, bool], dict[_Asked, _Sample]]"


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
    stalls: _Stalls
    jumps: tuple[Jump, ...] = ()
    exact: bool = True
    refused: bool = False


class Rule(NamedTuple):
    """How long runs are cut: to `base` iterations and the rest of a division of what is more by `period`.

    A run goes on as it does in the next `step` iterations.  State has `long` iterations to recur in.
    """

    base: int
    period: int
    step: int
    long: int

    def of(self, trips: int) -> int:
        """What is left of so many."""
        return trips if trips < self.base else self.base + (trips - self.base) % self.period


UNCUT = Rule(2**62, 1, 1, 2**62)


@dataclass(frozen=True, slots=True)
class Family:
    """Shapes that differ only in the trips of long runs: `shape` with these cut short, `what` is iterated in them.

    `members` are their numbers, `lacks` how many iterations of each are cut off: (members, runs).
    """

    shape: Shape
    what: tuple[Iteration, ...]
    members: Sequence[int]
    lacks: Ints


@dataclass(frozen=True, slots=True)
class _Line:
    """How the blocks of a family run: times are straight lines in the trips of its runs.

    `runs` has, for each run, samples of the code around it with fewer and with more iterations, and how many more.
    """

    base: _Sample
    runs: Sequence[tuple[_Sample, _Sample, int]]

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends in the sample that takes longest."""
        return max((self.base, *(longer for _, longer, _ in self.runs)), key=lambda s: s.first).ends

    def at(self, read: Callable[[_Sample], int], lacks: Ints) -> Ints:
        """What `read` finds in the samples, for each row of `lacks`."""
        import numpy as np

        found = np.full(len(lacks), read(self.base), np.int64)
        for (short, longer, step), more in zip(self.runs, lacks.T, strict=True):
            each, left = divmod(read(longer) - read(short), step)  # apart, as their product may be too large
            found += each * more + left * more // step
        return np.maximum(found, 0)

    def stalls(self, blocks: int, lacks: Sequence[int]) -> _Stalls:
        """Stalls of so many blocks, times those of a sample; `lacks` of each run are sums over them."""

        def line(name: str, cause: str) -> int:
            one = self.base.stalls[name][cause]
            more = zip(self.runs, lacks, strict=True)
            grown = ((b.stalls[name][cause] - a.stalls[name][cause]) * n // step for (a, b, step), n in more)
            return max(0, blocks * one + sum(grown))

        return {name: {cause: line(name, cause) for cause in CAUSES} for name in self.base.stalls}


class _Fair:
    """One processor of each kind, at its fair share of the memory."""

    def __init__(self, model: Model, long: int | None = None, *, jump: bool = True) -> None:
        self.model, self.jump = model, jump
        self.long = LONG if long is None else long
        self.count = model.hardware.processors or 0
        self.known: dict[_Asked, _Sample] = {}
        self.rounds: tuple[Wave, ...] = ()
        self.exact = True

    def run(self) -> _Run:
        kernel = self.model.kernel
        active = min(self.count, kernel.blocks)
        resident = min(self.model.footprint.resident, -(-kernel.blocks // active))
        whole = self.model.whole
        busy = {name: whole.busy.get(name, 0) for name in (*SHARED, *OWN)}
        place = self.waves if len(self.alike) == 1 else self.mixed
        seen, makespan, occupied = place(active, resident)
        least = max(length if name in SHARED else -(-length // active) for name, length in busy.items())
        makespan = max(makespan, least)
        units = {name: self.books(name, busy[name], seen[name], makespan, occupied) for name in busy}
        time = _kernel_time(self.model, makespan, active, units, self.spread_pct(resident))
        time = replace(time, extrapolated=not self.exact)
        return _Run(self.model, time, whole.moved)

    def at_least(self) -> int:
        """Ps that no run of the kernel, launch left out, falls below: its waves, each at what its units are busy."""
        blocks = self.model.kernel.blocks
        active = min(self.count, blocks)
        resident = min(self.model.footprint.resident, -(-blocks // active))
        busy = self.model.whole.busy
        least = max(length if name in SHARED else -(-length // active) for name, length in busy.items())
        if len(self.alike) > 1:
            return least
        (shape,) = self.alike.values()
        full, rest = divmod(blocks, active * resident)
        waves = full * max(self.busy(shape, ((active, resident),)))
        return max(least, waves + (max(self.busy(shape, deal(rest, self.count))) if rest else 0))

    def with_waves(self, run: _Run) -> _Run:
        """The run with the waves that its makespan is made of, where it is."""
        whole = run.time.launch_ps + sum(wave.times * wave.each_ps for wave in self.rounds)
        waves = self.rounds if whole == run.time.makespan_ps else ()
        return replace(run, time=replace(run.time, waves=waves))

    @cached_property
    def alike(self) -> dict[Profile, Shape]:
        """Classes by what they do on their own units, each with the shape that moves most: ragged ends take less."""
        out: dict[Profile, Shape] = {}
        for kind, key in zip(self.model.classes, self.profiles, strict=True):
            before = out.setdefault(key, kind.shape)
            if before != kind.shape:
                out[key] = max(before, kind.shape, key=self.bytes_of)
        return out

    @cached_property
    def profiles(self) -> list[Profile]:
        """The profile of each class."""
        numbers: dict[Iteration | tuple[Cost, ...], int] = {}
        return [profile(kind.shape, numbers) for kind in self.model.classes]

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
        parts: list[tuple[_Sample, int]] = []
        makespan = occupied = 0
        kinds = deal(rest, self.count)
        if full:
            sample = self.sample(shape, ((active, resident),), 1 if self.in_step(resident) else min(full, 2))
            if self.in_step(resident):
                sample = replace(sample, steady=sample.first + self.model.hardware.block_ps)
            kinds = deal_after(rest, active, sample.ends, request(self.model, shape))
            parts.append((sample, full * active * resident))
            makespan = sample.first + (full - 1) * sample.steady
            self.rounds = (
                Wave("first", active * resident, 1, sample.first),
                Wave("further", active * resident, full - 1, sample.steady),
            )
            occupied = makespan * active
        if rest:
            sample = self.sample(shape, kinds, 1, fresh=not full)
            parts.append((sample, rest))
            self.rounds += (Wave("last", rest, 1, sample.first),)
            makespan += sample.first
            occupied += sample.occupied
        seen: _Stalls = {
            name: {cause: sum(s.stalls[name][cause] * number // s.blocks for s, number in parts) for cause in CAUSES}
            for name in (*SHARED, *OWN)
        }
        return seen, makespan, occupied

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
        shapes = [self.alike[key] for key in self.profiles]
        counts = [kind.count for kind in self.model.classes]
        rounds = 2 if blocks > slots and not self.in_step(resident) else 1
        cuts: dict[Rule, list[Family]] = {}

        def run(kinds: Kinds) -> tuple[list[Family], Rule, Kinds, int]:
            rule = self.rule(shapes, kinds, rounds)
            if rule not in cuts:
                cuts[rule] = families_of(shapes, rule)
            return cuts[rule], rule, kinds, rounds

        full = run(((active, resident),))
        first, steady = self.times(*full)
        start = int((first - steady).max())
        seen = self.stalls(counts, *full)
        if blocks > LIST_LIMIT:
            total = sum(time * number for time, number in zip(steady.tolist(), counts, strict=True))
            return seen, start - (-total // slots) + int(steady.max()), start * active + total // resident
        corners = [[self.times(*run(((n, each),)))[1].tolist() for each in (1, resident)] for n in (1, active)]
        spans = [span([[found[n] for found in row] for row in corners], active, resident) for n in range(len(shapes))]
        makespan, occupied = place_blocks(self.model.class_of_blocks().tolist(), spans, active, resident)
        return seen, start + makespan, start * active + occupied

    def rule(self, shapes: Sequence[Shape], kinds: Kinds, rounds: int, *, fresh: bool = True) -> Rule:
        """How long runs of shapes are cut, which makes families of them.

        A few shapes are simulated as they are.  Of many, one of the longest says after how many iterations the state
        recurs: blocks whose trips leave the same rest when divided by that differ in whole periods.
        """
        if not self.jump:
            return UNCUT
        nested = any(isinstance(item, Repeat) for shape in shapes for item in shape)
        if len(set(shapes)) <= FEW_SHAPES and all(items(shape) <= FEW_ITEMS for shape in shapes):
            with suppress(NoJumpError):
                whole = UNCUT._replace(long=min(self.long, SHORT) if nested else self.long)
                for shape in shapes:
                    self.simulated(shape, kinds, rounds, fresh, whole.long, strict=nested)
                return whole
        long = min(self.long, SHORT)
        probe = near(cut(max(shapes, key=self.model.iterations), Rule(2 * long, 1, 1, long), Counter()))
        found = self.simulated(probe, kinds, rounds, fresh, long)
        inner = [jump for jump in found.jumps if jump.what is not None]
        period = lcm(*(jump.period for jump in inner))
        if inner and found.exact and not found.refused and period <= LONG_PERIOD:
            return Rule(max(jump.trips for jump in inner), period, -(-2 * long // period) * period, long)
        return Rule(long // 2, 1, long // 2, long)

    def times(self, families: Sequence[Family], rule: Rule, kinds: Kinds, rounds: int) -> tuple[Ints, Ints]:
        """`first` and `steady` of the samples of all shapes."""
        import numpy as np

        out = np.zeros((2, sum(len(family.members) for family in families)), np.int64)
        for family in families:
            line = self.line(family, rule, kinds, rounds, True)
            least = self.least(family, kinds)
            found = line.at(lambda s: s.first, family.lacks), line.at(lambda s: s.steady, family.lacks)
            out[:, family.members] = np.maximum(found, least)
        return out[0], out[1]

    def stalls(
        self, counts: Sequence[int], families: Sequence[Family], rule: Rule, kinds: Kinds, rounds: int
    ) -> _Stalls:
        """Stalls that the samples of all blocks saw, `counts` of each shape."""
        out: dict[str, dict[str, int]] = {name: dict.fromkeys(CAUSES, 0) for name in (*SHARED, *OWN)}
        for family in families:
            own = [counts[n] for n in family.members]
            lacks = [sum(n * each for n, each in zip(column, own, strict=True)) for column in family.lacks.T.tolist()]
            seen = self.line(family, rule, kinds, rounds, True).stalls(sum(own), lacks)
            for name, causes in seen.items():
                for cause, time in causes.items():
                    out[name][cause] += time
        blocks = rounds * sum(weight * each for weight, each in kinds)  # of every sample
        return {name: {cause: time // blocks for cause, time in causes.items()} for name, causes in out.items()}

    def line(self, family: Family, rule: Rule, kinds: Kinds, rounds: int, fresh: bool) -> _Line:
        """The line of a family: exact where its state recurs as the rule says, in each visit of a run alike."""
        base = self.simulated(family.shape, kinds, rounds, fresh, rule.long)
        runs = []
        for one in family.what:
            shape, more = lengthened(family.shape, one, rule)
            longer = self.simulated(shape, kinds, rounds, fresh, rule.long)
            runs.append((base, longer, more))
            jumps = [jump for jump in longer.jumps if jump.what is one]
            left_out = all(jump.period * jump.times >= rule.step for jump in jumps)
            fits = left_out and all(rule.period % jump.period == 0 for jump in jumps)
            same = len({tuple(n * rule.period // jump.period for n in jump.grown) for jump in jumps}) == 1
            self.exact &= fits and same and not longer.refused
        return _Line(base, runs)

    def sample(self, shape: Shape, kinds: Kinds, rounds: int, *, fresh: bool = True) -> _Sample:
        """How `rounds` rounds of blocks run on one processor of each kind; `fresh`: nothing ran before them."""
        rule = self.rule([shape], kinds, rounds, fresh=fresh)
        (family,) = families_of([shape], rule)
        line = self.line(family, rule, kinds, rounds, fresh)
        first, steady, occupied = (
            int(line.at(read, family.lacks)[0])
            for read in (lambda s: s.first, lambda s: s.steady, lambda s: s.occupied)
        )
        blocks, least = line.base.blocks, int(self.least(family, kinds)[0])
        all_ = line.stalls(blocks, [n * blocks for n in family.lacks[0].tolist()])
        stalls = {name: {cause: time // blocks for cause, time in causes.items()} for name, causes in all_.items()}
        return _Sample(blocks, max(first, least), max(steady, least), occupied, line.ends, stalls)

    def least(self, family: Family, kinds: Kinds) -> Ints:
        """A round of each member takes no less than its units are busy."""
        import numpy as np

        one, *more = (np.array(self.busy(shape, kinds)) for shape in (family.shape, *map(once, family.what)))
        busy = np.tile(one, (len(family.members), 1))
        for n, each in zip(family.lacks.T, more, strict=True):
            busy += np.outer(n, each)
        found: Ints = busy.max(axis=1)
        return found

    def busy(self, shape: Shape, kinds: Kinds) -> list[int]:
        """How long each unit is busy in a round of such blocks, in ps."""
        blocks, resident = sum(weight * each for weight, each in kinds), max(each for _, each in kinds)
        busy = self.model.totals(shape).busy
        return [busy.get(name, 0) * (blocks if name in SHARED else resident) for name in (*SHARED, *OWN)]

    def simulated(
        self, shape: Shape, kinds: Kinds, rounds: int, fresh: bool, long: int, *, strict: bool = False
    ) -> _Sample:
        """How `rounds` rounds of blocks run: simulated once.  State has `long` iterations of a loop to recur in.

        Raises NoJumpError as Jumps do.
        """
        key = (shape, kinds, rounds, fresh, long)
        if key not in self.known:
            self.known[key] = self.simulate(*key, strict=strict)
        self.exact &= self.known[key].exact
        return self.known[key]

    def simulate(self, shape: Shape, kinds: Kinds, rounds: int, fresh: bool, long: int, *, strict: bool) -> _Sample:
        """One processor of each kind.

        Alike blocks run nearly in step.  That two fifths of a request are made up for agrees best with `chip`
        (tests/unit/test_fidelity.py); with nothing `fair` is up to 11 % slow, with a whole request up to 6 % fast.
        From the second round on their beginnings and ends are out of step as well.  Blocks of several classes are so
        altogether.
        """
        floor, processors, logs = self.start(shape, kinds, rounds, fresh)
        if not self.jump:
            return summary(kinds, rounds, _finish(floor), floor, processors, logs)
        all_ = [log for own in logs for slot in own for log in slot.values()]
        jumps = Jumps(floor, processors, all_, long, LONG_OUTER, strict=strict)
        found = summary(kinds, rounds, _finish(floor, jumps=jumps), floor, processors, logs)
        return replace(found, jumps=tuple(jumps.made), exact=jumps.exact, refused=jumps.refused)

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
        numbers = count() if numbers is None else numbers

        def take() -> Iterator[tuple[int, Course]]:
            for n in range(rounds):
                for bucket in buckets.values():
                    bucket.depth = max(bucket.depth, later if n else depth)
                yield next(numbers), Course(shape, len(self.model.parts))

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
                    place = env.process(_slot(floor, processor, take(), own, start))
                    floor.owners[place] = (-1 - len(floor.owners),)
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
            summary(kinds, 1, end, floor, processors, logs)
        units = processors[0].units
        chip = {name: unit.bucket.spans or [] for name, unit in units.items() if isinstance(unit, FairShare)}
        return _recording(model, recorder, model.iterations(shape), active, end, units, chip, logs[0])

    def books(self, name: str, busy: int, seen: Mapping[str, int], makespan: int, occupied: int) -> UnitTime:
        """Busy time is counted; idle time while processors have a block goes to the causes that the samples saw, in
        their proportion; the rest is the tail of the grid."""
        instances = 1 if name in SHARED else self.count
        idle = instances * makespan - busy
        total = sum(seen.values())
        inside = idle * occupied // (self.count * makespan) if name in SHARED else max(0, occupied - busy)
        stalls: dict[str, int] = {
            cause: min(inside, idle) * time // total if total else 0 for cause, time in seen.items()
        }
        stalls["tail"] += idle - sum(stalls.values())
        return UnitTime(instances, busy, stalls)


def profile(shape: Shape, numbers: dict[Iteration | tuple[Cost, ...], int]) -> Profile:
    """What a shape does on the units of a processor: runs of alike iterations, whatever they move.

    `numbers` gets iterations that were seen, and their costs, each with a number for what they cost.
    """
    out: list[object] = []
    for item in shape:
        todo: Iterable[tuple[int, object]]
        if isinstance(item, Visit):
            todo = ((trips, _number(iteration, numbers)) for trips, iteration in item.stretches)
        else:
            todo = ((item.times, profile(item.body, numbers)),)
        runs: list[tuple[int, object]] = []
        for trips, what in todo:
            if runs and runs[-1][1] == what:
                runs[-1] = runs[-1][0] + trips, what
            else:
                runs.append((trips, what))
        out.append(tuple(runs))
    return tuple(out)


def _number(iteration: Iteration, numbers: dict[Iteration | tuple[Cost, ...], int]) -> int:
    if iteration not in numbers:
        costs = tuple(work.cost for work in iteration)
        numbers[iteration] = numbers.setdefault(costs, len(numbers))
    return numbers[iteration]


def deal(blocks: int, processors: int) -> Kinds:
    """How many processors get how many of `blocks`, at most one more than others."""
    each, more = divmod(blocks, processors)
    return tuple(kind for kind in ((more, each + 1), (processors - more, each)) if kind[0] and kind[1])


def summary(
    kinds: Kinds,
    rounds: int,
    end: int,
    floor: Floor,
    processors: Sequence[Processor],
    logs: Sequence[Sequence[Mapping[tuple[str, int], Log]]],
) -> _Sample:
    """What a simulation that ended at `end` by its clock showed; `logs` are those of each slot of each processor."""
    ended = floor.ended
    slots = sum(resident for _, resident in kinds)
    stalls: dict[str, dict[str, int]] = {name: dict.fromkeys(CAUSES, 0) for name in (*SHARED, *OWN)}
    occupied = 0
    for processor, own, (weight, _) in zip(processors, logs, kinds, strict=True):
        worker = next(iter(own[0].values()))
        occupied += weight * max(log.end for slot in own for log in slot.values())
        for name, unit in processor.units.items():
            unit.idle(end, worker)
            for cause, length in unit.stalls.items():
                stalls[name][cause] += length * weight
    end += floor.skipped
    first = ended[slots - 1] + (end - ended[-1])  # stores on their way when the last block has ended
    return _Sample(
        blocks=rounds * sum(weight * resident for weight, resident in kinds),
        first=first,
        steady=end - first if rounds > 1 else end,
        occupied=occupied // rounds,
        ends=tuple(ended[-slots:]),
        stalls=stalls,
    )


def families_of(shapes: Sequence[Shape], rule: Rule) -> list[Family]:
    """Shapes by what they are with their long runs cut."""
    import numpy as np

    found: dict[tuple[Shape, tuple[Iteration, ...]], tuple[list[int], list[list[int]]]] = {}
    for n, shape in enumerate(shapes):
        lacks: Counter[Iteration] = Counter()
        short = cut(shape, rule, lacks)
        members, rows = found.setdefault((short, tuple(lacks)), ([], []))
        members.append(n)
        rows.append(list(lacks.values()))
    return [
        Family(shape, what, members, np.array(rows, np.int64).reshape(len(rows), len(what)))
        for (shape, what), (members, rows) in found.items()
    ]


def cut(shape: Shape, rule: Rule, lacks: Counter[Iteration], times: int = 1) -> Shape:
    """A shape that comes so many times with its long runs cut; `lacks` gets what is cut off.

    That makes iterations of loops around alike that differ in the trips of loops inside only.
    """
    out: list[Visit | Repeat] = []
    nested = False
    for item in shape:
        if isinstance(item, Visit):
            runs = item.stretches
            if any(trips >= rule.base for trips, _ in runs):
                for trips, work in runs:
                    if trips >= rule.base:
                        lacks[work] += (trips - rule.of(trips)) * times
                item = Visit(item.part, tuple([(rule.of(trips), work) for trips, work in runs]))
            out.append(item)
            continue
        nested = True
        out.append(Repeat(item.times, cut(item.body, rule, lacks, times * item.times)))
    return folded(out) if nested else tuple(out)


def folded(row: Sequence[Visit | Repeat]) -> Shape:
    """The shape with runs of loops that come again and again, up to LONG_PATTERN of them in turn, as one loop."""
    out: list[Visit | Repeat] = []
    at = 0
    while at < len(row):
        best = 1, 1
        for length in range(1, LONG_PATTERN + 1 if isinstance(row[at], Repeat) else 1):
            pattern, times = row[at : at + length], 1
            while len(pattern) == length and row[at + times * length : at + (times + 1) * length] == pattern:
                times += 1
            if times > 1 and times * length > best[0] * best[1]:
                best = length, times
        length, times = best
        found = tuple(row[at : at + length])
        if times > 1 and length == 1 and isinstance(loop := found[0], Repeat):
            out.append(Repeat(loop.times * times, loop.body))
        else:
            out += [Repeat(times, found)] if times > 1 else found
        at += length * times
    return tuple(out)


def lengthened(shape: Shape, what: Iteration, rule: Rule) -> tuple[Shape, int]:
    """The shape with `step` more iterations in each cut run of `what`, and how many that are."""
    out: list[Visit | Repeat] = []
    more = 0
    for item in shape:
        if isinstance(item, Visit):
            runs = [(trips + rule.step * (trips >= rule.base and work == what), work) for trips, work in item.stretches]
            more += sum(trips for trips, _ in runs) - sum(trips for trips, _ in item.stretches)
            out.append(Visit(item.part, tuple(runs)))
        else:
            body, each = lengthened(item.body, what, rule)
            more += each * item.times
            out.append(Repeat(item.times, body))
    return tuple(out), more


def items(shape: Shape) -> int:
    """Visits and loops that a shape is written with."""
    return sum(1 if isinstance(item, Visit) else items(item.body) + 1 for item in shape)


def near(shape: Shape) -> Shape:
    """The loop of a shape that has most iterations with what is before and after it."""
    if len(shape) <= FEW_ITEMS:
        return shape
    longest = max(range(len(shape)), key=lambda n: max(sum(t for t, _ in v.stretches) for _, v in visits((shape[n],))))
    return shape[max(0, longest - 1) : longest + 2]


def once(what: Iteration) -> Shape:
    """A shape that does `what` once."""
    return (Visit(0, ((1, what),)),)


def span(corners: Sequence[Sequence[int]], active: int, resident: int) -> Span:
    """How long a block takes, by how many processors are busy and how many blocks share its own.

    `corners` are the times with one processor and with all, each with one block there and with all.
    """

    def at(processors: int, each: int) -> float:
        x = (processors - 1) / max(1, active - 1)
        y = (each - 1) / max(1, resident - 1)
        alone: float
        shared: float
        alone, shared = (few + (many - few) * x for few, many in zip(*corners, strict=True))
        return alone + (shared - alone) * y

    return at


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
    take: Iterable[tuple[int, Course]],
    logs: Mapping[tuple[str, int], Log],
    start: int,
) -> Process:
    """A place for one block on a processor: from `start` on runs the blocks it takes, one after another."""
    for log in logs.values():
        log.state = "launch" if start else "tail"
    yield floor.env.timeout(start)  # all slots exist before the first takes a block
    for n, (number, course) in enumerate(take):
        if n and not floor.model.schedule.persistent and floor.model.hardware.block_ps:
            for log in logs.values():
                log.mark(int(floor.env.now))
                log.state = "launch"
            yield floor.env.timeout(floor.model.hardware.block_ps)
        for log in logs.values():
            log.mark(int(floor.env.now))
            log.state = "data"
        warm = n > 0 and floor.model.schedule.persistent
        yield from Block(floor, processor, course, number, warm=warm).run(logs)


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
