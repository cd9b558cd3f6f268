"""Exact sums of index expressions, in time that does not depend on how far the indices run.

An expression over one index, made with + - *const //const min max, is piecewise quasi-linear.  For a period
P that makes every division come out even, index = r + P*t turns it into linear pieces in t for each residue
r; a product of expressions becomes a polynomial on each piece, and Faulhaber's formulas add it up.  Python's
integers do not overflow, so the results are exact at any size.
"""

from __future__ import annotations

from math import comb, gcd, prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from iosim.index import Ex, Expr, Index, Least, Lookup, Most, Plus, Quotient, Times, at, indices, least, most

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MOST_TERMS = 2**20  # values of the shorter indices that one sum may substitute, one after another

Poly: TypeAlias = tuple[int, ...]  # coefficients, the constant first


class Piece(NamedTuple):
    """A polynomial in t that holds from the end of the piece before up to, not including, `end`."""

    end: int
    poly: Poly


class _UnevenError(Exception):
    """The period must be multiplied by `factor` for a division to come out even."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.factor = factor


def sum_product(factors: Sequence[Ex], extents: Mapping[str, int]) -> int:
    """The sum of the product of `factors` over every index from 0 to its extent - 1.

    Factors that share no index are summed apart and multiplied.  Where factors tie several indices together,
    the shorter ones are substituted value by value and the longest is summed in closed form.

    Raises NotImplementedError when that would take more than MOST_TERMS substitutions.
    """
    if any(extent <= 0 for extent in extents.values()):
        return 0
    total = prod(f for f in factors if isinstance(f, int))
    named: frozenset[str] = frozenset()
    for group, names in _groups([f for f in factors if isinstance(f, Expr)]):
        named |= names
        if total:
            total *= _sum_group(group, {name: extents[name] for name in names})
    return total * prod(extent for name, extent in extents.items() if name not in named)


def sum_over(factors: Sequence[Ex], index: str, extent: int) -> int:
    """The sum of the product of `factors`, expressions over `index` alone, for index = 0 .. extent - 1."""
    period = 1
    while 2 * period <= extent:
        try:
            return sum(_sum_residue(factors, r, period, -((r - extent) // period)) for r in range(period))
        except _UnevenError as uneven:
            period *= uneven.factor
    return sum(prod(at(f, {index: value}) for f in factors) for value in range(extent))


def bounds(e: Ex, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(least, greatest) value that `e` can take while each index stays in its range, both ends included.

    Interval arithmetic: exact where no index occurs twice or all occurrences pull the same way, else wider.
    """
    match e:
        case Index(name):
            return ranges[name]
        case Plus(a, b):
            (a0, a1), (b0, b1) = bounds(a, ranges), bounds(b, ranges)
            return a0 + b0, a1 + b1
        case Times(a, factor):
            ends = [factor * end for end in bounds(a, ranges)]
            return min(ends), max(ends)
        case Quotient(a, divisor):
            a0, a1 = bounds(a, ranges)
            return a0 // divisor, a1 // divisor
        case Least(a, b):
            (a0, a1), (b0, b1) = bounds(a, ranges), bounds(b, ranges)
            return min(a0, b0), min(a1, b1)
        case Most(a, b):
            (a0, a1), (b0, b1) = bounds(a, ranges), bounds(b, ranges)
            return max(a0, b0), max(a1, b1)
        case Lookup(_, table, a):
            a0, a1 = bounds(a, ranges)
            return min(table[a0 : a1 + 1]), max(table[a0 : a1 + 1])
        case int():
            return e, e
        case _:
            raise TypeError(f"{e!r} is not an index expression")


def inside(e: Ex, lo: Ex, hi: Ex) -> Ex:
    """1 where lo <= e < hi, else 0."""
    result: Ex = most(0, least(1, least(e - lo + 1, hi - e)))
    return result


def _groups(factors: Sequence[Expr]) -> list[tuple[list[Expr], frozenset[str]]]:
    """The factors in groups that share no index, with the indices of each group."""
    groups: list[tuple[list[Expr], frozenset[str]]] = []
    for factor in factors:
        joined, names, apart = [factor], indices(factor), []
        for group in groups:
            if group[1] & names:
                joined, names = group[0] + joined, names | group[1]
            else:
                apart.append(group)
        groups = [*apart, (joined, names)]
    return groups


