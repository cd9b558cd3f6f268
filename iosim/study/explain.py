"""How each number of a run comes about, in steps with the values put in.

The steps of bytes are read off the tile program: the loops and views of its loads and stores, each factor counted by
the ledger.  Those of SRAM are read off its tiles, those of time off the rounds that the timeline adds up.  So a changed
dataflow changes its explanation, and the steps give the number itself: `Line.total` is `Line.value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

from iosim.dtypes import dtype
from iosim.index import affine, cdiv
from iosim.interpreters.ledger import Flow, Ledger, Part, parts, union_bytes
from iosim.memory.cache import USABLE
from iosim.memory.onchip import shared
from iosim.pipeline import segments
from iosim.program import Compute, Kernel, Loop, Program, Span, Tile, View, tiles, walk
from iosim.report.text import STALL_WORDS, UNIT_WORDS, stall_of
from iosim.study.depends import Dependence, dependence
from iosim.study.run import Note, Plan, Run
from iosim.words import count, digits, duration, percent, size

if TYPE_CHECKING:
    from iosim.interpreters.timeline import KernelTime


@dataclass(frozen=True, slots=True)
class Step:
    """A sentence, and the product of `factors` over `over` that it explains, in `unit`; no factors: words alone.

    `program` are the lines of the program that it is about.
    """

    text: str
    factors: tuple[int, ...] = ()
    unit: str = "B"
    over: int = 1
    program: tuple[str, ...] = ()

    @property
    def value(self) -> Fraction:
        """What the step comes to."""
        return Fraction(prod(self.factors), self.over) if self.factors else Fraction(0)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of `iosim run`, by its `label` there: the steps to its raw `value` (None: no number)."""

    key: str
    label: str
    value: Fraction | None
    unit: str
    steps: tuple[Step, ...]
    depends: Dependence | None = None

    @property
    def total(self) -> Fraction:
        """The sum of the steps."""
        return sum((step.value for step in self.steps), Fraction(0))


@dataclass(frozen=True, slots=True)
class Explanation:
    """All lines of one run."""

    plan: Plan
    run: Run
    lines: tuple[Line, ...]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.explain import render
        from iosim.report.notebook import printed

        return printed(render(self))


def explain(
    plan: Plan, run: Run, given: Mapping[str, Any], *, depends: bool = True, note: Note = lambda _: None
) -> Explanation:
    """The lines of `run`, which is that of `plan`; `given` are the fields of the schedule that the user settled.

    Without `depends` it is not sought what each line follows, which takes seconds.
    """
    found = dependence(plan, run, given, note) if depends else {}
    return Explanation(plan, run, tuple(replace(l, depends=found.get(l.key)) for l in lines(run)))


def lines(run: Run) -> Iterator[Line]:
    """Every line of `iosim run`, what it depends on left out."""
    yield extra_memory(run)
    for direction, key, label in (("read", "hbm_read", "HBM read"), ("write", "hbm_write", "HBM write"),
                                  ("add", "hbm_add", "HBM add")):  # fmt: skip
        if steps := hbm_steps(run.program, run.ledger, direction):
            total = sum(f.hbm_bytes for f in run.ledger.flows if f.direction == direction)
            yield Line(key, label, Fraction(total), "B", steps)
    yield dram(run)
    yield sram(run)
    yield resident(run)
    yield Line("tile", "tile, stages", None, "", (Step(f"{run.why}."), *_slots(run)))
    yield from timed(run)
    yield check(run)


# ---------------------------------------------------------------- bytes in device memory


def extra_memory(run: Run) -> Line:
    """Scratch tensors."""
    steps = tuple(
        Step(f"{t.name} is kept in device memory between kernels, as {t.dtype}", (*t.shape, dtype(t.dtype).bytes))
        for t in run.program.tensors
        if t.role == "scratch"
    )
    largest = max((t for k in run.program.kernels for node, _ in walk(k.body) if isinstance(node, Compute)
                   for t in tiles(node)), key=lambda t: t.bytes, default=None)  # fmt: skip
    none = "no tensor of the program is scratch"
    if largest is not None:
        none += f"; the largest tile that is computed, {largest} ({_by(largest)}), stays on chip"
    extra = run.ledger.extra_bytes
    return Line("extra_memory", "extra memory", Fraction(extra), "B", steps or (Step(f"{none}."),))


