"""The best schedules of a dataflow on a machine: a search over tiles, stages, warp groups and staging.

Each candidate goes through the machine's rules first (`RULES`), which need no time.  Of those that are left each has a
bound: no run falls below the time for which its busiest unit is busy (timeline.least_ps).  Candidates are timed (fair
fidelity) in the order of their bounds, until no bound that is left is below the times that count: those of the best
`top` and of the best for each number of stages.  So the answer is that of timing all of them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice, product, repeat, starmap
from multiprocessing import get_context
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from iosim.dataflows import Dataflow, load_dataflow
from iosim.errors import InputError, nearest
from iosim.hardware import DEFAULT, Hardware
from iosim.interpreters.ledger import Ledger, ledger
from iosim.kernels import load_kernel
from iosim.memory.cache import DeviceTraffic
from iosim.memory.onchip import CapacityError, Footprint, footprints, on_matrix_unit
from iosim.problem import Attention, require_int
from iosim.program import Compute, Load, Program, tile_of, walk
from iosim.schedule import MAX_GROUPS, Schedule
from iosim.study.choose import MARGIN, complete
from iosim.study.ragged import Engine
from iosim.study.run import Note, device_traffic, machine_called, plan_of, require_formats

if TYPE_CHECKING:
    from iosim.interpreters.timeline import Timeline, UnitTime
    from iosim.study.batch import Batch

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
KEYS = (16, 32, 48, 64, 96, 128, 192, 256)
STAGES = ((1,), (1, 2), (2, 1), (2,), (2, 3), (3, 2), (3,), (4,))
GROUPS = (1, 2, 3, 4, 6, 8)
SWITCHES = ("producer", "pingpong", "overlap")  # of FlashAttention-3's order
TOP = 10
BATCH = 32  # candidates that are timed before the bounds are looked at again, whatever the number of processes
SURE = 10  # a run that is longer by one part in so many at the highest clock is longer at every other
FEW = 16  # candidates for each process at least, so that it is worth its start
RULES: Mapping[str, str] = {
    "size": "a tile of twice the rows that there are, or more",
    "instruction": "rows of a group, or keys, are no whole instructions",
    "threads": "more threads than a block may have",
    "staging": "the matrix unit reads the operand moved from elsewhere",
    "SRAM": "more SRAM than a block gets",
    "margin": "less SRAM left free than the margin asks for",
    "registers": "more registers than a thread or a processor has",
    "tensor memory": "more tensor memory than a processor has",
}

Given: TypeAlias = Mapping[str, Any]  # fields of a schedule
Left: TypeAlias = tuple[Given, Schedule, tuple[int, ...]]  # a candidate, its schedule, resident blocks


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its time.  `given` are the fields that were searched, `footprint` that with most SRAM."""

    given: Given = field(hash=False)
    schedule: Schedule
    footprint: Footprint
    makespan_ps: int
    units: Mapping[str, UnitTime] = field(hash=False)
    launch_ps: int
    bound: str

    @property
    def seconds(self) -> float:
        return self.makespan_ps / 1e12

    @property
    def stages(self) -> int:
        """The number of stages, that of the tile with most."""
        return max(self.schedule.stages)

    @property
    def order(self) -> tuple[int, int, str]:
        """Faster first; of equally fast ones that with less SRAM."""
        return self.makespan_ps, self.footprint.sram_bytes, repr(sorted(self.given.items()))


@dataclass(frozen=True, slots=True)
class Removed:
    """What a rule removed: how many candidates, and the range of each searched field among them."""

    rule: str
    count: int
    values: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True, repr=False)
class Tuned:
    """The answer of a search.

    `candidates` are the best, best first, and `by_stages` the best for each number of stages.  `default` is what the
    default rule, or a kernel's authors, would take.  `considered` counts all candidates, `timed` those that needed a
    time: the others fell to a rule or to their bound.
    """

    problem: Attention
    dataflow: str
    computes: str
    kernel: str | None
    hardware: Hardware
    margin: float
    space: Mapping[str, tuple[Any, ...]]
    considered: int
    removed: tuple[Removed, ...]
    bounded: int
    timed: int
    candidates: tuple[Candidate, ...]
    by_stages: tuple[Candidate, ...]
    default: Candidate | None
    took: float
    batch: Batch | None = None

    def __str__(self) -> str:
        """What `iosim tune` prints."""
        from iosim.report.tune import render

        return render(self)

    def __repr__(self) -> str:
        best = self.candidates[0]
        return f"<Tuned {self.dataflow} on {self.hardware.name}: {best.given}, {best.seconds:.3g} s>"


