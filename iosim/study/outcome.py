"""What cases come to, many of them on all cores: the numbers that answers about variants are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from iosim.errors import InputError
from iosim.interpreters.ledger import ledger
from iosim.interpreters.model import Model
from iosim.interpreters.shapes import visits
from iosim.interpreters.timeline import SHARED
from iosim.memory.cache import DeviceTraffic, behind_caches, depends_on
from iosim.memory.onchip import Footprint, footprints
from iosim.parallel import cores
from iosim.program import Program
from iosim.same import Same
from iosim.schedule import Schedule
from iosim.study.run import (
    Note,
    Plan,
    Run,
    evaluate,
    plan_of,
    require_formats,
    require_uneven,
    resident_on,
)
from iosim.study.vary import Case

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.interpreters.timeline import Timeline
    from iosim.study.energy import EnergyUse

T = TypeVar("T")
R = TypeVar("R")
Items: TypeAlias = tuple[tuple[str, int], ...]

SOON = 4.0  # seconds of work, from which on starting processes pays


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case comes to.

    `busy` are shares of the run by unit (and "launch"), `stalls` those by cause for which the units of `compute_unit`
    stand still.  `load_ps` is how long the loads of a processor take, those of a block one after the other.
    `makespan_ps` is None where the profile lacks what `no_time` names, `energy` where it was not asked for.
    """

    schedule: Schedule
    why: str
    footprint: Footprint
    hbm_bytes: int
    dram_bytes: int
    makespan_ps: int | None
    no_time: str
    bound: str
    compute_unit: str
    busy: Mapping[str, float] = field(hash=False)
    stalls: Mapping[str, float] = field(hash=False)
    load_ps: int
    energy: EnergyUse | None = None

    @property
    def seconds(self) -> float | None:
        """Predicted time."""
        return None if self.makespan_ps is None else self.makespan_ps / 1e12

    @property
    def stall(self) -> str:
        """What the compute units wait for most; "" where there is no time."""
        return max(self.stalls, key=lambda cause: self.stalls[cause], default="")

    @property
    def hidden(self) -> float | None:
        """The share of the time of its loads that is hidden: under work, of its own block or another, or each other."""
        if self.makespan_ps is None or not self.load_ps:
            return None
        return max(0.0, 1 - self.stalls["data"] * self.makespan_ps / self.load_ps)


def outcome(case: Case, schedule: Schedule | None = None, *, energy: bool = False) -> Outcome:
    """What a case comes to, with a whole `schedule` where it is settled; raises as `run_case`, and as `Run.energy`."""
    if case.batch is not None:
        from iosim.study.batch import outcome_of

        if energy:
            raise InputError("energy: is not estimated for sequences of different lengths")
        return outcome_of(case, schedule)
    run = run_case(case, schedule)
    return replace(_summary(run), energy=run.energy) if energy else _summary(run)


def run_case(case: Case, schedule: Schedule | None = None) -> Run:
    """The run of a case.

    Raises InputError where it cannot run, CapacityError (an InputError) where a block does not fit.
    """
    flow = case.source.load()
    require_formats(case.problem, case.machine, flow)
    if schedule is None:
        plan = plan_of(case.problem, case.machine, flow, case.given)
        require_uneven(case.given, [plan.program])
    else:
        plan = Plan(case.problem, case.machine, flow, schedule, "as given", flow(case.problem, schedule))
    return evaluate(plan, case.fidelity, device=_traffic(plan))


def attempt(job: tuple[Case, Schedule | None], *, energy: bool = False) -> Outcome | str:
    """`outcome`, or why there is none."""
    try:
        return outcome(*job, energy=energy)
    except InputError as error:
        return str(error)


def attempts(
    jobs: Sequence[tuple[Case, Schedule | None]], note: Note = lambda _: None, *, energy: bool = False
) -> list[Outcome | str]:
    """`attempt` for each job, on all cores where that pays."""
    return spread(partial(attempt, energy=energy), jobs, note, "variant")


