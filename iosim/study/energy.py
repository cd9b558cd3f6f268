"""Joules of a run, by level of memory and by unit: counted bytes and operations, times what the profile says of each.

Only switching is counted, what moving a byte and doing an operation take.  What a chip draws standing still, its clocks
and the fetching of instructions are in no profile and not here, so that a long wait costs nothing.  The figures are
estimates, most of them right within a factor of two: good for comparing, not for a power supply.

What is counted (see `amounts`):

    hbm        bytes that cross the DRAM interface, either way
    l2         bytes between processors and L2: a multicast read once a cluster, a reduction both ways
    sram       bytes into and out of SRAM: copies in, operands and results that live there, stores from it; spills, in
               the L1 that is cut from the same array
    tmem       bytes into and out of tensor memory, on machines that have it
    registers  of each lane operation two operands and a result of 4 bytes (three operands of a multiply-add, one of a
               special function); of each matrix instruction the accumulators, read and written, and the operands that
               it takes from registers; whatever copies between registers and device memory
    matrix     FLOPs on whole instructions, padding included
    vector     FLOPs of the lanes: a multiply-add is two; maxima, comparisons and conversions are one each
    exp        special functions

Board power is limited: a run cannot take more than TDP x time, which bounds the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from iosim.dtypes import dtype
from iosim.errors import InputError
from iosim.interpreters.ledger import executions
from iosim.interpreters.model import Model
from iosim.memory.onchip import on_matrix_unit
from iosim.program import tile_of

if TYPE_CHECKING:
    from iosim.interpreters.ledger import Flow
    from iosim.program import Compute, Kernel
    from iosim.study.run import Run

LEVELS = ("hbm", "l2", "sram", "tmem", "registers")
UNITS = ("matrix", "vector", "exp")
# The numbers of a profile's [energy] that make up a part.
FIGURES: Mapping[str, tuple[str, ...]] = {
    **{level: (f"{level}_pj_per_byte",) for level in LEVELS},
    "matrix": ("matrix_fp16_pj_per_flop", "matrix_fp8_pj_per_flop"),
    "vector": ("vector_pj_per_flop",),
    "exp": ("exp_pj_per_op",),
}
REGISTER = 4  # bytes
OPERANDS = {"fma": 3, "lane": 2, "special": 1}  # registers that an operation reads; all write one


@dataclass(frozen=True, slots=True)
class Part:
    """Joules of one level or unit, and their range; `count` are its bytes, FLOPs or operations."""

    name: str
    count: int
    joules: float
    low: float
    high: float

    @property
    def unit(self) -> str:
        """Of `count`."""
        return "B" if self.name in LEVELS else "op" if self.name == "exp" else "FLOP"


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Joules of a run.

    `parts` are levels, then units, those that do something; `kernels` the same by kernel, of which they are the sums.
    `bound_joules` is TDP x time, None where the profile has no TDP or the run no time.
    """

    parts: tuple[Part, ...]
    kernels: Mapping[str, tuple[Part, ...]] = field(hash=False)
    bound_joules: float | None

    @property
    def counted(self) -> float:
        """The sum of all parts, unbounded."""
        return sum(p.joules for p in self.parts)

    @property
    def joules(self) -> float:
        """What the run takes: the sum of all parts, but no more than the bound."""
        return self._bounded(self.counted)

    @property
    def low(self) -> float:
        """Where every figure is at its low end."""
        return self._bounded(sum(p.low for p in self.parts))

    @property
    def high(self) -> float:
        """Where every figure is at its high end."""
        return self._bounded(sum(p.high for p in self.parts))

    @property
    def bound_binds(self) -> bool:
        """Whether the parts add up to more than TDP x time."""
        return self.bound_joules is not None and self.counted > self.bound_joules

    @property
    def elasticities(self) -> dict[str, float]:
        """Percent of joules for 1 % more of the figures of each part: its share, or nothing where the bound binds."""
        return {p.name: 0.0 if self.bound_binds else p.joules / self.counted for p in self.parts}

    def _bounded(self, joules: float) -> float:
        return joules if self.bound_joules is None else min(joules, self.bound_joules)


def energy(run: Run) -> EnergyUse:
    """The energy of a run; that of a training step is of both its passes.

    Raises InputError where the run needs a figure that the profile does not know.
    """
    found: dict[str, Counter[str]] = {}
    for part in run.parts or (run,):
        found |= {kernel.name: amounts(part, kernel) for kernel in part.program.kernels}
    facts = {f.name.removeprefix("energy."): f for f in run.hardware.fields() if f.name.startswith("energy.")}
    prices: dict[str, tuple[float, float, float]] = {}
    for name in dict.fromkeys(name for counts in found.values() for name in counts):
        fact = facts.get(name)
        if fact is None or fact.value is None:
            why = f": {fact.source}" if fact is not None else ""
            raise InputError(f"energy: the profile {run.hardware.name} does not know energy.{name}{why}")
        low, high = fact.low, fact.high
        prices[name] = fact.value, fact.value if low is None else low, fact.value if high is None else high
    tdp = run.hardware.energy.tdp_w
    return EnergyUse(
        parts=_parts(sum(found.values(), Counter()), prices),
        kernels={name: _parts(counts, prices) for name, counts in found.items()},
        bound_joules=None if tdp is None or run.seconds is None else tdp * run.seconds,
    )