def tune(
    problem: Attention,
    *,
    dataflow: str | Dataflow = "flash2",
    kernel: str | None = None,
    hardware: str | Hardware = DEFAULT,
    margin: float = MARGIN,
    limits: Mapping[str, Sequence[Any]] | None = None,
    top: int = TOP,
    for_triton: bool = False,
    workers: int | None = 1,
    note: Note = lambda _: None,
    batch: Batch | None = None,
) -> Tuned:
    """Search the schedules of a dataflow, or of a `kernel` that people run, for the fastest.

    `margin` is the share of SRAM that stays free.  `limits` gives the values of searched fields, in place of those in
    this file.  With a `batch`, its sequences have the place of the problem's queries and keys: rules are held against a
    tile of the tallest of them, and every candidate that they leave is timed.  `for_triton` keeps to what a
    triton.Config can say.  `workers` are processes, None for one a core; more than one need a script that starts behind
    `if __name__ == "__main__"`.

    Raises InputError for bad input, CapacityError where no candidate is left.
    """
    start = perf_counter()
    machine = machine_called(hardware)
    require_int("top", top, 1, 10**6)
    if not 0 <= margin < 1:
        raise InputError(f"margin: {margin!r} is not from 0 to below 1")
    if missing := machine.missing_for_time():
        raise InputError(f"{machine.name}: no time without {', '.join(missing)}, which the profile does not know")
    called = dataflow if kernel is None else kernel
    search = Search(problem, machine, called, kernel is not None)
    if batch is not None:
        search = BatchSearch(problem, machine, called, kernel is not None, batch)
    require_formats(problem, machine, search.flow)
    space = _space(search, limits or {}, for_triton=for_triton or kernel == "triton")
    note("applying the machine's rules")
    left, removed = _apply_rules(search, space, margin, note)
    considered = len(left) + sum(r.count for r in removed)
    if not left:
        counts = ", ".join(f"{r.rule} {r.count}" for r in removed)
        raise CapacityError(f"tune: the rules remove all {considered} candidates ({counts}); a smaller --margin, other "
                            "limits or another machine may leave some")  # fmt: skip
    count = min(workers or os.cpu_count() or 1, len(left) // FEW)
    with _pool(count if isinstance(search.called, str) else 1) as pool:
        timed, by_stages, number = _best(search, search.bounded(left), top, pool, note)
    return Tuned(
        problem, search.flow.name, search.flow.computes, kernel, machine, margin, space, considered, removed,
        len(left) - number, number,
        timed, by_stages, search.default(), perf_counter() - start, batch,
    )  # fmt: skip


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Search:
    """A problem, a machine and a dataflow (or a kernel, by name), and what its candidates share."""

    problem: Attention
    machine: Hardware
    called: str | Dataflow
    is_kernel: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get what it is, not what it keeps."""
        return Search, (self.problem, self.machine, self.called, self.is_kernel)

    @cached_property
    def flow(self) -> Dataflow:
        if isinstance(self.called, Dataflow):
            return self.called
        return load_kernel(self.called).dataflow() if self.is_kernel else load_dataflow(self.called)

    @cached_property
    def settled(self) -> Given:
        """Fields that the authors of the kernel settled, whatever the tile."""
        return load_kernel(str(self.called)).file.settings if self.is_kernel else {}

    @cached_property
    def _programs(self) -> dict[tuple[Any, ...], tuple[Program, Ledger]]:
        return {}

    @cached_property
    def _traffic(self) -> dict[tuple[Any, ...], DeviceTraffic]:
        return {}

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and keys of the largest tile that makes sense."""
        return self.problem.n_q, self.problem.n_k

    def bounded(self, left: Sequence[Left]) -> list[tuple[int, int, Given]]:
        """(least time in ps, stages, fields) of each candidate, lowest bounds first."""
        return _bounded(self, left)

    def complete(self, given: Given) -> Schedule:
        """The whole schedule of a candidate."""
        return complete(self.flow, self.problem, self.machine, given)

    def reads(self, schedule: Schedule) -> tuple[Any, ...]:
        """What a program depends on of a schedule; loop orders are none of it."""
        return tuple(getattr(schedule, name) for name in self.flow.uses if name not in SWITCHES)

    def program(self, schedule: Schedule) -> tuple[Program, Ledger]:
        """The program of a schedule and what it moves."""
        key = self.reads(schedule)
        if key not in self._programs:
            program = self.flow(self.problem, schedule)
            self._programs[key] = program, ledger(program)
        return self._programs[key]

    def footprints(self, schedule: Schedule) -> Mapping[str, Footprint]:
        """What a block of each kernel takes."""
        return footprints(self.program(schedule)[0], schedule, self.machine)

    def run(self, given: Given, enough_ps: int | None = None) -> Candidate:
        """A candidate in time; one above `enough_ps` need not be exact."""
        from iosim.interpreters.timeline import timeline

        schedule = self.complete(given)
        program, counted = self.program(schedule)
        prints = self.footprints(schedule)
        resident = tuple(f.resident for f in prints.values())
        key = (*self.reads(schedule), resident, tuple(schedule.multicast.items()), schedule.descending)
        if key not in self._traffic:
            self._traffic[key] = device_traffic(program, counted, schedule, self.machine, prints)
        timed = timeline(program, schedule, self.machine, self._traffic[key], enough_ps=enough_ps)
        return _candidate(given, schedule, prints, timed)

    def default(self) -> Candidate | None:
        """What the default rule or the kernel's authors take; None where nothing fits."""
        from iosim.interpreters.timeline import timeline

        try:
            plan = plan_of(self.problem, self.machine, self.flow, {})
        except CapacityError:
            return None
        s = plan.schedule
        prints = footprints(plan.program, s, self.machine)
        if not all(f.resident for f in prints.values()):
            return None
        traffic = device_traffic(plan.program, ledger(plan.program), s, self.machine, prints)
        given = {"block_q": s.block_q, "block_k": s.block_k, "stages": s.stages, "groups": s.groups}
        return _candidate(given, s, prints, timeline(plan.program, s, self.machine, traffic))


@dataclass(frozen=True)
class BatchSearch(Search):
    """A search for sequences of different lengths, of which `problem` is what they have in common."""

    batch: Batch

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSearch, (self.problem, self.machine, self.called, self.is_kernel, self.batch)

    @cached_property
    def engine(self) -> Engine:
        """With no field given."""
        return self._engine({})

    @cached_property
    def alike(self) -> Attention:
        """What a tile is chosen for."""
        return self.engine.alike(self.batch.sequences)

    @property
    def settled(self) -> Given:
        return {"place": {}}

    @property
    def largest(self) -> tuple[int, int]:
        return self.alike.n_q * (self.alike.group if self.engine.packed else 1), self.alike.n_k

    def bounded(self, left: Sequence[Left]) -> list[tuple[int, int, Given]]:
        return [(0, max(schedule.stages), given) for given, schedule, _ in left]

    def complete(self, given: Given) -> Schedule:
        plain = {"splits": 1, "pack_gqa": self.engine.packed and self.alike.group > 1}
        return complete(self.engine.flow, self.alike, self.machine, {**plain, **given})

    def program(self, schedule: Schedule) -> tuple[Program, Ledger]:
        key = self.reads(schedule)
        if key not in self._programs:
            program = self.engine.flow(self.alike, schedule)
            self._programs[key] = program, ledger(program)
        return self._programs[key]

    def run(self, given: Given, enough_ps: int | None = None) -> Candidate:
        del enough_ps
        from iosim.study.batch import footprint_of

        engine = self._engine(given)
        step = engine.step(self.batch.sequences)
        return _candidate(given, step.schedule, {"": footprint_of(engine, step)}, step.timeline)

    def default(self) -> Candidate | None:
        try:
            found = self.run({})
        except CapacityError:
            return None
        s = found.schedule
        given = {"block_q": s.block_q, "block_k": s.block_k, "stages": s.stages, "groups": s.groups}
        return replace(found, given=given)

    def _engine(self, given: Given) -> Engine:
        if not isinstance(self.called, str) or self.is_kernel:
            raise InputError("lengths: sequences of different lengths are run by a dataflow, flash2 or split-kv")
        return Engine(self.problem, self.machine, self.called, given, self.batch.split_rule, self.batch.cache)


def _candidate(given: Given, schedule: Schedule, prints: Mapping[str, Footprint], timed: Timeline) -> Candidate:
    largest = max(prints.values(), key=lambda f: f.sram_bytes)
    launch = sum(k.launch_ps for k in timed.kernels)
    return Candidate(given, schedule, largest, timed.makespan_ps, timed.units, launch, timed.bound)


def _space(search: Search, limits: Mapping[str, Sequence[Any]], *, for_triton: bool) -> dict[str, tuple[Any, ...]]:
    """The values of each searched field."""
    uses = search.flow.uses
    space: dict[str, tuple[Any, ...]] = {
        name: values for name, values in (("block_q", ROWS), ("block_k", KEYS)) if name in uses
    }
    if not space:
        raise InputError(f"dataflow: {search.flow.name} has no block_q and block_k to search")
    space |= {"stages": STAGES, "groups": tuple(g for g in GROUPS if g <= MAX_GROUPS)}
    if for_triton:
        space = {name: tuple(v for v in values if _of_triton(v)) for name, values in space.items()}
    else:
        space |= {name: (True, False) for name in SWITCHES if name in uses and not search.is_kernel}
        if "place" not in search.settled:
            space["place"] = _places(search, space)
    for name, values in limits.items():
        if name not in space:
            raise InputError(f"{name}: is not searched in {search.flow.name}; {', '.join(space)} are"
                             f"{nearest(name, space)}")  # fmt: skip
        if not values:
            raise InputError(f"{name}: needs one value or more")
        pairs = [(v,) if name == "stages" and isinstance(v, int) else v for v in values]
        whole = [tuple(v) if isinstance(v, list) else v for v in pairs]
        space[name] = tuple(v for n, v in enumerate(whole) if v not in whole[:n])
        for value in space[name]:
            Schedule(**{"block_q": 64, "block_k": 64, name: value})  # refuses what no schedule has
            if for_triton and not _of_triton(value):
                raise InputError(f"{name}: Triton has no {value}: its sizes are powers of two, its stages one number")
    search.complete({name: values[0] for name, values in space.items()})  # refuses a kernel of another machine
    return space


def _of_triton(value: Any) -> bool:
    """Whether a triton.Config can say it: powers of two, one number of stages."""
    return len(value) == 1 if isinstance(value, tuple) else value & (value - 1) == 0


def _places(search: Search, space: Mapping[str, Sequence[Any]]) -> tuple[Given, ...]:
    """No move, and each left operand of a product moved alone: from SRAM into registers, or the other way."""
    schedule = search.complete({name: values[0] for name, values in space.items()})
    program, _ = search.program(schedule)
    moves: dict[str, str] = {}
    for kernel in program.kernels:
        loaded = {n.tile.name for n, _ in walk(kernel.body) if isinstance(n, Load)}
        matrix = search.machine.with_units(schedule.of(kernel.name).units).matrix
        for node, _ in walk(kernel.body):
            if isinstance(node, Compute) and node.op == "matmul" and on_matrix_unit(node):
                name = tile_of(node.args[0]).name
                in_registers = name not in loaded and matrix.operand_a in ("registers", "either")
                moves[name] = "sram" if in_registers else "registers"
    return ({}, *({name: place} for name, place in moves.items()))


# ---------------------------------------------------------------- rules


def _apply_rules(
    search: Search, space: Mapping[str, tuple[Any, ...]], margin: float, note: Note
) -> tuple[list[Left], tuple[Removed, ...]]:
    """The candidates that no rule removes, with their schedules and resident blocks; and what each rule removed."""
    counts: Counter[str] = Counter()
    values: dict[str, dict[str, set[Any]]] = {}
    left: list[Left] = []
    known: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}
    for n, chosen in enumerate(product(*space.values())):
        given: Given = {name: value for name, value in zip(space, chosen, strict=True) if name != "place" or value}
        rule = _cheap_rule(search, given)
        if not rule:
            schedule = search.complete(given)
            rule, resident = _capacity_rule(search, given, schedule, margin, known)
        if rule:
            counts[rule] += 1
            seen = values.setdefault(rule, {name: set() for name in space})
            for name, value in given.items():
                seen[name].add(value if name != "place" else tuple(value.items()))
        else:
            left.append((given, schedule, resident))
        if n % 1000 == 0:
            note(f"applying the machine's rules: {n:,} candidates")
    removed = tuple(
        Removed(rule, counts[rule], {name: tuple(sorted(v)) for name, v in values[rule].items() if v})
        for rule in RULES
        if counts[rule]
    )
    return left, removed


