"""How a library picks its kernels by the shape of the work: a matrix product's tile, a row softmax by row length.

Both as fields of a schedule, see iosim/schedule.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.problem import Attention

ROWS, COLS = (512, 256, 128, 64), (256, 128, 64, 32)
MOST = 256 * 128  # elements of a tile: what two warp groups hold in registers
ENOUGH = 0.95  # of the processors get a tile
DEPTH = 64  # elements of one step of the inner dimension
MOST_STAGES, STAGED = 16, 16 * 1024  # buffers; bytes of SRAM through which results leave
BAND = 4096  # rows of scores that are walked column by column
Size = Literal["n_q", "n_k", "d", "d_v"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Product(_Table):
    """A matrix product: the problem's sizes that it has as rows and columns of its result, in which fields its tile.

    `operands` are the loaded tiles of its left and its right side.  Blocks run in pairs (clusters of two), beside each
    other where there is more than one column of tiles, and read what both need once.
    """

    rows: Size
    cols: Size
    tile: tuple[str, ...]
    operands: tuple[str, str]
    band: bool = False

    def fields(self, a: Attention, hardware: Hardware) -> dict[str, Any]:
        """The tile that cuBLAS takes on Hopper, as its kernels' names say: see `tile`; as many buffers as fit.

        Kernels are persistent where warp groups issue the matrix instructions, and clusters need those machines too.
        """
        size, products = (getattr(a, self.rows), getattr(a, self.cols)), a.batch * a.heads
        rows, cols = tile(*size, products, hardware.processors or 1, free=len(self.tile) > 1)
        room = hardware.sram.block_capacity_bytes - min(STAGED, 2 * rows * cols)
        stages = max(1, min(MOST_STAGES, room // (2 * DEPTH * (rows + cols))))
        band = max(1, BAND // rows) if self.band and getattr(a, self.rows) > BAND else 1
        hopper = hardware.matrix.issued_by == "group"
        pairs = {self.operands[0 if getattr(a, self.cols) > cols else 1]: 2}
        return {
            **dict(zip(self.tile, (rows, cols), strict=False)),
            "block_d": DEPTH,
            "stages": (stages,),
            "band": band,
            "units": (),
            "groups": max(1, min(2, rows // 64)),
            "registers": 168,
            "persistent": hopper,
            "ahead": hopper,
            "multicast": pairs if hopper else {},
        }


def tile(rows: int, cols: int, products: int, processors: int, *, free: bool = True) -> tuple[int, int]:
    """Rows and columns of the largest tile of which nearly all processors get one; of alike ones twice as high as wide.

    As counted on an H200 (names of the nvjet kernels in iosim/data/h200_counters.csv), where results are wide and where
    they are as narrow as a head.  Where its columns are not `free`, it has as many as rows, and no more than there are.
    """
    width = next((c for c in reversed(COLS) if c >= cols), COLS[0])
    tiles = [(r, c) for r in ROWS for c in COLS if r * c <= MOST and c <= width and (free or c == min(r, width))]
    tiles.sort(key=lambda t: (-prod(t), abs(t[0] / t[1] - 2), -t[1]))
    enough = [t for t in tiles if products * -(-rows // t[0]) * -(-cols // t[1]) >= ENOUGH * processors]
    return (enough or tiles[-1:])[0]


class Counted(_Table):
    """Instructions of a lane as hardware counted them.

    For each row and lane, for each place of a row that the code passes through, for each element; and beyond those for
    an element that is left over when whole vectors have been taken.
    """

    lane: float
    place: float = 0
    element: float
    tail: float = 0


class Code(_Table):
    """How the code of row kernels keeps a processor busy.

    It fills at best the share `filled` of the issue slots; a special function takes `special_slots` of them, as it has
    fewer lanes than a warp; a warp alone takes `latency` cycles from one instruction to its next.
    """

    filled: float
    special_slots: float
    latency: float


class Lengths(_Table):
    """A kernel over rows of up to `most` elements, a `multiple`: rows and warp groups a block, registers a thread.

    `places` are how many elements of a row its code passes through, 0 for those that are there.  A row that is longer
    than `cols` is read anew in each pass, in tiles of that size with `stages` buffers.  A block takes `vector` elements
    at once, its threads the same number or none; `in_turn` says that each load waits for the one before it.
    `operations` of an element are those of the program, `special` the special functions of one, `special_place` of a
    place beyond, for `exps` exps in the program.
    """

    most: int = 2**24
    multiple: int = 1
    rows: int = 1
    groups: int = 1
    registers: int
    places: int = 0
    cols: int = 2**24
    place: Mapping[str, str] = {}
    operations: int
    exps: int = 0
    special: float = 0
    special_place: float = 0
    counted: Counted
    vector: int = 0
    in_turn: bool = False
    stages: int = 1

    def takes(self, n: int) -> bool:
        """Whether it is written for rows of `n` elements."""
        return n <= self.most and n % self.multiple == 0

    def fields(self, n: int, hardware: Hardware, code: Code) -> dict[str, Any]:
        """The fields of the schedule for rows of `n` elements."""
        lanes = self.groups * 128 // self.rows
        tiles = -(-n // self.cols)
        c = self.counted
        tail = n % self.cols if self.cols < n else 0
        each = c.element + (c.lane * lanes + c.place * self.places + c.tail * tail) / n
        special = self.special + self.special_place * self.places / n
        each = (each + (code.special_slots - 1) * special) / code.filled
        own = self.operations + special - self.exps  # of which the program has its exps
        instructions = {"score" if self.exps else "element": (each - own) / max(1, self.exps)}
        if self.exps:
            instructions["special"] = (special - self.exps) / self.exps
        busiest = c.element + c.place if not self.vector else c.element * (-(-n // self.vector) * self.vector) / n
        instructions["latency"] = code.latency * busiest / each
        return {
            "softmax_rows": self.rows,
            "softmax_cols": -(-n // tiles),
            "groups": self.groups,
            "registers": self.registers,
            "stages": (self.stages,),
            "place": dict(self.place),
            "cycles": {"enter": (-(-n // self.vector) - 1) * _trip(hardware)} if self.in_turn else {},
            "instructions": instructions,
        }


def _trip(hardware: Hardware) -> int:
    """Cycles from a load to its arrival from device memory."""
    trip = hardware.copy.latency_ps + (hardware.hbm.latency_ps or 0)
    return round(trip * (hardware.clock_hz or 0) / 10**12)