def _sum_group(factors: Sequence[Ex], extents: Mapping[str, int]) -> int:
    by_extent = sorted(extents, key=lambda name: (extents[name], name))
    if len(by_extent) == 1:
        return sum_over(factors, by_extent[0], extents[by_extent[0]])
    if prod(extents[name] for name in by_extent[:-1]) > MOST_TERMS:
        axes = ", ".join(f"{name} < {extents[name]}" for name in by_extent)
        product = " * ".join(f"({f})" for f in factors)
        raise NotImplementedError(f"no closed form for the sum over {axes} of {product}")
    short, rest = by_extent[0], {name: extents[name] for name in by_extent[1:]}
    return sum(sum_product([at(f, {short: value}) for f in factors], rest) for value in range(extents[short]))


def _sum_residue(factors: Sequence[Ex], residue: int, period: int, count: int) -> int:
    """The part of `sum_over` where index = residue + period * t, t = 0 .. count - 1."""
    pieces = [Piece(count, (1,))]
    for factor in factors:
        pairs = _overlay(pieces, _pieces(factor, residue, period, count))
        pieces = [Piece(end, _times(p, q)) for _, end, p, q in pairs]
    total, start = 0, 0
    for end, poly in pieces:
        before, until = _power_sums(len(poly), start), _power_sums(len(poly), end)
        total += sum(c * (u - b) for c, u, b in zip(poly, until, before, strict=True))
        start = end
    return total


def _pieces(e: Ex, residue: int, period: int, count: int) -> list[Piece]:
    """`e` as linear pieces (constant, slope) in t, where index = residue + period * t, t = 0 .. count - 1."""
    match e:
        case Index():
            return [Piece(count, (residue, period))]
        case Times(a, factor):
            inner = _pieces(a, residue, period, count)
            return [Piece(end, (c * factor, slope * factor)) for end, (c, slope) in inner]
        case Quotient(a, divisor):
            return list(_divided(_pieces(a, residue, period, count), divisor))
        case Plus(a, b):
            pairs = _overlay(_pieces(a, residue, period, count), _pieces(b, residue, period, count))
            return [Piece(end, (p[0] + q[0], p[1] + q[1])) for _, end, p, q in pairs]
        case Least(a, b) | Most(a, b):
            pairs = _overlay(_pieces(a, residue, period, count), _pieces(b, residue, period, count))
            return [p for pair in pairs for p in _chosen(*pair, smaller=isinstance(e, Least))]
        case Lookup():
            (name,) = indices(e)
            values = (at(e, {name: residue + period * t}) for t in range(count))
            return [Piece(t + 1, (value, 0)) for t, value in enumerate(values)]
        case int():
            return [Piece(count, (e, 0))]
        case _:
            raise TypeError(f"{e!r} is not an index expression")


def _divided(pieces: Sequence[Piece], divisor: int) -> Iterator[Piece]:
    start = 0
    for end, (c, slope) in pieces:
        if end - start == 1:
            c, slope = c + slope * start, 0
        if slope % divisor:
            raise _UnevenError(divisor // gcd(slope, divisor))
        yield Piece(end, (c // divisor, slope // divisor))
        start = end


def _chosen(start: int, end: int, p: Poly, q: Poly, *, smaller: bool) -> Iterator[Piece]:
    """The smaller or the larger of two lines, cut where they cross."""
    if p[1] < q[1]:
        p, q = q, p
    # p - q does not fall: p is the smaller one before `cut`, q from there on.
    gap, slope = q[0] - p[0], p[1] - q[1]
    cut = min(max(gap // slope + 1, start), end) if slope else (end if gap >= 0 else start)
    first, second = (p, q) if smaller else (q, p)
    if cut > start:
        yield Piece(cut, first)
    if cut < end:
        yield Piece(end, second)


def _overlay(a: Sequence[Piece], b: Sequence[Piece]) -> Iterator[tuple[int, int, Poly, Poly]]:
    """(start, end, polynomial of a, polynomial of b) for two piecewise functions on the same range."""
    start, ia, ib = 0, 0, 0
    while ia < len(a):
        end = min(a[ia].end, b[ib].end)
        yield start, end, a[ia].poly, b[ib].poly
        ia, ib = ia + (a[ia].end == end), ib + (b[ib].end == end)
        start = end


def _times(p: Poly, q: Poly) -> Poly:
    out = [0] * (len(p) + len(q) - 1)
    for i, x in enumerate(p):
        for j, y in enumerate(q):
            out[i + j] += x * y
    return tuple(out)


def _power_sums(powers: int, n: int) -> list[int]:
    """The sums of t**k over t = 0 .. n - 1 for k below `powers`.

    Adding up (t + 1)**(k + 1) - t**(k + 1) gives n**(k + 1) = sum over j <= k of comb(k + 1, j) * sums[j].
    """
    sums: list[int] = []
    for k in range(powers):
        known = sum(comb(k + 1, j) * s for j, s in enumerate(sums))
        sums.append((n ** (k + 1) - known) // (k + 1))
    return sums
