"""A set-associative cache in partitions, least recently used out first: which of a stream of accesses hit.

Every unit of memory has a home partition and a set, both by an integer hash of its number.  What another partition
reads is kept there too, as a replica, so that it takes room twice; writes and reductions go to the home alone.  A
replica that is overwritten stays as it is: it is not read again before it would have to be.

The sets are independent of each other (a replica has its unit's set), so that the n-th accesses of all sets are
worked out at one time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]
    Bools: TypeAlias = NDArray[np.bool_]

WAYS = 16  # an assumption: 8 to 32 differ by 1 to 2 MB on the H200 kernels that were measured


class Outcome(NamedTuple):
    """What became of each access, in the order given.

    `missed`: its home had to fetch the unit, or to make room for one that is written.  `reached`: it came to the home,
    and was not answered by a replica.
    """

    missed: Bools
    reached: Bools


def hashed(numbers: Ints) -> NDArray[np.uint64]:
    """Numbers scrambled by the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def simulate(units: Ints, asks: Ints, partitions: int, slots: int, distinct: int) -> Outcome:
    """The outcome of accesses to `units` in order, in an empty cache with room for `slots` units in each partition.

    `asks` has bit n set where partition n reads, and is 0 for a write or a reduction.  There are `distinct` units.
    """
    if slots == 0:
        everything = np.ones(len(units), bool)
        return Outcome(everything, everything)
    ways = min(WAYS, slots)
    sets = max(1, min(slots // ways, distinct))
    mixed = hashed(units)
    home = (mixed >> np.uint64(40)).astype(np.int64) % partitions
    of_set = (mixed % np.uint64(sets)).astype(np.int64)
    order, ends = _rounds(of_set, sets)
    tags, rows, homes, asked = (x[order] for x in (units + 1, of_set, home, asks))
    cache = np.zeros((ways, partitions * sets), np.int64)
    missed, reached = np.empty(len(units), bool), np.empty(len(units), bool)
    first = 0
    for end in ends.tolist():
        part = slice(first, end)
        tag, row, at_home, by = tags[part], rows[part], homes[part], asked[part]
        to_home = (by == 0) | ((by >> at_home) & 1 == 1)
        for away in range(1, partitions):
            there = (at_home + away) % partitions
            reads = np.flatnonzero((by >> there) & 1)
            if len(reads):
                to_home[reads] |= ~_touch(cache, there[reads] * sets + row[reads], tag[reads])
        come = np.flatnonzero(to_home)
        miss = np.zeros(end - first, bool)
        miss[come] = ~_touch(cache, at_home[come] * sets + row[come], tag[come])
        missed[order[part]], reached[order[part]] = miss, to_home
        first = end
    return Outcome(missed, reached)


def _rounds(of_set: Ints, sets: int) -> tuple[Ints, Ints]:
    """(order, ends): the accesses so that the first ones of all sets come first, then the second ones; where each ends."""
    by_set = np.argsort(of_set, kind="stable")
    counts = np.bincount(of_set, minlength=sets)
    turn = np.empty(len(of_set), np.int64)
    turn[by_set] = np.arange(len(of_set)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn))


def _touch(cache: Ints, rows: Ints, tags: Ints) -> Bools:
    """Look `tags` up in the sets `rows`, all of them different, and put each in front; whether it was there.

    `cache` is (ways, sets), the most recent way first.
    """
    old = cache.take(rows, axis=1)
    found = np.logical_or.accumulate(old == tags, axis=0)
    new = np.empty_like(old)
    new[0], new[1:] = tags, old[:-1]
    np.copyto(new[1:], old[1:], where=found[:-1])
    cache[:, rows] = new
    there: Bools = found[-1]
    return there