def _cheap_rule(search: Search, given: Given) -> str:
    """The rule that removes a candidate whose program need not be known for that; "" where there is none."""
    a, hardware = search.problem, search.machine.with_units(search.settled.get("units", ()))
    rows, keys, groups = given.get("block_q", ROWS[0]), given.get("block_k", KEYS[0]), given["groups"]
    most_rows, most_keys = search.largest
    if rows >= 2 * max(most_rows, ROWS[0]) or keys >= 2 * max(most_keys, KEYS[0]):
        return "size"
    matrix = hardware.matrix
    if a.dtype != "fp32" and matrix.instruction_m is not None:
        by_warp = hardware.warps_per_group if matrix.issued_by == "warp" else 1
        parts, rest = divmod(rows, matrix.instruction_m)
        # Triton gives several groups the same rows where there are too few; nobody else is known to do so.
        shared = search.called == "triton" and groups * by_warp % max(parts, 1) == 0
        if rest or keys % (matrix.instruction_n or 1) or not (parts % (groups * by_warp) == 0 or shared):
            return "instruction"
    threads = (groups + given.get("producer", False)) * hardware.group_threads
    if threads > hardware.max_threads_per_block:
        return "threads"
    moved = given.get("place", {}).values()
    return "staging" if "registers" in moved and matrix.operand_a not in ("registers", "either") else ""


