"""A profile of a user's GPU: what was measured, what its driver says, and the rest from the nearest shipped profile.

Every number says in `source` which of the three it is: "calibrate: ..." (confidence "measured"), "driver: ..."
(confidence "datasheet"), or "as NAME: ..." with what that profile says (confidence "inferred", or "estimate" as there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from iosim.hardware import Hardware, hardware_of, profile_data
from iosim.study.readings import Bench, Properties, Reading, Readings
from iosim.study.validate import names

# Compute capabilities of shipped profiles, and from the newest on the profile whose matrix instructions a GPU has.
CAPABILITY = {"a100-sxm-80gb": (8, 0), "h100-sxm": (9, 0), "h200-sxm": (9, 0), "b200": (10, 0)}
NEAREST = (((12, 0), "a100-sxm-80gb"), ((10, 0), "b200"), ((9, 0), "h100-sxm"), ((0, 0), "a100-sxm-80gb"))
DIGITS = 4  # that a measured number keeps

# Readings that are said beside others, or become fields by another name in `_measured`.
BESIDE = ("processor.sustained_clock_mhz", "matmul.tflops")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A complete profile as TOML data, the shipped profile that it leans on, and benchmarks that could not run."""

    data: Mapping[str, Any]
    base: str
    failed: tuple[str, ...]

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return hardware_of(self.data, f"profile {self.data['name']}")


def calibrate(bench: Bench, name: str, today: date, note: Callable[[str], object] = lambda _: None) -> Calibration:
    """Measure a GPU and write its profile.  Raises InputError for a name that a profile can't have."""
    properties = bench.properties()
    base = nearest_profile(properties)
    hardware_of({**profile_data(base), "name": name}, "--name")
    found = bench.readings(note)
    same = properties.capability == CAPABILITY[base]
    data = _inherited(profile_data(base), base, same)
    data |= {
        "name": name,
        "title": properties.name,
        "vendor": "NVIDIA",
        "notes": _notes(properties, base, today, found),
    }
    for field, entry in (*_queried(properties), *_measured(properties, found, data)):
        _put(data, field, entry)
    sources = {
        **data.get("sources", {}),
        "calibrate": f"micro-benchmarks of `iosim calibrate` on an {properties.name}, {today}, {properties.software}",
        "driver": f"what the driver of that {properties.name} says",
    }
    used = " ".join(_sources(data))
    data["sources"] = {key: words for key, words in sources.items() if key in used}
    hardware_of(data, f"profile {name}")
    return Calibration(data, base, found.failed)


def nearest_profile(properties: Properties) -> str:
    """The shipped profile of this GPU, or of its compute capability, or of one with the same matrix instruction."""
    named = names.machine(properties.name)
    if CAPABILITY.get(named) == properties.capability:
        return named
    return next(profile for since, profile in NEAREST if properties.capability >= since)


def _notes(p: Properties, base: str, today: date, found: Readings) -> str:
    lines = [
        f"Written by `iosim calibrate` on {today}: compute capability {'{}.{}'.format(*p.capability)}, {p.software}.",
        f"What could be neither measured nor asked for is as in the profile {base}.",
        "Cycles and rates are given at the clock of processors that run matrix instructions, short of the power limit.",
    ]
    lines += [f"Could not be measured: {reason}." for reason in found.failed]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the three kinds of number


def _inherited(value: Any, base: str, same: bool) -> Any:
    """A profile's data with each number said to be that profile's."""
    if isinstance(value, list):
        return [_inherited(v, base, same) for v in value]
    if not isinstance(value, dict):
        return value
    if "source" not in value:
        return {key: v if key == "sources" else _inherited(v, base, same) for key, v in value.items()}
    confidence = value["confidence"]
    keep = confidence == "estimate" or (same and confidence == "datasheet")
    return {**value, "source": f"as {base}: {value['source']}", "confidence": confidence if keep else "inferred"}