def hbm_steps(program: Program, counted: Ledger, direction: str) -> tuple[Step, ...]:
    """What all blocks load, store or add, tensors that move alike together."""
    alike: dict[tuple[str, tuple[int, ...], str, int], list[tuple[str, str]]] = {}
    for kernel in program.kernels:
        for node, loops in walk(kernel.body):
            if isinstance(node, Compute):
                continue
            flow = counted.flow(kernel.name, node)
            if flow.direction != direction or not flow.hbm_bytes:
                continue
            tensor = node.view.tensor
            found = parts(kernel, node, loops)
            again = tuple(p.amount for p in found if not p.axes and p.amount > 1)
            inside = tuple(p.amount for p in found if p.axes and p.amount > 1) or (1,)
            where = "".join(f", in {_loop(loop)}" for loop in loops)
            key = (kernel.name, (*again, 0, *inside), _often(kernel, found, node.view), dtype(tensor.dtype).bytes)
            alike.setdefault(key, []).append((tensor.name, f"{flow.text}{where}"))
    several = len(program.kernels) > 1
    verb = {"read": "read", "write": "written", "add": "added to"}[direction]
    out = []
    for (kernel_name, factors, often, bytes_), found_in in alike.items():
        names = [name for name, _ in found_in]
        at = factors.index(0)
        number = (len(names),) if len(names) > 1 else ()
        text = (
            f"{_and([_loads(name, names) for name in names])} {'are' if len(set(names)) > 1 else 'is'} {verb} {often}"
        )
        text += f" (kernel {kernel_name})" if several else ""
        values = (*factors[:at], *number, *factors[at + 1 :], bytes_)
        out.append(Step(text, values, program=tuple(line for _, line in found_in)))
    return tuple(out)


def _loads(name: str, names: Sequence[str]) -> str:
    """A tensor, and how many nodes move it in the same way where that is more than one."""
    return f"{name} ({names.count(name)} times)" if names.count(name) > 1 else name


def _loop(loop: Loop) -> str:
    last = loop.hi - 1 if isinstance(loop.hi, int) else f"{loop.hi} - 1"
    return f"loop {loop.index} = {loop.lo} .. {last}"


def _and(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"; each once."""
    once = list(dict.fromkeys(words))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}" if once else ""


def _often(kernel: Kernel, found: Sequence[Part], view: View) -> str:
    """How often each element is moved, in words: by the indices that its view does not name or is tied to."""
    shape = view.tensor.shape
    first = next(n for n, ix in enumerate(view.index) if isinstance(ix, Span))
    again = [_index(kernel, p) for p in found if not p.axes and p.amount > 1]
    words = [f"once for each of {' and each of '.join(again)}"] if again else []
    whole = True
    for p in found:
        axes = prod(shape[n] for n in p.axes)
        if p.axes and p.amount != axes:
            whole = False
            over = _and([name for name, _, _ in p.ranges]) or "no index"
            what = "rows" if first in p.axes else f"places along axis {p.axes[0]}"
            tiles_ = count(p.times, "tile", "tiles")
            words.append(f"{p.amount:,} {what} in {tiles_} over all {over} (each once would be {axes:,})")
    return "; ".join(words) or ("once" if whole else "")


def _index(kernel: Kernel, part: Part) -> str:
    """The values of indices that re-read: what they run over, as some view of the kernel says."""
    if len(part.ranges) > 1:
        names = _and([name for name, _, _ in part.ranges])
        return f"{part.amount:,} values of {names} together"
    (name, lo, hi) = part.ranges[0]
    if lo == 0 and isinstance(hi, int):
        for node, _ in walk(kernel.body):
            if isinstance(node, Compute):
                continue
            view = node.view
            for n, ix in enumerate(view.index):
                length, tensor = view.tensor.shape[n], view.tensor.name
                if isinstance(ix, Span) and affine(ix.start) == (0, {name: ix.size}) and cdiv(length, ix.size) == hi:
                    return f"⌈{length:,}/{ix.size:,}⌉ = {hi:,} blocks of {ix.size:,} rows of {tensor} ({name})"
                if not isinstance(ix, Span) and affine(ix) == (0, {name: 1}) and length == hi:
                    return f"{hi:,} values of {name} along axis {n} of {tensor}"
    return f"{part.amount:,} values of {name}"


