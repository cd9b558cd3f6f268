"""The default schedule, by a rule that can be said in a sentence.

block_q is the largest of 256, 128, 64 whose grids give every processor a block, else 64 (smaller where 64 rows do
not fit, or where there are fewer queries); block_k is the largest of 128, 64 (32, 16 where those do not fit) that
leaves a tenth of the SRAM free at two stages; one stage only where no 64 x 64 tile fits at two.  One warp group takes
up to 64 rows.  With a block mask both divide its blocks: where none of these does, they are divisors of the blocks in
the same range.  A dataflow may have a rule of its own, which settles some fields or adds to what this rule takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import log2
from typing import TYPE_CHECKING, Any

from iosim.dataflows import Dataflow
from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.memory.onchip import CapacityError, footprints
from iosim.problem import Attention
from iosim.program import Compute, walk
from iosim.schedule import GROUP_ROWS, MAX_GROUPS, Schedule

if TYPE_CHECKING:
    from iosim.dataflows import Also

MARGIN = 0.10  # of SRAM, for what a program does not show; the guide's checklist asks for it
ROWS = (256, 128, 64, 32, 16)
KEYS = (128, 64, 32, 16)
WIDE = 64  # a narrower key tile only where no tile of this width fits
SOFTMAX_BYTES = 32 * 1024  # of scores in one softmax block, so that several blocks are resident


def choose(dataflow: Dataflow, a: Attention, hardware: Hardware, given: Mapping[str, Any]) -> tuple[Schedule, str]:
    """A schedule for `dataflow`, and in words why; `given` are the fields that are settled already.

    Raises CapacityError where nothing fits: itemised, with the capacity and the nearest tile that fits.
    """

    def rule(also: Also | None = None, *, rows: Sequence[int] = ROWS, **settled: Any) -> tuple[Schedule, str]:
        return _Choice(dataflow, a, hardware, {**settled, **given}, also, rows).take()

    return rule() if dataflow.plan is None else dataflow.plan(a, hardware, given, rule)


def unfitting(dataflow: Dataflow, a: Attention, hardware: Hardware, given: Mapping[str, Any]) -> Schedule:
    """The schedule that `choose` refuses: the fields `given`, the others as small as it tries them."""

    def rule(also: Also | None = None, *, rows: Sequence[int] = ROWS, **settled: Any) -> tuple[Schedule, str]:
        return _Choice(dataflow, a, hardware, {**settled, **given}, also, rows).smallest(), ""

    return rule()[0] if dataflow.plan is None else dataflow.plan(a, hardware, given, rule)[0]


def complete(dataflow: Dataflow, a: Attention, hardware: Hardware, given: Mapping[str, Any]) -> Schedule:
    """The schedule with `given` tile and stages and what follows from them; whether it fits is not looked at."""

    def rule(also: Also | None = None, *, rows: Sequence[int] = ROWS, **settled: Any) -> tuple[Schedule, str]:
        return _Choice(dataflow, a, hardware, {**settled, **given}, also, rows).complete({}), ""

    return (rule() if dataflow.plan is None else dataflow.plan(a, hardware, given, rule))[0]


@dataclass(frozen=True)
class _Choice:
    """The general rule where the fields `given` are settled.

    `also` says what a dataflow adds to a schedule, `tried` are heights of a query tile, largest first.
    """

    dataflow: Dataflow
    a: Attention
    hardware: Hardware
    given: Mapping[str, Any]
    also: Also | None
    tried: Sequence[int]

    def take(self) -> tuple[Schedule, str]:
        """The schedule, and why."""
        if {"block_q", "block_k", "stages"} <= self.given.keys():
            schedule = self.complete({})
            self.refuse(schedule)
            return schedule, "tile and stages as given"
        depths = [self.given["stages"]] if "stages" in self.given else [(2,), (1,)]
        for margin, narrowest, stages in product((MARGIN, 0.0), (WIDE, 1), depths):
            if found := self.first(margin, narrowest, stages):
                return found, self.reason(found, margin)
        self.refuse(self.smallest())
        raise CapacityError(f"no schedule of {self.dataflow.name} fits on {self.hardware.name}")

    # ------------------------------------------------------------------ candidates

    @cached_property
    def rows(self) -> list[int]:
        """Heights of a query tile that make sense."""
        if "block_q" in self.given:
            return [self.given["block_q"]]
        rows = self.a.n_q * (self.a.group if self.given.get("pack_gqa") else 1)
        tried = [r for r in self.tried if r < 2 * max(rows, self.tried[-1])]
        return self._dividing(tried, 0)

    def _dividing(self, sizes: list[int], axis: int) -> list[int]:
        """The sizes that divide a block of the mask, if there is one; else its divisors in their range, if any."""
        if self.a.block_mask is None:
            return sizes
        block = self.a.block_mask.size(self.a.n_q, self.a.n_k)[axis]
        range_of = range(sizes[0], min(block, sizes[-1]) - 1, -1)
        return next(filter(None, ([n for n in some if block % n == 0] for some in (sizes, range_of))), sizes)

    def candidates(self, block_q: int, narrowest: int, stages: tuple[int, ...]) -> Iterator[Schedule]:
        """Schedules with query tiles of one height: wide key tiles before narrow ones."""
        given = self.given
        tried = self._dividing([k for k in KEYS if k < 2 * max(self.a.n_k, KEYS[-1])], 1)
        keys = [given["block_k"]] if "block_k" in given else tried
        for block_k in keys:
            if block_k >= narrowest:
                yield self.complete({"block_q": block_q, "block_k": block_k, "stages": stages})

    def smallest(self) -> Schedule:
        """The candidate with the smallest tile and fewest stages, whether it fits or not."""
        return list(self.candidates(self.rows[-1], 1, self.given.get("stages", (1,))))[-1]

    def complete(self, sizes: Mapping[str, Any]) -> Schedule:
        """Fill in what follows from the tile sizes: warp groups, the tile of a row softmax, what the dataflow adds."""
        fields = {**sizes, **self.given}
        most = min(MAX_GROUPS, self.hardware.max_threads_per_block // self.hardware.group_threads)
        groups = min(most, max(1, -(-fields["block_q"] // GROUP_ROWS)))
        size = 4 if fields.get("scores") == "fp32" else dtype(self.a.score_dtype).bytes
        row_tile = _softmax_tile(self.a, self.hardware, groups, size)
        defaults = {"groups": groups, "block_d": min(64, self.a.d), **row_tile}
        schedule = Schedule(**{**defaults, **fields})
        return schedule if self.also is None else replace(schedule, **self.also(schedule))

    def first(self, margin: float, narrowest: int, stages: tuple[int, ...]) -> Schedule | None:
        """The schedule that the rule takes, of those that fit with `margin` and have no key tile below `narrowest`."""
        smallest = None
        for block_q in self.rows:
            if block_q < GROUP_ROWS and smallest is not None:
                break
            found = next((s for s in self.candidates(block_q, narrowest, stages) if self.fits(s, margin)), None)
            if found is None:
                continue
            smallest = found
            if self.blocks(found) >= (self.hardware.processors or 1):
                break
        if smallest is None or (narrowest > 1 and smallest.block_q < GROUP_ROWS and "block_q" not in self.given):
            return None
        return smallest

    def blocks(self, schedule: Schedule) -> int:
        """Blocks of the smallest grid of a kernel with products, keys not split: whether to split them comes after the
        tile, which the other kernels hardly depend on.
        """
        kernels = self.dataflow(self.a, replace(schedule, splits=1)).kernels
        products = [k for k in kernels if any(isinstance(n, Compute) and n.op == "matmul" for n, _ in walk(k.body))]
        return min(kernel.blocks for kernel in products or kernels)

    def fits(self, schedule: Schedule, margin: float = 0.0) -> bool:
        prints = footprints(self.dataflow(self.a, schedule), schedule, self.hardware).values()
        return all(f.fits and f.sram_bytes <= (1 - margin) * f.sram_capacity for f in prints)

    # ------------------------------------------------------------------ words

    def reason(self, schedule: Schedule, margin: float) -> str:
        """Why the rule took `schedule`, in words."""
        if "block_q" not in self.dataflow.uses:
            fits = "whole rows fit" if schedule.softmax_cols >= self.a.n_k else "a row does not fit"
            return f"{schedule.softmax_rows} rows x {schedule.softmax_cols} columns a block, as {fits} on chip"
        block_q, blocks, hardware = schedule.block_q, self.blocks(schedule), self.hardware
        units = f"{hardware.processors} {hardware.called}s"
        if "block_q" in self.given:
            why = f"block_q {block_q} as given"
        elif not hardware.processors:
            why = f"block_q {block_q} is the largest that fits; how many {hardware.called}s there are is unknown"
        elif blocks >= hardware.processors:
            why = f"block_q {block_q} is the largest that fits and gives each of {units} a block"
        else:
            why = f"block_q {block_q} gives {blocks} of {units} a block, a larger one fewer"
        stages = ",".join(map(str, schedule.stages)) + (" stages" if schedule.stages != (1,) else " stage")
        if "stages" not in self.given and schedule.stages == (1,):
            stages += ", two do not fit"
        if "block_k" in self.given:
            return f"{why}; block_k {schedule.block_k} as given; {stages}"
        room = f"leaves {margin:.0%} of SRAM free" if margin else "fits, with less than a tenth of SRAM to spare,"
        return f"{why}; block_k {schedule.block_k} is the largest that {room} at {stages}"

    def refuse(self, schedule: Schedule) -> None:
        """Raise CapacityError, with the nearest tile that fits, if a block of `schedule` does not."""
        prints = footprints(self.dataflow(self.a, schedule), schedule, self.hardware)
        bad = next((f for f in prints.values() if not f.fits), None)
        if bad is not None:
            raise CapacityError(f"{self.dataflow.name}: {bad.complaint(self.hardware)}; {self.nearest(schedule)}")

    def nearest(self, schedule: Schedule) -> str:
        """The tile that fits and whose sizes differ least, by ratio, from those of `schedule`."""

        def sizes(asked: int) -> list[int]:
            return sorted({asked, *(n for n in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n <= asked)})

        def distance(tile: tuple[int, int]) -> float:
            return abs(log2(tile[0] / schedule.block_q)) + abs(log2(tile[1] / schedule.block_k))

        most = self.hardware.max_threads_per_block // self.hardware.group_threads
        near = [(q, k) for q in sizes(schedule.block_q) for k in sizes(schedule.block_k)]
        for q, k in sorted(near, key=distance):
            s = replace(schedule, block_q=q, block_k=k, groups=min(MAX_GROUPS, most, -(-q // GROUP_ROWS)))
            if self.fits(s if self.also is None else replace(s, **self.also(s))):
                return f"block_q {q}, block_k {k} would fit"
        return "no smaller tile fits at these stages"


def _softmax_tile(a: Attention, hardware: Hardware, groups: int, size: int) -> dict[str, int]:
    """Whole rows where one fits in SRAM, and in fp32 in half of the registers of the block; else 4096 columns.

    A score takes `size` bytes in SRAM.
    """
    threads = groups * hardware.group_threads
    in_sram = int((1 - MARGIN) * hardware.sram.block_capacity_bytes) // size
    in_registers = threads * (hardware.max_registers_per_thread or 255) // 2
    cols = a.n_k if a.n_k <= min(in_sram, in_registers) else min(4096, in_sram, in_registers)
    cols = max(1, cols)  # of a machine that has room for none, which is said of the tile
    rows = min(64, SOFTMAX_BYTES // (cols * size), in_registers // cols)
    return {"softmax_cols": cols, "softmax_rows": 1 << max(0, rows.bit_length() - 1)}
