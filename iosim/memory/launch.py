"""In which order a program's blocks ask for tiles: what a cache sees, step by step.

The blocks of a kernel start in launch order, the last grid axis fastest, each in the first slot that is free; a slot
is a place for one resident block.  All resident blocks walk their loops together: one iteration of an innermost loop
is one step, and what stands outside the loops goes with the step that follows.  Requests for one tile that come in
one step from one partition of the chip count as one.  Slots, and so the blocks that fill them, are dealt to the
partitions in turn, those of a cluster together.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from iosim.index import at
from iosim.program import Compute, Loop

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from iosim.program import Kernel, Load, Node, Store

    Ints: TypeAlias = NDArray[np.int64]


class Requests(NamedTuple):
    """The requests of one load or store, in order of time: arrays over requests.

    `starts` has one row for each axis of the tensor: where the tile begins.  Bit n of `partitions` is set where
    partition n asks.
    """

    node: Load | Store
    step: Ints
    starts: Ints
    partitions: Ints


def requests(
    kernel: Kernel, resident: int, partitions: int, descending: Collection[str] = (), cluster: int = 1
) -> tuple[list[Requests], int]:
    """The requests of each load and store of a kernel in program order, and how many steps the kernel takes.

    The loops named in `descending` run from their last iteration to the first; `cluster` is how many blocks are one.
    """
    blocks = np.arange(kernel.blocks)
    cells = np.unravel_index(blocks, tuple(extent for _, extent in kernel.grid)) if kernel.grid else ()
    env = {axis: np.asarray(cell) for (axis, _), cell in zip(kernel.grid, cells, strict=True)}
    taken = np.maximum(1, _steps(kernel.body, env, len(blocks)))
    begin, slot = _placed(taken, max(1, min(resident, kernel.blocks)))
    found: list[Requests] = []
    _Walk(frozenset(descending), found).walk(kernel.body, env, begin, np.left_shift(1, slot // cluster % partitions))
    return [_merged(r) for r in found], int((begin + taken).max()) + 1


def _innermost(body: Sequence[Node]) -> bool:
    return not any(isinstance(node, Loop) for node in body)


def _unrolled(loop: Loop, env: Mapping[str, Ints], count: int, *, down: bool = False) -> _Iterations:
    """Every iteration of a loop of `count` instances, in the order in which they run."""
    lo = np.broadcast_to(np.asarray(at(loop.lo, env)), count)
    trips = np.maximum(0, np.broadcast_to(np.asarray(at(loop.hi, env)), count) - lo)
    who = np.repeat(np.arange(count), trips)
    which = np.arange(len(who)) - np.repeat(np.cumsum(trips) - trips, trips)
    index = lo[who] + (trips[who] - 1 - which if down else which)
    return _Iterations(who, which, {**{name: values[who] for name, values in env.items()}, loop.index: index})


class _Iterations(NamedTuple):
    """Iterations of a loop: the instance that each belongs to, its number there from 0 on, the indices in it."""

    who: Ints
    which: Ints
    env: Mapping[str, Ints]


def _steps(body: Sequence[Node], env: Mapping[str, Ints], count: int) -> Ints:
    """How many steps each of `count` instances of a body takes."""
    total = np.zeros(count, np.int64)
    for node in body:
        if isinstance(node, Loop):
            each = _unrolled(node, env, count)
            taken = None if _innermost(node.body) else _steps(node.body, each.env, len(each.who))
            total += np.bincount(each.who, taken, count).astype(np.int64)
    return total


def _placed(taken: Ints, slots: int) -> tuple[Ints, Ints]:
    """(first step, slot) of each block: the next one goes where a slot is free first."""
    if (taken == taken[0]).all():
        wave, slot = np.divmod(np.arange(len(taken)), slots)
        return wave * taken[0], slot
    free = [(0, slot) for slot in range(slots)]
    begin, where = np.empty_like(taken), np.empty_like(taken)
    for block, steps in enumerate(taken.tolist()):
        begin[block], where[block] = start, into = free[0]
        heapreplace(free, (start + steps, into))
    return begin, where


@dataclass(frozen=True)
class _Walk:
    """Collects the requests of a kernel's body in `found`."""

    descending: frozenset[str]
    found: list[Requests]

    def walk(self, body: Sequence[Node], env: Mapping[str, Ints], step: Ints, asks: Ints) -> None:
        """The requests of a body whose instances begin at `step`."""
        for node in body:
            if isinstance(node, Loop):
                step = step + self._loop(node, env, step, asks)
            elif not isinstance(node, Compute):
                self._request(node, env, step, asks)

    def _loop(self, loop: Loop, env: Mapping[str, Ints], step: Ints, asks: Ints) -> Ints:
        """The requests of a loop; how many steps it takes."""
        who, which, inner = _unrolled(loop, env, len(step), down=loop.index in self.descending)
        taken, before = None, which
        if not _innermost(loop.body):
            taken = _steps(loop.body, inner, len(who))
            so_far = np.cumsum(taken) - taken
            before = so_far - np.repeat(so_far[which == 0], np.bincount(who)[np.unique(who)])
        self.walk(loop.body, inner, step[who] + before, asks[who])
        return np.bincount(who, taken, len(step)).astype(np.int64)

    def _request(self, node: Load | Store, env: Mapping[str, Ints], step: Ints, asks: Ints) -> None:
        starts = np.stack([np.broadcast_to(np.asarray(at(s, env)), len(step)) for s in node.view.starts])
        if node.when is not None:
            index, lo, hi = env[node.when.index], at(node.when.lo, env), at(node.when.hi, env)
            runs = (lo <= index) & (index < hi)
            step, starts, asks = step[runs], starts[:, runs], asks[runs]
        self.found.append(Requests(node, step, starts, asks))


def _merged(r: Requests) -> Requests:
    """Requests for one tile in one step made one, in order of time."""
    if not len(r.step):
        return r
    order = np.lexsort((*r.starts[::-1], r.step))
    step, starts = r.step[order], r.starts[:, order]
    new = np.append(True, (np.diff(step) != 0) | (np.diff(starts, axis=1) != 0).any(axis=0))
    first = np.flatnonzero(new)
    return Requests(r.node, step[first], starts[:, first], np.bitwise_or.reduceat(r.partitions[order], first))
