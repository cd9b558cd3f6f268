"""Which options and profile numbers the lines of a run depend on, found by changing each alone and running again.

A number of the profile is put at half and at double, an option takes another value; the schedule is held, except for
the line that says which tile is taken.  What a line does not follow in any of these cases it does not depend on here:
a longer problem may be bound by something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import DeviceTraffic, behind_caches, depends_on
from iosim.memory.onchip import footprints
from iosim.program import Program
from iosim.schedule import Schedule
from iosim.study.choose import choose
from iosim.study.run import Note, Plan, Run

LINES = ("extra_memory", "hbm_read", "hbm_write", "hbm_add", "dram", "sram", "resident", "tile", "time", "peak_share",
         "busiest", "stall")  # fmt: skip
TIMED = frozenset(LINES[-4:])  # a fidelity changes these alone: nothing else is simulated


@dataclass(frozen=True, slots=True)
class Dependence:
    """Names of options and of profile numbers that move a line, and of those that do not.

    `untried` are numbers for which every other value leaves no such line: a block does not fit then, say.
    """

    options: tuple[str, ...]
    numbers: tuple[str, ...]
    other_options: tuple[str, ...]
    other_numbers: tuple[str, ...]
    untried: tuple[str, ...]


def dependence(plan: Plan, run: Run, given: Mapping[str, Any], note: Note = lambda _: None) -> dict[str, Dependence]:
    """By line; `given` are the fields of the schedule that were settled by the user."""
    lines = _Lines(run)
    here = lines.of(plan, given)
    found: list[dict[str, set[str]]] = [{key: set() for key in LINES} for _ in range(4)]
    for kind, changes in enumerate((_options(plan), _machines(plan))):
        for name, changed in changes:
            note(f"what depends on {name}")
            there = lines.of(changed, given)
            for key in here.keys() & there.keys():
                found[2 * kind + (here[key] == there[key])][key].add(name)
    options = list(dict.fromkeys(name for name, _ in _options(plan)))
    numbers = [fact.name for fact in plan.machine.fields() if fact.value is not None and not _unused(fact.name)]
    if run.timeline is not None:
        options.append("--fidelity")
        for key in LINES:
            found[0 if key in TIMED else 1][key].add("--fidelity")

    def of(key: str) -> Dependence:
        moving, still, moving_numbers, still_numbers = (kind[key] for kind in found)
        return Dependence(
            tuple(name for name in options if name in moving),
            tuple(name for name in numbers if name in moving_numbers),
            tuple(name for name in options if name in still - moving),
            tuple(name for name in numbers if name in still_numbers - moving_numbers),
            tuple(name for name in numbers if name not in still_numbers | moving_numbers),
        )

    return {key: of(key) for key in LINES}


class _Lines:
    """What the lines say for other plans; traffic is simulated again only where something differs that it feels."""

    def __init__(self, run: Run) -> None:
        self.fidelity = None if run.timeline is None else run.timeline.fidelity
        self.known: list[tuple[Program, tuple[object, ...], DeviceTraffic]] = []

    def of(self, plan: Plan, given: Mapping[str, Any]) -> dict[str, object]:
        """By line; what cannot be had is missing."""
        program, machine, schedule = plan.program, plan.machine, plan.schedule
        counted = ledger(program)
        out: dict[str, object] = {
            "extra_memory": counted.extra_bytes,
            "hbm_read": counted.hbm_read_bytes,
            "hbm_write": counted.hbm_write_bytes,
            "hbm_add": counted.hbm_add_bytes,
        }
        with suppress(InputError):  # where nothing fits
            out["tile"] = _tile(choose(plan.flow, plan.problem, machine, given)[0])
        prints = footprints(program, schedule, machine)
        print_ = max(prints.values(), key=lambda f: f.sram_bytes)
        out |= {"sram": (print_.sram_bytes, print_.sram_capacity), "resident": (print_.resident, print_.limit)}
        resident = {name: f.resident * (machine.processors or 1) for name, f in prints.items()}
        if all(resident.values()):
            device = self.traffic(program, machine, schedule, resident)
            out["dram"] = device.dram_read_bytes, device.dram_write_bytes
            out |= self.timed(plan, device)
        return out

    def traffic(
        self, program: Program, machine: Hardware, schedule: Schedule, resident: Mapping[str, int]
    ) -> DeviceTraffic:
        felt = depends_on(machine), resident, schedule.descending
        for known, other, device in self.known:
            if known is program and other == felt:  # flows are those of nodes, not of their values
                return device
        multicast = {name: schedule.of(name).multicast for name in resident}
        device = behind_caches(program, ledger(program), machine, resident, schedule.descending, multicast)
        self.known.append((program, felt, device))
        return device

    def timed(self, plan: Plan, device: DeviceTraffic) -> dict[str, object]:
        if self.fidelity is None or plan.machine.missing_for_time():
            return {}
        from iosim.interpreters.timeline import timeline

        try:
            time = timeline(plan.program, plan.schedule, plan.machine, device, fidelity=self.fidelity)
        except InputError:  # an instruction that the machine lacks
            return {}
        whole, a, machine = time.makespan_ps, plan.problem, plan.machine
        peak = (machine.matrix_rate(a.dtype) or machine.vector_rate or 1) * (machine.processors or 1)
        shares = {name: u.busy_ps / (u.instances * whole) for name, u in time.units.items()}
        waits = {
            name: {cause: ps / (u.instances * whole) for cause, ps in u.stalls_ps.items()}
            for name, u in time.units.items()
            if name in ("matrix", "vector")
        }
        return {
            "time": whole,
            "peak_share": plan.flow.flops(a) / (whole * peak),
            "busiest": (time.bound, shares.get(time.bound)),
            "stall": waits,
        }


def _unused(name: str) -> bool:
    """Numbers of which no line of a run is made."""
    return name.startswith("energy.")


def _tile(s: Schedule) -> tuple[object, ...]:
    return s.block_q, s.block_k, s.softmax_rows, s.softmax_cols, s.stages


def _machines(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan on its machine with one number at half and at double, as far as the profile allows."""
    for fact in plan.machine.fields():
        if fact.value is None or _unused(fact.name):
            continue
        half = fact.value // 2 if isinstance(fact.value, int) else fact.value / 2
        for value in (half, fact.value * 2):
            try:
                yield fact.name, replace(plan, machine=plan.machine.with_value(fact.name, value))
            except InputError:  # a share above 1, a block that may hold more than there is
                continue


