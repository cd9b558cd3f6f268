"""The configurations of a store that no other beats in time, SRAM and traffic at once.

Compared are those that compute the same (problem, pass) on a machine of the same name: dataflows, schedules and changed
fields of the machine.  a beats b where it is no worse in any of the three and better in one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from iosim.errors import InputError, nearest
from iosim.study.sweep import Stored


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration: picoseconds, bytes of SRAM that a block takes, bytes read from and written to DRAM."""

    row: Stored
    time_ps: int
    sram_bytes: int
    dram_bytes: int

    @property
    def cost(self) -> tuple[int, int, int]:
        """What is to be small."""
        return self.time_ps, self.sram_bytes, self.dram_bytes


@dataclass(frozen=True, slots=True)
class Front:
    """The points of one problem on one machine; those in `best` are beaten by none, fastest first."""

    best: tuple[Point, ...]
    beaten: tuple[Point, ...]

    @property
    def row(self) -> Stored:
        """One of the rows, for what all have in common."""
        return self.best[0].row


@dataclass(frozen=True, slots=True)
class Pareto:
    """The fronts of a store, and how many of its rows have no time or have failed."""

    fronts: tuple[Front, ...]
    untimed: int
    failed: int


def pareto(rows: Iterable[Stored], hw: Sequence[str] = ()) -> Pareto:
    """The fronts, on the machines named or on all; raises InputError for a machine, or a store, without any."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    untimed = failed = 0
    every = list(rows)
    names = sorted({str(row.inputs["machine"]["name"]) for row in every})
    for name in hw:
        if name not in names:
            raise InputError(f"hw: {name!r} is in no row; there are {', '.join(names)}{nearest(name, names)}")
    for row in every:
        if hw and row.inputs["machine"]["name"] not in hw:
            continue
        if row.result is None:
            failed += 1
        elif (point := _point(row)) is None:
            untimed += 1
        else:
            problem = json.dumps(row.inputs["problem"], sort_keys=True)
            key = (row.inputs["machine"]["name"], problem, str(row.result.get("computes")),
                   str(row.inputs.get("fidelity")), str(row.inputs.get("iosim")))  # fmt: skip
            groups.setdefault(key, []).append(point)
    if not groups:
        raise InputError(f"store: none of its {len(every):,} rows has a time")
    return Pareto(tuple(map(front, groups.values())), untimed, failed)


def _point(row: Stored) -> Point | None:
    r = row.result or {}
    numbers = [r.get(name) for name in ("makespan_ps", "sram_used_bytes", "dram_read_bytes", "dram_write_bytes")]
    if not all(isinstance(n, int) for n in numbers):
        return None
    time, sram, read, written = (int(n or 0) for n in numbers)
    return Point(row, time, sram, read + written)


def front(points: Sequence[Point]) -> Front:
    """Sorted by cost, a point can only be beaten by one before it: n log n for the sort, and n times the front."""
    best: list[Point] = []
    beaten: list[Point] = []
    for point in sorted(points, key=lambda p: p.cost):
        lost = any(b.sram_bytes <= point.sram_bytes and b.dram_bytes <= point.dram_bytes and b.cost != point.cost
                   for b in best)  # fmt: skip
        (beaten if lost else best).append(point)
    return Front(tuple(best), tuple(beaten))
