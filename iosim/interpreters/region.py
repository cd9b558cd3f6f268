"""Which part of a program must run for some of its outputs: worked out backwards, from stores to loads.

A box is one (lo, hi) range an axis.  Bounds are conservative: everything that is needed lies inside, perhaps more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from iosim.index import Ex, Index, Least, Lookup, Most, Plus, Quotient, Times, affine
from iosim.program import Compute, Kernel, Load, Loop, Node, Program, Span, Store, Tensor, View

Range: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Range, ...]
Ranges: TypeAlias = Mapping[str, Range]


@dataclass(frozen=True, slots=True)
class Region:
    """The cells of each kernel that must run (None: the kernel need not), and what is touched of each tensor.

    `touched` reaches beyond a tensor's own limits where its last tile does.
    """

    cells: tuple[Box | None, ...]
    touched: Mapping[str, Box]


def region(program: Program, demand: Mapping[str, Box]) -> Region:
    """What must run so that the boxes in `demand` of the named tensors are right."""
    wanted = dict(demand)
    touched = dict(demand)
    cells: list[Box | None] = []
    for kernel in reversed(program.kernels):
        box = needed_cells(kernel, wanted)
        while box is not None:
            add_loads(kernel, box, wanted)
            larger = needed_cells(kernel, wanted)  # a kernel that loads what it stores may need more of itself
            if larger == box:
                break
            box = larger
        cells.append(box)
        if box is not None:
            for node, ranges in nodes(kernel.body, _ranges(kernel, box)):
                if not isinstance(node, Compute):
                    _widen(touched, node.view.tensor.name, reach(node.view, ranges))
    return Region(tuple(reversed(cells)), touched)


def bounds(e: Ex, ranges: Ranges) -> Range:
    """The least and the largest value of `e` while its indices stay in `ranges`, or a wider pair."""
    match e:
        case Index(name):
            lo, hi = ranges[name]
            return lo, hi - 1
        case Plus(a, b):
            (alo, ahi), (blo, bhi) = bounds(a, ranges), bounds(b, ranges)
            return alo + blo, ahi + bhi
        case Times(a, factor):
            lo, hi = bounds(a, ranges)
            return (lo * factor, hi * factor) if factor >= 0 else (hi * factor, lo * factor)
        case Quotient(a, divisor):
            lo, hi = bounds(a, ranges)
            return lo // divisor, hi // divisor
        case Least(a, b):
            (alo, ahi), (blo, bhi) = bounds(a, ranges), bounds(b, ranges)
            return min(alo, blo), min(ahi, bhi)
        case Most(a, b):
            (alo, ahi), (blo, bhi) = bounds(a, ranges), bounds(b, ranges)
            return max(alo, blo), max(ahi, bhi)
        case Lookup(_, table, a):
            lo, hi = bounds(a, ranges)
            return min(table[lo : hi + 1]), max(table[lo : hi + 1])
        case int():
            return e, e
        case _:
            raise TypeError(f"{e!r} is no index expression")


def reach(view: View, ranges: Ranges) -> Box:
    """The box that a view covers while its indices run over `ranges`, tensor limits left aside."""
    out = []
    for ix in view.index:
        lo, hi = bounds(ix.start if isinstance(ix, Span) else ix, ranges)
        out.append((lo, hi + (ix.size if isinstance(ix, Span) else 1)))
    return tuple(out)


def within(box: Box, tensor: Tensor) -> Box:
    """The part of a box that lies in the tensor."""
    return tuple((max(lo, 0), max(0, min(hi, size))) for (lo, hi), size in zip(box, tensor.shape, strict=True))


def _ranges(kernel: Kernel, box: Box) -> Ranges:
    return {axis: span for (axis, _), span in zip(kernel.grid, box, strict=True)}


def needed_cells(kernel: Kernel, wanted: Mapping[str, Box]) -> Box | None:
    """The smallest box of cells found that holds every cell which stores into a wanted box."""
    full = {axis: (0, extent) for axis, extent in kernel.grid}
    found: dict[str, Range] | None = None
    for node, ranges in nodes(kernel.body, full):
        if isinstance(node, Store) and node.view.tensor.name in wanted:
            box = within(wanted[node.view.tensor.name], node.view.tensor)
            hit = narrow(node.view, box, ranges)
            if hit is not None:
                cells = {axis: hit[axis] for axis in full}
                found = cells if found is None else {axis: _hull(found[axis], cells[axis]) for axis in full}
    return None if found is None else tuple(found.values())


def narrow(view: View, wanted: Box, ranges: Ranges) -> dict[str, Range] | None:
    """`ranges` cut to where the view can touch the wanted box; None where it cannot.

    The start of each axis is affine, c0 + sum of c * x, so each index is bounded by what the others leave.  Two rounds
    find both digits of a mixed radix like kv * group + g when the wanted range is one head.
    """
    out = dict(ranges)
    for _ in range(2):
        for ix, (lo, hi) in zip(view.index, wanted, strict=True):
            form = affine(ix.start if isinstance(ix, Span) else ix)
            if form is None or lo >= hi:
                return None
            least = lo - (ix.size if isinstance(ix, Span) else 1) + 1 - form[0]
            most = hi - 1 - form[0]
            for name, c in form[1].items():
                others = [bounds(Index(other) * k, out) for other, k in form[1].items() if other != name]
                low, high = least - sum(b for _, b in others), most - sum(a for a, _ in others)
                if c < 0:
                    low, high, c = -high, -low, -c
                if c:
                    out[name] = (max(out[name][0], -(-low // c)), min(out[name][1], high // c + 1))
                    if out[name][0] >= out[name][1]:
                        return None
            if not form[1] and not least <= 0 <= most:
                return None
    return out


def add_loads(kernel: Kernel, box: Box, wanted: dict[str, Box]) -> None:
    """Widen `wanted` by what the cells in `box` load."""
    for node, ranges in nodes(kernel.body, _ranges(kernel, box)):
        if isinstance(node, Load):
            _widen(wanted, node.view.tensor.name, within(reach(node.view, ranges), node.view.tensor))


def nodes(body: Sequence[Node], ranges: Ranges) -> Iterator[tuple[Load | Store | Compute, Ranges]]:
    """Every node that can run, with the ranges of all its indices."""
    for node in body:
        if isinstance(node, Loop):
            inner = (bounds(node.lo, ranges)[0], bounds(node.hi, ranges)[1])
            if inner[0] < inner[1]:
                yield from nodes(node.body, {**ranges, node.index: inner})
            continue
        seen = ranges
        if node.when is not None:
            lo, hi = ranges[node.when.index]
            lo, hi = max(lo, bounds(node.when.lo, ranges)[0]), min(hi, bounds(node.when.hi, ranges)[1])
            if lo >= hi:
                continue
            seen = {**ranges, node.when.index: (lo, hi)}
        yield node, seen


def _widen(boxes: dict[str, Box], name: str, box: Box) -> None:
    if all(lo < hi for lo, hi in box):
        boxes[name] = tuple(map(_hull, boxes[name], box)) if name in boxes else box


def _hull(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])
