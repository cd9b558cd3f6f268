"""What a measurement is, whichever file it came from: a shape, an implementation, and quantities in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from iosim.problem import Attention

Kind: TypeAlias = Literal["calls", "kernels", "tiles", "published"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that is measured and predicted.

    `measured` is the quantity that it is held against, where that is not itself.  `exact` ones are right or wrong,
    and so is each error: 0 or as far as it is off.  `floor` is the least that is scored: below it, a counter is noise.
    `kind` is the only kind of row that has it, "" for all.
    """

    name: str
    unit: str
    words: str
    measured: str = ""
    exact: bool = False
    floor: float = 0.0
    kind: str = ""

    @property
    def source(self) -> str:
        """The name under which the measurement stands in a row."""
        return self.measured or self.name


# Floors: lines of the L2 that other work left dirty reach the DRAM counters (iosim/data/README.md).
QUANTITIES: Mapping[str, Quantity] = {
    q.name: q
    for q in (
        Quantity("time", "s", "time"),
        Quantity("time_estimated", "s", "time, registers and spills estimated", measured="time", kind="tiles"),
        Quantity("dram_read_bytes", "B", "DRAM bytes read", floor=0.1e6),
        Quantity("dram_write_bytes", "B", "DRAM bytes written", floor=20e6),
        Quantity("l2_bytes", "B", "L2 bytes"),
        Quantity("peak_extra_bytes", "B", "peak extra memory", exact=True),
        Quantity("peak_bytes", "B", "peak memory, inputs too", exact=True),
        Quantity("smem_bytes", "B", "SRAM a block", exact=True),
        Quantity("launches", "", "launches or does not", exact=True),
        Quantity("occupancy", "blocks", "resident blocks a processor", exact=True),
        Quantity("registers", "", "registers a thread"),
        Quantity("rmse", "", "root mean square error against float64"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a call.

    `name` has no namespaces and template arguments.  `role` is what it does (iosim/study/validate/names.py), ""
    where that is not known.  `call` numbers the calls of a file and `position` the kernels of a call, from 0, in the
    order in which they ran.  `sram_bytes` is as Nsight Compute counts, the driver's share of a block included.
    """

    name: str
    role: str
    call: int
    position: int
    grid: int | None = None
    block: int | None = None  # threads
    registers: int | None = None  # of a thread
    sram_bytes: int | None = None
    exp_instructions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One point of a tile sweep; `registers` and `spills` (of a thread) are None where it did not launch."""

    block_q: int
    block_k: int
    stages: int
    warps: int
    registers: int | None = None
    spills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a measurement file.

    `device` is the machine as the file calls it, `machine` the profile that this means ("" where there is none).
    `problem` is None where the file gives no shape, or one that iosim cannot hold; `unmodelled` then says why.
    `measured` maps quantities (by `QUANTITIES`) to numbers in SI units.  `step` is the resolution of a printed
    number, for those that are only right to it (whole MiB); `kernel` and `tile` are there in files about them.
    """

    file: str
    line: int
    kind: Kind
    device: str
    machine: str
    implementation: str
    direction: str
    problem: Attention | None
    measured: Mapping[str, float] = field(hash=False)
    unmodelled: str = ""
    step: int = 1
    note: str = ""
    kernel: Kernel | None = None
    tile: Tile | None = None

    @property
    def where(self) -> str:
        """File and line, as messages name them."""
        return f"{self.file}:{self.line}"
