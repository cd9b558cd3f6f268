"""A checklist for a schedule on a machine: what its authors' guide asks of a FlashAttention kernel, with numbers.

The points are those of Moore Threads' optimisation guide: SRAM use below 90 % with everything counted, a tile that
suits d, double buffering, asynchronous copies, registers, occupancy; and the tail of the grid, arithmetic intensity,
whole instructions, fp32 sums.  What a line finds, and what its remedy would bring, comes from the same interpreters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

from iosim.dataflows import Dataflow, load_dataflow
from iosim.dtypes import dtype
from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.model import Model
from iosim.memory.onchip import CapacityError, Footprint, footprints
from iosim.pipeline import Segment, segments
from iosim.problem import Attention
from iosim.schedule import MAX_GROUPS
from iosim.study.choose import MARGIN, unfitting
from iosim.study.run import Plan, Run, evaluate, plan_of, require_uneven
from iosim.words import count, digits, duration, kib, percent

Status: TypeAlias = Literal["pass", "warn", "fail", "skip"]

WORSE = 0.05  # of the time of a neighbouring tile: more than this is worth a change
STARVED = 0.05  # of a block's time that the compute units wait for data: less than this needs no second buffer
TAIL = 0.20  # of the time without a block to run
BUFFERS = 2  # of each tile that a loop loads
GROUPS = 2  # warp groups on a processor, so that one's softmax runs under another's products
GUIDE = {64: (512, 256), 128: (256, 128), 256: (128, 64)}  # the guide's tile table: d to block_q, block_k


@dataclass(frozen=True, slots=True)
class Line:
    """One point of the list: `value` in `unit` is held against `threshold`, `found` and `wanted` say so in words."""

    name: str
    status: Status
    found: str
    wanted: str
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    remedy: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Checklist:
    """All lines for one schedule, and `notes` on figures of the guide that this tile is one of.

    `seconds` is None where the schedule does not fit, or the machine has no time.
    """

    plan: Plan
    seconds: float | None
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.checklist import render
        from iosim.report.notebook import printed

        return printed(render(self))

    def count(self, status: Status) -> int:
        """How many lines have a status."""
        return sum(line.status == status for line in self.lines)

    def failed(self, *, strict: bool) -> list[str]:
        """Names of the lines that make the check fail."""
        bad = ("fail", "warn") if strict else ("fail",)
        return [line.name for line in self.lines if line.status in bad]


def checklist(
    problem: Attention,
    flow: Dataflow,
    machine: Hardware,
    given: Mapping[str, Any],
    *,
    fidelity: str = "fair",
    margin: float = MARGIN,
    note: Callable[[str], None] = lambda _: None,
) -> Checklist:
    """Check the schedule with the fields `given`, the others chosen as `iosim run` does.

    `margin` is the share of SRAM that is to stay free.  A tile that does not fit is a line that fails.  Raises
    InputError for bad input.
    """
    if not 0 <= margin < 1:
        raise InputError(f"margin: {margin:g} is not a share of SRAM from 0 to below 1, like 0.1")
    try:
        plan = plan_of(problem, machine, flow, given)
    except CapacityError:
        schedule = unfitting(flow, problem, machine, given)
        plan = Plan(problem, machine, flow, schedule, "as given, though it does not fit", flow(problem, schedule))
    require_uneven(given, [plan.program])
    case = _Case(plan, given, fidelity, margin, note)
    lines = []
    for check in CHECKS:
        note(f"check of {check.__name__.strip('_')}")
        lines.append(check(case))
    notes = list(guide_notes(plan))
    if case.run is not None and case.run.no_time:
        notes.append(f"No time: {case.run.no_time}.")
    return Checklist(plan, case.seconds, tuple(lines), tuple(notes))


# ---------------------------------------------------------------- the schedule, and others that it is held against


@dataclass(frozen=True)
class _Trial:
    """The same with some fields of the schedule changed."""

    change: Mapping[str, Any]
    plan: Plan
    fidelity: str
    flow: str = ""

    @cached_property
    def footprint(self) -> Footprint:
        """Of the kernel that takes most SRAM."""
        prints = footprints(self.plan.program, self.plan.schedule, self.plan.machine)
        return max(prints.values(), key=lambda f: f.sram_bytes)

    @cached_property
    def run(self) -> Run:
        return evaluate(self.plan, self.fidelity)

    @property
    def seconds(self) -> float | None:
        return self.run.seconds

    def words(self, now: float | None) -> str:
        """What it takes: "block_k 64 would take 160 KiB (83 %) and 61.2 us (67.9 us now)"."""
        f = self.footprint
        fields = ", ".join(f"{name} {_value(value)}" for name, value in self.change.items()) or self.flow
        memory = f"{kib(f.sram_bytes)} ({percent(f.sram_bytes / f.sram_capacity)})"
        if self.seconds is None:
            return f"{fields} would take {memory}"
        before = "" if now is None else f", now {duration(now)}"
        return f"{fields} would take {memory} and {duration(self.seconds)}{before}"


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class _Case:
    """A schedule to be checked."""

    plan: Plan
    given: Mapping[str, Any]
    fidelity: str
    margin: float
    note: Callable[[str], None]
    tried: dict[tuple[tuple[str, Any], ...], _Trial | None] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Hardware:
        """As the kernel sees it."""
        return self.plan.machine.with_units(self.plan.schedule.units)

    @cached_property
    def prints(self) -> dict[str, Footprint]:
        return footprints(self.plan.program, self.plan.schedule, self.plan.machine)

    @cached_property
    def run(self) -> Run | None:
        """None where a block does not fit."""
        return evaluate(self.plan, self.fidelity) if all(f.resident for f in self.prints.values()) else None

    @property
    def seconds(self) -> float | None:
        return None if self.run is None else self.run.seconds

    @property
    def tiled(self) -> bool:
        return {"block_q", "block_k"} <= set(self.plan.flow.uses)

    @cached_property
    def parts(self) -> dict[str, tuple[Segment, ...]]:
        return {k.name: segments(k, self.plan.schedule.of(k.name)) for k in self.plan.program.kernels}

    def workers(self, kernel: str) -> int:
        """Warp groups that share a block's rows."""
        return self.parts[kernel][0].order.roles[-1].count

    def attempt(self, **change: Any) -> _Trial | None:
        """The schedule with these fields changed, None where it does not fit with the margin."""
        s, uses = self.plan.schedule, self.plan.flow.uses
        key = tuple(sorted(change.items()))
        if key not in self.tried:
            now = {name: getattr(s, name) for name in ("block_q", "block_k") if name in uses} | {"stages": s.stages}
            self.tried[key] = self._try({**self.given, **now, **change}, change)
        return self.tried[key]

    def _try(self, given: Mapping[str, Any], change: Mapping[str, Any]) -> _Trial | None:
        self.note(f"trying {', '.join(f'{name} {_value(value)}' for name, value in change.items())}")
        try:
            plan = plan_of(self.plan.problem, self.plan.machine, self.plan.flow, given)
            prints = footprints(plan.program, plan.schedule, plan.machine).values()
        except InputError:
            return None
        if not all(f.fits and f.sram_bytes <= (1 - self.margin) * f.sram_capacity for f in prints):
            return None
        return _Trial(change, plan, self.fidelity)

    @cached_property
    def neighbours(self) -> tuple[_Trial, ...]:
        """Tiles with a side or both twice or half as long that fit with the margin."""
        if not self.tiled:
            return ()
        q, k = self.plan.schedule.block_q, self.plan.schedule.block_k
        tiles = [(q // 2, k), (q, k // 2), (2 * q, k), (q, 2 * k), (2 * q, k // 2), (q // 2, 2 * k)]
        a = self.plan.problem
        changes = [
            {name: size for name, size, before in (("block_q", x, q), ("block_k", y, k)) if size != before}
            for x, y in tiles
            if 16 <= x < 2 * max(a.n_q, 16) and 16 <= y < 2 * max(a.n_k, 16)
        ]
        return tuple(t for change in changes if (t := self.attempt(**change)))

    def fastest(self, trials: Sequence[_Trial]) -> _Trial | None:
        """The trial with the least time, which is below that of the schedule, if there is one."""
        now = self.seconds
        timed = [t for t in trials if t.seconds is not None and (now is None or t.seconds < now)]
        return min(timed, key=lambda t: cast("float", t.seconds), default=None)

    def remedy(self, trials: Sequence[_Trial], otherwise: str = "") -> str:
        """What the fastest of these would take; without times, what the first would."""
        if not trials:
            return otherwise
        timed = [t for t in trials if t.seconds is not None]
        best = min(timed, key=lambda t: cast("float", t.seconds)) if timed else trials[0]
        return best.words(self.seconds)


# ---------------------------------------------------------------- the lines


def _sram(case: _Case) -> Line:
    f = max(case.prints.values(), key=lambda f: f.sram_bytes)
    share, most = f.sram_bytes / f.sram_capacity, 1 - case.margin
    good = share < most if case.margin else share <= 1
    remedy = ""
    if not good:
        found = list(_smaller(case))
        remedy = case.remedy(found, "no smaller tile fits with this margin at these stages")
    items = " + ".join(f"{name} {kib(size)}" for name, size in f.items.items())
    return Line(
        "SRAM", "pass" if good else "fail",
        f"{f.sram_bytes / 1024:.4g} of {kib(f.sram_capacity)}, {percent(share)}",
        f"below {most:.0%}".replace("%", " %") if case.margin else "100 % at most",
        100 * share, 100 * most, "%", remedy,
        f"kernel {f.kernel}: {items}; what is not listed (statistics, O, temporaries) is in registers",
    )  # fmt: skip


def _smaller(case: _Case) -> Iterator[_Trial]:
    """Tiles and stages that take less SRAM and fit, near ones first; at the first size at which some do."""
    s = case.plan.schedule
    if case.tiled:
        for shift in range(1, 8):
            sides: list[dict[str, Any]] = [{"block_k": s.block_k >> shift}, {"block_q": s.block_q >> shift}]
            sides += [sides[0] | sides[1]] if shift > 1 else []
            fitting = [t for side in sides if min(side.values()) >= 16 and (t := case.attempt(**side))]
            if fitting:
                yield from fitting
                break
    if max(s.stages) > 1 and (t := case.attempt(stages=(1,))):
        yield t


def _tile(case: _Case) -> Line:
    a, s = case.plan.problem, case.plan.schedule
    if not case.tiled or case.seconds is None:
        why = "the dataflow has no such tile" if not case.tiled else _no_time(case)
        return Line("tile for d", "skip", why, "")
    best = min(case.neighbours, key=lambda t: t.seconds or 0, default=None)
    ahead = 0.0 if best is None or best.seconds is None else case.seconds / best.seconds - 1
    table = GUIDE.get(a.d)
    detail = "" if table is None else f"the guide's table has {table[0]} x {table[1]} for d = {a.d}"
    found = f"{s.block_q} x {s.block_k}, d {a.d}: {duration(case.seconds)}"
    good = ahead <= WORSE
    gain = f"{percent(ahead)} slower than a neighbour" if ahead > 0 else "no neighbour is faster"
    return Line(
        "tile for d", "pass" if good else "warn", f"{found}, {gain}", f"within {percent(WORSE)}", 100 * ahead,
        100 * WORSE, "%", "" if good or best is None else best.words(case.seconds), detail,
    )  # fmt: skip


def _buffers(case: _Case) -> Line:
    loops = [part for parts in case.parts.values() for part in parts if part.loop is not None and part.copies]
    slots = {copy.name: part.order.slots.get(copy.name, 1) for part in loops for copy in part.copies}
    if not slots:
        return Line("double buffered", "skip", "no loop loads tiles", "")
    least = min(slots.values())
    lone = [name for name, number in slots.items() if number < BUFFERS]
    waits = _share(case.run, "data")
    if waits is not None:
        waits /= max(1e-9, 1 - (_share(case.run, "tail") or 0.0))
    found = f"{count(least, 'buffer', 'buffers')} of {', '.join(lone or slots)}"
    if waits is not None:
        found += f"; {percent(waits)} of a block's time waits for data"
    good = not lone or (waits is not None and waits < STARVED)
    remedy = ""
    if not good:
        s = case.plan.schedule
        deeper: list[Mapping[str, Any]] = [{"stages": (2,)}]
        if case.tiled:
            deeper += [{"stages": (2,), "block_k": s.block_k // n} for n in (2, 4) if s.block_k // n >= 16]
            deeper += [{"stages": (2,), "block_q": s.block_q // 2}] if s.block_q >= 32 else []
        remedy = case.remedy([t for d in deeper if (t := case.attempt(**d))], "two buffers fit with no tile near this")
    return Line(
        "double buffered", "pass" if good else "warn", found, f"{BUFFERS} buffers", least, BUFFERS, "buffers", remedy
    )


def _copies(case: _Case) -> Line:
    used, engine = case.machine.copy, case.machine.copies[0]
    waited = sorted({
        step.phase for parts in case.parts.values() for part in parts for role in part.order.roles
        for step in role.steps if step.verb == "run" and step.phase in {copy.name for copy in part.copies}
    })  # fmt: skip
    if not used.asynchronous:
        able = next((c.name for c in case.machine.copies if c.asynchronous), "")
        remedy = f"{case.machine.name} has {able}" if able else f"{case.machine.name} has no asynchronous copy"
        return Line("async copies", "warn", f"{used.name} is not asynchronous", "asynchronous", remedy=remedy)
    if waited:
        words = f"{used.name}, but {', '.join(waited)} is waited for where it is issued"
        return Line("async copies", "warn", words, "asynchronous", remedy="issue it before other work, wait after it")
    if engine.asynchronous and used.name != engine.name:
        units = tuple(engine.name if unit == used.name else unit for unit in case.plan.schedule.units)
        other = replace(case.plan, schedule=replace(case.plan.schedule, units=units))
        words, remedy = f"{used.name}, which threads issue", ""
        seconds = None if case.seconds is None else evaluate(other, case.fidelity).seconds
        if case.seconds is not None and seconds is not None:
            if case.seconds < (1 + WORSE) * seconds:
                words += f"; {engine.name} would bring {duration(max(0.0, case.seconds - seconds))}"
                return Line("async copies", "pass", words, f"asynchronous, {engine.name} if it pays")
            remedy = f"with {engine.name}, else unchanged, {duration(seconds)}, now {duration(case.seconds)}"
        return Line("async copies", "warn", words, engine.name, remedy=remedy)
    return Line("async copies", "pass", used.name, "asynchronous")


def _registers(case: _Case) -> Line:
    f = max(case.prints.values(), key=lambda f: f.registers / (f.max_registers or f.registers))
    spills, most = case.plan.schedule.spills, f.max_registers
    if most is None:
        return Line("registers", "skip", f"{f.registers} a thread", "the profile knows no limit", f.registers)
    whole = case.machine.registers
    too_many = f.registers > most or (whole is not None and f.block_registers > whole)
    status: Status = "fail" if too_many else "warn" if spills else "pass"
    found = f"about {f.registers} a thread, {f.block_registers:,} a block"
    found += f"; {spills} spilled" if spills else "; would spill" if f.registers > most else "; none spilled"
    remedy = ""
    if status != "pass":
        s = case.plan.schedule
        changes: list[Mapping[str, Any]] = [{"groups": 2 * s.groups}] if 2 * s.groups <= MAX_GROUPS else []
        changes += [{"block_q": s.block_q >> n} for n in (1, 2) if case.tiled and s.block_q >> n >= 16]
        fitting = [t for change in changes if (t := case.attempt(**change))]
        remedy = case.remedy(fitting, "no smaller tile near this fits")
        remedy += "".join(f" ({t.footprint.registers} registers)" for t in fitting if remedy == t.words(case.seconds))
    limit = f"{most} a thread" + ("" if whole is None else f", {whole:,} a block")
    return Line("registers", status, found, limit, f.registers, most, "registers a thread", remedy)


def _occupancy(case: _Case) -> Line:
    found = {name: f.resident * case.workers(name) for name, f in case.prints.items()}
    name = min(found, key=lambda name: found[name])
    f, groups = case.prints[name], found[name]
    words = f"{count(f.resident, 'block', 'blocks')} of {count(case.workers(name), 'warp group', 'warp groups')}"
    words += f" on a {case.machine.called} (limit: {f.limit})"
    status: Status = "fail" if not f.resident else "pass" if groups >= GROUPS else "warn"
    remedy = ""
    if status != "pass":
        more = [t for t in case.neighbours if _working(t) >= GROUPS]
        remedy = case.remedy(more, "" if f.resident else f.complaint(case.machine))
    return Line("occupancy", status, words, f"{GROUPS} warp groups", groups, GROUPS, "warp groups", remedy)


def _working(trial: _Trial) -> int:
    """Warp groups that work on a processor at one time, in the kernel with fewest."""
    s, program = trial.plan.schedule, trial.plan.program
    prints = footprints(program, s, trial.plan.machine)
    return min(prints[k.name].resident * segments(k, s.of(k.name))[0].order.roles[-1].count for k in program.kernels)


def _tail(case: _Case) -> Line:
    idle = _share(case.run, "tail")
    if idle is None or case.run is None or case.run.timeline is None:
        return Line("tail of the grid", "skip", _no_time(case), "")
    kernel = max(case.run.timeline.kernels, key=lambda k: k.makespan_ps)
    slots = kernel.resident * (case.machine.processors or 1)
    found = f"{count(kernel.blocks, 'block', 'blocks')} on {slots} places, {digits(kernel.blocks / slots)} waves"
    found += f"; {percent(idle)} of the time idle"
    good = idle <= TAIL
    remedy = "" if good else _fuller(case, idle)
    return Line(
        "tail of the grid", "pass" if good else "warn", found, f"{percent(TAIL)} at most", 100 * idle, 100 * TAIL, "%",
        remedy,
    )  # fmt: skip


def _fuller(case: _Case, idle: float) -> str:
    """What leaves processors idle for less of the time, and takes less of it."""
    trials = list(case.neighbours)
    uses, a = case.plan.flow.uses, case.plan.problem
    if "grid_order" in uses and case.plan.schedule.grid_order == "natural" and (a.causal or a.window is not None):
        trials += [t for t in [case.attempt(grid_order="longest-first")] if t]
    if case.plan.flow.name == "flash2" and (split := _splitting(case)):
        trials.append(split)
    fuller = [t for t in trials if (share := _share(t.run, "tail")) is not None and share < idle]
    best = case.fastest(fuller)
    if best is None:
        return "nothing near this is both faster and less idle; more heads or a larger batch fill the last wave"
    return f"{best.words(case.seconds)}, {percent(_share(best.run, 'tail') or 0)} idle"


def _splitting(case: _Case) -> _Trial | None:
    """The dataflow that cuts the keys into splits."""
    flow = load_dataflow("split-kv")
    if flow.refusal(case.plan.problem):
        return None
    try:
        plan = plan_of(case.plan.problem, case.plan.machine, flow, {})
    except InputError:
        return None
    return _Trial({}, plan, case.fidelity, f"split-kv with {plan.schedule.splits} splits")


def _intensity(case: _Case) -> Line:
    machine, a = case.machine, case.plan.problem
    rate = machine.matrix_rate(a.dtype) if a.dtype != "fp32" else 2 * (machine.vector_rate or 0)
    if case.run is None or not rate or not machine.processors or not case.plan.flow.flops(a):
        why = "the tile does not fit" if case.run is None else "no rate, or no FLOPs, to hold it against"
        return Line("intensity", "skip", why, "")
    peak, flops = rate * machine.processors, case.plan.flow.flops(a)
    ridges = {"DRAM": peak / machine.hbm.bandwidth}
    if machine.l2 is not None and machine.l2.bandwidth:
        ridges["L2"] = peak / machine.l2.bandwidth
    mine = _intensities(case.run)
    low = [level for level, ridge in ridges.items() if mine[level] < ridge]
    worst = min(ridges, key=lambda level: mine[level] / ridges[level])
    words = [", ".join(f"{level} {digits(of[level])}" for level in ridges) for of in (mine, ridges)]
    remedy = ""
    once = flops / case.run.ledger.io_bytes
    if low and once < ridges[worst]:
        remedy = f"no tile reaches {worst}'s: inputs and outputs once give {digits(once)} FLOP/B; memory bounds this"
    elif low:
        better = [t for t in case.neighbours if _intensities(t.run)[worst] > mine[worst]]
        best = max(better, key=lambda t: _intensities(t.run)[worst], default=None)
        remedy = "no tile near this fits and reaches more"
        if best is not None:
            remedy = f"{best.words(case.seconds)}; {worst} {digits(_intensities(best.run)[worst])} FLOP/B"
    return Line(
        "intensity", "warn" if low else "pass", f"{words[0]} FLOP/B", f"ridge {words[1]}", mine[worst], ridges[worst],
        f"FLOP/B of {worst}", remedy,
    )  # fmt: skip


def _intensities(run: Run) -> dict[str, float]:
    """Convention FLOPs a byte that crosses the DRAM interface, and a byte that the blocks ask for."""
    flops, ledger = run.dataflow.flops(run.problem), run.ledger
    dram = run.device.dram_read_bytes + run.device.dram_write_bytes
    asked = ledger.hbm_read_bytes + ledger.hbm_write_bytes + ledger.hbm_add_bytes
    return {"DRAM": flops / max(1, dram), "L2": flops / max(1, asked)}


def _alignment(case: _Case) -> Line:
    s, m = case.plan.schedule, case.machine.matrix
    models = [Model(k, s.of(k.name), case.plan.machine.with_units(s.of(k.name).units), ()) for k in
              case.plan.program.kernels]  # fmt: skip
    tiles, whole = (sum(model.product_flops[n] for model in models) for n in range(2))
    if not whole:
        return Line("alignment", "skip", "no product runs on the matrix unit", "")
    padding = 1 - tiles / whole
    size = " x ".join(str(n or "?") for n in (m.instruction_m, m.instruction_n, m.instruction_k))
    remedy = ""
    if padding > 0 and case.tiled:
        up = {
            "block_q": _up(s.block_q, (m.instruction_m or 1) * s.groups),
            "block_k": _up(s.block_k, max(m.instruction_n or 1, m.instruction_k or 1)),
        }
        change = {name: size for name, size in up.items() if size != getattr(s, name)}
        trial = case.attempt(**change) if change else None
        d = _up(case.plan.problem.d, max(m.instruction_n or 1, m.instruction_k or 1))
        remedy = f"d {d} would fill them" if d != case.plan.problem.d else ""
        remedy = case.remedy([trial]) if trial else remedy
    found = f"{percent(padding)} of products is padding"
    return Line("alignment", "warn" if padding > 0 else "pass", found, f"whole {m.name} {size}", 100 * padding, 0, "%",
                remedy)  # fmt: skip


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _accumulator(case: _Case) -> Line:
    kind = case.plan.problem.accumulator
    good = kind == "fp32"
    remedy = "" if good else "--accumulator fp32; iosim precision shows the errors of both"
    bits = {"fp32": 24, "fp16": 11}[kind]
    return Line(
        "fp32 sums", "pass" if good else "warn", f"{kind} accumulator", "fp32", bits,
        24, "bits", remedy,
    )  # fmt: skip


CHECKS: Sequence[Callable[[_Case], Line]] = (
    _sram, _tile, _buffers, _copies, _registers, _occupancy, _tail, _intensity, _alignment, _accumulator
)  # fmt: skip


def _no_time(case: _Case) -> str:
    return "the tile does not fit" if case.run is None else f"no time on {case.machine.name}"


def _share(run: Run | None, cause: str) -> float | None:
    """Of the run that the units which do most work stand still for a cause."""
    if run is None or run.timeline is None:
        return None
    of_softmax = run.problem.dtype == "fp32" or run.dataflow.computes == "softmax"
    unit = run.timeline.units["vector" if of_softmax else "matrix"]
    return unit.stalls_ps[cause] / (unit.instances * run.timeline.makespan_ps)


# ---------------------------------------------------------------- what the guide says of its tiles


def guide_notes(plan: Plan) -> Iterator[str]:
    """For a tile of the guide's table: what its SRAM figures count, by this program's own tiles."""
    a, s = plan.problem, plan.schedule
    if GUIDE.get(a.d) != (s.block_q, s.block_k) or dtype(a.dtype).bytes != 2 or plan.flow.name != "flash2":
        return
    one, two = (_items(plan, stages) for stages in (1, 2))
    if not {"q", "k", "v"} <= one.keys():
        return
    data, staged = sum(one.get(name, 0) for name in "qkv"), one.get("p", 0)
    buffered = data + one.get("k", 0) + one.get("v", 0)
    yield (f"The guide's table has this tile for d = {a.d} (its Bc is block_q, its Br block_k) at about 128 KB for Q, "
           f"K and V: q {kib(one['q'])} + k {kib(one['k'])} + v {kib(one['v'])} = {kib(data)}.")  # fmt: skip
    if a.d == 128:
        yield (f"It also calls it typical at about 192 KB, which has two readings: K and V double buffered without P, "
               f"{kib(one['q'])} + 2 x {kib(one['k'])} + 2 x {kib(one['v'])} = {kib(buffered)}, or K and V once with "
               f"P staged, {kib(data)} + {kib(staged or s.block_q * s.block_k * 2)} = "
               f"{kib(data + (staged or s.block_q * s.block_k * 2))}.")  # fmt: skip
    if staged:
        whole, capacity = sum(two.values()), plan.machine.sram.block_capacity_bytes
        last = "fits" if whole <= capacity else "does not fit"
        yield (f"{plan.machine.matrix.name} takes P from SRAM, so P is staged here; with two buffers of K and V as "
               f"well it is {kib(whole)}, which {last} in {kib(capacity)}.")  # fmt: skip
    if a.d == 128 and buffered >= (1 - MARGIN) * plan.machine.sram.block_capacity_bytes:
        yield (f"Either way it is {percent(buffered / plan.machine.sram.block_capacity_bytes)} of SRAM, which breaks "
               "the guide's own rule of less than 90 %.")  # fmt: skip


def _items(plan: Plan, stages: int) -> dict[str, int]:
    """SRAM bytes by tile with so many stages; a tile's buffers together."""
    schedule = replace(plan.schedule, stages=(stages,))
    prints = footprints(plan.flow(plan.problem, schedule), schedule, plan.machine)
    return {name.split(" ")[0]: size for f in prints.values() for name, size in f.items.items()}
