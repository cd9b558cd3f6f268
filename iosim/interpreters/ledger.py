"""The ledger: what a tile program moves and computes, counted without running it.

One execution of a node moves the product, over the axes of its view, of how much of the span lies inside the
tensor.  The ledger adds that up over the loops and the grid, innermost index first.  Consecutive tiles
telescope: where start grows by `size` with j, and with clip(x) = min(max(x, 0), n),

    sum over j = lo .. hi - 1 of |[start, start + size) in [0, n)|  =  clip(start at hi) - clip(start at lo).

An index that nothing names multiplies by its trips; what is left goes to iosim.sums.  The cost does not
depend on the size of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from iosim.dtypes import dtype
from iosim.index import Ex, Index, affine, at, indices, least, most
from iosim.program import Compute, Load, Span, extent, line, walk
from iosim.sums import bounds, inside, sum_product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from iosim.program import Kernel, Loop, Program, Store, Tensor

Direction: TypeAlias = Literal["read", "write", "add"]
Box: TypeAlias = tuple[tuple[int, int], ...]  # (first, end) for each axis of a tensor


@dataclass(frozen=True, slots=True)
class Flow:
    """What one load or store of a kernel moves between device memory and the chip, over all blocks.

    `hbm_bytes` is what the blocks ask for, elements inside the tensor only.  `unique_bytes` is the part of
    the tensor that is touched at least once: all of `box`, the smallest one around the tiles (exact unless
    they leave gaps in it), and never more than `hbm_bytes`.  `statistic` marks one number a row, like the
    log-sum-exp, which the papers' counts leave out.  `text` is the node as pseudo-code.
    """

    kernel: str
    tensor: str
    direction: Direction
    text: str
    statistic: bool
    hbm_bytes: int
    unique_bytes: int
    box: Box
    node: Load | Store = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes, work and device memory of a program.  Every `_bytes` is in bytes.

    `work` has, by kernel, the executed amount of each unit as iosim.ops counts it (matrix: FLOPs, vector and
    exp: operations), padding and masked work included.  `paper_hbm_bytes` counts a library kernel's operands
    once and any other kernel as its blocks ask, row statistics left out.  `io_bytes` are the inputs and
    outputs, `extra_bytes` all scratch tensors, `allocated_bytes` the most that scratch and outputs hold at
    one time, `peak_bytes` the same with the inputs.
    """

    flows: tuple[Flow, ...]
    work: Mapping[str, Mapping[str, int]]
    paper_hbm_bytes: int
    io_bytes: int
    extra_bytes: int
    allocated_bytes: int
    peak_bytes: int

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes that all blocks load."""
        return self._bytes("read")

    @property
    def hbm_write_bytes(self) -> int:
        """Bytes that all blocks store."""
        return self._bytes("write")

    @property
    def hbm_add_bytes(self) -> int:
        """Bytes that all blocks add to device memory, the payload once, in neither of the other two."""
        return self._bytes("add")

    @property
    def by_tensor(self) -> dict[str, dict[str, int]]:
        """{tensor: {direction: bytes}}, zeros left out."""
        out: dict[str, dict[str, int]] = {}
        for flow in self.flows:
            if flow.hbm_bytes:
                row = out.setdefault(flow.tensor, {})
                row[flow.direction] = row.get(flow.direction, 0) + flow.hbm_bytes
        return out

    @property
    def executed_flops(self) -> int:
        """FLOPs of the matrix products, on whole tiles."""
        return sum(units.get("matrix", 0) for units in self.work.values())

    def flow(self, kernel: str, node: Load | Store) -> Flow:
        """The flow of one load or store, by its kernel's name and the node itself."""
        return next(f for f in self.flows if f.kernel == kernel and f.node is node)

    def _bytes(self, direction: Direction) -> int:
        return sum(flow.hbm_bytes for flow in self.flows if flow.direction == direction)


class _Range(NamedTuple):
    """An index runs from lo to hi - 1; the bounds depend on indices further out only."""

    axis: str
    lo: Ex
    hi: Ex


class _Clip(NamedTuple):
    """How much of [start, start + size) lies in [0, limit)."""

    start: Ex
    size: int
    limit: int


