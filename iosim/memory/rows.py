"""What a layout does to bandwidth: rows of a tile that do not follow each other in device memory.

A tile of rows of `width` bytes, `pitch` bytes apart, is no one run of bytes.  Four things come of it.

1. Requests.  A row asks the L2 for whole sectors (32 bytes on an H200): those that it touches.
2. Fetches.  DRAM is read in pieces of `access` bytes (64, two sectors).  Of a piece at the end of a row the rest is a
   neighbour's, the same row of the next head, or nobody's.  A neighbour that is read while the L2 still holds the piece
   finds it there; else it is fetched once more.
3. Short runs.  Pieces that follow each other stream.  A run of one piece alone, or one that begins in the middle of a
   line (128 bytes), costs DRAM as much as `broken` pieces more: 0.7, or 0.26 where the neighbours are read at the same
   time, which fill the gaps between the runs.
4. Stores of a part of a sector.  The L2 has to complete it: as much as 7 pieces, or 2.5 where the next head's rows
   bring the rest while it is still there.

So with p pieces fetched and b broken runs for a row, a tile takes DRAM (p + broken b) access / width times as long as
one run of as many bytes.  All numbers are measured on an H200: sectors and pieces by counters, exactly; the others are
fitted to the rates of loads and stores in iosim/data/h200_rows.csv (tests/unit/test_layout.py holds the model against
it, and against the calls of h200_layouts.csv, to which nothing is fitted: whole runs are 4 % off in decoding, 2 % in
prefills).

Limits.  Loads of rows of 64 bytes and more, up to 16 KiB apart: 4 % off in the mean and 19 % at worst, mostly on the
fast side (rows of 128 bytes take 8 % longer from 2 KiB apart on).  Stores: 15 % and 50 %, short runs faster than they
are.  The reach of the TLB is left out: rows 64 KiB apart take up to 37 % longer, 256 KiB apart up to 51 %.  So is what
an engine's own shape of a copy does to odd rows: cuDNN's decoding takes 19 % longer for rows of 256 bytes that are 272
apart, where this gives 6 %.  Edges of long runs count for nothing: a contiguous tile has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any

from iosim.dtypes import dtype
from iosim.index import indices
from iosim.memory.closed_form import distinct_tiles, kept, wave_bytes
from iosim.program import Load, Span

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.interpreters.ledger import Flow
    from iosim.program import Kernel, Program, View
    from iosim.strides import Strides

HEADS = 1  # the axis of a tensor (batch, heads, n, d)
MOST_HEADS = 16  # that a pattern goes through: offsets repeat, and edges at both ends count for less


@dataclass(frozen=True, slots=True)
class Grain:
    """In what pieces memory is asked for, in bytes, and what a broken run costs, in pieces: alone, among neighbours."""

    sector: int
    line: int
    access: int
    broken: float
    broken_among: float
    partial: float  # what storing a part of a sector costs, in pieces
    partial_among: float


H200 = Grain(  # measured, see above
    sector=32, line=128, access=64, broken=0.7, broken_among=0.26, partial=7.0, partial_among=2.5
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """`rows` rows of `width` bytes, `pitch` apart, from byte `first` on; those of `heads` heads are `head` apart."""

    width: int
    pitch: int
    rows: int
    first: int = 0
    heads: int = 1
    head: int = 0

    @property
    def whole(self) -> bool:
        """Whether a head's rows are one run."""
        return self.width == self.pitch if self.rows > 1 else self.heads == 1


@dataclass(frozen=True, slots=True)
class Cost:
    """For each byte asked for: bytes of sectors, bytes that DRAM moves, bytes that a stream moves in the same time."""

    sectors: float
    moved: float
    time: float


@dataclass(frozen=True, slots=True)
class RowCost:
    """What the layout of a tensor costs one load or store."""

    pattern: Pattern
    together: float  # share of neighbours that are moved at the same time
    found: float  # share of neighbours whose pieces are in the L2, those included
    cost: Cost


@lru_cache(maxsize=4096)
def cost_of(pattern: Pattern, grain: Grain, together: float, found: float, *, store: bool = False) -> Cost:
    """The cost of rows, where such shares of the neighbours are moved together with them, or find their pieces."""
    p, g = pattern, grain
    if p.whole:
        return Cost(1.0, 1.0, 1.0)
    alone, among = _pieces(p, g.access, g.line, shared=False), _pieces(p, g.access, g.line, shared=True)
    broken = together * g.broken_among + (1 - together) * g.broken
    time = found * (among[0] + broken * among[1]) + (1 - found) * (alone[0] + g.broken * alone[1])
    size, sectors, partial = g.access, *_sectors(p, g.sector)
    if store:  # what is dirty goes out by sectors
        time += partial * (found * g.partial_among + (1 - found) * g.partial)
        size, alone, among = g.sector, *(_pieces(p, g.sector, g.line, shared=shared) for shared in (False, True))
    return Cost(
        sectors=sectors * g.sector / p.width,
        moved=(found * among[0] + (1 - found) * alone[0]) * size / p.width,
        time=time * g.access / p.width,
    )