def dram(run: Run) -> Line:
    """What is left behind the L2, by tensor."""
    machine, device = run.hardware, run.device
    asked = run.ledger.hbm_read_bytes + run.ledger.hbm_write_bytes + 2 * run.ledger.hbm_add_bytes
    if machine.caches and machine.caches[0].capacity_bytes:
        room = machine.caches[0].capacity_bytes
        how = "simulated request by request" if device.method == "simulated" else "a closed form of the simulation"
        first = (f"of the {size(asked)} asked for, what misses the L2 of {size(room)}, {percent(USABLE)} of which data "
                 f"gets ({how}; it begins empty)")  # fmt: skip
    else:
        first = "there is no L2: all that is asked for"
    steps = [Step(f"{first}.")]
    by: dict[tuple[str, str], list[Flow]] = {}
    moved: dict[tuple[str, str], int] = {}
    for f in device.flows:
        for way, bytes_ in (("read", f.dram_read_bytes), ("written", f.dram_write_bytes)):
            if bytes_:
                by.setdefault((f.flow.tensor, way), []).append(f.flow)
                moved[f.flow.tensor, way] = moved.get((f.flow.tensor, way), 0) + bytes_
    for (tensor, way), flows in by.items():
        total, once = moved[tensor, way], union_bytes(flows)
        often = "each of its bytes once" if total == once else f"{total / once:.3g} times the {size(once)} touched"
        blocks = size(sum(f.hbm_bytes for f in flows))
        steps.append(Step(f"{tensor} is {way}: {often}, where blocks ask for {blocks}", (total,)))
    if larger := [f for f in device.flows if f.rows is not None and f.rows.cost.moved > 1]:
        times = ", ".join(dict.fromkeys(f"{f.flow.tensor} {f.rows.cost.moved:.3g}" for f in larger if f.rows))
        steps.append(Step(f"rows of layout {run.problem.layout} fill no whole pieces of memory, which makes it {times} "
                          f"times as much."))  # fmt: skip
    total = device.dram_read_bytes + device.dram_write_bytes
    return Line("dram", "DRAM read + write", Fraction(total), "B", tuple(steps))


# ---------------------------------------------------------------- on chip


def _by(tile: Tile) -> str:
    return f"{tile.shape[0]} x {tile.shape[1]} {tile.dtype}"


def sram(run: Run) -> Line:
    """The tiles in SRAM of the kernel that takes most."""
    print_ = run.footprint
    known = {t.name: t for k in run.program.kernels if k.name == print_.kernel for node, _ in walk(k.body)
             for t in tiles(node)}  # fmt: skip
    steps = tuple(_item(name, bytes_, known) for name, bytes_ in print_.items.items())
    return Line("sram", "SRAM a block", Fraction(print_.sram_bytes), "B", steps or (Step("no tile in SRAM."),))


def _item(name: str, bytes_: int, known: Mapping[str, Tile]) -> Step:
    """ "k x2" is two buffers of tile k; "q or p" one place for both."""
    whole, cross, slots = name.rpartition(" x")
    names, buffers = (whole, int(slots)) if cross and slots.isdecimal() else (name, 1)
    some = [known[part] for part in names.split(" or ") if part in known]
    tile = next((t for t in some if t.bytes * buffers == bytes_), None)
    if tile is None:
        return Step(name, (bytes_,))
    share = f" (one place for {names})" if len(some) > 1 else ""
    text = f"tile {tile}{share}, {tile.dtype}" + (f", {buffers} buffers" if buffers > 1 else "")
    factors = (*tile.shape, dtype(tile.dtype).bytes, *((buffers,) if buffers > 1 else ()))
    return Step(text, factors)


def resident(run: Run) -> Line:
    """The limits, and which one binds."""
    f, machine = run.footprint, run.hardware.with_units(run.schedule.of(run.footprint.kernel).units)
    units = {"SRAM": "B", "tensor memory": "B"}
    steps = []
    for what, (has, takes) in shared(machine, f.sram_bytes, f.tmem_bytes, f.block_registers, f.threads).items():
        unit = units.get(what, what)
        text = f"{what}: ⌊{has:,} / {takes:,} {unit}⌋ = {has // takes:,}"
        text += ", which binds" if what == f.limit else ""
        # The floor is a product only of the limit that binds; the others are words.
        steps.append(Step(text, (f.resident,) if what == f.limit else (), unit="blocks"))
    return Line("resident", "resident blocks", Fraction(f.resident), "blocks", tuple(steps))


def _slots(run: Run) -> Iterator[Step]:
    """How often the loops run that load tiles."""
    for kernel in run.program.kernels:
        for part in segments(kernel, run.schedule.of(kernel.name)):
            if part.loop is not None and part.copies:
                each = [f"{p.name} {count(part.order.slots.get(p.name, 1), 'buffer', 'buffers')}" for p in part.copies]
                yield Step(f"Kernel {kernel.name}, {_loop(part.loop)}: of tile {', '.join(each)}.")


# ---------------------------------------------------------------- time


