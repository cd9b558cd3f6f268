"""What is known of a GPU: properties that its driver gives, and readings of micro-benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

Note = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Properties:
    """What the driver says of a GPU: counts, bytes, MHz, bits, watts.  None: it does not say."""

    name: str
    capability: tuple[int, int]
    processors: int
    warp_size: int
    max_threads: int  # of a processor
    max_threads_per_block: int
    max_blocks: int  # of a processor
    registers: int  # of a processor, of 32 bits
    sram_bytes: int
    sram_block_bytes: int
    sram_reserved_bytes: int  # of each block
    l2_bytes: int
    memory_bytes: int
    memory_clock_mhz: float
    memory_bus_bits: int
    software: str  # versions of the driver and the libraries
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None

    @property
    def memory_gb_per_s(self) -> float:
        """Peak bandwidth of device memory: two transfers a clock."""
        return 2 * self.memory_clock_mhz * 1e6 * self.memory_bus_bits / 8 / 1e9


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured number, its lowest and highest repeat, and how it was measured.

    `name` is a dotted name of a profile; or of what `iosim.study.calibrate` converts: FLOP a clock, nanoseconds, watts
    under load, and what belongs to an instruction by its name.
    """

    name: str
    value: float
    low: float
    high: float
    source: str


def reading(name: str, values: Sequence[float], source: str) -> Reading:
    """The median of repeats, and their range."""
    return Reading(name, median(values), min(values), max(values), source)


@dataclass(frozen=True, slots=True)
class Readings:
    """All that was read, and a reason for each benchmark that could not run."""

    readings: tuple[Reading, ...]
    failed: tuple[str, ...] = ()


class Bench(Protocol):
    """Measures a GPU; `iosim.gpu.bench.GpuBench` does, and tests pass another."""

    def properties(self) -> Properties:
        """What the driver says."""

    def readings(self, note: Note) -> Readings:
        """Run the micro-benchmarks; `note` is told which."""
