"""What the blocks of a kernel do, segment by segment: shapes, made for many blocks at a time.

A shape names runs of alike iterations with their number.  Where guards begin and end, and where spans leave their
tensors, is found by arithmetic on arrays over all blocks, so that what a block does costs no more than its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from iosim.dtypes import dtype
from iosim.index import Ex, Index, affine, at, indices
from iosim.pipeline import Leaf, Segment, nests
from iosim.program import Compute, Load, Loop, Span, Store, extent
from iosim.sums import bounds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]

Cells: TypeAlias = Mapping[str, Any]  # indices of so many blocks or iterations: arrays, one value a cell

Lengths: TypeAlias = tuple[tuple[str, int], ...]  # (unit, ps)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One load or store of a block in one iteration: bytes asked for, and ps on each unit it needs at full rate."""

    tensor: str
    direction: str
    bytes: int
    lengths: Lengths

    def share(self, rank: int, workers: int) -> Transfer | None:
        """The part that worker `rank` carries out, None where it is nothing."""
        bytes_ = self.bytes * (rank + 1) // workers - self.bytes * rank // workers
        if not bytes_:
            return None
        lengths = tuple((unit, -(-length * bytes_ // self.bytes)) for unit, length in self.lengths)
        return Transfer(self.tensor, self.direction, bytes_, lengths)


@dataclass(frozen=True, slots=True)
class Cost:
    """What computing takes: ps on the own units for each group.

    A group alone needs `chain` ps, as its instructions follow one another, and its results are there `lag` ps later.
    """

    lengths: Lengths = ()
    chain: int = 0
    lag: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a phase does in one iteration: what it computes, and what it moves.

    `work_of` makes each once, so that alike ones, of several models too, are the same object.
    """

    cost: Cost
    moves: tuple[Transfer, ...]

    @property
    def lengths(self) -> Lengths:
        return self.cost.lengths


@lru_cache(maxsize=2**16)
def work_of(cost: Cost, moves: tuple[Transfer, ...]) -> Work:
    """The Work of these."""
    return Work(cost, moves)


Iteration: TypeAlias = tuple[Work, ...]  # by number of the phase
Stretch: TypeAlias = tuple[int, Iteration]  # so many alike iterations


@dataclass(frozen=True, slots=True)
class Visit:
    """One run through a segment, by its number: all iterations of a loop, or straight code once."""

    part: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Consecutive alike iterations of a loop that has loops inside."""

    times: int
    body: Shape


Shape: TypeAlias = tuple["Visit | Repeat", ...]  # what a block does, in order


def visits(shape: Shape, times: int = 1) -> Iterator[tuple[int, Visit]]:
    """The visits of a shape with how often each is made."""
    for item in shape:
        if isinstance(item, Visit):
            yield times, item
        else:
            yield from visits(item.body, times * item.times)


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one block: ps by unit, bytes by (tensor, direction)."""

    busy: Mapping[str, int]
    moved: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Makes the shapes of blocks: `iteration` says what each phase of a segment does with indices."""

    iteration: Callable[[Segment, Mapping[str, int]], Iteration]

    def of(self, parts: Sequence[Segment], cells: Cells, count: int, depth: int = 0) -> list[Shape]:
        """What `count` blocks do in `parts`, which are in the same `depth` loops."""
        columns: list[list[Shape]] = []
        for loop, inside in nests(parts, depth):
            if loop is not None:
                columns.append(self._repeats(loop, inside, cells, count, depth))
            elif inside[0].loop is not None:
                columns.append(self._visits(inside[0], inside[0].loop, cells, count))
            else:
                once = self._iterations(inside[0], cells, count)
                columns.append([(Visit(inside[0].number, ((1, work),)),) for work in once])
        return [tuple(item for items in row for item in items) for row in zip(*columns, strict=True)]

    def _repeats(self, loop: Loop, inside: Sequence[Segment], cells: Cells, count: int, depth: int) -> list[Shape]:
        """The iterations of a loop with loops inside, alike consecutive ones as one item."""
        lows, highs = (_column(at(end, cells), count).tolist() for end in (loop.lo, loop.hi))
        first = []
        for n, (lo, hi) in enumerate(zip(lows, highs, strict=True)):
            env = {name: int(values[n]) for name, values in cells.items()}
            first.append([*_changes(loop, inside, env, lo, hi), hi])
        each = [len(starts) - 1 for starts in first]
        starts = np.array([u for own in first for u in own[:-1]], np.int64)
        within = {name: np.repeat(values, each) for name, values in cells.items()} | {loop.index: starts}
        bodies = iter(self.of(inside, within, len(starts), depth + 1) if len(starts) else [])
        out: list[Shape] = []
        for own in first:
            runs = groupby([(end - u, next(bodies)) for u, end in pairwise(own)], lambda run: run[1])
            out.append(tuple(Repeat(sum(times for times, _ in alike), body) for body, alike in runs))
        return out

    def _visits(self, part: Segment, loop: Loop, cells: Cells, count: int) -> list[Shape]:
        """All iterations of a loop without loops inside, cut where a node may do something else than before."""
        lo, hi = (_column(at(end, cells), count) for end in (loop.lo, loop.hi))
        columns = [lo, *(cut for node in leaves(part) for cut in _cuts(node, loop, cells, lo, hi)), np.maximum(lo, hi)]
        ends = np.sort(np.clip(np.stack(columns, 1), lo[:, None], np.maximum(lo, hi)[:, None]), axis=1)
        trips = np.diff(ends, axis=1)
        row, column = np.nonzero(trips)
        within = {name: values[row] for name, values in cells.items()} | {loop.index: ends[row, column]}
        works = self._iterations(part, within, len(row))
        runs: list[list[Stretch]] = [[] for _ in range(count)]
        for n, times, work in zip(row.tolist(), trips[row, column].tolist(), works, strict=True):
            runs[n].append((times, work))
        return [(Visit(part.number, tuple(own)),) for own in runs]

    def _iterations(self, part: Segment, cells: Cells, count: int) -> list[Iteration]:
        """What the phases of a segment do in each of `count` cells."""
        if not count:
            return []
        labels, first = [0] * count, [0]
        varying: list[Ints] = []
        if count > 1:
            told = (np.where(_runs(node, cells), _bytes(node, cells), -1) for node in leaves(part))
            varying = [column for column in told if column.ndim]
        if varying:
            _, where, inverse = np.unique(np.stack(varying, 1), axis=0, return_index=True, return_inverse=True)
            labels, first = inverse.reshape(-1).tolist(), where.tolist()
        works = [self.iteration(part, {name: int(values[n]) for name, values in cells.items()}) for n in first]
        return [works[label] for label in labels]


def leaves(part: Segment) -> list[Leaf]:
    """The nodes of a segment."""
    return [node for phase in part.phases for node in phase.nodes]


def active(phase_nodes: Sequence[Leaf], env: Mapping[str, int]) -> tuple[tuple[Leaf, int], ...]:
    """The nodes that run with the indices `env`, each with the bytes that it asks for."""
    return tuple((node, int(_bytes(node, env))) for node in phase_nodes if _runs(node, env))


def _column(values: Any, count: int) -> Ints:
    return np.broadcast_to(np.asarray(values, np.int64), (count,))


def _runs(node: Leaf, cells: Cells) -> Any:
    """Whether a node's guard lets it run."""
    if node.when is None:
        return True
    value = cells[node.when.index]
    return (at(node.when.lo, cells) <= value) & (value < at(node.when.hi, cells))


def _bytes(node: Leaf, cells: Cells) -> Any:
    """What a load or store asks for, where it is in its tensor."""
    if isinstance(node, Compute):
        return 0
    count = dtype(node.view.tensor.dtype).bytes
    for axis, limit in zip(node.view.index, node.view.tensor.shape, strict=True):
        if isinstance(axis, Span):
            count = count * extent(axis.start, axis.size, limit, cells)
    return count


def _changes(loop: Loop, inside: Sequence[Segment], env: Mapping[str, int], lo: int, hi: int) -> list[int]:
    """Iterations of lo .. hi - 1 from which on what is inside a loop with loops may do something else than before."""
    if lo >= hi:
        return []
    tied = set(ties(inside, {loop.index: (lo, hi - 1)} | {name: (value, value) for name, value in env.items()}))
    cells = {**env, loop.index: np.arange(lo, hi)}
    changed = np.zeros(hi - lo, bool)
    changed[0] = True
    for e in tied:
        values = np.broadcast_to(np.asarray(value_of(e, cells)), changed.shape)
        changed[1:] |= values[1:] != values[:-1]
    return [lo + int(n) for n in np.flatnonzero(changed)]


def _cuts(node: Leaf, loop: Loop, cells: Cells, lo: Ints, hi: Ints) -> Iterator[Ints]:
    """Iterations of lo .. hi - 1 from which on a node may do something else than before, those beyond aside."""
    if node.when is not None:
        ends = [at(node.when.lo, cells), at(node.when.hi, cells)]
        if any(loop.index in indices(end) for end in (node.when.lo, node.when.hi)):
            yield from _each(lo, hi)
        elif node.when.index == loop.index:
            yield from (_column(end, len(lo)) for end in ends)
    if isinstance(node, Compute):
        return
    for axis, limit in zip(node.view.index, node.view.tensor.shape, strict=True):
        if not isinstance(axis, Span) or loop.index not in indices(axis.start):
            continue
        form = affine(axis.start)
        if form is None:
            yield from _each(lo, hi)
        elif step := form[1].get(loop.index):
            # The span lies inside while 0 <= start <= limit - size; beyond, each iteration is looked at.
            start = form[0] + sum(factor * cells[name] for name, factor in form[1].items() if name != loop.index)
            room = limit - axis.size
            first, last = (0, room) if step > 0 else (room, 0)
            begin, end = (_column(e, len(lo)) for e in (-(-(first - start) // step), (last - start) // step + 1))
            yield from _each(lo, np.minimum(begin, hi) + 1)
            yield from _each(np.maximum(end, lo), hi)


def _each(lo: Ints, hi: Ints) -> Iterator[Ints]:
    """lo, lo + 1 and so on up to hi - 1, as far as any cell needs it."""
    return (np.minimum(lo + n, np.maximum(lo, hi)) for n in range(max(0, int((hi - lo).max()))))


def ties(parts: Sequence[Segment], limits: Mapping[str, tuple[int, int]]) -> Iterator[Any]:
    """Expressions whose values, with other indices at 0, tell what segments do with indices that have these limits."""
    for part in parts:
        reach = dict(limits)
        for loop in part.loops:
            if loop.index not in limits:
                yield from (e for end in (loop.lo, loop.hi) for e in _tie(end, limits))
                reach[loop.index] = bounds(loop.lo, reach)[0], bounds(loop.hi, reach)[1] - 1
        for node in leaves(part):
            if node.when is not None:
                for e in (node.when.lo, node.when.hi, Index(node.when.index)):
                    yield from _tie(e, limits)
            if not isinstance(node, Compute):
                yield from _ragged(node, limits, reach)


def _tie(e: Ex, grid: Mapping[str, Any]) -> list[Ex]:
    """Expressions whose values, with loop indices at 0, tell what `e` is in a block."""
    if affine(e) is not None or indices(e) <= grid.keys():
        return [e]
    return [Index(name) for name in sorted(indices(e) & grid.keys())]


def _ragged(node: Load | Store, grid: Mapping[str, Any], reach: Mapping[str, tuple[int, int]]) -> Iterator[Extent | Ex]:
    """What tells blocks apart in how much of the node's spans lies inside the tensor; nothing where all of it does."""
    for axis, limit in zip(node.view.index, node.view.tensor.shape, strict=True):
        if isinstance(axis, Span):
            first, last = bounds(axis.start, reach)
            if first < 0 or last + axis.size > limit:
                yield Extent(axis, limit) if indices(axis.start) <= grid.keys() else axis.start


@dataclass(frozen=True, slots=True)
class Extent:
    axis: Span
    limit: int


def value_of(e: Any, cells: Mapping[str, Any]) -> Any:
    """An expression over the cells, other indices at 0; of a span, how many of its elements lie inside."""
    names = indices(e.axis.start if isinstance(e, Extent) else e) - cells.keys()
    env = {**cells, **dict.fromkeys(names, 0)}
    return extent(e.axis.start, e.axis.size, e.limit, env) if isinstance(e, Extent) else at(e, env)
