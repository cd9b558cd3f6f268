"""The tile pipeline of one kernel: what one processor does over time, at several numbers of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iosim.errors import InputError, nearest
from iosim.interpreters.recording import Recording, Watch
from iosim.memory.onchip import CapacityError, footprint
from iosim.pipeline import segments
from iosim.study.run import Plan, Run, evaluate, plan_of, require_uneven

if TYPE_CHECKING:
    from iosim.dataflows import Dataflow
    from iosim.hardware import Hardware
    from iosim.interpreters.timeline import KernelTime
    from iosim.problem import Attention
    from iosim.study.run import Note

STAGES = ((1,), (2,), (3,))
SIZES = ("block_q", "block_k", "block_d", "splits", "softmax_rows", "softmax_cols")


@dataclass(frozen=True, slots=True)
class Case:
    """One number of stages: a run with its recording, or `refusal` says why there is none."""

    stages: tuple[int, ...]
    run: Run | None
    recording: Recording | None
    refusal: str = ""

    @property
    def words(self) -> str:
        """ "1 stage", "2 stages", "2,1 stages"."""
        return ",".join(map(str, self.stages)) + (" stage" if self.stages == (1,) else " stages")

    @property
    def time(self) -> KernelTime:
        """Of the whole kernel."""
        if self.run is None or self.run.timeline is None or self.recording is None:
            raise InputError(f"{self.words}: no time, {self.refusal}")
        return next(k for k in self.run.timeline.kernels if k.name == self.recording.kernel)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One kernel at several numbers of stages, the same tile in all.

    The iterations from `first` to before `last` of `turns` are wanted; `block` is the one shown alone, by its number.
    `fixed` says why fewer numbers of stages are shown than asked for.
    """

    problem: Attention
    flow: Dataflow
    machine: Hardware
    kernel: str
    kernels: tuple[str, ...]
    fidelity: str
    first: int
    last: int
    turns: int
    cases: tuple[Case, ...]
    block: int | None = None
    fixed: str = ""

    @property
    def shown(self) -> list[tuple[Case, Recording]]:
        """The cases that run, with their recordings."""
        return [(case, case.recording) for case in self.cases if case.recording is not None]

    def window(self, recording: Recording) -> tuple[int, int]:
        """From when to when the wanted iterations run, in ps."""
        return recording.window(self.first, self.last)


def pipeline(
    problem: Attention,
    flow: Dataflow,
    machine: Hardware,
    given: Mapping[str, Any],
    *,
    fidelity: str = "fair",
    stages: Sequence[tuple[int, ...]] = STAGES,
    kernel: str | None = None,
    iterations: tuple[int, int | None] = (0, None),
    block: int | None = None,
    processor: int | None = None,
    note: Note = lambda _: None,
) -> Pipeline:
    """Record one processor of a kernel (by default the one that takes longest) at each number of `stages`.

    The tile is the same in all: the one that the rule takes, or as `given`.  Raises InputError for a kernel or a block
    that there is not, for iterations that the block has not, and for a machine without a time; CapacityError where none
    of the numbers of stages fits.
    """
    plan = plan_of(problem, machine, flow, given)
    require_uneven(given, [plan.program])
    name = _kernel(plan, kernel, fidelity)
    first, last = iterations
    watch = Watch(name, block, processor, last)
    tile = {size: getattr(plan.schedule, size) for size in SIZES if size in flow.uses}
    cases, fixed = [], ""
    alone = len(stages) == 1
    plans = list(_plans(plan, name, {**given} if alone else {**tile, **given}, stages))
    if len({orders for _, p, orders in plans if p is not None}) == 1 and not alone and all(p for _, p, _ in plans):
        fixed = (
            "the number of stages changes nothing in this kernel: its buffers are fixed, or it loads no tile in a loop"
        )
        plans = [(plan.schedule.stages, plan, "")]
    for depth, one, why in plans:
        if one is None:
            cases.append(Case(depth, None, None, why))
            continue
        note(f"timeline of {flow.name} at {Case(depth, None, None).words}")
        run = evaluate(one, fidelity, watch=watch)
        if run.timeline is None:
            raise InputError(f"hw: {machine.name} has no time: {run.no_time}")
        cases.append(Case(depth, run, run.timeline.recordings[name]))
    if not any(case.recording for case in cases):
        raise CapacityError(cases[0].refusal)
    turns = next(case.recording.turns for case in cases if case.recording is not None)
    if turns and first >= turns:
        raise InputError(f"iterations: {first}..{last}: kernel {name} has {turns} iterations, numbered from 0")
    last = turns if last is None else min(last, turns)
    names = tuple(k.name for k in plan.program.kernels)
    return Pipeline(problem, flow, machine, name, names, fidelity, first, last, turns, tuple(cases), block, fixed)