class _Domain(NamedTuple):
    """When a node runs: ranges from the outermost grid axis to the innermost loop, and guards of 0 or 1."""

    ranges: tuple[_Range, ...]
    guards: tuple[Ex, ...]

    def limits(self) -> dict[str, tuple[int, int]] | None:
        """The least and greatest value of each index, None where one never runs."""
        out: dict[str, tuple[int, int]] = {}
        for index, lo, hi in self.ranges:
            out[index] = bounds(lo, out)[0], bounds(hi, out)[1] - 1
            if out[index][0] > out[index][1]:
                return None
        return out


def ledger(program: Program) -> Ledger:
    """Count what `program` moves and computes; exact, in time that does not depend on the problem's size.

    Raises NotImplementedError where views or bounds tie long indices together in a way without a closed form.
    """
    flows: list[Flow] = []
    work: dict[str, dict[str, int]] = {}
    for kernel in program.kernels:
        units = work.setdefault(kernel.name, {})
        for compute, times in executions(kernel):
            for unit, amount in compute.work.items():
                units[unit] = units.get(unit, 0) + amount * times
        for node, loops in walk(kernel.body):
            if not isinstance(node, Compute):
                flows.append(_flow(kernel, node, _domain(kernel, node, loops)))
    once = {kernel.name for kernel in program.kernels if kernel.operands_once}
    allocated = _allocated_bytes(program)
    inputs = sum(t.bytes for t in program.tensors if t.role == "in")
    return Ledger(
        flows=tuple(flows),
        work=work,
        paper_hbm_bytes=_paper_bytes(flows, once),
        io_bytes=sum(t.bytes for t in program.tensors if t.role != "scratch"),
        extra_bytes=sum(t.bytes for t in program.tensors if t.role == "scratch"),
        allocated_bytes=allocated,
        peak_bytes=allocated + inputs,
    )


def executions(kernel: Kernel) -> Iterator[tuple[Compute, int]]:
    """Each operation of a kernel with how often it runs, over all blocks."""
    times: dict[_Domain, int] = {}
    for node, loops in walk(kernel.body):
        if isinstance(node, Compute):
            domain = _domain(kernel, node, loops)
            if domain not in times:
                times[domain] = _total(domain, ())
            yield node, times[domain]


def union_bytes(flows: Iterable[Flow]) -> int:
    """Bytes of one tensor that at least one of `flows`, all of that tensor, touches."""
    flows = [f for f in flows if f.hbm_bytes]
    if not flows:
        return 0
    size = dtype(flows[0].node.view.tensor.dtype).bytes
    return min(size * _volume({f.box for f in flows}), sum(f.unique_bytes for f in flows))


def _domain(kernel: Kernel, node: Load | Store | Compute, loops: Sequence[Loop]) -> _Domain:
    ranges = [_Range(axis, 0, n) for axis, n in kernel.grid]
    ranges += [_Range(loop.index, loop.lo, loop.hi) for loop in loops]
    if node.when is None:
        return _Domain(tuple(ranges), ())
    index, lo, hi = node.when.index, node.when.lo, node.when.hi
    at_index = next(k for k, r in enumerate(ranges) if r.axis == index)
    if indices(lo) | indices(hi) <= {r.axis for r in ranges[:at_index]}:
        _, outer_lo, outer_hi = ranges[at_index]
        ranges[at_index] = _Range(index, most(outer_lo, lo), least(outer_hi, hi))
        return _Domain(tuple(ranges), ())
    return _Domain(tuple(ranges), (inside(Index(index), lo, hi),))


def _flow(kernel: Kernel, node: Load | Store, domain: _Domain) -> Flow:
    tensor = node.view.tensor
    size = dtype(tensor.dtype).bytes
    spans = [ix if isinstance(ix, Span) else Span(ix, 1) for ix in node.view.index]
    clips = [_Clip(s.start, s.size, n) for s, n in zip(spans, tensor.shape, strict=True)]
    hbm_bytes = size * _total(domain, clips)
    box = _box(domain, clips)
    direction: Direction = "read" if isinstance(node, Load) else "add" if node.add else "write"
    return Flow(
        kernel=kernel.name,
        tensor=tensor.name,
        direction=direction,
        text=line(node),
        statistic=node.view.is_row_statistic,
        hbm_bytes=hbm_bytes,
        unique_bytes=min(hbm_bytes, size * prod(end - first for first, end in box)),
        box=box,
        node=node,
    )