def _options(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with one option changed; what the dataflow is not written for is left out."""
    changes: list[tuple[str, str, Mapping[str, Any]]] = [("problem", *change) for change in _problems(plan)]
    changes += [("schedule", *change) for change in _schedules(plan)]
    for what, option, fields in changes:
        try:
            made = replace(plan, **{what: replace(getattr(plan, what), **fields)})
            yield option, replace(made, program=plan.flow(made.problem, made.schedule))
        except InputError:
            continue


def _problems(plan: Plan) -> Sequence[tuple[str, Mapping[str, Any]]]:
    a = plan.problem
    half = {name: max(1, getattr(a, name) // 2) for name in ("n_q", "n_k", "d", "d_v")}
    both = {"n_q": half["n_q"]} | ({"n_k": half["n_k"]} if a.n_q == a.n_k else {})
    deep = {"d": half["d"]} | ({"d_v": half["d"]} if a.d == a.d_v else {})
    heads = {"heads": 2 * a.heads} | ({"kv_heads": 2 * a.heads} if a.heads == a.kv_heads else {})
    return [
        ("--n", both),
        ("--n-k", {"n_k": half["n_k"]}),
        ("--d", deep),
        ("--d-v", {"d_v": half["d_v"]}),
        ("--batch", {"batch": 2 * a.batch}),
        ("--heads", heads),
        *([("--kv-heads", {"kv_heads": 1 if a.kv_heads > 1 else a.heads})] if a.heads > 1 else []),
        *(("--dtype", {"dtype": name}) for name in ("fp16", "fp32", "fp8") if name != a.dtype),
        ("--accumulator", {"accumulator": "fp16" if a.accumulator == "fp32" else "fp32"}),
        ("--causal", {"causal": not a.causal}),
        ("--window", {"window": max(1, (a.window or a.n_k) // 2)}),
        ("--lse", {"lse": not a.lse}),
    ]


def _schedules(plan: Plan) -> Sequence[tuple[str, Mapping[str, Any]]]:
    s, read = plan.schedule, {"stages", *plan.flow.uses}
    values: dict[str, Any] = {
        "block_q": max(1, s.block_q // 2),
        "block_k": max(1, s.block_k // 2),
        "stages": (1,) if s.stages != (1,) else (2,),
        "splits": 2 * s.splits,
        "softmax": "naive" if s.softmax != "naive" else "safe",
        "scores": "fp32" if s.scores != "fp32" else "data",
        "grid_order": "longest-first" if s.grid_order == "natural" else "natural",
    }
    return [(f"--{name.replace('_', '-')}", {name: value}) for name, value in values.items() if name in read]
