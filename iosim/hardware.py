"""Machine profiles: TOML files whose every number has a source, read into one frozen `Hardware`.

A profile is data, never code. In the file each number is a table,

    count = { value = 56, source = "musaInfo multiProcessorCount", confidence = "datasheet" }
    latency_cycles = { value = 260, low = 200, high = 350, source = "...", confidence = "estimate" }
    max_blocks = { unknown = "not public" }

and its key names its unit. `Hardware` gives the same facts as plain numbers in SI units (bytes, bytes a
second, hertz, operations a second), times in integer picoseconds rounded up once, and None where nobody
knows. GB is 10^9 bytes, KiB, MiB and GiB are powers of 2.

Bad profiles raise `InputError`: one line with the file, the field, the value and what is allowed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StringConstraints, ValidationError
from pydantic_core import core_schema

from iosim.errors import InputError, nearest, show
from iosim.files import read_text, toml
from iosim.same import Same

DEFAULT = "mp31"
SCHEMA = "iosim.hardware/1"
LEVELS = ("hbm", "l3", "l2", "sram", "tmem", "registers")  # from far to near
DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp8_e4m3")

Confidence = Literal["datasheet", "measured", "inferred", "estimate"]
Operand = Literal["sram", "registers", "either", "sram_or_tmem"]

_MAX_FILE_BYTES = 1 << 20
_MOST_PROBLEMS = 100  # that are told of one file
_MEGA, _GIGA, _TERA = 10**6, 10**9, 10**12
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

_UNITS = {  # the end of a key → the unit that people read
    "_gib": "GiB",
    "_gb": "GB",
    "_mib": "MiB",
    "_kib": "KiB",
    "_bytes": "B",
    "_gb_per_s": "GB/s",
    "_bytes_per_clock": "B/clock",
    "_per_clock": "/clock",
    "_cycles": "cycles",
    "_mhz": "MHz",
    "_w_per_ghz3": "W/GHz^3",
    "_per_us": "/us",
    "_us": "us",
    "_w": "W",
    "_pj_per_byte": "pJ/B",
    "_pj_per_flop": "pJ/FLOP",
    "_pj_per_op": "pJ/op",
}


# ---------------------------------------------------------------- what a profile file may hold


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a profile with its range, source and confidence; `unknown` says why there is none."""

    value: int | float | None = None
    low: int | float | None = None
    high: int | float | None = None
    source: str = ""
    confidence: Confidence | None = None
    unknown: str = ""


def _number_problem(key: str, value: object) -> str:
    """What is wrong with a bare number, or an empty string."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{key} = {show(value)} is not a number"
    return "" if -inf < value < inf else f"{key} = {show(value)} is not finite"


def _text_problem(key: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return ""
    return f"{key} = {show(value)} must be a text that is not empty"


def _quantity_problem(raw: object) -> str:
    """The first thing wrong with the table of one number, or an empty string."""
    if not isinstance(raw, dict):
        return f'{show(raw)} must be a table {{ value = ..., source = "...", confidence = "..." }}'
    allowed = [member.name for member in fields(Quantity)]
    for key in raw:
        if key not in allowed:
            return f"unknown key {key!r}{nearest(key, allowed)}; allowed: {', '.join(allowed)}"
    if "unknown" in raw:
        return "unknown excludes every other key" if len(raw) > 1 else _text_problem("unknown", raw["unknown"])
    for key in ("value", "source", "confidence"):
        if key not in raw:
            return f"{show(raw)} has no {key}"
    problem = _text_problem("source", raw["source"]) or _number_problem("value", raw["value"])
    return problem or _confidence_problem(raw["confidence"]) or _range_problem(raw)


def _confidence_problem(word: object) -> str:
    allowed = get_args(Confidence)
    if word in allowed:
        return ""
    return f"confidence = {show(word)} must be one of {', '.join(allowed)}{nearest(str(word), allowed)}"


def _range_problem(raw: dict[str, Any]) -> str:
    ends = [key for key in ("low", "high") if key in raw]
    if len(ends) == 1 or (not ends and raw["confidence"] == "estimate"):
        lacking = " and ".join(key for key in ("low", "high") if key not in raw)
        return f"value = {show(raw['value'])} has no {lacking}; an estimate needs both, and so does any range"
    for key in ends:
        if problem := _number_problem(key, raw[key]):
            return problem
    if ends and not raw["low"] <= raw["value"] <= raw["high"]:
        low, value, high = (show(raw[key]) for key in ("low", "value", "high"))
        return f"value = {value} must lie between low = {low} and high = {high}"
    return ""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the numbers of a field may be. The ends keep each derived integer above zero and finite."""

    least: int | float = 0.001
    most: int = 10**9
    whole: bool = False
    known: bool = False

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self)

    def __call__(self, raw: object) -> Quantity:
        if problem := _quantity_problem(raw):
            raise ValueError(problem)
        quantity = Quantity(**cast("dict[str, Any]", raw))
        if self.known and quantity.value is None:
            raise ValueError(f"must be known: {self.words()}")
        for key in ("value", "low", "high"):
            number = getattr(quantity, key)
            if number is not None and not self.allows(number):
                raise ValueError(f"{key} = {show(number)} must be {self.words()}")
        return quantity

    def allows(self, number: int | float) -> bool:
        return self.least <= number <= self.most and (not self.whole or number == int(number))

    def words(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.least} to {self.most}"


