"""The roofline of a machine, and where kernels lie under it.

A ceiling is the work a second that a unit of the chip allows: bandwidth times intensity (work a byte) for a memory, a
rate for a compute unit.  The work of a kernel is its matrix FLOPs, executed, whole tiles; of a kernel without matrix
work, such as a softmax, its vector operations.

The exp unit allows as much work as there is for each exponential: 2 (d + d_v) FLOPs a score in a fused kernel, so that
its ceiling depends on the head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.study.cases import Runs, cases
from iosim.study.run import Run

MEMORIES = ("DRAM", "L2", "SRAM")
WORK = ("vector", "alu", "exp")  # of a kernel without matrix work


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A memory's `rate` in bytes a second, a compute unit's in FLOP or operations a second, of the whole chip."""

    name: str
    rate: float
    memory: bool
    words: str

    def at(self, intensity: float) -> float:
        """The work a second that it allows at an intensity (work a byte)."""
        return self.rate * intensity if self.memory else self.rate


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """One kernel of a run: its work, the bytes that it asks for and that reach DRAM, its time, launch included.

    `busy` are the shares of the time that units are busy.  `roof` is the work a second that the lowest ceiling allows,
    which `bound` names; that of SRAM follows from how long its ports are busy.
    """

    machine: str
    dataflow: str
    kernel: str
    matrix: bool
    work: int
    asked_bytes: int
    dram_bytes: int
    time_ps: int
    busy: Mapping[str, float]
    roof: float
    bound: str

    @property
    def rate(self) -> float:
        """Work a second that is reached, launch included."""
        return self.work * 1e12 / self.time_ps

    @property
    def dram_intensity(self) -> float | None:
        """Work a byte of DRAM; None where nothing reaches it."""
        return self.work / self.dram_bytes if self.dram_bytes else None

    @property
    def asked_intensity(self) -> float:
        """Work a byte that is asked for, which an L2 sees."""
        return self.work / self.asked_bytes


@dataclass(frozen=True)
class Roofline:
    """Ceilings by machine, and the kernels of all dataflows on one problem."""

    problem: Attention
    machines: tuple[Hardware, ...]
    ceilings: Mapping[str, tuple[Ceiling, ...]]
    points: tuple[KernelPoint, ...]
    left_out: tuple[str, ...]


def roofline(a: Attention, machines: Sequence[Hardware], dataflows: Sequence[str], runs: Runs) -> Roofline:
    """Ceilings of machines and the kernels of dataflows on them."""
    shape = {name: value for name, value in a.as_dict().items() if name != "n_q"}
    found = runs.get(cases([a.n_q], shape, machines, dataflows))
    tops = {m.name: tuple(ceilings(a, m)) for m in machines}
    points = [p for case, run in found.items() for p in kernel_points(run, tops[case.machine.name])]
    return Roofline(a, tuple(machines), tops, tuple(points), tuple(runs.left_out))


def ceilings(a: Attention, machine: Hardware) -> Iterator[Ceiling]:
    """What the profile knows of the chip's limits, memories from far to near, then compute units."""
    count = machine.processors or 0
    hbm = machine.hbm
    yield Ceiling("DRAM", hbm.bandwidth * hbm.read_efficiency, True, f"{hbm.kind}, what reads reach of its peak")
    if machine.l2 is not None and machine.l2.bandwidth:
        yield Ceiling("L2", machine.l2.bandwidth, True, "all partitions")
    if machine.sram.bandwidth and count:
        yield Ceiling("SRAM", machine.sram.bandwidth * count, True, f"all {machine.called}s")
    rate = machine.matrix_rate(a.dtype)
    if rate and count:
        yield Ceiling("matrix", rate * count, False, f"dense {a.dtype} peak")
    if machine.exp_rate and count:
        work = 2 * (a.d + a.d_v)
        yield Ceiling("exp", machine.exp_rate * count * work, False, f"{work} FLOPs for each exponential")
    if machine.vector_rate and count:
        yield Ceiling("vector", machine.vector_rate * count, False, "operations of all FP32 lanes")


def kernel_points(run: Run, tops: Sequence[Ceiling]) -> Iterator[KernelPoint]:
    """The kernels of a run that has times."""
    for k in run.timeline.kernels if run.timeline is not None else ():
        work = run.ledger.work[k.name]
        matrix = work.get("matrix", 0) > 0
        done = work["matrix"] if matrix else sum(work.get(unit, 0) for unit in WORK)
        flows = [f for f in run.device.flows if f.flow.kernel == k.name]
        bytes_ = {
            "DRAM": sum(f.dram_read_bytes + f.dram_write_bytes for f in flows),
            "L2": sum(f.flow.hbm_bytes * (1 + (f.flow.direction == "add")) for f in flows),
        }
        limits = {c.name: c.rate * done / bytes_[c.name] for c in tops if bytes_.get(c.name)}
        sram = k.units["sram"]
        if sram.busy_ps:  # at the clock that the kernel runs at
            limits["SRAM"] = done * 1e12 * sram.instances / sram.busy_ps
        limits |= {c.name: c.rate for c in tops if not c.memory and _limits(c.name, matrix, work)}
        bound = min(limits, key=lambda name: limits[name])
        yield KernelPoint(
            machine=run.hardware.name,
            dataflow=run.dataflow.name,
            kernel=k.name,
            matrix=matrix,
            work=done,
            asked_bytes=bytes_["L2"],
            dram_bytes=bytes_["DRAM"],
            time_ps=k.makespan_ps,
            busy={name: u.busy_ps / (u.instances * k.makespan_ps) for name, u in k.units.items()},
            roof=limits[bound],
            bound=bound,
        )


def _limits(ceiling: str, matrix: bool, work: Mapping[str, Any]) -> bool:
    """Whether a compute unit's ceiling is about this kernel's work."""
    return {"matrix": matrix, "exp": matrix and work.get("exp", 0) > 0, "vector": not matrix}[ceiling]
