"""The predictions that measurements are held against: one line of `MODELS` each.

To add one, write a function

    def my_time(row: Row, machine: Hardware) -> Mapping[str, float] | NotModelled

that returns numbers in SI units by quantity (iosim/study/validate/rows.py lists them), or NotModelled with a reason,
and put it into `MODELS` with the quantities that it may give.  A model sees one row: rows are evaluated one by one, in
any order.  What several rows share (the kernels of a call) a model may cache by row.implementation, row.direction,
row.problem and the machine.  Models are asked in order; the first that gives a quantity is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from iosim.hardware import Hardware
from iosim.memory.onchip import resident_blocks
from iosim.memory.peak import SPLITS, peak_extra_bytes, peak_total_bytes
from iosim.memory.triton import registers, sram_bytes
from iosim.study.validate.rows import QUANTITIES, Row


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Why there is no prediction."""

    reason: str


Prediction: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Model:
    """A function that predicts some quantities of some rows."""

    quantities: tuple[str, ...]
    predict: Callable[[Row, Hardware], Prediction | NotModelled]


def predict(row: Row, machine: Hardware | None) -> dict[str, float | NotModelled]:
    """Everything that was measured in `row`, predicted; a reason in place of each number that no model gives."""
    asked = [q.name for q in QUANTITIES.values() if q.source in row.measured and q.kind in ("", row.kind)]
    out: dict[str, float | NotModelled] = dict.fromkeys(asked, NotModelled("no model"))
    if row.problem is None or machine is None:
        reason = row.unmodelled or (f"no profile of {row.device}" if row.problem else "no shape")
        return dict.fromkeys(asked, NotModelled(reason))
    for model in MODELS:
        open_ = [name for name in asked if isinstance(out[name], NotModelled) and name in model.quantities]
        if not open_:
            continue
        given = model.predict(row, machine)
        for name in open_:
            if isinstance(given, NotModelled):
                out[name] = given
            elif name in given:
                out[name] = given[name]
    return out


def _peak_memory(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """Peak device memory of a call."""
    if (a := row.problem) is None:
        return NotModelled("no shape")
    if machine.processors is None and row.implementation in SPLITS:
        return NotModelled(f"{machine.name} does not say how many processors it has, which decides the splits")
    extra = peak_extra_bytes(row.implementation, row.direction, a, machine.processors)
    total = peak_total_bytes(row.implementation, row.direction, a)
    found = {"peak_extra_bytes": extra, "peak_bytes": total}
    given = {name: float(value) for name, value in found.items() if value is not None}
    return given or NotModelled(f"no list of the tensors of {row.implementation} {row.direction}")


def _triton_sram(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """SRAM of a block of Triton's FlashAttention, and whether it launches."""
    if row.tile is None or row.problem is None or row.implementation != "triton":
        return NotModelled(f"no SRAM rule for {row.implementation}")
    used = sram_bytes(row.problem, row.tile.block_q, row.tile.block_k, row.tile.stages)
    return {"smem_bytes": used, "launches": float(used <= machine.sram.block_capacity_bytes)}


def _time(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """Seconds, from the kernel that a row stands for."""
    from iosim.study.validate.times import NoModelError, predicted_time  # slow to import

    try:
        return {"time": predicted_time(row, machine)}
    except NoModelError as why:
        return NotModelled(str(why))


def _estimated(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """Registers of a tile, and its time with these and the spills that go with them."""
    from iosim.study.validate.times import NoModelError, predicted_time  # slow to import

    if row.tile is None or row.problem is None or row.implementation != "triton":
        return NotModelled(f"no rule for the registers of {row.implementation}")
    t = row.tile
    held, spilled = registers(row.problem, t.block_q, t.block_k, t.stages, t.warps)
    unit, threads = machine.registers_per_warp_unit, t.warps * machine.warp_size
    taken = -(-held * machine.warp_size // unit) * unit * t.warps
    sram = sram_bytes(row.problem, t.block_q, t.block_k, t.stages)
    found = {"registers": float(held), "occupancy": float(resident_blocks(machine, sram, 0, taken, threads)[0])}
    try:
        return found | {
            "time_estimated": predicted_time(replace(row, tile=replace(t, registers=held, spills=spilled)), machine)
        }
    except NoModelError as why:
        return found or NotModelled(str(why))


def _dram(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """DRAM bytes of a kernel."""
    from iosim.study.validate.times import NoModelError, predicted_dram  # slow to import

    try:
        read, written = predicted_dram(row, machine)
    except NoModelError as why:
        return NotModelled(str(why))
    return {"dram_read_bytes": read, "dram_write_bytes": written}


def _l2(row: Row, machine: Hardware) -> Prediction | NotModelled:
    """Bytes of the L2 in a kernel."""
    from iosim.study.validate.times import NoModelError, predicted_l2  # slow to import

    try:
        return {"l2_bytes": predicted_l2(row, machine)}
    except NoModelError as why:
        return NotModelled(str(why))


MODELS: tuple[Model, ...] = (
    Model(("peak_extra_bytes", "peak_bytes"), _peak_memory),
    Model(("smem_bytes", "launches"), _triton_sram),
    Model(("time",), _time),
    Model(("registers", "occupancy", "time_estimated"), _estimated),
    Model(("dram_read_bytes", "dram_write_bytes"), _dram),
    Model(("l2_bytes",), _l2),
)
