"""A set-associative cache in partitions, least recently used out first: which of a stream of accesses hit.

Every unit of memory has a home partition and a set, both by an integer hash of its number.  What another partition
reads is kept there too, as a replica, so that it takes room twice; writes and reductions go to the home alone.  A
replica that is overwritten stays as it is: it is not read again before it would have to be.

The sets are independent of each other (a replica has its unit's set), so that the n-th accesses of all sets are
worked out at one time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from iosim.memory.closed_form import WAYS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]
    Tags: TypeAlias = NDArray[Any]  # short whole numbers where they do
    Bools: TypeAlias = NDArray[np.bool_]


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


def sorted_by(keys: Ints) -> NDArray[np.intp]:
    """The stable order of keys that are not negative; numpy's radix sort, which is for short integers, where it can."""
    short = len(keys) and keys.max() < 2**16
    return np.argsort(keys.astype(np.uint16) if short else keys, kind="stable")


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache with room for `slots` units in each of its partitions."""

    partitions: int
    slots: int

    @property
    def ways(self) -> int:
        return min(WAYS, self.slots)

    @property
    def sets(self) -> int:
        """Of one partition."""
        return self.slots // self.ways if self.slots else 0

    def run(self, units: Ints, asks: Ints) -> Outcome:
        """The outcome of accesses to `units`, in order, when the cache is empty at the beginning.

        `asks` has bit n set where partition n reads, and is 0 for a write or a reduction.
        """
        missed, reached = np.ones((2, len(units)), bool)
        if not self.slots:
            return Outcome(missed, reached)
        mixed = hashed(units)
        home = (mixed >> np.uint64(40)).astype(np.int64) % self.partitions
        of_set = (mixed % np.uint64(self.sets)).astype(np.int64)
        order, ends = _rounds(of_set, self.sets)
        short = np.int32 if units.max(initial=0) < 2**31 - 1 else np.int64  # half of what has to be moved
        tags: Tags = (units + 1).astype(short)[order]
        sets, homes, asked = (x[order] for x in (of_set, home, asks))
        held = np.zeros((self.ways, self.partitions * self.sets), short)
        first = 0
        for end in ends.tolist():
            part = slice(first, end)
            miss, come = self._round(held, tags[part], sets[part], homes[part], asked[part])
            missed[order[part]], reached[order[part]] = miss, come
            first = end
        return Outcome(missed, reached)

    def _round(self, held: Tags, tag: Tags, of_set: Ints, home: Ints, asks: Ints) -> tuple[Bools, Bools]:
        """(missed, reached) of accesses that are each to another set; `held` are the units in the cache."""
        come = (asks == 0) | ((asks >> home) & 1 == 1)
        for away in range(1, self.partitions):
            there = (home + away) % self.partitions
            reads = np.flatnonzero((asks >> there) & 1)
            come[reads] |= ~_touch(held, there[reads] * self.sets + of_set[reads], tag[reads])
        at = np.flatnonzero(come)
        miss = np.zeros(len(tag), bool)
        miss[at] = ~_touch(held, home[at] * self.sets + of_set[at], tag[at])
        return miss, come


def _rounds(of_set: Ints, sets: int) -> tuple[Ints, Ints]:
    """(order, ends): the accesses in rounds, of which the n-th holds the n-th access of every set; where each ends."""
    by_set = sorted_by(of_set)
    counts = np.bincount(of_set, minlength=sets)
    turn = np.empty(len(of_set), np.int64)
    turn[by_set] = np.arange(len(of_set)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sorted_by(turn), np.cumsum(np.bincount(turn))


def _touch(held: Tags, rows: Ints, tags: Tags) -> Bools:
    """Look `tags` up in the sets `rows`, all of them different, and put each in front; whether it was there.

    `held` is (ways, sets), the most recent way first.
    """
    old = held.take(rows, axis=1)
    found = np.logical_or.accumulate(old == tags, axis=0)
    new = np.empty_like(old)
    new[0], new[1:] = tags, old[:-1]
    np.copyto(new[1:], old[1:], where=found[:-1])
    held[:, rows] = new
    there: Bools = found[-1]
    return there
