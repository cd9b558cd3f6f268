"""One launch whose blocks come from several kernels: how engines run sequences of different lengths together.

The tile language has no tables, so that a program cannot look up where a sequence begins.  What it can say is one
kernel a class of alike sequences, and what a launch of them all does is this: the kernels have the same body, phase by
phase, and their blocks share one grid, placed on processors in one order.  No block crosses a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.model import BlockClass, Model
from iosim.interpreters.shapes import Shape
from iosim.interpreters.timeline import LONG, Fidelity, KernelTime, Samples, kernel_at_its_clock
from iosim.memory.cache import DramFlow
from iosim.memory.onchip import CapacityError, Footprint
from iosim.program import Kernel
from iosim.schedule import Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CLOCK_STEP_HZ = 60_000_000  # below the ceiling, clocks are whole multiples: launches that differ little share one
MIX_STEPS = 16  # the mix of DRAM reads and writes is rounded to one part in so many, for the same reason


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The kernel of one sequence, and what its flows move; sequences that are alike are one member."""

    kernel: Kernel
    flows: tuple[DramFlow, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Kernels whose blocks share one grid, the member of each sequence in launch order."""

    name: str
    sequences: tuple[Member, ...]

    @property
    def members(self) -> Mapping[Member, int]:
        """Each with how many sequences are like it."""
        return Counter(self.sequences)


@dataclass(slots=True)
class Known:
    """What launches have had computed, for those to come: bodies with the same phases and tiles on one machine.

    `long` is how many alike iterations are simulated, further ones extrapolated.  `clock_hz` is the last launch's.
    """

    samples: Samples = field(default_factory=dict)
    models: dict[tuple[Member, Schedule, int | None, int], Model] = field(default_factory=dict)
    long: int = LONG
    clock_hz: int | None = None


@dataclass(frozen=True)
class OneSequence(Model):
    """A kernel in a launch, whose DRAM gives `bandwidth` bytes a second to all of it."""

    bandwidth: int = 0

    @cached_property
    def dram_bandwidth(self) -> int:
        return self.bandwidth


@dataclass(frozen=True)
class SharedGrid(Model):
    """The model of a launch: the blocks of the `models`, one a sequence, in launch order.

    The first model's body stands for all: they differ in trips, extents and masks, which the shapes of blocks say.
    """

    models: tuple[Model, ...] = ()

    @cached_property
    def footprint(self) -> Footprint:
        """Of the one that takes most."""
        return max((model.footprint for model, _ in self._distinct), key=lambda f: (-f.resident, f.sram_bytes))

    @cached_property
    def classes(self) -> tuple[BlockClass, ...]:
        """The classes of all blocks, alike ones of different sequences as one."""
        counts: dict[Shape, int] = {}
        for model, times in self._distinct:
            for kind in model.classes:
                counts[kind.shape] = counts.get(kind.shape, 0) + kind.count * times
        return tuple(BlockClass({}, count, shape) for shape, count in counts.items())

    def class_of_blocks(self) -> NDArray[np.int64]:
        """The number of the class of every block, sequence by sequence, or those with most iterations first."""
        import numpy as np

        number = {kind.shape: n for n, kind in enumerate(self.classes)}
        of = {
            id(model): np.array([number[kind.shape] for kind in model.classes])[model.class_of_blocks()]
            for model, _ in self._distinct
        }
        blocks = np.concatenate([of[id(model)] for model in self.models])
        if self.schedule.grid_order == "natural":
            return blocks
        lengths = np.array([self.iterations(kind.shape) for kind in self.classes])
        return blocks[np.argsort(-lengths[blocks], kind="stable")]

    @cached_property
    def lengths(self) -> tuple[int, float]:
        """Iterations of the longest block, and the mean over all blocks."""
        each = [(self.iterations(kind.shape), kind.count) for kind in self.classes]
        return max(n for n, _ in each), sum(n * count for n, count in each) / sum(count for _, count in each)

    @cached_property
    def _distinct(self) -> tuple[tuple[Model, int], ...]:
        """Models with how many sequences have each: one object is one model."""
        times = Counter(map(id, self.models))
        return tuple((model, times[key]) for key, model in {id(model): model for model in self.models}.items())


def model_of(launch: Launch, schedule: Schedule, machine: Hardware, known: Known) -> SharedGrid:
    """The model of a launch; raises CapacityError for a block that does not fit, InputError for unlike bodies."""
    first = launch.sequences[0].kernel
    bandwidth = _bandwidth(launch, schedule, machine)
    own = replace(schedule, grid_order="natural")  # a member is one sequence; the launch has the order

    def model(member: Member) -> Model:
        key = member, own, machine.clock_hz, bandwidth
        if key not in known.models:
            known.models[key] = OneSequence(member.kernel, own, machine, member.flows, bandwidth)
        return known.models[key]

    models = {member: model(member) for member in launch.members}
    if len({tuple(tuple(phase.name for phase in part.phases) for part in m.parts) for m in models.values()}) > 1:
        raise InputError(f"{launch.name}: kernels with different bodies cannot share a grid")
    blocks = sum(member.kernel.blocks * times for member, times in launch.members.items())
    kernel = replace(first, name=launch.name, grid=(("block", blocks),))
    grid = SharedGrid(kernel, schedule, machine, (), tuple(models[member] for member in launch.sequences))
    if not grid.footprint.resident:
        raise CapacityError(grid.footprint.complaint(machine))
    return grid


def _bandwidth(launch: Launch, schedule: Schedule, machine: Hardware) -> int:
    """Bytes a second that DRAM gives the launch, see Model.dram_bandwidth, its mix of reads and writes rounded."""
    read = sum(times * f.dram_read_bytes for member, times in launch.members.items() for f in member.flows)
    write = sum(times * f.dram_write_bytes for member, times in launch.members.items() for f in member.flows)
    mixed = round(MIX_STEPS * 2 * min(read, write) / (read + write)) / MIX_STEPS if read + write else 0.0
    hbm = machine.hbm
    efficiency = 1 / ((1 - mixed) / hbm.read_efficiency + mixed / hbm.mixed_efficiency)
    return int(hbm.bandwidth * efficiency * schedule.dram_share)


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """A launch's run; `moved` are bytes that its blocks ask for, by (tensor, direction).

    `longest` and `mean` are iterations of a block.
    """

    time: KernelTime
    moved: Mapping[tuple[str, str], int]
    longest: int
    mean: float


def launch_time(
    launch: Launch, schedule: Schedule, hardware: Hardware, known: Known, fidelity: Fidelity = "fair"
) -> LaunchTime:
    """The time of a launch; raises as `model_of` does."""
    made: list[SharedGrid] = []
    nominal = hardware.with_units(schedule.units)

    def at(machine: Hardware) -> SharedGrid:
        made.append(model_of(launch, schedule, machine, known))
        return made[-1]

    kernel = launch.sequences[0].kernel
    time, moved = kernel_at_its_clock(
        kernel, nominal, at, known.samples, known.long, fidelity, known.clock_hz, CLOCK_STEP_HZ
    )
    known.clock_hz = made[-1].hardware.clock_hz
    return LaunchTime(time, moved, *made[-1].lengths)