def _capacity_rule(
    search: Search, given: Given, schedule: Schedule, margin: float, known: dict[tuple[Any, ...], Any]
) -> tuple[str, tuple[int, ...]]:
    """The rule that removes a candidate for what a block of it takes, and how many blocks are resident.

    `known` keeps what was found out for candidates that take the same.
    """
    slots = tuple(
        (index, tuple(order.slots.items()), sum(r.count for r in order.roles))
        for index, order in schedule.orders.items()
    )
    same = {name: value for name, value in given.items() if name not in SWITCHES}
    key = (repr(same), slots)
    if key not in known:
        prints = search.footprints(schedule).values()
        known[key] = (
            next(filter(None, (_over(f, margin, search.machine) for f in prints)), ""),
            tuple(f.resident for f in prints),
        )
    return cast("tuple[str, tuple[int, ...]]", known[key])


def _over(f: Footprint, margin: float, hardware: Hardware) -> str:
    """The rule that a block breaks, "" where there is none."""
    if f.sram_bytes > f.sram_capacity:
        return "SRAM"
    if hardware.tmem is not None and f.tmem_bytes > hardware.tmem.capacity_bytes:
        return "tensor memory"
    if f.threads > hardware.max_threads_per_block:
        return "threads"
    if not f.fits:
        return "registers"
    return "margin" if f.sram_bytes > (1 - margin) * f.sram_capacity else ""