_Count = Annotated[Quantity, _Rule(least=1, most=10**6, whole=True)]
_CountKnown = Annotated[Quantity, _Rule(least=1, most=10**6, whole=True, known=True)]
_Partitions = Annotated[Quantity, _Rule(least=1, most=32, whole=True)]  # each is simulated, with a bit in a word
_ZeroOrCount = Annotated[Quantity, _Rule(least=0, most=10**6, whole=True, known=True)]
_Amount = Annotated[Quantity, _Rule()]
_AmountKnown = Annotated[Quantity, _Rule(known=True)]
_ZeroOrAmount = Annotated[Quantity, _Rule(least=0)]
_ZeroOrAmountKnown = Annotated[Quantity, _Rule(least=0, known=True)]
_Fraction = Annotated[Quantity, _Rule(most=1, known=True)]
_Share = Annotated[Quantity, _Rule(most=10, known=True)]
_Text = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]
_Line = Annotated[str, StringConstraints(strict=True, pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
_Name = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class _Processor(_Table):
    called: _Line  # what the vendor calls a processor: SM, MP, CU
    count: _Count
    clock_mhz: _Amount
    warp_size: _CountKnown  # threads
    warps_per_group: _CountKnown
    max_threads: _Count
    max_threads_per_block: _CountKnown
    max_blocks: _Count
    boost_clock_mhz: _AmountKnown | None = None  # without matrix instructions
    matrix_clock_mhz: _AmountKnown | None = None  # at most, with them
    barrier_cycles: _ZeroOrAmountKnown | None = None  # of a block of no warps
    barrier_cycles_per_warp: _ZeroOrAmountKnown | None = None
    reduce_cycles: _ZeroOrAmountKnown | None = None  # maximum over the lanes that share a row
    turn_cycles: _ZeroOrAmountKnown | None = None  # to hand a turn from one warp group to another
    arrival_cycles: _ZeroOrAmountKnown | None = None  # to see that a copy by the engine has arrived


class _Power(_Table):
    """Board power is f^3 times the sum of these for a clock f.

    `matrix` at the peak FLOP a clock, `vector` with an instruction in each issue slot, `l2` for each byte a clock that
    every processor reads from the L2.
    """

    limit_w: _AmountKnown
    idle_w_per_ghz3: _AmountKnown
    matrix_w_per_ghz3: _AmountKnown
    vector_w_per_ghz3: _AmountKnown
    l2_w_per_ghz3: _AmountKnown


class _Hbm(_Table):
    name: Literal["hbm"]
    kind: _Line
    capacity_gb: _AmountKnown | None = None  # one of the two
    capacity_gib: _AmountKnown | None = None
    bandwidth_gb_per_s: _AmountKnown  # peak
    read_efficiency: _Fraction
    mixed_efficiency: _Fraction  # one stream read, one written
    latency_cycles: _ZeroOrAmount
    # Of rows that do not follow each other (iosim/memory/rows.py); as on an H200 where they are not given.
    access_bytes: _CountKnown | None = None  # that are read at a time
    broken_pieces: _ZeroOrAmountKnown | None = None  # what a short run costs beyond its bytes, in such pieces
    broken_among_pieces: _ZeroOrAmountKnown | None = None  # where neighbours are read at the same time


class _Cache(_Table):
    name: Literal["l2", "l3"]
    capacity_mib: _Amount  # all partitions together
    partitions: _Partitions
    private_partitions: StrictBool  # does a partition serve only its own share of the processors?
    bandwidth_gb_per_s: _Amount  # all partitions together
    shared_bandwidth_gb_per_s: _AmountKnown | None = None  # of reads that many processors make nearly in step
    step_bandwidth_gb_per_s: _AmountKnown | None = None  # of reads that all make in step; the same as shared
    write_bandwidth_gb_per_s: _AmountKnown | None = None  # the same as for reads where it is not given
    add_bandwidth_gb_per_s: _AmountKnown | None = None  # of fp32 reductions, payload; the same as for writes
    latency_cycles: _ZeroOrAmount
    sector_bytes: _CountKnown | None = None  # that are asked for at a time; as on an H200 where they are not given
    line_bytes: _CountKnown | None = None


class _Sram(_Table):
    name: Literal["sram"]
    capacity_kib: _AmountKnown  # of one processor
    block_capacity_kib: _AmountKnown
    reserved_per_block_bytes: _ZeroOrCount
    bandwidth_bytes_per_clock: _Amount
    latency_cycles: _ZeroOrAmount
    unified_kib: _AmountKnown | None = None  # with the L1 cache that it is carved out of


class _TensorMemory(_Table):
    name: Literal["tmem"]
    capacity_kib: _AmountKnown
    read_bytes_per_clock: _Amount
    write_bytes_per_clock: _Amount


class _Registers(_Table):
    name: Literal["registers"]
    registers_per_processor: _Count  # of 32 bits
    max_registers_per_thread: _Count
    registers_per_warp_unit: _CountKnown | None = None  # a warp's registers are given out in multiples of this
    # Bytes a clock and processor at which spilled registers come and go, by the level that holds them.
    spill_l1_bytes_per_clock: _AmountKnown | None = None
    spill_l2_bytes_per_clock: _AmountKnown | None = None
    spill_hbm_bytes_per_clock: _AmountKnown | None = None


class _Memory(_Table):
    hbm: _Hbm
    l3: _Cache | None = None
    l2: _Cache | None = None
    sram: _Sram
    tmem: _TensorMemory | None = None
    registers: _Registers


class _Copy(_Table):
    name: _Line
    asynchronous: StrictBool
    bandwidth_bytes_per_clock: _Amount  # of one processor's port
    latency_cycles: _ZeroOrAmountKnown | None = None  # beyond that of the level read


class _Rates(_Table):
    fp16: _Amount | None = None
    bf16: _Amount | None = None
    tf32: _Amount | None = None
    fp8_e4m3: _Amount | None = None


class _Matrix(_Table):
    name: _Line
    issued_by: Literal["warp", "group", "block"]
    operand_a: Operand
    operand_b: Operand
    accumulator: Literal["registers", "tmem"]
    instruction_m: _Count  # the smallest tile, of which others are multiples
    instruction_n: _Count
    instruction_k: _Count  # for operands of 2 bytes
    instruction_m_max: _Count
    instruction_n_max: _Count
    tflops: _Rates  # whole chip, dense
    drain_cycles: _ZeroOrAmountKnown | None = None  # from the last of a chain of products to its result
    switch_cycles: _ZeroOrAmountKnown | None = None  # more, for each further accumulator of one warp group
    issue_share: _ZeroOrAmountKnown | None = None  # of all issue slots, taken in each busy cycle
    lone_share: _Fraction | None = None  # of the rate, that one warp group alone reaches
    power_factor: _Share | None = None  # power of a FLOP against that of [matrix]


class _Exp(_Table):
    ops_per_clock: _Amount  # of one processor


class _Vector(_Table):
    lanes_per_clock: _Amount  # FP32 lanes of one processor; an FMA takes one lane
    alu_lanes_per_clock: _AmountKnown | None = None  # maxima, comparisons, conversions; the same where not given
    issue_lanes_per_clock: _AmountKnown | None = None  # instructions of a lane, of any kind; the same where not given


class _Launch(_Table):
    kernel_us: _ZeroOrAmountKnown
    block_cycles: _ZeroOrAmountKnown | None = None  # from the end of a block to the first instruction of the next
    blocks_per_us: _AmountKnown | None = None  # that a grid starts on the whole chip; all at once where not given


class _Energy(_Table):
    hbm_pj_per_byte: _ZeroOrAmount
    l2_pj_per_byte: _ZeroOrAmount
    sram_pj_per_byte: _ZeroOrAmount
    tmem_pj_per_byte: _ZeroOrAmount | None = None
    registers_pj_per_byte: _ZeroOrAmount
    matrix_fp16_pj_per_flop: _ZeroOrAmount
    matrix_fp8_pj_per_flop: _ZeroOrAmount
    vector_pj_per_flop: _ZeroOrAmount
    exp_pj_per_op: _ZeroOrAmount
    tdp_w: _Amount


class _Profile(_Table):
    schema_: Literal["iosim.hardware/1"] = Field(alias="schema")
    name: _Name
    title: _Line
    vendor: _Line
    notes: _Text = "none"
    processor: _Processor
    memory: _Memory
    copy_: _Copy = Field(alias="copy")
    copy_threads: _Copy | None = None  # asynchronous copies that threads issue, beside a copy engine
    matrix: _Matrix
    matrix_warp: _Matrix | None = None  # an instruction that one warp issues, beside one of a warp group
    exp: _Exp
    vector: _Vector
    launch: _Launch
    power: _Power | None = None
    energy: _Energy
    sources: dict[str, _Line] = Field(default_factory=dict)  # what the short names in `source` stand for


# ---------------------------------------------------------------- what the rest of iosim reads


class Fact(NamedTuple):
    """One number of a profile as people read it: `value`, `low` and `high` are in `unit`.

    An unknown number has the value None, the confidence "unknown" and the reason as its source.
    """

    name: str
    value: float | None
    unit: str
    confidence: str
    source: str
    low: float | None
    high: float | None


class Estimate(NamedTuple):
    """A guessed number, in the unit that its dotted name ends with, and its plausible range."""

    name: str
    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory: bytes, peak bytes a second, and the share of the peak that streams reach."""

    kind: str
    capacity_bytes: int
    bandwidth: int
    read_efficiency: float
    mixed_efficiency: float
    latency_ps: int | None


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache level: bytes and bytes a second of all partitions together.

    Requests for one line that are under way together are merged before the cache, which then gives `shared_bandwidth`,
    or `step_bandwidth` where all processors make them in step.
    """

    name: str
    capacity_bytes: int | None
    bandwidth: int | None
    shared_bandwidth: int | None
    step_bandwidth: int | None
    write_bandwidth: int | None
    add_bandwidth: int | None
    latency_ps: int | None
    partitions: int | None
    private_partitions: bool


@dataclass(frozen=True, slots=True)
class Sram:
    """The scratchpad of one processor: bytes, bytes a second; `unified_bytes` with the L1 that it is carved out of."""

    capacity_bytes: int
    block_capacity_bytes: int
    reserved_per_block_bytes: int
    bandwidth: int | None
    latency_ps: int | None
    unified_bytes: int


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Memory of one processor that holds matrix accumulators: bytes, bytes a second."""

    capacity_bytes: int
    read_bandwidth: int | None
    write_bandwidth: int | None


@dataclass(frozen=True, slots=True)
class CopyEngine:
    """What fills the SRAM of one processor: bytes a second of its port, latency beyond that of the level read."""

    name: str
    asynchronous: bool
    bandwidth: int | None
    latency_ps: int


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """The matrix instruction: where operands and accumulators live, its smallest and largest tile.

    `instruction_m`, `_n` and `_k` are the smallest sizes, of which others are multiples (`_k` for operands of
    2 bytes); `issued_by` says who issues one: a warp, a warp group or a block.  `rates` are FLOP/s of one processor by
    dtype, of which one warp group alone reaches `lone_share`; a result is there `drain_ps` after its last product.
    Each busy cycle takes `issue_share` of all issue slots.
    """

    name: str
    issued_by: str
    operand_a: str
    operand_b: str
    accumulator: str
    instruction_m: int | None
    instruction_n: int | None
    instruction_k: int | None
    instruction_m_max: int | None
    instruction_n_max: int | None
    drain_ps: int
    switch_ps: int
    issue_share: float
    lone_share: float
    power_factor: float
    rates: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Power:
    """What limits the clock: watts, and watts per GHz^3 of each part at full rate (L2: for a byte a clock each)."""

    limit_w: float
    idle_w_per_ghz3: float
    matrix_w_per_ghz3: float
    vector_w_per_ghz3: float
    l2_w_per_ghz3: float


@dataclass(frozen=True, slots=True)
class Energy:
    """Picojoules a byte, FLOP or operation, and the board's power limit in watts."""

    hbm_pj_per_byte: float | None
    l2_pj_per_byte: float | None
    sram_pj_per_byte: float | None
    tmem_pj_per_byte: float | None
    registers_pj_per_byte: float | None
    matrix_fp16_pj_per_flop: float | None
    matrix_fp8_pj_per_flop: float | None
    vector_pj_per_flop: float | None
    exp_pj_per_op: float | None
    tdp_w: float | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """A validated machine in SI units; made by `load_hardware` and by `with_value`.

    Rates (`clock_hz`, `vector_rate`, `alu_rate`, `issue_rate`, `exp_rate`, `matrix_rate`) are per second, all but the
    clock of one processor. `registers` counts 32-bit registers of one processor. `profile_hash` is the SHA-256 of the
    profile's content: comments and layout of the file do not change it.
    """

    name: str
    profile_hash: str
    title: str = field(repr=False)
    vendor: str = field(repr=False)
    notes: str = field(repr=False)
    called: str = field(repr=False)  # what the vendor calls a processor
    processors: int | None = field(repr=False)
    clock_hz: int | None = field(repr=False)
    warp_size: int = field(repr=False)
    group_threads: int = field(repr=False)
    warps_per_group: int = field(repr=False)
    max_threads: int | None = field(repr=False)
    max_threads_per_block: int = field(repr=False)
    max_blocks: int | None = field(repr=False)
    registers: int | None = field(repr=False)
    max_registers_per_thread: int | None = field(repr=False)
    registers_per_warp_unit: int = field(repr=False)
    spill_bytes_per_clock: tuple[float, float, float] | None = field(repr=False)  # held by the L1, the L2, HBM
    hbm: DeviceMemory = field(repr=False)
    caches: tuple[Cache, ...] = field(repr=False)  # outermost first
    sram: Sram = field(repr=False)
    tmem: TensorMemory | None = field(repr=False)
    copy: CopyEngine = field(repr=False)
    matrix: MatrixUnit = field(repr=False)
    exp_rate: int | None = field(repr=False)  # exponentials
    vector_rate: int | None = field(repr=False)  # lane operations; an FMA is one, and two FLOPs
    alu_rate: int | None = field(repr=False)  # maxima, comparisons, conversions
    grain: Mapping[str, float | None] = field(repr=False, hash=False)  # of rows, see iosim/memory/rows.py
    issue_rate: int | None = field(repr=False)  # instructions of a lane, whichever unit carries them out
    barrier_ps: tuple[int, int] = field(repr=False)  # of a block, and for each of its warps
    reduce_ps: int = field(repr=False)
    turn_ps: int = field(repr=False)
    arrival_ps: int = field(repr=False)
    launch_ps: int = field(repr=False)
    block_ps: int = field(repr=False)
    start_ps: int = field(repr=False)  # from the start of one block to that of the next, anywhere on the chip
    power: Power | None = field(repr=False)
    boost_hz: int | None = field(repr=False)
    matrix_hz: int | None = field(repr=False)
    energy: Energy = field(repr=False)
    matrices: tuple[MatrixUnit, ...] = field(repr=False)  # all that a kernel may choose from
    copies: tuple[CopyEngine, ...] = field(repr=False)
    sources: tuple[tuple[str, str], ...] = field(repr=False)  # short names in a `source`, spelt out
    _profile: _Profile = field(repr=False, compare=False)
    _content: str = field(repr=False, compare=False)  # canonical JSON

    @property
    def l2(self) -> Cache | None:
        """The cache nearest the processors, or None on a machine without one."""
        return self.caches[-1] if self.caches else None

    @property
    def staged_operand(self) -> bool:
        """True when operand A of the matrix unit can only come from SRAM, so that P must be written there."""
        return self.matrix.operand_a == "sram"

    def matrix_rate(self, dtype: str) -> int | None:
        """FLOP/s of one processor's matrix unit, dense.

        None when the unit has no such rate (always for fp32, which runs on the vector unit) or nobody knows
        it. Raises InputError for a dtype that iosim does not have.
        """
        if dtype not in DTYPES:
            raise InputError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
        return self.matrix.rates.get(dtype)

    def with_units(self, names: Iterable[str]) -> "Hardware":
        """The machine as a kernel sees it that uses these matrix and copy instructions, by their names in the profile.

        Raises InputError for a name that the profile does not have.
        """
        out = self
        for name in names:
            units: tuple[MatrixUnit | CopyEngine, ...] = self.matrices + self.copies
            known = {unit.name: unit for unit in units}
            if name not in known:
                raise InputError(
                    f"{self.name}: has no unit {name!r}{nearest(name, known)}; it has {', '.join(map(repr, known))}"
                )
            unit = known[name]
            if isinstance(unit, MatrixUnit):
                out = out if out.matrix is unit else replace(out, matrix=unit)
            else:
                out = out if out.copy is unit else replace(out, copy=unit)
        return out

    def at_clock(self, clock_hz: int) -> "Hardware":
        """The machine with its processors at another clock: all that is counted in their cycles changes with it.

        Device memory and the bandwidth of caches keep their time.
        """
        if not self.clock_hz or clock_hz == self.clock_hz:
            return self
        return _at_clock(Same(self), clock_hz)

    def fields(self) -> list[Fact]:
        """Every number of the profile, in the order of the schema."""
        return [
            Fact(
                name,
                quantity.value,
                _unit(name),
                quantity.confidence or "unknown",
                quantity.source or quantity.unknown,
                quantity.low,
                quantity.high,
            )
            for name, quantity in _quantities(self._profile)
        ]

    def estimates(self) -> list[Estimate]:
        """The numbers that are guesses, with their ranges."""
        return [
            Estimate(name, q.value, q.low, q.high, q.source)
            for name, q in _quantities(self._profile)
            if q.confidence == "estimate" and q.value is not None and q.low is not None and q.high is not None
        ]

    def missing_for_time(self) -> list[str]:
        """Dotted names of unknown numbers without which time cannot be predicted; empty when it can.

        The rate of a dtype is not among them: ask `matrix_rate`.
        """
        return list(_missing_for_time(Same(self._profile)))

    def with_value(self, name: str, value: float | str | bool | None) -> "Hardware":
        """The machine with one field changed, e.g. `with_value("hbm.bandwidth_gb_per_s", 3200)`: see `with_values`."""
        return self.with_values({name: value})

    def with_values(self, values: Mapping[str, float | str | bool | None]) -> "Hardware":
        """A new machine in which some fields differ, by dotted name.

        A value is in the unit that its name ends with; None makes a number unknown. Raises InputError for a name that
        the schema does not have, or a value that it does not allow.
        """
        origin = f"profile {self.name}"
        kinds = dict(_schema_fields(_Profile))
        data = json.loads(self._content)
        for name, value in values.items():
            if name not in kinds:
                raise InputError(f"{origin}: {name}: unknown field{nearest(name, kinds)}")
            table, key = _table_of(data, name)
            if table is None:
                what = "such level" if name.split(".")[0] in LEVELS else f"table [{name.rpartition('.')[0]}]"
                raise InputError(f"{origin}: {name}: this machine has no {what}")
            table[key] = _assumed(value, table.get(key)) if kinds[name] is Quantity else value
        return _build(data, origin)


@lru_cache(maxsize=64)
def _at_clock(of: Same[Hardware], clock_hz: int) -> Hardware:
    """`at_clock`, the same object each time: what is found out about it is kept by that."""
    machine = of.value
    ratio = Fraction(clock_hz, machine.clock_hz or 1)
    return replace(
        machine,
        clock_hz=clock_hz,
        caches=tuple(replace(c, latency_ps=_slower(c.latency_ps, ratio)) for c in machine.caches),
        sram=replace(
            machine.sram,
            bandwidth=_faster(machine.sram.bandwidth, ratio),
            latency_ps=_slower(machine.sram.latency_ps, ratio),
        ),
        matrices=tuple(_unit_at(unit, ratio) for unit in machine.matrices),
        copies=tuple(_unit_at(unit, ratio) for unit in machine.copies),
        copy=_unit_at(machine.copy, ratio),
        matrix=_unit_at(machine.matrix, ratio),
        exp_rate=_faster(machine.exp_rate, ratio),
        vector_rate=_faster(machine.vector_rate, ratio),
        alu_rate=_faster(machine.alu_rate, ratio),
        issue_rate=_faster(machine.issue_rate, ratio),
        barrier_ps=cast("tuple[int, int]", tuple(_slower(part, ratio) for part in machine.barrier_ps)),
        reduce_ps=cast("int", _slower(machine.reduce_ps, ratio)),
        turn_ps=cast("int", _slower(machine.turn_ps, ratio)),
        arrival_ps=cast("int", _slower(machine.arrival_ps, ratio)),
        block_ps=cast("int", _slower(machine.block_ps, ratio)),
    )


@lru_cache(maxsize=64)
def _missing_for_time(profile: Same[_Profile]) -> tuple[str, ...]:
    return tuple(
        name
        for name, quantity in _quantities(profile.value)
        if quantity.value is None and not name.startswith(("energy.", "matrix.", "matrix_warp."))
    )


# ---------------------------------------------------------------- finding and reading a file


class ProfileError(InputError):
    """A profile with one or more mistakes; `problems` has a line for each."""

    def __init__(self, origin: str, problems: list[str]) -> None:
        rest = len(problems) - 1
        super().__init__(f"{origin}: {problems[0]}" + (f" (and {rest} more: see iosim hw check)" if rest else ""))
        self.origin, self.problems = origin, tuple(problems)


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted. Lists a directory and opens no file."""
    return sorted(path.stem for path in _profile_directory().glob("*.toml"))


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Read a machine: a shipped profile by name, or a TOML file.

    A text that holds a path separator or ends in .toml is a path, and so is every `os.PathLike`.
    Raises InputError when there is no such profile, or the file cannot be read or is not a valid profile.
    """
    path = _path(name_or_path)
    return _build(_parsed(path), str(path))


def profile_data(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a profile's file holds, as TOML data; raises InputError as `load_hardware` does."""
    path = _path(name_or_path)
    data = _parsed(path)
    _build(data, str(path))
    return data


def hardware_of(data: Mapping[str, Any], origin: str) -> Hardware:
    """The machine of a profile's TOML data; raises InputError, which `origin` opens, when it is not valid."""
    return _build(dict(data), origin)


def _path(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a shipped profile or of a user's."""
    if not isinstance(name_or_path, str) or _looks_like_path(name_or_path):
        return Path(name_or_path)
    names = profile_names()
    if name_or_path not in names:
        hint = nearest(name_or_path, names)
        raise InputError(
            f"unknown machine {show(name_or_path)}{hint}; shipped: {', '.join(names)}; "
            "or give a path that ends in .toml"
        )
    return _profile_directory() / f"{name_or_path}.toml"


def _profile_directory() -> Path:
    """Inside the package in a wheel, beside it in a source checkout."""
    package = Path(__file__).parent
    for directory in (package / "hw_profiles", package.parent / "hw_profiles"):
        if directory.is_dir():
            return directory
    raise InputError(f"no shipped profiles: neither {package} nor {package.parent} holds hw_profiles")


def _looks_like_path(text: str) -> bool:
    return text.endswith(".toml") or "/" in text or os.sep in text


def _parsed(path: Path) -> dict[str, Any]:
    return toml(read_text(path, _MAX_FILE_BYTES, "a profile", "TOML"), str(path))


def settable() -> dict[str, type | tuple[str, ...]]:
    """The fields of a profile that results may depend on, by dotted name, for `with_values`.

    Each has what its value is: int for a whole number, float for any, bool for a switch, or the words that it allows.
    """
    return dict(_settable(_Profile))


def without_unit(name: str) -> str:
    """A field's name without the unit that it ends with: "sram.capacity" for "sram.capacity_kib"."""
    end = next((end for end in sorted(_UNITS, key=len, reverse=True) if name.endswith(end)), "")
    return name.removesuffix(end)


def _settable(model: type[BaseModel], loc: tuple[str, ...] = ()) -> Iterator[tuple[str, type | tuple[str, ...]]]:
    for name, info in model.model_fields.items():
        kind, here = _kind(info.annotation), (*loc, info.alias or name)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settable(kind, here)
        elif kind is Quantity:
            optional = (m for arg in get_args(info.annotation) for m in getattr(arg, "__metadata__", ()))
            rule = next(m for m in (*info.metadata, *optional) if isinstance(m, _Rule))
            yield _dotted(here), int if rule.whole else float
        elif kind is bool:
            yield _dotted(here), bool
        elif get_origin(kind) is Literal and len(get_args(kind)) > 1 and name != "name":
            yield _dotted(here), get_args(kind)


# ---------------------------------------------------------------- from data to a machine


def _build(data: dict[str, Any], origin: str) -> Hardware:
    """Validate parsed data and convert it; `origin` opens every message."""
    try:
        profile = _Profile.model_validate(_by_level(data, origin))
    except ValidationError as error:
        raise ProfileError(origin, _problems(error)) from None
    if problems := list(_contradictions(profile)):
        raise ProfileError(origin, problems)
    content = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return _convert(profile, content)


def _by_level(data: dict[str, Any], origin: str) -> dict[str, Any]:
    """The same data with the list of memory levels as a table by name."""
    if "memory" not in data:
        return data
    levels: dict[str, Any] = {}
    for position, level in enumerate(_memory_list(data["memory"], origin), start=1):
        name = level.get("name") if isinstance(level, dict) else None
        if name not in LEVELS:
            allowed = f"must be one of {', '.join(LEVELS)}{nearest(str(name), LEVELS)}"
            raise InputError(f"{origin}: memory: name = {show(name)} of level {position} {allowed}")
        if name in levels:
            raise InputError(f"{origin}: memory: level {name!r} is given twice")
        levels[name] = level
    order = [name for name in LEVELS if name in levels]
    if list(levels) != order:
        raise InputError(f"{origin}: memory: levels go from far to near: {', '.join(order)}, not {', '.join(levels)}")
    return {**data, "memory": levels}


def _memory_list(levels: object, origin: str) -> list[Any]:
    if isinstance(levels, list):
        return levels
    raise InputError(f"{origin}: memory: must be a list of [[memory]] tables, not {show(levels)}")


def _problems(error: ValidationError) -> list[str]:
    """One line a mistake; misspelt keys first, and without the key they stand for as missing."""
    errors = error.errors(include_url=False)[:_MOST_PROBLEMS]
    lines, explained = [], set()
    for e in errors:
        if e["type"] == "extra_forbidden":
            keys = [key for key, _ in _keys(_model_at(e["loc"][:-1]))]
            hint = nearest(str(e["loc"][-1]), keys)
            explained.add((*e["loc"][:-1], hint.partition("'")[2].partition("'")[0]))
            lines.append(f"{_dotted(e['loc'])}: unknown key{hint}; allowed: {', '.join(keys)}")
    for e in errors:
        if e["type"] != "extra_forbidden" and e["loc"] not in explained:
            lines.append(f"{_dotted(e['loc'])}: {_problem(e)}")
    return lines


def _problem(error: Any) -> str:
    """What pydantic says of one field, in our words."""
    kind, value = error["type"], show(error["input"])
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "missing":
        return _missing(error["loc"])
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{value} must be one of {', '.join(allowed)}{nearest(str(error['input']), allowed)}"
    if kind == "string_pattern_mismatch" and error["loc"] == ("name",):
        return f"{value} must be at most 64 of a-z, 0-9, '.', '_' and '-'"
    if kind == "string_too_short":
        return f"{value} must be a text that is not empty"
    if kind.startswith("string"):
        return f"{value} must be one line of at most 200 characters"
    return f"{value} must be {'true or false' if kind.startswith('bool') else 'a table'}"


def _missing(loc: tuple[str | int, ...]) -> str:
    if loc == ("memory",) or (loc[0] == "memory" and len(loc) == 2):
        level = str(loc[-1]) if len(loc) == 2 else "hbm"
        return f'missing; [[memory]] must list a level with name = "{level}"'
    kind = dict(_keys(_model_at(loc[:-1])))[str(loc[-1])]
    if kind is Quantity:
        return 'missing; give { value = ..., source = "...", confidence = "..." } or { unknown = "why" }'
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"missing; a profile needs the table [{_dotted(loc)}]"
    return "missing"


def _contradictions(profile: _Profile) -> Iterator[str]:
    """What is wrong between fields that are each well formed."""
    hbm, sram, processor = profile.memory.hbm, profile.memory.sram, profile.processor
    if (hbm.capacity_gb is None) == (hbm.capacity_gib is None):
        yield "hbm: must have one of capacity_gb and capacity_gib"
    block, whole = _known(sram.block_capacity_kib, _KIB), _known(sram.capacity_kib, _KIB)
    reserved = _known(sram.reserved_per_block_bytes)
    if block + reserved > whole:
        yield (
            f"sram.block_capacity_kib: value = {show(sram.block_capacity_kib.value)} with {reserved} "
            f"reserved bytes must be at most sram.capacity_kib = {show(sram.capacity_kib.value)}"
        )
    threads, in_block = _scaled(processor.max_threads), _known(processor.max_threads_per_block)
    if threads is not None and in_block > threads:
        yield f"processor.max_threads_per_block: value = {in_block} must be at most max_threads = {threads}"
    group = _known(processor.warp_size) * _known(processor.warps_per_group)
    if group > in_block:
        yield (
            f"processor.warps_per_group: a group of {group} threads must be at most max_threads_per_block = {in_block}"
        )
    matrix = profile.matrix
    if profile.memory.tmem is None and "tmem" in matrix.operand_a + matrix.operand_b + matrix.accumulator:
        yield 'matrix: names tmem, but [[memory]] lists no level with name = "tmem"'


def _convert(profile: _Profile, content: str) -> Hardware:
    processor, memory, clock = profile.processor, profile.memory, profile.processor.clock_mhz
    copies = [_copy_engine(c, clock) for c in (profile.copy_, profile.copy_threads) if c]
    matrices = [_matrix_unit(m, processor) for m in (profile.matrix, profile.matrix_warp) if m]
    return Hardware(
        name=profile.name,
        profile_hash=hashlib.sha256(content.encode("ascii")).hexdigest(),
        title=profile.title,
        vendor=profile.vendor,
        notes=profile.notes,
        called=processor.called,
        processors=_scaled(processor.count),
        clock_hz=_scaled(clock, _MEGA),
        warp_size=_known(processor.warp_size),
        warps_per_group=_known(processor.warps_per_group),
        group_threads=_known(processor.warp_size) * _known(processor.warps_per_group),
        max_threads=_scaled(processor.max_threads),
        max_threads_per_block=_known(processor.max_threads_per_block),
        max_blocks=_scaled(processor.max_blocks),
        registers=_scaled(memory.registers.registers_per_processor),
        max_registers_per_thread=_scaled(memory.registers.max_registers_per_thread),
        registers_per_warp_unit=_optional(memory.registers.registers_per_warp_unit, 1),
        spill_bytes_per_clock=_spills(memory.registers),
        hbm=_device_memory(memory.hbm, clock),
        caches=tuple(_cache(level, clock) for level in (memory.l3, memory.l2) if level),
        sram=_sram(memory.sram, clock),
        tmem=_tensor_memory(memory.tmem, clock) if memory.tmem else None,
        copy=copies[0],
        matrix=matrices[0],
        matrices=tuple(matrices),
        copies=tuple(copies),
        exp_rate=_per_second(profile.exp.ops_per_clock, clock),
        vector_rate=_per_second(profile.vector.lanes_per_clock, clock),
        alu_rate=_per_second(profile.vector.alu_lanes_per_clock or profile.vector.lanes_per_clock, clock),
        grain=_grain(memory),
        issue_rate=_per_second(profile.vector.issue_lanes_per_clock or profile.vector.lanes_per_clock, clock),
        barrier_ps=(
            _optional_ps(processor.barrier_cycles, clock),
            _optional_ps(processor.barrier_cycles_per_warp, clock),
        ),
        reduce_ps=_optional_ps(processor.reduce_cycles, clock),
        turn_ps=_optional_ps(processor.turn_cycles, clock),
        arrival_ps=_optional_ps(processor.arrival_cycles, clock),
        block_ps=_optional_ps(profile.launch.block_cycles, clock),
        start_ps=_start_ps(profile.launch),
        power=_power(profile.power) if profile.power else None,
        boost_hz=_scaled(processor.boost_clock_mhz, _MEGA),
        matrix_hz=_scaled(processor.matrix_clock_mhz, _MEGA),
        launch_ps=ceil(cast("Fraction", _exact(profile.launch.kernel_us)) * _MEGA),
        energy=Energy(**{name: getattr(getattr(profile.energy, name), "value", None) for name in _Energy.model_fields}),
        sources=tuple(profile.sources.items()),
        _profile=profile,
        _content=content,
    )


def _device_memory(hbm: _Hbm, clock: Quantity) -> DeviceMemory:
    decimal = _scaled(hbm.capacity_gb, _GIGA)
    return DeviceMemory(
        kind=hbm.kind,
        capacity_bytes=cast("int", _scaled(hbm.capacity_gib, _GIB) if decimal is None else decimal),
        bandwidth=_known(hbm.bandwidth_gb_per_s, _GIGA),
        read_efficiency=float(cast("float", hbm.read_efficiency.value)),
        mixed_efficiency=float(cast("float", hbm.mixed_efficiency.value)),
        latency_ps=_picoseconds(hbm.latency_cycles, clock),
    )


def _grain(memory: _Memory) -> dict[str, float | None]:
    """The numbers of memory.rows.Grain that a profile gives, None for others."""
    cache, hbm = memory.l2 or memory.l3, memory.hbm
    return {
        "sector": None if cache is None else _optional(cache.sector_bytes, None),
        "line": None if cache is None else _optional(cache.line_bytes, None),
        "access": _optional(hbm.access_bytes, None),
        "broken": getattr(hbm.broken_pieces, "value", None),
        "broken_among": getattr(hbm.broken_among_pieces, "value", None),
    }


def _cache(cache: _Cache, clock: Quantity) -> Cache:
    read = _scaled(cache.bandwidth_gb_per_s, _GIGA)
    write = _optional(cache.write_bandwidth_gb_per_s, read, _GIGA)
    shared = _optional(cache.shared_bandwidth_gb_per_s, read, _GIGA)
    return Cache(
        name=cache.name,
        capacity_bytes=_scaled(cache.capacity_mib, _MIB),
        bandwidth=read,
        shared_bandwidth=shared,
        step_bandwidth=_optional(cache.step_bandwidth_gb_per_s, shared, _GIGA),
        write_bandwidth=write,
        add_bandwidth=_optional(cache.add_bandwidth_gb_per_s, write, _GIGA),
        latency_ps=_picoseconds(cache.latency_cycles, clock),
        partitions=_scaled(cache.partitions),
        private_partitions=cache.private_partitions,
    )


def _sram(sram: _Sram, clock: Quantity) -> Sram:
    return Sram(
        capacity_bytes=_known(sram.capacity_kib, _KIB),
        block_capacity_bytes=_known(sram.block_capacity_kib, _KIB),
        reserved_per_block_bytes=_known(sram.reserved_per_block_bytes),
        bandwidth=_per_second(sram.bandwidth_bytes_per_clock, clock),
        latency_ps=_picoseconds(sram.latency_cycles, clock),
        unified_bytes=_optional(sram.unified_kib, _known(sram.capacity_kib, _KIB), _KIB),
    )


def _tensor_memory(tmem: _TensorMemory, clock: Quantity) -> TensorMemory:
    return TensorMemory(
        capacity_bytes=_known(tmem.capacity_kib, _KIB),
        read_bandwidth=_per_second(tmem.read_bytes_per_clock, clock),
        write_bandwidth=_per_second(tmem.write_bytes_per_clock, clock),
    )


def _copy_engine(copy: _Copy, clock: Quantity) -> CopyEngine:
    bandwidth = _per_second(copy.bandwidth_bytes_per_clock, clock)
    return CopyEngine(copy.name, copy.asynchronous, bandwidth, _optional_ps(copy.latency_cycles, clock))


def _matrix_unit(matrix: _Matrix, processor: _Processor) -> MatrixUnit:
    chip = {name: _scaled(getattr(matrix.tflops, name), _TERA) for name in _Rates.model_fields}
    processors = _scaled(processor.count)
    return MatrixUnit(
        name=matrix.name,
        issued_by=matrix.issued_by,
        operand_a=matrix.operand_a,
        operand_b=matrix.operand_b,
        accumulator=matrix.accumulator,
        instruction_m=_scaled(matrix.instruction_m),
        instruction_n=_scaled(matrix.instruction_n),
        instruction_k=_scaled(matrix.instruction_k),
        instruction_m_max=_scaled(matrix.instruction_m_max),
        instruction_n_max=_scaled(matrix.instruction_n_max),
        drain_ps=_optional_ps(matrix.drain_cycles, processor.clock_mhz),
        switch_ps=_optional_ps(matrix.switch_cycles, processor.clock_mhz),
        issue_share=float(_optional_number(matrix.issue_share, 0.0)),
        lone_share=float(_optional_number(matrix.lone_share, 1.0)),
        power_factor=float(_optional_number(matrix.power_factor, 1.0)),
        rates={name: rate // processors for name, rate in chip.items() if rate is not None and processors},
    )


def _spills(registers: _Registers) -> tuple[float, float, float] | None:
    rates = registers.spill_l1_bytes_per_clock, registers.spill_l2_bytes_per_clock, registers.spill_hbm_bytes_per_clock
    l1, l2, hbm = (_optional_number(rate, 0.0) for rate in rates)
    return (l1, l2, hbm) if l1 and l2 and hbm else None


def _start_ps(launch: _Launch) -> int:
    rate = _exact(launch.blocks_per_us)
    return 0 if rate is None else round(_MEGA / rate)


def _power(power: _Power) -> Power:
    return Power(**{name: _optional_number(getattr(power, name), 0.0) for name in _Power.model_fields})


def _unit_at(unit: Any, ratio: Fraction) -> Any:
    """A matrix or copy unit at `ratio` times its clock."""
    if isinstance(unit, CopyEngine):
        return replace(
            unit, bandwidth=_faster(unit.bandwidth, ratio), latency_ps=cast("int", _slower(unit.latency_ps, ratio))
        )
    rates = {name: floor(rate * ratio) for name, rate in unit.rates.items()}
    drain, switch = (cast("int", _slower(time, ratio)) for time in (unit.drain_ps, unit.switch_ps))
    return replace(unit, rates=rates, drain_ps=drain, switch_ps=switch)


# ---------------------------------------------------------------- numbers


def _exact(quantity: Quantity | None) -> Fraction | None:
    """The number as it is written (0.1 is a tenth), or None."""
    return None if quantity is None or quantity.value is None else Fraction(str(quantity.value))


def _scaled(quantity: Quantity | None, factor: int = 1) -> int | None:
    number = _exact(quantity)
    return None if number is None else floor(number * factor)


def _known(quantity: Quantity, factor: int = 1) -> int:
    """As `_scaled`, for a field whose rule says that it is known."""
    return cast("int", _scaled(quantity, factor))


def _per_second(per_clock: Quantity, clock_mhz: Quantity) -> int | None:
    amount, clock = _exact(per_clock), _exact(clock_mhz)
    return None if amount is None or clock is None else floor(amount * clock * _MEGA)


def _optional(quantity: Quantity | None, otherwise: Any, factor: int = 1) -> Any:
    """As `_scaled`, for a field that a profile may leave out."""
    return otherwise if quantity is None else _scaled(quantity, factor)


def _optional_number(quantity: Quantity | None, otherwise: float) -> float:
    return otherwise if quantity is None or quantity.value is None else float(quantity.value)


def _optional_ps(cycles: Quantity | None, clock_mhz: Quantity) -> int:
    """Cycles in picoseconds; 0 for a field that a profile leaves out."""
    return 0 if cycles is None else (_picoseconds(cycles, clock_mhz) or 0)


def _faster(rate: int | None, ratio: Fraction) -> int | None:
    return None if rate is None else floor(rate * ratio)


def _slower(time: int | None, ratio: Fraction) -> int | None:
    return None if time is None else ceil(time / ratio)


def _picoseconds(cycles: Quantity, clock_mhz: Quantity) -> int | None:
    amount, clock = _exact(cycles), _exact(clock_mhz)
    return None if amount is None or clock is None else ceil(amount * _MEGA / clock)


# ---------------------------------------------------------------- names


def _keys(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """The keys of a table as a file writes them, and what each one holds."""
    for name, info in model.model_fields.items():
        yield info.alias or name, _kind(info.annotation)


def _kind(annotation: Any) -> Any:
    """An annotation without `| None` and without its rules."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _model_at(loc: tuple[str | int, ...]) -> type[BaseModel]:
    model: type[BaseModel] = _Profile
    for key in loc:
        model = dict(_keys(model))[str(key)]
    return model


def _dotted(loc: tuple[str | int, ...]) -> str:
    """`memory.hbm.kind` is written `hbm.kind`: levels have names of their own."""
    return ".".join(str(key) for key in (loc[1:] if loc[0] == "memory" and len(loc) > 1 else loc))


def _schema_fields(model: type[BaseModel], loc: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every field that a profile may have, by dotted name, and what it holds."""
    for key, kind in _keys(model):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _schema_fields(kind, (*loc, key))
        else:
            yield _dotted((*loc, key)), kind


def _quantities(model: BaseModel, loc: tuple[str, ...] = ()) -> Iterator[tuple[str, Quantity]]:
    """Every number that this profile gives or calls unknown, by dotted name."""
    for name, info in type(model).model_fields.items():
        child, here = getattr(model, name), (*loc, info.alias or name)
        if isinstance(child, Quantity):
            yield _dotted(here), child
        elif isinstance(child, BaseModel):
            yield from _quantities(child, here)


def _unit(name: str) -> str:
    """The unit that a dotted name ends with; empty for counts and shares."""
    if ".tflops." in name:
        return "TFLOPS"
    return next((unit for end, unit in sorted(_UNITS.items(), key=lambda u: -len(u[0])) if name.endswith(end)), "")


def _table_of(data: dict[str, Any], name: str) -> tuple[dict[str, Any] | None, str]:
    """The table of parsed data that holds a dotted name (None: no such level), and its key there."""
    *path, key = name.split(".")
    table: dict[str, Any] = data
    for step in path:
        levels = [level for level in data["memory"] if level["name"] == step]
        if not levels and (step in LEVELS or step not in table):
            return None, key
        table = levels[0] if levels else table[step]
    return table, key


def _assumed(value: object, old: dict[str, Any] | None) -> dict[str, Any]:
    """The table of a number that a caller sets: a guess with no range, which says what it replaces."""
    if value is None:
        return {"unknown": "taken to be unknown"}
    before = "" if old is None else f" in place of {old.get('value', 'unknown')}"
    return {
        "value": value,
        "low": value,
        "high": value,
        "source": f"assumed{before}",
        "confidence": "estimate",
    }