def spread(call: Callable[[T], R], jobs: Sequence[T], note: Note, what: str, each: float | None = None) -> list[R]:
    """`call` of each job in order, in as many processes as there are cores where the work is long enough.

    `each` is how many seconds one is thought to take; without it the first one is timed.
    """
    from time import monotonic

    out: list[R] = []
    start = monotonic()
    if each is None and jobs:
        note(f"{what} 1 of {len(jobs)}")
        out.append(call(jobs[0]))
        each = monotonic() - start
    rest = jobs[len(out) :]
    if cores() == 1 or len(rest) < 2 or len(rest) * (each or 0) < SOON:
        for job in rest:
            note(f"{what} {len(out) + 1} of {len(jobs)}")
            out.append(call(job))
        return out
    with ProcessPoolExecutor(min(cores(), len(rest)), mp_context=get_context("spawn")) as pool:
        for done in pool.map(call, rest):
            out.append(done)
            note(f"{what} {len(out)} of {len(jobs)}")
    return out


# ---------------------------------------------------------------- one run


def _traffic(plan: Plan) -> DeviceTraffic:
    """What passes the caches: the same for variants that differ in what it does not depend on."""
    prints = footprints(plan.program, plan.schedule, plan.machine)
    if any(not f.resident for f in prints.values()):
        bad = next(f for f in prints.values() if not f.resident)
        raise InputError(bad.complaint(plan.machine))
    resident = resident_on(plan.machine, prints)
    key = depends_on(plan.machine), tuple(resident.items())
    return _behind(Same(plan.program), plan.schedule, key, _Machine(plan.machine))


class _Machine:
    """A machine that is no part of a key: equal to every other."""

    def __init__(self, machine: Hardware) -> None:
        self.machine = machine

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Machine)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=32)
def _behind(
    of: Same[Program], schedule: Schedule, key: tuple[tuple[object, ...], Items], machine: _Machine
) -> DeviceTraffic:
    program = of.value  # itself: what is found of it names its own nodes
    multicast = {kernel.name: schedule.of(kernel.name).multicast for kernel in program.kernels}
    return behind_caches(program, ledger(program), machine.machine, dict(key[1]), schedule.descending, multicast)


def shares(t: Timeline, unit: str) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of a run by unit (and "launch") for which it is busy, and by cause for which `unit` stands still."""
    span, of = t.makespan_ps, t.units[unit]
    busy = {name: u.busy_ps / (u.instances * span) for name, u in t.units.items()}
    busy["launch"] = sum(k.launch_ps for k in t.kernels) / span
    return busy, {cause: ps / (of.instances * span) for cause, ps in of.stalls_ps.items()}


def _summary(r: Run) -> Outcome:
    t, unit = r.timeline, r.compute_unit
    hbm = r.ledger.hbm_read_bytes + r.ledger.hbm_write_bytes + 2 * r.ledger.hbm_add_bytes
    busy, stalls = ({}, {}) if t is None else shares(t, unit)
    return Outcome(
        schedule=r.schedule,
        why=r.why,
        footprint=r.footprint,
        hbm_bytes=hbm,
        dram_bytes=r.device.dram_read_bytes + r.device.dram_write_bytes,
        makespan_ps=None if t is None else t.makespan_ps,
        no_time=r.no_time,
        bound="" if t is None else t.bound,
        compute_unit=unit,
        busy=busy,
        stalls=stalls,
        load_ps=0 if t is None else sum(_load_ps(r, name) for name in r.footprints),
    )


def _load_ps(r: Run, name: str) -> int:
    """How long the loads of one kernel take, one after the other, on a processor: latency and slowest unit of each.

    All processors load at one time, and the blocks that share one load side by side.
    """
    own = r.schedule.of(name)
    kernel = next(k for k in r.program.kernels if k.name == name)
    flows = tuple(f for f in r.device.flows if f.flow.kernel == name)
    model = Model(kernel, own, r.hardware.with_units(own.units), flows)
    active = min(r.hardware.processors or 1, kernel.blocks)
    total = 0
    for kind in model.classes:
        for times, visit in visits(kind.shape):
            for trips, done in visit.stretches:
                loads = (move for work in done for move in work.moves if move.direction == "read")
                each = sum(
                    model.latency(move) + max(ps * (active if unit in SHARED else 1) for unit, ps in move.lengths)
                    for move in loads
                )
                total += kind.count * times * trips * each
    return round(total / (active * min(model.footprint.resident, kernel.blocks / active)))
