"""A program's requests run through a set-associative cache: what each of its flows reads from and writes to DRAM."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from iosim.memory.closed_form import WAYS, tile_bytes
from iosim.memory.launch import Requests, requests
from iosim.memory.lru import Cache, sorted_by
from iosim.memory.units import LARGEST, LINE, Units, cut
from iosim.program import Store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from iosim.interpreters.ledger import Ledger
    from iosim.program import Program

    Ints: TypeAlias = NDArray[np.int64]

MOST_TILES = 2_000_000  # requests for tiles, and blocks, that are put in order: about 0.5 us each
MOST_ACCESSES = 3_000_000  # accesses to units that are looked up: about 0.2 us each
FEW_ACCESSES = 500_000  # units are made smaller, so that they spread more evenly over the sets, up to so many
LARGE_SHARE = 10  # a tensor matters that holds one part in so many of all bytes
SETS = 64  # that a partition has at least, where its capacity allows for units of a line


def simulated(
    program: Program,
    ledger: Ledger,
    capacity: int,
    partitions: int,
    resident: Mapping[str, int],
    descending: Collection[str] = (),
    *,
    clusters: Mapping[str, int] | None = None,
    bounded: bool = True,
) -> list[tuple[int, int]] | None:
    """(read, written) DRAM bytes of each flow of `ledger` behind a cache of `capacity` bytes, empty at the beginning.

    The loops named in `descending` run from their last iteration to the first; `clusters` has, by kernel, how many
    blocks are one cluster.
    None where `bounded`, and it would be more work than the budget: that is counted before it is done.
    """
    tiles = sum(-(-f.hbm_bytes // tile_bytes(f)) for f in ledger.flows) + sum(k.blocks for k in program.kernels)
    if bounded and tiles > MOST_TILES:
        return None
    asked: list[Requests] = []
    now = 0
    for kernel in program.kernels:
        own, steps = requests(
            kernel, resident[kernel.name], partitions, descending, (clusters or {}).get(kernel.name, 1)
        )
        asked += [r._replace(step=r.step + now) for r in own]
        now += steps
    units, count = _cut(program, asked, capacity // partitions)
    if bounded and count > MOST_ACCESSES:
        return None
    number = sum(u.count for u in units.values())
    slot = -(-sum(t.bytes for t in program.tensors) // number)
    cache = Cache(partitions, min(capacity // partitions // slot, WAYS * number))
    return _moved(_accesses(asked, units), len(ledger.flows), cache)


def _cut(program: Program, asked: Sequence[Requests], capacity: int) -> tuple[dict[str, Units], int]:
    """The units of each tensor and about how many accesses they make of the requests.

    The smallest that make few accesses, or else the largest: within what gives a partition of `capacity` enough sets,
    and as one for all tensors that matter, as a cache has room for so many units of their mean size.
    """
    whole = sum(t.bytes for t in program.tensors)
    matter = [u.bytes for u in cut(program, LARGEST).values() if LARGE_SHARE * u.tensor.bytes >= whole]
    most = min(*matter, LARGEST, capacity // (WAYS * SETS))
    size = LINE
    while True:
        units = cut(program, size)
        count = sum(len(r.step) * prod(units[r.node.view.tensor.name].in_tile(r.node.view)) for r in asked)
        if count <= FEW_ACCESSES or 2 * size > most:
            return units, count
        size *= 2


class _Accesses(NamedTuple):
    """Accesses to units in order of time: arrays over accesses.  `asks` is 0 for a write or a reduction."""

    unit: Ints
    bytes: Ints
    asks: Ints
    flow: NDArray[np.int32]
    fetches: NDArray[np.bool_]  # where what is missed has to be read
    dirties: NDArray[np.bool_]


def _accesses(asked: Sequence[Requests], units: Mapping[str, Units]) -> _Accesses:
    parts: list[tuple[NDArray[Any], ...]] = []
    stores = np.array([isinstance(r.node, Store) for r in asked], bool)
    fetches = np.array([not isinstance(r.node, Store) or r.node.add for r in asked], bool)
    for number, r in enumerate(asked):
        request, unit, size = units[r.node.view.tensor.name].accesses(r)
        asks = np.zeros_like(request) if stores[number] else r.partitions[request]
        parts.append((r.step[request], unit, size, asks, np.full(len(request), number, np.int32)))
    step, *rest = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = sorted_by(step)
    unit, size, asks, flow = (column[order] for column in rest)
    return _Accesses(unit, size, asks, flow, fetches[flow], stores[flow])


def _moved(a: _Accesses, flows: int, cache: Cache) -> list[tuple[int, int]]:
    """(read, written) by flow: each unit that is missed is read, and each that was made dirty is written once."""
    missed, reached = cache.run(a.unit, a.asks)
    read = np.bincount(a.flow, a.bytes * (missed & reached & a.fetches), flows)
    # A unit stays from one miss to the next; the first access that makes it dirty in that time is what is written.
    there = np.flatnonzero(reached)
    by_unit = there[sorted_by(a.unit[there])]
    stay = np.cumsum(missed[by_unit])
    dirty = a.dirties[by_unit]
    first = np.unique(stay[dirty], return_index=True)[1]
    written_at = by_unit[dirty][first]
    written = np.bincount(a.flow[written_at], a.bytes[written_at], flows)
    return [(int(r), int(w)) for r, w in zip(read, written, strict=True)]
