"""How much the time of a dataflow depends on each number of a machine, and where each stops mattering.

A number is taken a tenth up and down: times are whole picoseconds, the clock under a power limit settles within half a
percent, and blocks come in waves, so that a step of 1 % would measure these.  The schedule stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil, log

from iosim.errors import InputError, nearest
from iosim.hardware import Energy, Fact, Hardware, MatrixUnit, settable, without_unit
from iosim.memory.onchip import footprints
from iosim.program import Compute, Program, tile_of, walk
from iosim.schedule import Schedule
from iosim.study.outcome import Outcome, attempt, outcome, spread
from iosim.study.run import Note
from iosim.study.vary import HW, IN_PROPORTION, Case, machine_with, moved

STEP = 1.1
LEAST = 0.0005  # of the time; a smaller change of it is none
WORTH = 0.01  # of the time, that a doubling has to bring
DOUBLINGS = 6  # up to which the value is looked for from which on a number does not matter
HALVINGS = 3  # of the exponent of 2, in search of that value: within 9 % of it
COSTS = ("_cycles", "_cycles_per_warp", ".kernel_us", "_w_per_ghz3", "issue_share", "power_factor")  # less is better
CAPACITIES = (
    "sram.capacity_kib",
    "registers.registers_per_processor",
    "processor.max_threads",
    "processor.max_blocks",
    "tmem.capacity_kib",
)
PART_OF = {"sram.block_capacity_kib", *(n for names in IN_PROPORTION.values() for n in names if not n.endswith("."))}


@dataclass(frozen=True, slots=True)
class Effect:
    """What one number does to the time; times are shares of the base's, None where the number can't be so.

    `less` and `more` are with a tenth less and more (by the factor `STEP`), `better` with twice as much, or half of
    what costs time.  `enough` is the value from which on that brings less than `WORTH`; `then` is the busiest unit
    there.  None for `enough` where it is so already, or not within `DOUBLINGS`.  `along` changes with it.
    """

    name: str
    unit: str
    value: float
    less: float | None
    more: float | None
    better: float | None = None
    enough: float | None = None
    then: str = ""
    along: tuple[str, ...] = ()

    @property
    def elasticity(self) -> float:
        """Percent of time for 1 % more of the number."""
        low, high = (1.0 if end is None else end for end in (self.less, self.more))
        span = log(STEP) * sum(end is not None for end in (self.less, self.more))
        return log(high / low) / span if span else 0.0

    @property
    def swing(self) -> float:
        """The larger change of time of the two, as a share."""
        return max(abs(end - 1) for end in (self.less, self.more, 1.0) if end is not None)

    @property
    def is_cost(self) -> bool:
        """Whether it is a time or a load, of which less is better."""
        return self.name.endswith(COSTS)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What room brings: blocks resident on a processor now and with twice the room, and the time then over the base's.

    `needed` is the least value with which one more block is resident, None where another limit keeps it away.
    """

    name: str
    unit: str
    value: float
    resident: int
    doubled_resident: int
    doubled: float | None
    needed: float | None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Effects sorted by what they do; `unread` numbers are of units that are not used."""

    case: Case
    base: Outcome
    effects: tuple[Effect, ...]
    capacities: tuple[Capacity, ...]
    unread: tuple[str, ...]

    @property
    def mattering(self) -> tuple[Effect, ...]:
        """Effects that are there."""
        return tuple(e for e in self.effects if e.swing >= LEAST)


@dataclass(frozen=True, slots=True)
class _Base:
    """What every number is tried on."""

    case: Case
    schedule: Schedule
    makespan_ps: int

    def at(self, name: str, value: float) -> tuple[float, str] | None:
        """Time over the base's and the busiest unit; None where a number can't have the value."""
        if settable()[name] is int:
            value = round(value)
        try:
            machine = machine_with(self.case.machine, {name: value})
        except InputError:
            return None
        found = attempt((replace(self.case, machine=machine), self.schedule))
        if isinstance(found, str) or found.makespan_ps is None:
            return None
        return found.makespan_ps / self.makespan_ps, found.bound


def sensitivity(
    case: Case, only: Sequence[str] = (), note: Note = lambda _: None, *, energy: bool = False
) -> Sensitivity:
    """Try every number that the case's time can depend on, or `only` those of these names; `energy` of the base too.

    Raises InputError for a case that cannot run, a machine without what time needs, and an unknown name.
    """
    note("the plain run")
    base = outcome(case, energy=energy)
    if base.makespan_ps is None:
        raise InputError(f"hw: {base.no_time}, without which there is no time")
    facts = {f.name: f for f in case.machine.fields() if f.value}
    wanted = _wanted(only, facts)
    tried, unread = _numbers(case, base.schedule, [facts[name] for name in wanted])
    start = _Base(case, base.schedule, base.makespan_ps)
    jobs = [*tried, *(facts[name] for name in CAPACITIES if name in wanted)]
    found = spread(partial(_tried, start), jobs, note, "number")
    effects = sorted((e for e in found if isinstance(e, Effect)), key=lambda e: (-e.swing, e.name))
    capacities = tuple(c for c in found if isinstance(c, Capacity))
    return Sensitivity(case, base, tuple(effects), capacities, tuple(unread))


def _wanted(only: Sequence[str], facts: Mapping[str, Fact]) -> list[str]:
    """The numbers that are to be tried; whole ones other than the number of processors are no matter of degree."""
    kinds = settable()
    able = [
        name
        for name in facts
        if name in CAPACITIES
        or (name not in PART_OF and not name.startswith(("energy.", "hbm.capacity"))
            and (kinds[name] is float or name == "processor.count"))
    ]  # fmt: skip
    called = {without_unit(name): name for name in able} | {name: name for name in able}
    names = [called.get(name.removeprefix(HW), name.removeprefix(HW)) for name in only]
    for name in names:
        if name not in able:
            known = "changes nothing here by degrees" if name in kinds else "is no number of this profile"
            raise InputError(f"field: {name}: {known}{nearest(name, [n for n in called if n != name])}")
    return [name for name in able if not names or name in names]


def _numbers(case: Case, schedule: Schedule, facts: Iterable[Fact]) -> tuple[list[Fact], list[str]]:
    """The numbers that reach a run, and the names of those that do not: of units, rates and parts that are not used."""
    program = case.source.load()(case.problem, schedule)
    base = _seen(case.machine, program, schedule)
    tried, unread = [], []
    for fact in facts:
        if fact.name in CAPACITIES or not fact.value:
            continue
        changed = case.machine
        for value in (fact.value * STEP, fact.value / STEP):
            try:
                changed = machine_with(case.machine, {fact.name: _whole(fact.name, value)})
                break
            except InputError:
                continue
        if _seen(changed, program, schedule) == base:
            unread.append(fact.name)
        else:
            tried.append(fact)
    return tried, unread


def _seen(machine: Hardware, program: Program, schedule: Schedule) -> list[Hardware]:
    """The machine as each kernel of a program can see it, without what it does not use."""
    no_energy = Energy(*(None,) * len(fields(Energy)))
    out = []
    for kernel in program.kernels:
        h = machine.with_units(schedule.of(kernel.name).units)
        products = (n for n, _ in walk(kernel.body) if isinstance(n, Compute) and n.op == "matmul")
        dtypes = {"fp16", *(tile_of(n.args[0]).dtype for n in products)}  # the power model has fp16's
        h = replace(
            h,
            profile_hash="",
            sources=(),
            energy=no_energy,
            copies=(),
            matrices=tuple(_with_rates(unit, dtypes) for unit in h.matrices[:1] if h.power),
            matrix=_with_rates(h.matrix, dtypes),
            spill_bytes_per_clock=h.spill_bytes_per_clock if schedule.of(kernel.name).spills else None,
        )
        out.append(h)
    return out


def _with_rates(unit: MatrixUnit, dtypes: Collection[str]) -> MatrixUnit:
    return replace(unit, rates={name: rate for name, rate in unit.rates.items() if name in dtypes})


def _whole(name: str, value: float) -> float:
    return round(value) if settable()[name] is int else value


# ---------------------------------------------------------------- one number


def _tried(base: _Base, fact: Fact) -> Effect | Capacity:
    return _capacity(base, fact) if fact.name in CAPACITIES else _effect(base, fact)


def _effect(base: _Base, fact: Fact) -> Effect:
    value = fact.value or 0.0
    effect = Effect(fact.name, fact.unit, value, None, None, along=tuple(moved(base.case.machine, fact.name, value)))
    for less in (False, True) if effect.is_cost else (True, False):  # the worse one first
        done = base.at(fact.name, value / STEP if less else value * STEP)
        share = done and done[0]
        effect = replace(effect, less=share) if less else replace(effect, more=share)
        if done is not None and effect.swing < LEAST and fact.name not in IN_PROPORTION:
            return effect
    power = 0.5 if effect.is_cost else 2.0
    better = base.at(fact.name, value * power)
    if better is None:
        return effect
    effect = replace(effect, better=better[0])
    if 1 / better[0] - 1 < WORTH:
        return effect
    enough, then = _enough(base, fact, power, better[0])
    return replace(effect, enough=enough, then=then)


def _enough(base: _Base, fact: Fact, power: float, better: float) -> tuple[float | None, str]:
    """The value from which on another doubling (halving) brings less than `WORTH`, and the busiest unit there."""
    value = fact.value or 0.0
    known: dict[float, tuple[float, str] | None] = {0.0: (1.0, ""), 1.0: (better, "")}

    def at(exponent: float) -> tuple[float, str] | None:
        if exponent not in known:
            known[exponent] = base.at(fact.name, value * power**exponent)
        return known[exponent]

    def is_enough(exponent: float) -> bool | None:
        here, there = at(exponent), at(exponent + 1)
        return None if here is None or there is None else here[0] / there[0] - 1 < WORTH

    high = 1.0
    while (done := is_enough(high)) is False and high < DOUBLINGS:
        high += 1
    if not done:
        return None, ""
    low = high - 1
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    del known[high]  # the first two have no unit
    found = at(high)
    return value * power**high, found[1] if found else ""


def _capacity(base: _Base, fact: Fact) -> Capacity:
    value, machine = fact.value or 0.0, base.case.machine
    program = base.case.source.load()(base.case.problem, base.schedule)

    def resident(amount: float) -> int:
        try:
            other = machine_with(machine, {fact.name: _whole(fact.name, amount)})
        except InputError:
            return 0
        return sum(f.resident for f in footprints(program, base.schedule, other).values())

    now, twice = resident(value), resident(2 * value)
    doubled = base.at(fact.name, 2 * value)
    low, high = value, next((value * k for k in (2, 4) if resident(value * k) > now), 0.0)
    if not high:
        return Capacity(fact.name, fact.unit, value, now, twice, doubled and doubled[0], None)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if resident(middle) > now else (middle, high)
    return Capacity(fact.name, fact.unit, value, now, twice, doubled and doubled[0], float(ceil(high)))
