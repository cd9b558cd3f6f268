"""One dataflow on one machine, and several side by side: the results that commands print and programs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from iosim.dataflows import Dataflow, load_dataflow
from iosim.dtypes import dtype
from iosim.errors import InputError, nearest
from iosim.hardware import DEFAULT, Hardware, load_hardware
from iosim.interpreters.ledger import Ledger, ledger
from iosim.memory.cache import DeviceTraffic, behind_caches
from iosim.memory.onchip import Footprint, footprints
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule
from iosim.study.bounds import Bounds, bounds
from iosim.study.choose import choose

if TYPE_CHECKING:
    import pandas as pd

    from iosim.check import Check
    from iosim.interpreters.timeline import Timeline

DATAFLOWS = ("standard", "flash2")
Note = Callable[[str], None]


@dataclass(frozen=True, repr=False)
class Run:
    """What one dataflow does with one problem on one machine.

    `timeline` is None where the profile lacks a number that time needs, and `no_time` says which.  `check` is None
    where no check was asked for.
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

    def __repr__(self) -> str:
        time = "no time" if self.seconds is None else f"{self.seconds:.3g} s"
        return f"<Run of {self.dataflow.name} on {self.hardware.name}: {time}>"

    @property
    def footprint(self) -> Footprint:
        """Of the kernel that takes most SRAM."""
        return max(self.footprints.values(), key=lambda f: f.sram_bytes)

    @property
    def bounds(self) -> Bounds:
        """The fewest HBM accesses that the problem can do with on this machine."""
        return bounds(self.problem, self.hardware, self.ledger.io_bytes)

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
    """Runs of one problem: every dataflow on every machine, machine by machine."""

    problem: Attention
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        """What `iosim run` prints."""
        from iosim.report.text import render

        return render(self)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.runs))})"

    def to_frame(self) -> pd.DataFrame:
        """One row a run: bytes, capacity, time and check."""
        import pandas as pd

        from iosim.report.document import run_row

        return pd.DataFrame([run_row(r) for r in self.runs]).set_index(["hardware", "dataflow"])


def compare(
    problem: Attention,
    *,
    dataflows: str | Sequence[str] = DATAFLOWS,
    hardware: str | Hardware | Sequence[str | Hardware] = (DEFAULT,),
    schedule: Schedule | Mapping[str, Any] | None = None,
    fidelity: str = "fair",
    check: bool = True,
    seed: int = 0,
    note: Note = lambda _: None,
) -> Comparison:
    """Run every dataflow on every machine.

    `schedule` is a whole Schedule, or some of its fields by name; the rest is chosen for each dataflow and machine.
    `note` is told what happens next.  The numeric check depends on the schedule alone, so machines share it.

    Raises InputError for bad input, CapacityError (an InputError) for a tile that does not fit.
    """
    names = [dataflows] if isinstance(dataflows, str) else list(dataflows)
    given_machines = [hardware] if isinstance(hardware, str | Hardware) else list(hardware)
    if not names or not given_machines:
        raise InputError("compare: needs at least one dataflow and one machine")
    machines = [h if isinstance(h, Hardware) else load_hardware(h) for h in given_machines]
    flows = [load_dataflow(name) for name in names]
    for what, names in (("dataflow", [f.name for f in flows]), ("hw", [h.name for h in machines])):
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise InputError(f"{what}: {twice} is given twice")
    if len({f.computes for f in flows}) > 1:
        kinds = ", ".join(f"{f.name} ({f.computes})" for f in flows)
        raise InputError(f"dataflow: {kinds} compute different things and cannot be compared")
    given = _given(schedule)
    read = {"stages", "groups", "place", "orders"}.union(*(f.uses for f in flows))
    if not isinstance(schedule, Schedule) and (idle := sorted(given.keys() - read)):
        raise InputError(f"{idle[0]}: changes nothing in {', '.join(f.name for f in flows)}")
    plans = [(machine, flow, *choose(flow, problem, machine, given)) for machine in machines for flow in flows]
    programs = {(flow.name, chosen): flow(problem, chosen) for _, flow, chosen, _ in plans}
    checks = _checks(problem, programs, seed, note) if check else {}
    runs = []
    for machine, flow, chosen, why in plans:
        note(f"time of {flow.name} on {machine.name}")
        program = programs[flow.name, chosen]
        runs.append(_one(problem, machine, flow, chosen, why, program, fidelity, checks.get((flow.name, chosen))))
    return Comparison(problem, tuple(runs))


def run(
    problem: Attention,
    *,
    dataflow: str = "flash2",
    hardware: str | Hardware = DEFAULT,
    schedule: Schedule | Mapping[str, Any] | None = None,
    fidelity: str = "fair",
    check: bool = True,
    seed: int = 0,
) -> Run:
    """Run one dataflow on one machine; see `compare`."""
    return compare(
        problem,
        dataflows=(dataflow,),
        hardware=(hardware,),
        schedule=schedule,
        fidelity=fidelity,
        check=check,
        seed=seed,
    ).runs[0]


def _given(schedule: Schedule | Mapping[str, Any] | None) -> Mapping[str, Any]:
    names = [f.name for f in fields(Schedule)]
    if isinstance(schedule, Schedule):
        return {name: getattr(schedule, name) for name in names}
    for name in schedule or {}:
        if name not in names:
            raise InputError(f"schedule: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    fixed = dict(schedule or {})
    if isinstance(fixed.get("stages"), int):
        fixed["stages"] = (fixed["stages"],)
    return fixed


def _checks(
    problem: Attention, programs: Mapping[tuple[str, Schedule], Program], seed: int, note: Note
) -> dict[tuple[str, Schedule], Check]:
    from iosim.check import check_all

    note(f"numeric check of {', '.join(dict.fromkeys(name for name, _ in programs))}")
    return dict(zip(programs, check_all(problem, list(programs.values()), seed=seed), strict=True))


def _one(
    problem: Attention,
    machine: Hardware,
    flow: Dataflow,
    schedule: Schedule,
    why: str,
    program: Program,
    fidelity: str,
    check: Check | None,
) -> Run:
    counted = ledger(program)
    prints = footprints(program, schedule, machine)
    resident = {name: f.resident * (machine.processors or 1) for name, f in prints.items()}
    device = behind_caches(program, counted, machine, resident)
    timed, no_time = _time(problem, machine, schedule, program, device, fidelity)
    return Run(flow, problem, machine, schedule, why, program, counted, device, prints, timed, no_time, check)


def _time(
    problem: Attention, machine: Hardware, schedule: Schedule, program: Program, device: DeviceTraffic, fidelity: str
) -> tuple[Timeline | None, str]:
    if missing := machine.missing_for_time():
        return None, f"the profile does not know {', '.join(missing)}"
    if problem.dtype != "fp32" and machine.matrix_rate(problem.dtype) is None:
        have = [d for d in ("fp16", "bf16") if machine.matrix_rate(d) is not None]
        raise InputError(
            f"dtype: {machine.name} has no matrix rate for {problem.dtype}; it has {', '.join([*have, 'fp32'])}"
        )
    from iosim.interpreters.timeline import Fidelity, timeline

    return timeline(program, schedule, machine, device, fidelity=cast("Fidelity", fidelity)), ""