def _total(domain: _Domain, clips: Sequence[_Clip]) -> int:
    """The sum over a node's executions of the product of `clips` (of 1 when there are none)."""
    limits = domain.limits()
    if limits is None:
        return 0
    factors: list[Ex] = list(domain.guards)
    ragged: list[_Clip] = []
    for clip in clips:
        first, last = bounds(clip.start, limits)
        if first >= 0 and last + clip.size <= clip.limit:
            factors.append(clip.size)
        else:
            ragged.append(clip)
    axes: dict[str, int] = {}
    for run in reversed(domain.ranges):
        naming = [c for c in ragged if run.axis in indices(c.start)]
        loose = not any(run.axis in indices(f) for f in factors)
        if loose and not naming:
            factors.append(most(run.lo, run.hi) - run.lo)
        elif loose and len(naming) == 1 and _consecutive(naming[0], run.axis):
            ragged.remove(naming[0])
            factors.append(_telescoped(naming[0], run))
        else:  # it becomes an axis of the final sum: index = first + 0, 1, 2, ...
            first, last = limits[run.axis]
            if not (isinstance(run.lo, int) and isinstance(run.hi, int)):
                factors.append(inside(Index(run.axis), run.lo, run.hi))
            shift = {run.axis: Index(run.axis) + first}
            factors = [at(f, shift) for f in factors]
            ragged = [c._replace(start=at(c.start, shift)) for c in ragged]
            axes[run.axis] = last - first + 1
    factors += [extent(c.start, c.size, c.limit, {}) for c in ragged]
    return sum_product(factors, axes)


def _consecutive(clip: _Clip, index: str) -> bool:
    form = affine(clip.start)
    return form is not None and form[1].get(index) == clip.size


def _telescoped(clip: _Clip, run: _Range) -> Ex:
    """The sum of `clip` over the range."""

    def clipped(value: Ex) -> Ex:
        inner: Ex = least(most(at(clip.start, {run.axis: value}), 0), clip.limit)
        return inner

    return clipped(most(run.lo, run.hi)) - clipped(run.lo)


def _box(domain: _Domain, clips: Sequence[_Clip]) -> Box:
    """The smallest box that holds all tiles, as far as the bounds of the starts tell."""
    limits = domain.limits()
    if limits is None:
        return tuple((0, 0) for _ in clips)
    ends = [(bounds(c.start, limits), c) for c in clips]
    box = [(max(0, first), min(c.limit, last + c.size)) for (first, last), c in ends]
    return tuple((first, max(first, end)) for first, end in box)


def _volume(boxes: set[Box]) -> int:
    """Elements in the union of boxes, axis by axis between their edges."""
    if not boxes:
        return 0
    if len(boxes) == 1 or not next(iter(boxes)):
        return prod(end - first for first, end in next(iter(boxes)))
    total, edges = 0, sorted({edge for box in boxes for edge in box[0]})
    for first, end in pairwise(edges):
        across = {box[1:] for box in boxes if box[0][0] <= first and end <= box[0][1]}
        total += (end - first) * _volume(across)
    return total


def _paper_bytes(flows: Sequence[Flow], once: set[str]) -> int:
    counted = [f for f in flows if not f.statistic]
    operands: dict[tuple[str, str, str], list[Flow]] = {}
    for f in counted:
        if f.kernel in once:
            operands.setdefault((f.kernel, f.tensor, f.direction), []).append(f)
    asked = sum(f.hbm_bytes for f in counted if f.kernel not in once)
    return asked + sum(map(union_bytes, operands.values()))


def _allocated_bytes(program: Program) -> int:
    """The most that scratch and outputs hold at one time, in bytes.

    A tensor is there from the first kernel that stores it on; scratch until the last kernel that touches it.
    """
    alive = [0] * len(program.kernels)
    for tensor in (t for t in program.tensors if t.role != "in"):
        used = [n for n, kernel in enumerate(program.kernels) if _touches(kernel, tensor)]
        last = len(alive) - 1 if tensor.role == "out" else used[-1]
        for n in range(used[0], last + 1):
            alive[n] += tensor.bytes
    return max(alive)


def _touches(kernel: Kernel, tensor: Tensor) -> bool:
    return any(not isinstance(node, Compute) and node.view.tensor == tensor for node, _ in walk(kernel.body))