def _parts(counts: Mapping[str, int], prices: Mapping[str, tuple[float, float, float]]) -> tuple[Part, ...]:
    out = []
    for name, figures in FIGURES.items():
        here = [f for f in figures if counts.get(f)]
        if here:
            joules, low, high = (sum(counts[f] * prices[f][n] for f in here) / 1e12 for n in range(3))
            out.append(Part(name, sum(counts[f] for f in here), joules, low, high))
    return tuple(out)


def amounts(run: Run, kernel: Kernel) -> Counter[str]:
    """Bytes, FLOPs and operations of one kernel, by the figure of a profile's [energy] that each of them takes."""
    schedule = run.schedule.of(kernel.name)
    flows = tuple(f for f in run.device.flows if f.flow.kernel == kernel.name)
    model = Model(kernel, schedule, run.hardware.with_units(schedule.units), flows)
    found: Counter[str] = Counter()
    for f in flows:
        found["hbm_pj_per_byte"] += f.dram_read_bytes + f.dram_write_bytes
        found["l2_pj_per_byte"] += f.l2_bytes * (1 + (f.flow.direction == "add"))
        found += _moved(model, f.flow)
    for node, times in executions(kernel):
        for name, amount in _computed(model, node).items():
            found[name] += amount * times
    return +found


def _moved(model: Model, flow: Flow) -> Counter[str]:
    """What a load or store moves on the chip."""
    node, count = flow.node, flow.hbm_bytes
    place = model.places[node.tile.name]
    found = Counter({"sram_pj_per_byte": count * model.sram_passes(node)})
    if place != "sram":
        found[f"{place}_pj_per_byte"] += count
    return found


def _computed(model: Model, node: Compute) -> Counter[str]:
    """What one execution of an operation takes, for all warp groups of a block."""
    work = model.work(node)
    found = Counter({"sram_pj_per_byte": work["sram"]})
    found += _tensor_memory(model, node)
    if node.op == "matmul" and on_matrix_unit(node):
        narrow = dtype(tile_of(node.args[0]).dtype).bytes == 1
        found["matrix_fp8_pj_per_flop" if narrow else "matrix_fp16_pj_per_flop"] += work["matrix"]
        found["registers_pj_per_byte"] += _product_registers(model, node, work)
        return found
    special = work.get("exp", 0)
    if node.op == "exp" and node.out.shape[1] > 1:
        special += model.special([node])
        found += _spilled(model)
    fused = work.get("vector", 0) if node.op in ("exp", "matmul") else 0
    lanes = work.get("vector", 0) - fused + work.get("alu", 0)
    found["vector_pj_per_flop"] += 2 * fused + lanes
    found["exp_pj_per_op"] += special
    reads = {"fma": fused, "lane": lanes, "special": special}
    found["registers_pj_per_byte"] += sum(REGISTER * (OPERANDS[kind] + 1) * n for kind, n in reads.items())
    return found


def _tensor_memory(model: Model, node: Compute) -> Counter[str]:
    """Bytes into and out of tensor memory; each instruction of a product reads and writes its accumulators there."""
    count = sum(tile.bytes for tile in map(tile_of, node.args) if model.places[tile.name] == "tmem")
    if model.places[node.out.name] == "tmem":
        count += node.out.bytes * (2 * _steps(model, node) if node.op == "matmul" else 1)
    return Counter({"tmem_pj_per_byte": count})


def _steps(model: Model, node: Compute) -> int:
    """Instructions along the inner dimension of a product."""
    inner = node.args[0].shape[1]
    step = (model.hardware.matrix.instruction_k or inner) * 2 // dtype(tile_of(node.args[0]).dtype).bytes
    return -(-inner // step)


def _product_registers(model: Model, node: Compute, work: Mapping[str, int]) -> int:
    """Register bytes of a matrix product.

    An instruction reads an element of A for each run of its columns, one of B for each run of its rows.  Where a warp
    issues it, both are in registers: what comes from SRAM is put there first.
    """
    matrix, (a, b) = model.hardware.matrix, map(tile_of, node.args)
    rows, cols = model.share(node)
    height, width = min(matrix.instruction_m_max or rows, rows), min(matrix.instruction_n_max or cols, cols)
    products = work["matrix"] // 2
    count = 0
    if model.places[node.out.name] != "tmem":
        count += 2 * products * dtype(node.out.dtype).bytes * _steps(model, node) // node.args[0].shape[1]
    if model.by_warp or model.places[a.name] == "registers":
        count += products * dtype(a.dtype).bytes // width
    if model.by_warp or model.places[b.name] == "registers":
        count += products * dtype(b.dtype).bytes // height
    staged = node.out.bytes if model.places[node.out.name] == "sram" else 0
    return count + (work["sram"] - staged if model.by_warp else 0)


def _spilled(model: Model) -> Counter[str]:
    """Bytes of spilled registers in one turn of a loop, in the L1 and in every level up to the one that serves them."""
    if not model.schedule.spills:
        return Counter()
    near, l2, far = map(round, model.spilled)
    return Counter(sram_pj_per_byte=near + l2 + far, l2_pj_per_byte=l2 + far, hbm_pj_per_byte=far)
