"""One dataflow on one machine, and several side by side: the results that commands print and programs use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from iosim.dataflows import Dataflow, load_dataflow
from iosim.dtypes import dtype
from iosim.errors import InputError, nearest
from iosim.hardware import DEFAULT, Hardware, load_hardware
from iosim.index import Expr
from iosim.interpreters.ledger import Ledger, ledger
from iosim.memory.cache import DeviceTraffic, behind_caches
from iosim.memory.counters import l2_counted
from iosim.memory.onchip import Footprint, footprints
from iosim.problem import FP8, Attention
from iosim.program import Program, walk
from iosim.schedule import Schedule
from iosim.study.bounds import Bounds, bounds
from iosim.study.choose import choose
from iosim.study.loads import Loads, key_loads

if TYPE_CHECKING:
    import pandas as pd

    from iosim.check import Check
    from iosim.check.given import Inputs
    from iosim.interpreters.recording import Watch
    from iosim.interpreters.timeline import Timeline
    from iosim.memory.step import StepMemory
    from iosim.study.energy import EnergyUse
    from iosim.study.interval import Interval

DATAFLOWS = ("standard", "flash2")
PASSES = ("forward", "backward", "training")
Note = Callable[[str], None]


@dataclass(frozen=True, repr=False)
class Run:
    """What one dataflow does with one problem on one machine.

    `timeline` is None where the profile lacks a number that time needs, and `no_time` says which.  `check` is None
    where no check was asked for.  A training step has the runs of its two passes as `parts`, of which it is the sum,
    and `step` says what is alive when most is; `schedule` is then that of the forward pass.  `interval` is what
    `with_intervals` adds.
    """

    dataflow: Dataflow
    problem: Attention
    hardware: Hardware
    schedule: Schedule
    why: str
    program: Program
    ledger: Ledger
    device: DeviceTraffic
    footprints: Mapping[str, Footprint]
    timeline: Timeline | None
    no_time: str
    check: Check | None
    parts: tuple[Run, ...] = ()
    step: StepMemory | None = None
    interval: Interval | None = None

    def __repr__(self) -> str:
        time = "no time" if self.seconds is None else f"{self.seconds:.3g} s"
        return f"<Run of {self.dataflow.name} on {self.hardware.name}: {time}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return Comparison(self.problem, (self,))._repr_html_()

    @property
    def footprint(self) -> Footprint:
        """Of the kernel that takes most SRAM."""
        return max(self.footprints.values(), key=lambda f: f.sram_bytes)

    @property
    def bounds(self) -> Bounds:
        """The fewest HBM accesses that the problem can do with on this machine."""
        return bounds(self.problem, self.hardware, self.ledger.io_bytes)

    @property
    def key_loads(self) -> dict[str, Loads]:
        """How often each byte of K and V is loaded, where query heads share them."""
        return key_loads(self.problem, self.program, self.device)

    @property
    def accesses(self) -> int:
        """What the dataflow asks of HBM, in elements of the data dtype (a reduction is a read and a write)."""
        l = self.ledger
        return (l.hbm_read_bytes + l.hbm_write_bytes + 2 * l.hbm_add_bytes) // dtype(self.problem.dtype).bytes

    @property
    def fits(self) -> bool:
        """Whether all tensors that are alive at one time fit in device memory."""
        return self.ledger.peak_bytes <= self.hardware.hbm.capacity_bytes

    @property
    def seconds(self) -> float | None:
        """Predicted time."""
        return None if self.timeline is None else self.timeline.seconds

    @property
    def compute_unit(self) -> str:
        """The unit that does the most work: of matrix products the matrix unit, the vector lanes for fp32, softmax."""
        return "vector" if self.problem.dtype == "fp32" or self.dataflow.computes == "softmax" else "matrix"

    @property
    def tflops(self) -> float | None:
        """Convention FLOPs over predicted time, in 10^12 a second."""
        flops = self.dataflow.flops(self.problem)
        return flops / self.timeline.seconds / 1e12 if self.timeline is not None and flops else None

    @property
    def peak_share(self) -> float | None:
        """`tflops` over the machine's dense peak for the dtype (the vector lanes' for fp32)."""
        rate = self.hardware.matrix_rate(self.problem.dtype)
        if rate is None and self.problem.dtype == "fp32" and self.hardware.vector_rate is not None:
            rate = 2 * self.hardware.vector_rate
        if rate is None or self.tflops is None or self.hardware.processors is None:
            return None
        return self.tflops * 1e12 / (rate * self.hardware.processors)

    @property
    def l2_counter_bytes(self) -> int:
        """Bytes of the L2 as a GPU's own counter shows them; see iosim.memory.counters."""
        if self.parts:
            return sum(part.l2_counter_bytes for part in self.parts)
        return sum(l2_counted(self.program, self.schedule, self.hardware, self.footprints, self.device).values())

    @cached_property
    def energy(self) -> EnergyUse:
        """Estimated joules; raises InputError where the profile lacks a figure that this takes."""
        from iosim.study.energy import energy

        return energy(self)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """One row a load or store of the program: tensor, direction, hbm and dram bytes."""
        import pandas as pd

        return pd.DataFrame(
            {
                "kernel": f.flow.kernel,
                "tensor": f.flow.tensor,
                "direction": f.flow.direction,
                "hbm_bytes": f.flow.hbm_bytes,
                "dram_read_bytes": f.dram_read_bytes,
                "dram_write_bytes": f.dram_write_bytes,
            }
            for f in self.device.flows
        )

    @cached_property
    def stalls(self) -> pd.DataFrame:
        """One row a unit: instances, busy time and stalls by cause in ps, summed over instances."""
        import pandas as pd

        if self.timeline is None:
            return pd.DataFrame()
        rows = {
            name: {"instances": u.instances, "busy_ps": u.busy_ps, **{f"{c}_ps": t for c, t in u.stalls_ps.items()}}
            for name, u in self.timeline.units.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("unit")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs of one problem: every dataflow on every machine, machine by machine.

    `inputs` are a user's own tensors, where the check had any.
    """

    problem: Attention
    runs: tuple[Run, ...]
    inputs: Inputs | None = None

    def __str__(self) -> str:
        """What `iosim run` prints."""
        from iosim.report.text import render

        return render(self)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.runs))})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.notebook import comparison

        return comparison(self)

    def each(self, change: Callable[[Run], Run]) -> Comparison:
        """The same with every run changed."""
        return replace(self, runs=tuple(map(change, self.runs)))

    def to_frame(self) -> pd.DataFrame:
        """One row a run: bytes, capacity, time and check."""
        import pandas as pd

        from iosim.report.document import run_row

        return pd.DataFrame([run_row(r) for r in self.runs]).set_index(["hardware", "dataflow"])


def compare(
    problem: Attention,
    *,
    dataflows: str | Dataflow | Sequence[str | Dataflow] = DATAFLOWS,
    computes: str | None = None,
    hardware: str | Hardware | Sequence[str | Hardware] = (DEFAULT,),
    schedule: Schedule | Mapping[str, Any] | None = None,
    fidelity: str = "fair",
    check: bool = True,
    seed: int = 0,
    inputs: Inputs | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    note: Note = lambda _: None,
) -> Comparison:
    """Run every dataflow on every machine.

    `computes` is "forward", "backward" (of forward dataflows those of their gradients are taken) or "training" (each
    forward dataflow, followed by the one of its gradients, as one run); None stands for what the dataflows compute.
    `schedule` is a whole Schedule, or some of its fields by name; the rest is chosen for each dataflow and machine.
    `inputs` are the check's own tensors instead of normal random numbers: what `load_inputs` takes or gives.  `seed`
    makes random inputs and chooses the rows that are checked where they are too many.
    `note` is told what happens next.  The numeric check depends on the schedule alone, so machines share it.

    Raises InputError for bad input, CapacityError (an InputError) for a tile that does not fit.
    """
    asked = [dataflows] if isinstance(dataflows, str | Dataflow) else list(dataflows)
    names = [flow if isinstance(flow, str) else flow.name for flow in asked]
    given_machines = [hardware] if isinstance(hardware, str | Hardware) else list(hardware)
    if not names or not given_machines:
        raise InputError("compare: needs at least one dataflow and one machine")
    machines = machines_called(given_machines)
    flows = [_of_pass(load_dataflow(flow) if isinstance(flow, str) else flow, computes) for flow in asked]
    _require_different("dataflow", names, [f.name for f in flows])
    if len({f.computes for f in flows}) > 1:
        kinds = ", ".join(f"{f.name} ({f.computes})" for f in flows)
        raise InputError(f"dataflow: {kinds} compute different things and cannot be compared")
    own = _inputs(inputs, problem, flows[0].computes)
    given = fields_of(schedule)
    training = computes == "training"
    backwards = {f.name: _backward_of(f) for f in flows} if training else {}
    if not isinstance(schedule, Schedule):
        require_read(given, (*flows, *backwards.values()))
    for machine, flow in product(machines, (*flows, *backwards.values())):
        require_formats(problem, machine, flow)
    plans = [
        p for m, flow in product(machines, flows) for p in _plans(problem, m, flow, backwards.get(flow.name), given)
    ]
    require_uneven(given, [plan.program for plan in plans])
    checks = _checks(plans, seed, own, note) if check else {}
    runs = []
    for plan in plans:
        note(f"time of {plan.flow.name} on {plan.machine.name}")
        runs.append(evaluate(plan, fidelity, checks.get(plan.checked)))
    if training:
        from iosim.study.training import training_step

        runs = [training_step(forward, backward) for forward, backward in zip(runs[::2], runs[1::2], strict=True)]
    return Comparison(problem, tuple(runs), own)


def run(
    problem: Attention,
    *,
    dataflow: str = "flash2",
    computes: str | None = None,
    hardware: str | Hardware = DEFAULT,
    schedule: Schedule | Mapping[str, Any] | None = None,
    fidelity: str = "fair",
    check: bool = True,
    seed: int = 0,
    inputs: Inputs | str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Run:
    """Run one dataflow on one machine; see `compare`."""
    return compare(
        problem,
        dataflows=(dataflow,),
        computes=computes,
        hardware=(hardware,),
        schedule=schedule,
        fidelity=fidelity,
        check=check,
        seed=seed,
        inputs=inputs,
    ).runs[0]


def _require_different(what: str, asked: Sequence[str | Hardware], names: Sequence[str]) -> None:
    """Raise InputError where two of what was `asked` for have one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return
    called = [a if isinstance(a, str) else a.name for a, name in zip(asked, names, strict=True) if name == twice]
    file = next((a for a in called if a != twice), "")
    if len(set(called)) == 1 or not file:
        raise InputError(f"{what}: {twice} is given twice")
    if what == "hw":
        raise InputError(f'hw: {file} has name = "{twice}", as another machine here; give it a name of its own')
    if file.endswith(".py"):
        raise InputError(f"dataflow: {file} makes {twice}, as another dataflow here; rename the file and its function")
    raise InputError(f"dataflow: {twice} is given twice, as the backward pass of two of {', '.join(map(str, asked))}")


def require_read(given: Mapping[str, Any], flows: Sequence[Dataflow]) -> None:
    """Raise InputError for a field of a schedule that none of the dataflows reads."""
    read = {"stages", "groups", "place", "orders"}.union(*(f.uses for f in flows))
    if idle := sorted(given.keys() - read):
        raise InputError(f"{idle[0]}: changes nothing in {', '.join(f.name for f in flows)}")


def require_uneven(given: Mapping[str, Any], programs: Sequence[Program]) -> None:
    """Raise InputError for an order of blocks by length where all blocks of every kernel are equally long."""
    order = given.get("grid_order", "natural")
    loops = (loop for p in programs for kernel in p.kernels for _, around in walk(kernel.body) for loop in around)
    if order != "natural" and not any(isinstance(bound, Expr) for loop in loops for bound in (loop.lo, loop.hi)):
        raise InputError(f"grid_order: {order} changes nothing, as all blocks have as many loop iterations; a causal "
                         f"mask or a window makes them differ")  # fmt: skip


def machine_called(given: str | Hardware) -> Hardware:
    """A machine, or the one that is called so; an error says that it is about `hw`."""
    try:
        return given if isinstance(given, Hardware) else load_hardware(given)
    except InputError as error:
        raise InputError(f"hw: {error}") from None


def machines_called(given: Sequence[str | Hardware]) -> list[Hardware]:
    """Machines, or those that are called so, no two of one name."""
    machines = [machine_called(h) for h in given]
    _require_different("hw", given, [h.name for h in machines])
    return machines


def require_formats(problem: Attention, machine: Hardware, flow: Dataflow) -> None:
    """Raise InputError where the dataflow is not written for the problem's formats, or the machine lacks them."""
    if refusal := flow.refusal(problem):
        raise InputError(refusal)
    missing = bool(machine.missing_for_time())  # then bytes and numbers are all that is asked for, and fp8 has a rule
    able = [d for d in ("fp16", "bf16", FP8) if machine.matrix_rate(d) is not None or (missing and d != FP8)]
    if problem.dtype not in (*able, "fp32"):
        raise InputError(
            f"dtype: {machine.name} has no matrix rate for {problem.dtype}; it takes {', '.join([*able, 'fp32'])}"
        )


def fields_of(schedule: Schedule | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Fields of a schedule by name, a whole one or some of it; raises InputError for a name that it does not have."""
    names = [f.name for f in fields(Schedule)]
    if isinstance(schedule, Schedule):
        return {name: getattr(schedule, name) for name in names}
    for name in schedule or {}:
        if name not in names:
            raise InputError(f"schedule: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    fixed = dict(schedule or {})
    if isinstance(stages := fixed.get("stages"), int | list):
        fixed["stages"] = (stages,) if isinstance(stages, int) else tuple(stages)
    return fixed


def _inputs(
    given: Inputs | str | os.PathLike[str] | Mapping[str, Any] | None, problem: Attention, computes: str
) -> Inputs | None:
    if given is None:
        return None
    from iosim.check.given import Inputs, load_inputs

    inputs = given if isinstance(given, Inputs) else load_inputs(given)
    inputs.require(problem, computes)
    return inputs


def _of_pass(flow: Dataflow, computes: str | None) -> Dataflow:
    """The dataflow that a pass takes for `flow`."""
    if computes is None or (computes == flow.computes and computes in PASSES):
        return flow
    if computes not in PASSES:
        raise InputError(f"pass: {computes!r} is not one of {', '.join(PASSES)}{nearest(computes, PASSES)}")
    if flow.computes != "forward":
        raise InputError(f"dataflow: {flow.name} computes {flow.computes}; pass {computes} takes forward dataflows")
    return _backward_of(flow) if computes == "backward" else flow


def _backward_of(flow: Dataflow) -> Dataflow:
    if not flow.backward:
        raise InputError(f"dataflow: {flow.name} names no dataflow of its gradients (BACKWARD in its file)")
    try:
        found = load_dataflow(flow.backward)
    except InputError as error:
        words = str(error).removeprefix("dataflow: ")
        raise InputError(f"dataflow: BACKWARD of {flow.file or flow.name}: {words}") from None
    if found.computes != "backward":
        raise InputError(f"dataflow: BACKWARD of {flow.name} is {found.name}, which computes {found.computes}")
    return found


def chosen_fields(flow: Dataflow, schedule: Schedule) -> dict[str, Any]:
    """The fields of a schedule that a dataflow reads, and those that every timeline reads."""
    whole = schedule.as_dict()
    names = [*flow.uses, "stages", "groups"]
    return {name: whole[name] for name in names} | {name: whole[name] for name in ("place", "orders") if whole[name]}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: a program, and the choices that made it."""

    problem: Attention
    machine: Hardware
    flow: Dataflow
    schedule: Schedule
    why: str
    program: Program

    @property
    def checked(self) -> tuple[Attention, str, Schedule]:
        """What a check depends on."""
        return self.problem, self.flow.name, self.schedule


def _plans(
    problem: Attention, machine: Hardware, flow: Dataflow, backward: Dataflow | None, given: Mapping[str, Any]
) -> tuple[Plan, ...]:
    """A dataflow, and in a training step the one of its gradients, which may want the log-sum-exp."""
    if backward is None:
        return (plan_of(problem, machine, flow, given),)
    after = plan_of(problem, machine, backward, given)
    lse = problem.lse or any((t.name, t.role) == ("L", "in") for t in after.program.tensors)
    return plan_of(replace(problem, lse=lse), machine, flow, given), after


def plan_of(problem: Attention, machine: Hardware, flow: Dataflow, given: Mapping[str, Any]) -> Plan:
    """The program of a dataflow with `given` fields of the schedule, the others chosen; raises InputError."""
    schedule, why = choose(flow, problem, machine, given)
    return Plan(problem, machine, flow, schedule, why, flow(problem, schedule))


def check_of(plan: Plan, seed: int = 0) -> Check:
    """The numeric check of one plan."""
    return _checks([plan], seed, None, lambda _: None)[plan.checked]


def _checks(
    plans: Sequence[Plan], seed: int, inputs: Inputs | None, note: Note
) -> dict[tuple[Attention, str, Schedule], Check]:
    from iosim.check import check_all

    names = ", ".join(dict.fromkeys(plan.flow.name for plan in plans))
    note(f"numeric check of {names} (--no-check leaves it out)")
    out: dict[tuple[Attention, str, Schedule], Check] = {}
    for problem, computes in dict.fromkeys((plan.problem, plan.flow.computes) for plan in plans):
        alike = [plan for plan in plans if (plan.problem, plan.flow.computes) == (problem, computes)]
        programs = {plan.checked: plan.program for plan in alike}
        source = None if inputs is None else inputs.source(problem, computes, seed)
        done = check_all(problem, list(programs.values()), seed=seed, inputs=source)
        out |= dict(zip(programs, done, strict=True))
    return out


def evaluate(
    plan: Plan,
    fidelity: str = "fair",
    check: Check | None = None,
    watch: Watch | None = None,
    device: DeviceTraffic | None = None,
) -> Run:
    """Bytes, capacity and time of a plan, with recordings of what `watch` asks for; raises CapacityError.

    `device` is its traffic behind the caches, where a plan alike in all that this depends on has shown it.
    """
    program, schedule, machine = plan.program, plan.schedule, plan.machine
    counted = ledger(program)
    prints = footprints(program, schedule, machine)
    if device is None:
        device = device_traffic(program, counted, schedule, machine, prints)
    timed, no_time = _time(machine, schedule, program, device, fidelity, watch)
    return Run(
        plan.flow, plan.problem, machine, schedule, plan.why, program, counted, device, prints, timed, no_time, check
    )


def moved(plan: Plan) -> tuple[Ledger, dict[str, Footprint], DeviceTraffic]:
    """What a plan moves, what its blocks take on chip by kernel, and what is left behind the caches: all but time."""
    program, schedule, machine = plan.program, plan.schedule, plan.machine
    counted = ledger(program)
    prints = footprints(program, schedule, machine)
    return counted, prints, device_traffic(program, counted, schedule, machine, prints)


def device_traffic(
    program: Program, counted: Ledger, schedule: Schedule, machine: Hardware, prints: Mapping[str, Footprint]
) -> DeviceTraffic:
    """What reaches DRAM when as many blocks run at one time as their footprints allow."""
    multicast = {name: schedule.of(name).multicast for name in prints}
    return behind_caches(program, counted, machine, resident_on(machine, prints), schedule.descending, multicast)


def resident_on(machine: Hardware, prints: Mapping[str, Footprint]) -> dict[str, int]:
    """How many blocks of each kernel the machine runs at one time."""
    return {name: f.resident * (machine.processors or 1) for name, f in prints.items()}


def _time(
    machine: Hardware,
    schedule: Schedule,
    program: Program,
    device: DeviceTraffic,
    fidelity: str,
    watch: Watch | None,
) -> tuple[Timeline | None, str]:
    if missing := machine.missing_for_time():
        return None, f"the profile does not know {', '.join(missing)}"
    from iosim.interpreters.timeline import Fidelity, timeline

    return timeline(program, schedule, machine, device, fidelity=cast("Fidelity", fidelity), watch=watch), ""
