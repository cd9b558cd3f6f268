"""The default schedule, by a rule that can be said in a sentence.

block_q is the largest of 256, 128, 64 whose grids give every processor a block, else 64 (smaller where 64 rows do
not fit, or where there are fewer queries); block_k is the largest of 128, 64 (32, 16 where those do not fit) that
leaves a tenth of the SRAM free at two stages.  One warp group takes up to 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import log2
from typing import Any

from iosim.dataflows import Dataflow
from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.memory.onchip import CapacityError, footprints
from iosim.problem import Attention
from iosim.schedule import MAX_GROUPS, Schedule

MARGIN = 0.10  # of SRAM, for what a program does not show; the guide's checklist asks for it
ROWS = (256, 128, 64, 32, 16)
KEYS = (128, 64, 32, 16)
WIDE = 64  # a narrower key tile only where no tile of this width fits
GROUP_ROWS = 64
SOFTMAX_BYTES = 32 * 1024  # of scores in one softmax block, so that several blocks are resident


def choose(dataflow: Dataflow, a: Attention, hardware: Hardware, given: Mapping[str, Any]) -> tuple[Schedule, str]:
    """A schedule for `dataflow`, and in words why; `given` are the fields that are settled already.

    Raises CapacityError where nothing fits: itemised, with the capacity and the nearest tile that fits.
    """
    if {"block_q", "block_k", "stages"} <= given.keys():
        schedule = _complete(a, hardware, given)
        _refuse(dataflow, a, hardware, schedule)
        return schedule, "as given"
    for margin in (MARGIN, 0.0):
        for narrowest in (WIDE, 1):
            if found := _first(dataflow, a, hardware, given, margin, narrowest):
                return found, _reason(dataflow, a, hardware, found, given, margin)
    smallest = list(_candidates(a, hardware, given, _rows(a, given)[-1], 1))[-1]
    _refuse(dataflow, a, hardware, smallest)
    raise CapacityError(f"no schedule of {dataflow.name} fits on {hardware.name}")


def _rows(a: Attention, given: Mapping[str, Any]) -> list[int]:
    """Heights of a query tile, largest first."""
    return [given["block_q"]] if "block_q" in given else [r for r in ROWS if r < 2 * max(a.n_q, ROWS[-1])]


def _candidates(
    a: Attention, hardware: Hardware, given: Mapping[str, Any], block_q: int, narrowest: int
) -> Iterator[Schedule]:
    """Schedules with query tiles of one height: two stages before one, then wide key tiles before narrow ones."""
    keys = [given["block_k"]] if "block_k" in given else [k for k in KEYS if k < 2 * max(a.n_k, KEYS[-1])]
    for stages in [given["stages"]] if "stages" in given else [(2,), (1,)]:
        for block_k in keys:
            if block_k >= narrowest:
                yield _complete(a, hardware, {**given, "block_q": block_q, "block_k": block_k, "stages": stages})


def _first(
    dataflow: Dataflow, a: Attention, hardware: Hardware, given: Mapping[str, Any], margin: float, narrowest: int
) -> Schedule | None:
    """The schedule that the rule takes, of those that fit with `margin` and have no key tile below `narrowest`."""
    smallest = None
    for block_q in _rows(a, given):
        if block_q < GROUP_ROWS and smallest is not None:
            break
        candidates = _candidates(a, hardware, given, block_q, narrowest)
        found = next((s for s in candidates if _fits(dataflow, a, hardware, s, margin)), None)
        if found is None:
            continue
        if _blocks(dataflow, a, found) >= (hardware.processors or 1):
            smallest = found
            break
        smallest = found
    if smallest is None or (narrowest > 1 and smallest.block_q < GROUP_ROWS and "block_q" not in given):
        return None
    return smallest


def _blocks(dataflow: Dataflow, a: Attention, schedule: Schedule) -> int:
    """Blocks of the smallest grid."""
    return min(kernel.blocks for kernel in dataflow(a, schedule).kernels)


def _complete(a: Attention, hardware: Hardware, given: Mapping[str, Any]) -> Schedule:
    """Fill in what follows from the tile sizes: warp groups, and the tile of a row softmax."""
    most = min(MAX_GROUPS, hardware.max_threads_per_block // hardware.group_threads)
    groups = min(most, max(1, -(-given["block_q"] // GROUP_ROWS)))
    defaults = {"groups": groups, "block_d": min(64, a.d), **_softmax_tile(a, hardware, groups)}
    return Schedule(**{**defaults, **given})


def _softmax_tile(a: Attention, hardware: Hardware, groups: int) -> dict[str, int]:
    """Whole rows where one fits in SRAM, and in fp32 in half of the registers of the block; else 4096 columns."""
    size = dtype(a.dtype).bytes
    threads = groups * hardware.group_threads
    in_sram = int((1 - MARGIN) * hardware.sram.block_capacity_bytes) // size
    in_registers = threads * (hardware.max_registers_per_thread or 255) // 2
    cols = a.n_k if a.n_k <= min(in_sram, in_registers) else min(4096, in_sram, in_registers)
    rows = min(64, SOFTMAX_BYTES // (cols * size), in_registers // cols)
    return {"softmax_cols": cols, "softmax_rows": 1 << max(0, rows.bit_length() - 1)}


def _fits(dataflow: Dataflow, a: Attention, hardware: Hardware, schedule: Schedule, margin: float) -> bool:
    prints = footprints(dataflow(a, schedule), schedule, hardware).values()
    return all(f.fits and f.sram_bytes <= (1 - margin) * f.sram_capacity for f in prints)


def _reason(
    dataflow: Dataflow,
    a: Attention,
    hardware: Hardware,
    schedule: Schedule,
    given: Mapping[str, Any],
    margin: float,
) -> str:
    """Why the rule took `schedule`, in words."""
    block_q, blocks = schedule.block_q, _blocks(dataflow, a, schedule)
    units = f"{hardware.processors} {hardware.called}s"
    if "block_q" in given:
        why = f"block_q {block_q} as given"
    elif not hardware.processors:
        why = f"block_q {block_q} is the largest that fits; how many {hardware.called}s there are is unknown"
    elif blocks >= hardware.processors:
        why = f"block_q {block_q} is the largest that fits and gives each of {units} a block"
    else:
        why = f"block_q {block_q} gives {blocks} of {units} a block, a larger one fewer"
    stages = "x".join(map(str, schedule.stages)) + (" stages" if schedule.stages != (1,) else " stage")
    if "block_k" in given:
        return f"{why}; {stages}"
    room = f"leaves {margin:.0%} of SRAM free" if margin else "fits, with less than a tenth of SRAM to spare,"
    return f"{why}; block_k {schedule.block_k} is the largest that {room} at {stages}"


def _refuse(dataflow: Dataflow, a: Attention, hardware: Hardware, schedule: Schedule) -> None:
    """Raise CapacityError, with the nearest tile that fits, if a block of `schedule` does not."""
    prints = footprints(dataflow(a, schedule), schedule, hardware)
    bad = next((f for f in prints.values() if not f.fits), None)
    if bad is None:
        return
    raise CapacityError(f"{dataflow.name}: {bad.complaint(hardware)}; {_nearest(dataflow, a, hardware, schedule)}")


def _nearest(dataflow: Dataflow, a: Attention, hardware: Hardware, schedule: Schedule) -> str:
    """The tile that fits and whose sizes differ least, by ratio, from those of `schedule`."""

    def sizes(asked: int) -> list[int]:
        return sorted({asked, *(n for n in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n <= asked)})

    def distance(s: Schedule) -> float:
        return abs(log2(s.block_q / schedule.block_q)) + abs(log2(s.block_k / schedule.block_k))

    most = hardware.max_threads_per_block // hardware.group_threads
    near = [
        replace(schedule, block_q=q, block_k=k, groups=min(MAX_GROUPS, most, -(-q // GROUP_ROWS)))
        for q in sizes(schedule.block_q)
        for k in sizes(schedule.block_k)
    ]
    for s in sorted(near, key=distance):
        if all(f.fits for f in footprints(dataflow(a, s), s, hardware).values()):
            return f"block_q {s.block_q}, block_k {s.block_k} would fit"
    return "no smaller tile fits at these stages"