def _starts(p: Pattern, line: int) -> tuple[Sequence[Sequence[int]], range]:
    """Where rows begin, head by head, and which of them count: a period of their places in a line amid two others."""
    period = line // gcd(p.pitch, line)
    rows, counted = (3 * period, range(period, 2 * period)) if p.rows >= 3 * period else (p.rows, range(p.rows))
    heads = min(p.heads, MOST_HEADS)
    return [[p.first + h * p.head + r * p.pitch for r in range(rows)] for h in range(heads)], counted


def _sectors(p: Pattern, sector: int) -> tuple[float, float]:
    """(sectors that a row touches, sectors of which it has a part only) in the mean."""
    starts, counted = _starts(p, 4 * sector)
    each = [head[row] for head in starts for row in counted]
    touched = sum((at + p.width - 1) // sector - at // sector + 1 for at in each)
    whole = sum(max(0, (at + p.width) // sector - -(-at // sector)) for at in each)
    return touched / len(each), (touched - whole) / len(each)


def _pieces(p: Pattern, access: int, line: int, *, shared: bool) -> tuple[float, float]:
    """(pieces, broken runs) of a row in the mean; `shared`: pieces that heads before have fetched are there."""
    starts, counted = _starts(p, line)
    there: set[int] = set()
    pieces = broken = 0
    for head in starts:
        if not shared:
            there = set()
        runs: list[tuple[int, int, int]] = []  # row in which it begins, first piece, last piece
        for row, at in enumerate(head):
            for piece in range(at // access, (at + p.width - 1) // access + 1):
                if piece in there:
                    continue
                there.add(piece)
                pieces += row in counted
                if runs and piece == runs[-1][2] + 1:
                    runs[-1] = (*runs[-1][:2], piece)
                else:
                    runs.append((row, piece, piece))
        broken += sum(row in counted and _is_broken(low, high, line // access) for row, low, high in runs)
    rows = len(counted) * len(starts)
    return pieces / rows, broken / rows


def _is_broken(first: int, last: int, in_line: int) -> bool:
    """Whether a run of pieces is one alone, or begins in the middle of a line."""
    return first == last or first % max(1, in_line) != 0


# ---------------------------------------------------------------- of a program


def row_costs(
    program: Program, flows: Sequence[Flow], hardware: Hardware, resident: Mapping[str, int]
) -> list[RowCost | None]:
    """What the layouts of a program's tensors cost each of its flows; None where a tensor is contiguous.

    `resident` gives, by kernel, how many blocks run at one time.
    """
    if not program.strides:
        return [None] * len(flows)
    kernels = {kernel.name: kernel for kernel in program.kernels}
    waves = {name: _wave(kernel, flows, hardware, resident) for name, kernel in kernels.items()}
    grain = grain_of(hardware)
    return [_row_cost(program, f, kernels[f.kernel], waves[f.kernel], grain) for f in flows]


def grain_of(hardware: Hardware) -> Grain:
    """That of a machine; what its profile leaves out is taken to be as on an H200."""
    given: dict[str, Any] = {name: value for name, value in hardware.grain.items() if value is not None}
    return replace(H200, **given)


@dataclass(frozen=True, slots=True)
class _Wave:
    """The blocks of a kernel that run at one time, and the share of what they touch that the L2 keeps for the next."""

    blocks: int
    kept: float


def _wave(kernel: Kernel, flows: Sequence[Flow], hardware: Hardware, resident: Mapping[str, int]) -> _Wave:
    cache = hardware.caches[0] if hardware.caches else None
    blocks = max(1, min(resident[kernel.name], kernel.blocks))
    if cache is None or cache.capacity_bytes is None:
        return _Wave(blocks, 0.0)
    own = [f for f in flows if f.kernel == kernel.name]
    touched = wave_bytes(kernel, own, cache.capacity_bytes, cache.partitions or 1, blocks)
    return _Wave(blocks, kept(touched, cache.capacity_bytes))


def _row_cost(program: Program, flow: Flow, kernel: Kernel, wave: _Wave, grain: Grain) -> RowCost | None:
    view, strides = flow.node.view, program.strides.get(flow.tensor)
    if strides is None:
        return None
    pattern = pattern_of(view, strides)
    together = _together(view, pattern, kernel, wave.blocks)
    found = together + (1 - together) * wave.kept
    store = not isinstance(flow.node, Load)
    return RowCost(pattern, together, found, cost_of(pattern, grain, together, found, store=store))


def pattern_of(view: View, strides: Strides) -> Pattern:
    """The rows of a tile, and those of its neighbours along the axis of heads."""
    size = dtype(view.tensor.dtype).bytes
    spans = [(axis, ix) for axis, ix in enumerate(view.index) if isinstance(ix, Span)]
    (rows, _), (_, wide) = spans[0], spans[-1]
    shape = view.tensor.shape
    return Pattern(
        width=min(wide.size, shape[-1]) * size,
        pitch=strides.steps[rows] * size,
        rows=shape[rows],
        first=strides.first * size,
        heads=1 if rows == HEADS else shape[HEADS],
        head=strides.steps[HEADS] * size,
    )


def _together(view: View, pattern: Pattern, kernel: Kernel, wave: int) -> float:
    """The share of neighbouring heads whose rows the blocks of a wave move in one step."""
    if pattern.heads == 1:
        return 1.0
    named = indices(view.starts[HEADS]) & {axis for axis, _ in kernel.grid}
    heads = min(distinct_tiles(kernel.grid, frozenset(named), wave), pattern.heads)
    return 1.0 if heads == pattern.heads else (heads - 1) / heads