def _plans(
    plan: Plan, name: str, given: Mapping[str, Any], stages: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Plan | None, str]]:
    """For each number of stages its plan and the orders of kernel `name`, or None and why it does not fit."""
    for depth in stages:
        try:
            one = plan_of(plan.problem, plan.machine, plan.flow, {**given, "stages": depth})
            for kernel in one.program.kernels:
                print_ = footprint(kernel, one.schedule, one.machine)
                if not print_.resident:
                    raise CapacityError(f"{plan.flow.name}: {print_.complaint(plan.machine)}")
        except CapacityError as error:
            yield depth, None, str(error)
        else:
            (kernel,) = (k for k in one.program.kernels if k.name == name)
            yield depth, one, repr([part.order for part in segments(kernel, one.schedule.of(name))])


def _kernel(plan: Plan, name: str | None, fidelity: str) -> str:
    """The kernel of the program called so, or the one that takes longest."""
    names = [kernel.name for kernel in plan.program.kernels]
    if name is not None:
        if name not in names:
            raise InputError(f"program_kernel: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
        return name
    if len(names) == 1:
        return names[0]
    timed = evaluate(plan, fidelity).timeline
    return names[0] if timed is None else max(timed.kernels, key=lambda k: k.makespan_ps).name


@dataclass(frozen=True, slots=True)
class Trace:
    """One run with recordings of its kernels; the iterations from `first` to before `last` (None: all) are wanted."""

    run: Run
    recordings: Mapping[str, Recording]
    first: int
    last: int | None
    block: int | None

    @property
    def kernels(self) -> tuple[KernelTime, ...]:
        """The kernels of the program, in order."""
        return () if self.run.timeline is None else self.run.timeline.kernels

    def iterations(self, recording: Recording) -> tuple[int, int]:
        """The wanted iterations that a kernel has."""
        last = recording.turns if self.last is None else min(self.last, recording.turns)
        return min(self.first, last), last

    def cuts(self, recording: Recording) -> list[str]:
        """What of a kernel is not in the trace."""
        first, last = self.iterations(recording)
        if first == 0 and last == recording.turns:
            return []
        return [f"cut: iterations {first} to {last - 1} of {recording.turns} of kernel {recording.kernel} are traced"]

    def notes(self) -> list[str]:
        """What a reader has to know of what is traced."""
        out = [note for recording in self.recordings.values() for note in self.cuts(recording)]
        for r in self.recordings.values():
            if r.weight > 1:
                out.append(f"kernel {r.kernel}: one processor of {r.weight} alike ones, at its share of the bandwidth")
        return out


def trace(
    problem: Attention,
    flow: Dataflow,
    machine: Hardware,
    given: Mapping[str, Any],
    *,
    fidelity: str = "fair",
    kernel: str | None = None,
    iterations: tuple[int, int | None] = (0, None),
    block: int | None = None,
    processor: int | None = None,
    note: Note = lambda _: None,
) -> Trace:
    """Record one processor of each kernel of the program, or of one `kernel`; raises what `pipeline` does."""
    plan = plan_of(problem, machine, flow, given)
    require_uneven(given, [plan.program])
    name = None if kernel is None else _kernel(plan, kernel, fidelity)
    note(f"timeline of {flow.name} on {machine.name}")
    run = evaluate(plan, fidelity, watch=Watch(name, block, processor, iterations[1]))
    if run.timeline is None:
        raise InputError(f"hw: {machine.name} has no time: {run.no_time}")
    recordings = run.timeline.recordings
    most = max(r.turns for r in recordings.values())
    if most and iterations[0] >= most:
        raise InputError(f"iterations: {iterations[0]}..{iterations[1]}: no kernel has more than {most} iterations, "
                         "numbered from 0")  # fmt: skip
    return Trace(run, recordings, *iterations, block)