# ---------------------------------------------------------------- times


def _bounded(search: Search, left: Sequence[Left]) -> list[tuple[int, int, Given]]:
    """(least time in ps, stages, fields) of each candidate, lowest bounds first."""
    from iosim.interpreters.timeline import least_ps

    known: dict[tuple[str, tuple[int, ...]], int] = {}
    out = []
    for given, schedule, resident in left:
        # Neither buffers nor the order of a loop change how long units are busy.
        same = replace(schedule, stages=(1,), orders={}, shares={}, producer=True, pingpong=True, overlap=True)
        key = repr(same), resident
        if key not in known:
            known[key] = least_ps(*search.program(schedule), schedule, search.machine)
        out.append((known[key], max(schedule.stages), given))
    return sorted(out, key=lambda c: c[0])


def _best(
    search: Search, waiting: Sequence[tuple[int, int, Given]], top: int, pool: Executor | None, note: Note
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...], int]:
    """The best candidates, the best for each number of stages, and how many were timed for them."""
    timed: list[Candidate] = []
    best: dict[int, Candidate] = {}
    looked = number = 0

    def open_() -> Iterator[tuple[Given, int | None]]:
        """Those whose bound does not rule them out as things stand, and the longest time that would count."""
        nonlocal looked
        for bound, stages, given in waiting[looked:]:
            looked += 1
            counts = None
            if len(timed) >= top and stages in best:
                counts = max(timed[top - 1].makespan_ps, best[stages].makespan_ps)
            if counts is None or bound <= counts:
                yield given, counts

    while batch := list(islice(open_(), BATCH)):
        number += len(batch)
        jobs = [(given, None if counts is None else counts + counts // SURE) for given, counts in batch]
        timed += starmap(search.run, jobs) if pool is None else pool.map(_timed, repeat(search), jobs)
        timed.sort(key=lambda c: c.order)
        for candidate in reversed(timed):
            best[candidate.stages] = candidate
        timed = [c for n, c in enumerate(timed) if n < top or best[c.stages] is c]
        note(f"timed {number:,}, looked at {looked:,} of {len(waiting):,}; best {timed[0].seconds * 1e6:,.1f} us")
    return tuple(timed[:top]), tuple(best[stages] for stages in sorted(best)), number


def _timed(search: Search, job: tuple[Given, int | None]) -> Candidate:
    """A candidate in a process of the pool."""
    return _shared(search).run(*job)


@lru_cache(maxsize=1)
def _shared(search: Search) -> Search:
    """One search a process, so that its candidates share what they can."""
    return search


@contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    """Processes with one thread each for linear algebra; None for one."""
    if workers < 2:
        yield None
        return
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))  # read by the processes as they start
    ignore = signal.SIGINT, signal.SIG_IGN  # this process alone says that it was interrupted
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=signal.signal, initargs=ignore)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