def _queried(p: Properties) -> Iterator[tuple[str, dict[str, Any]]]:
    values = {
        "processor.count": (p.processors, "MULTIPROCESSOR_COUNT"),
        "processor.warp_size": (p.warp_size, "WARP_SIZE"),
        "processor.max_threads": (p.max_threads, "MAX_THREADS_PER_MULTIPROCESSOR"),
        "processor.max_threads_per_block": (p.max_threads_per_block, "MAX_THREADS_PER_BLOCK"),
        "processor.max_blocks": (p.max_blocks, "MAX_BLOCKS_PER_MULTIPROCESSOR"),
        "hbm.capacity_gb": (p.memory_bytes / 1e9, f"total memory {p.memory_bytes} bytes"),
        "hbm.bandwidth_gb_per_s": (
            round(p.memory_gb_per_s, 3),
            f"2 x MEMORY_CLOCK_RATE {p.memory_clock_mhz:g} MHz x GLOBAL_MEMORY_BUS_WIDTH {p.memory_bus_bits} bits",
        ),
        "l2.capacity_mib": (p.l2_bytes / 2**20, f"L2_CACHE_SIZE {p.l2_bytes} bytes"),
        "sram.capacity_kib": (p.sram_bytes / 2**10, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        "sram.block_capacity_kib": (p.sram_block_bytes / 2**10, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "sram.reserved_per_block_bytes": (p.sram_reserved_bytes, "RESERVED_SHARED_MEMORY_PER_BLOCK"),
        "registers.registers_per_processor": (p.registers, "MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "power.limit_w": (p.power_limit_w, "NVML's enforced power limit"),
        "energy.tdp_w": (p.default_power_limit_w, "NVML's default power limit"),
    }
    for field, (value, said) in values.items():
        if value:
            whole = int(value) if value == int(value) else value
            yield field, {"value": whole, "source": f"driver: {said}", "confidence": "datasheet"}


def _measured(p: Properties, found: Readings, base: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of the profile from readings; a later one of a field replaces an earlier."""
    readings = {r.name: r for r in found.readings}
    clock = _clock(readings, base)
    if "processor.matrix_clock_mhz" in readings or "processor.boost_clock_mhz" in readings:
        yield "processor.clock_mhz", _entry(clock)
    for r in found.readings:
        if r.name.startswith("matrix.flop_per_clock."):
            yield from _rate("matrix", r, clock.value, p.processors, readings.get("matmul.tflops"))
        elif r.name.startswith("mma.sync."):
            yield from _instruction(base, r, clock.value, p.processors)
        elif r.name.startswith("cp.async"):
            yield from _copy(base, r)
        elif r.name == "hbm.latency_ns":
            yield "hbm.latency_cycles", _entry(_times(r, clock.value / 1e3), f", {r.value:.0f} ns")
        elif r.name == "power.load_w":
            if p.power_limit_w and r.value > 0.9 * p.power_limit_w:
                yield "power.limit_w", _entry(r, f"; the limit is {p.power_limit_w:g} W")
        elif r.name == "power.load_w_per_ghz3":
            yield from _matrix_power(base, r)
        elif r.name not in BESIDE:
            yield r.name, _entry(r)


def _clock(readings: Mapping[str, Reading], base: Mapping[str, Any]) -> Reading:
    """The clock that cycles and rates are given at: of matrix instructions, from under full load to without them."""
    boost = readings.get("processor.boost_clock_mhz")
    matrix = readings.get("processor.matrix_clock_mhz", boost)
    if matrix is None:
        mhz = base["processor"]["clock_mhz"]["value"]
        return Reading("processor.clock_mhz", mhz, mhz, mhz, "")
    load = readings.get("processor.sustained_clock_mhz", matrix)
    highest = max(matrix.value, boost.value if boost else 0.0)
    how = f"{matrix.source}; {load.value:.0f} under full matrix load, {highest:.0f} at most"
    return Reading("processor.clock_mhz", matrix.value, min(matrix.value, load.value), highest, how)


def _rate(
    table: str, r: Reading, mhz: float, processors: int, matmul: Reading | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    dtype = r.name.rpartition(".")[2]
    beside = f"; {matmul.source} gets {matmul.value:.0f} TFLOPS" if matmul and dtype == "fp16" else ""
    words = f": {r.value:.0f} FLOP a clock and processor at {mhz:.0f} MHz{beside}"
    yield f"{table}.tflops.{dtype}", _entry(_times(r, processors * mhz / 1e6), words)


def _instruction(
    base: Mapping[str, Any], r: Reading, mhz: float, processors: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A reading of mma.sync, for the table that has this name."""
    table = next((t for t in ("matrix", "matrix_warp") if base.get(t, {}).get("name") == "mma.sync"), None)
    field = r.name.removeprefix("mma.sync.")
    if table and field.startswith("flop_per_clock."):
        yield from _rate(table, r, mhz, processors, None)
    elif table:
        yield f"{table}.{field}", _entry(r)


def _copy(base: Mapping[str, Any], r: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """A reading of an asynchronous copy, for the table of threads' copies or of the engine."""
    instruction, _, field = r.name.rpartition(".")
    name = "TMA" if instruction == "cp.async.bulk" else instruction
    for table in ("copy", "copy_threads"):
        if base.get(table, {}).get("name") == name:
            yield f"{table}.{field}", _entry(r)


def _matrix_power(base: Mapping[str, Any], r: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """Board power of products alone, less what the base profile gives the idle parts."""
    if "power" in base:
        idle = base["power"]["idle_w_per_ghz3"]["value"]
        less = Reading(r.name, r.value - idle, r.low - idle, r.high - idle, r.source)
        if less.low > 0:
            yield "power.matrix_w_per_ghz3", _entry(less, f", less idle {idle:g}")


# ---------------------------------------------------------------- data


def _times(r: Reading, factor: float) -> Reading:
    return Reading(r.name, r.value * factor, r.low * factor, r.high * factor, r.source)


def _entry(r: Reading, more: str = "") -> dict[str, Any]:
    """The table of a measured number; a range where repeats differ."""
    value, low, high = (float(f"{v:.{DIGITS}g}") for v in (r.value, r.low, r.high))
    span = {"low": low, "high": high} if low < high else {}
    return {"value": value, **span, "source": f"calibrate: {r.source}{more}", "confidence": "measured"}


def _sources(value: Any) -> Iterator[str]:
    """The source of every number in a profile's data."""
    if isinstance(value, list):
        for each in value:
            yield from _sources(each)
    elif isinstance(value, dict) and "confidence" in value:
        yield value["source"]
    elif isinstance(value, dict):
        for each in value.values():
            yield from _sources(each)


def _put(data: dict[str, Any], field: str, entry: dict[str, Any]) -> None:
    """Set a number by its dotted name; one of a table that the profile does not have is left out."""
    *path, key = field.split(".")
    levels = [level for level in data["memory"] if level["name"] == path[0]]
    table: Any = levels[0] if levels else data.get(path[0])
    for step in path[1:]:
        table = table and table.get(step)
    if table is not None:
        if field == "hbm.capacity_gb":
            table.pop("capacity_gib", None)
        table[key] = entry
