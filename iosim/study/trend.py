"""Predicted time of standard attention and FlashAttention over N: where the second starts to pay, and why not before.

A run's time is that of its compute units (the matrix unit's; vector lanes' for fp32 data): busy, and waiting by cause.
The timeline's causes are put into the words of a review:

    launch     the kernels' launches
    idle       processors without a block: too few blocks, or the last wave of a grid
    latency    waiting for data, for a free buffer, or for another warp group
    vector     softmax and other vector work, which the matrix unit waits for
    operands   matrix work that is held up by other matrix work, such as operands from SRAM
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.study.cases import Runs, cases
from iosim.study.run import Run

BASE = "standard"
PAYS = 1.1  # times as fast, from which on a dataflow pays
CAUSES: Mapping[str, tuple[str, ...]] = {
    "launch": ("launch",),
    "idle": ("tail",),
    "latency": ("data", "buffer", "barrier"),
    "vector": ("vector",),
    "operands": ("matrix",),
}
MEASURED_D = 128
# Moore Threads' guide on the gain over N, in its words; it asks to measure it on the target.
GUIDE = {512: "little", 2048: "clear", 4096: "strong", 16384: "most"}


@dataclass(frozen=True, slots=True)
class Point:
    """A run's time in ps, and how long its compute units are busy and wait by cause, as shares of the run."""

    run: Run
    time_ps: int
    launch_ps: int
    busy: float
    waits: Mapping[str, float]

    @property
    def kernel_ps(self) -> int:
        """Without launches."""
        return self.time_ps - self.launch_ps

    @property
    def largest(self) -> str:
        """The cause of most waiting."""
        return max(self.waits, key=lambda cause: self.waits[cause])


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one shape on an H200 in seconds, by implementation; `host_bound` are those that show the host's time."""

    problem: Attention
    seconds: Mapping[str, float]
    host_bound: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    """Points by (machine, dataflow, N).  `unknown` says of machines why they have no time.

    `measured` are calls at the same head dimension, or at d = 128 where there are none.
    """

    shape: Mapping[str, Any]
    lengths: tuple[int, ...]
    machines: tuple[Hardware, ...]
    points: Mapping[tuple[str, str, int], Point]
    unknown: Mapping[str, str]
    left_out: tuple[str, ...]
    measured: tuple[Measured, ...] = ()

    @property
    def problem(self) -> Attention:
        """The longest."""
        return Attention(n_q=self.lengths[-1], **self.shape)

    @property
    def timed(self) -> list[str]:
        """Machines that there are times of."""
        return list(dict.fromkeys(machine for machine, _, _ in self.points))

    def dataflows(self, machine: str) -> list[str]:
        """Those that there are times of."""
        return list(dict.fromkeys(name for where, name, _ in self.points if where == machine))

    def speed_up(self, machine: str, dataflow: str, n: int, *, launches: bool = True) -> float | None:
        """Standard attention's time over a dataflow's, with or without launches; None where one is not there."""
        base, other = (self.points.get((machine, name, n)) for name in (BASE, dataflow))
        if base is None or other is None:
            return None
        return base.time_ps / other.time_ps if launches else base.kernel_ps / other.kernel_ps

    def pays_from(self, machine: str, dataflow: str, *, launches: bool = True) -> int | None:
        """The least N of the list from which on the dataflow is `PAYS` times as fast or more; None: never."""
        found = None
        for n in reversed(self.lengths):
            gain = self.speed_up(machine, dataflow, n, launches=launches)
            if gain is None or gain < PAYS:
                break
            found = n
        return found


def trend(
    lengths: Sequence[int],
    shape: Mapping[str, Any],
    machines: Sequence[Hardware],
    dataflows: Sequence[str],
    runs: Runs,
) -> Trend:
    """Times at every length; raises InputError for a problem out of range."""
    found = runs.get(cases(lengths, shape, machines, dataflows))
    return Trend(
        shape,
        tuple(lengths),
        tuple(machines),
        {(c.machine.name, c.dataflow, c.problem.n_q): p for c, run in found.items() if (p := point(run)) is not None},
        {c.machine.name: run.no_time for c, run in found.items() if run.timeline is None},
        tuple(runs.left_out),
        tuple(measured(shape["d"]) or measured(MEASURED_D)),
    )


def measured(d: int) -> list[Measured]:
    """Forward calls of standard attention and others on an H200, fp16, no mask, by heads and N."""
    from iosim.study.validate.readers import read
    from iosim.study.validate.score import host_floors

    with as_file(files("iosim").joinpath("data", "h200_attention.csv")) as path:
        rows = [r for r in read(path) if r.direction == "forward" and r.problem is not None and not r.problem.causal]
    times: dict[Attention, dict[str, float]] = {}
    for r in rows:
        if r.problem is not None and r.problem.d == d and "time" in r.measured:
            times.setdefault(r.problem, {})[r.implementation] = r.measured["time"]
    floors = host_floors()
    found = [
        Measured(a, own, tuple(name for name, seconds in own.items() if seconds < floors.get(name, 0)))
        for a, own in times.items()
        if BASE in own and len(own) > 1
    ]
    return sorted(found, key=lambda m: (m.problem.batch * m.problem.heads, m.problem.n_q))


def point(run: Run) -> Point | None:
    """A run's time by cause; None where it has none."""
    if run.timeline is None:
        return None
    unit = run.timeline.units["vector" if run.problem.dtype == "fp32" else "matrix"]
    whole = unit.instances * run.timeline.makespan_ps
    waits = {word: sum(unit.stalls_ps[cause] for cause in causes) / whole for word, causes in CAUSES.items()}
    launch = sum(k.launch_ps for k in run.timeline.kernels)
    return Point(run, run.timeline.makespan_ps, launch, unit.busy_ps / whole, waits)