def timed(run: Run) -> Iterator[Line]:
    """Time, share of peak, busiest unit and largest stall; of a machine without a time why there is none."""
    if run.timeline is None:
        yield Line("time", "time", None, "", (Step(f"{run.no_time}."),))
        return
    whole = run.timeline.makespan_ps
    yield Line(
        "time", "time", Fraction(whole), "ps", tuple(step for k in run.timeline.kernels for step in _rounds(run, k))
    )
    yield _peak(run, whole)
    yield _busiest(run, whole)
    stall = stall_of(run)
    if stall is not None:
        unit = run.timeline.units[run.compute_unit]
        spent = unit.stalls_ps[stall[0]]
        rest = ", ".join(f"{c} {percent(s / (unit.instances * whole))}" for c, s in unit.stalls_ps.items() if s)
        text = (f"the largest stall of the {run.compute_unit} units is {STALL_WORDS[stall[0]]}: its time over all of "
                f"theirs, {count(unit.instances, 'unit', 'units')} x {whole:,} ps")  # fmt: skip
        busy = f"busy {percent(unit.busy_ps / (unit.instances * whole))}, {rest}"
        steps = (Step(text, (spent,), "", unit.instances * whole), Step(f"All of their time: {busy}."))
        yield Line("stall", "largest stall", Fraction(spent, unit.instances * whole), "", steps)


def _rounds(run: Run, k: KernelTime) -> Iterator[Step]:
    """A launch and rounds of blocks, which together are the kernel's time."""
    name = f"{k.name}: " if len(run.program.kernels) > 1 else ""
    called = run.hardware.called
    if k.launch_ps:
        yield Step(f"{name}launch", (k.launch_ps,), "ps")
    if not k.waves:
        how = "blocks of different lengths, each placed where a processor is free first"
        if run.timeline is not None and run.timeline.fidelity == "chip":
            how = "every processor simulated"
        yield Step(f"{name}{count(k.blocks, 'block', 'blocks')} on {k.processors:,} {called}s: {how}",
                   (k.makespan_ps - k.launch_ps,), "ps")  # fmt: skip
    for wave in k.waves:
        if wave.times:
            which = {"first": "first round", "further": "further rounds", "last": "last round"}[wave.what]
            yield Step(f"{name}{which} of {count(wave.blocks, 'block', 'blocks')} on "
                       f"{count(min(k.processors, wave.blocks), called, called + 's')}, "
                       f"{duration(wave.each_ps / 1e12)} each", (wave.times, wave.each_ps), "ps")  # fmt: skip


def _peak(run: Run, whole: int) -> Line:
    share = run.peak_share
    if share is None:
        return Line("peak_share", "share of peak", None, "", (Step("no rate, or no FLOPs by convention."),))
    rate = run.hardware.matrix_rate(run.problem.dtype) or 2 * (run.hardware.vector_rate or 0)
    flops, processors = run.dataflow.flops(run.problem), run.hardware.processors or 1
    text = (f"{flops:,} FLOPs, the convention for {run.problem.pairs:,} unmasked pairs of a query and a key, in "
            f"{duration(whole / 1e12)} are {digits(flops / whole)} TFLOP/s; {processors:,} {run.hardware.called}s of "
            f"{digits(rate / 1e12)} TFLOP/s could do {digits(processors * rate / 1e12)}")  # fmt: skip
    steps = (Step(text, (flops, 10**12), "", whole * processors * rate),)
    return Line("peak_share", "share of peak", Fraction(flops * 10**12, whole * processors * rate), "", steps)


def _busiest(run: Run, whole: int) -> Line:
    if run.timeline is None:
        raise ValueError("a run without a time has no busiest unit")
    bound = run.timeline.bound
    if bound == "launch":
        spent, over, who = sum(k.launch_ps for k in run.timeline.kernels), whole, "launching kernels"
    else:
        unit = run.timeline.units[bound]
        spent, over = unit.busy_ps, unit.instances * whole
        who = f"{UNIT_WORDS[bound]}, of {count(unit.instances, 'instance', 'instances')}"
    others = {n: u.busy_ps / (u.instances * whole) for n, u in run.timeline.units.items() if n != bound and u.busy_ps}
    rest = ", ".join(f"{n} {percent(share)}" for n, share in sorted(others.items(), key=lambda item: -item[1]))
    steps = (Step(f"busy time of {who}, over all of its time", (spent,), "", over), Step(f"Others: {rest}."))
    return Line("busiest", "busiest unit", Fraction(spent, over), "", steps)


def check(run: Run) -> Line:
    """The outcome, and what it was held against."""
    if run.check is None:
        return Line("check", "check", None, "", (Step("not asked for."),))
    c, types = run.check, dict.fromkeys(t.dtype for k in run.program.kernels for n, _ in walk(k.body) for t in tiles(n))
    units = ", ".join(f"2^-{dtype(name).bits} ({name})" for name in types)
    steps = (
        Step(f"{c.detail}."),
        Step(f"Each output has a bound of its own, from the roundoff of the formats that its tiles have, {units}, and "
             f"the number of terms added; the largest bound is {c.tolerance:.3g}, the largest error "
             f"{c.max_abs_error:.3g}, and the largest share of its own bound that an error takes {c.worst_ratio:.3g}."),
        Step("It depends on the problem, the schedule and --seed, on no number of the profile."),
    )  # fmt: skip
    return Line("check", "check", None, "", steps)
