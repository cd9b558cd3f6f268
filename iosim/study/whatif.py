"""What a dataflow on a machine would do if some of its fields, or the problem's or the machine's, were others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from iosim.errors import InputError
from iosim.study.outcome import Outcome, attempts
from iosim.study.run import Note
from iosim.study.vary import HW, TILE, Axis, Case, Value, kept, moved, problem_kinds, variants, varied


@dataclass(frozen=True, slots=True)
class Row:
    """One combination of values; `outcome` is None where it cannot run, and `refused` says why."""

    values: Mapping[str, Value] = field(hash=False)
    outcome: Outcome | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Rows in the order of the values.

    `case` is what all have in common, with `sets` in it; `kept` are fields of the plain run's schedule that all rows
    have, and `moved` fields of the profile that change with those varied.
    """

    case: Case
    axes: tuple[Axis, ...]
    sets: tuple[Axis, ...]
    rows: tuple[Row, ...]
    kept: Mapping[str, Value] = field(hash=False)
    moved: tuple[str, ...] = ()

    @property
    def base(self) -> Row:
        """What the others are compared with: the first row that runs."""
        return next(row for row in self.rows if row.outcome is not None)

    @property
    def fastest(self) -> Row | None:
        """The first of the rows with the least time; None where the profile lacks what time needs."""
        timed = [row for row in self.rows if row.outcome is not None and row.outcome.makespan_ps is not None]
        return min(timed, key=lambda row: (row.outcome and row.outcome.makespan_ps) or 0, default=None)

    def ratio(self, row: Row) -> float | None:
        """Time over that of the base."""
        of, base = row.outcome, self.base.outcome
        if of is None or base is None or of.makespan_ps is None or not base.makespan_ps:
            return None
        return of.makespan_ps / base.makespan_ps


def whatif(
    case: Case,
    axes: Sequence[Axis],
    sets: Sequence[Axis] = (),
    *,
    keep: bool = True,
    energy: bool = False,
    note: Note = lambda _: None,
) -> WhatIf:
    """Run every combination of the values of `axes`, with the one value of each of `sets` in all.

    `keep` as in `variants`; with `energy` each row has its joules.  Raises InputError where no row can run, with the
    reason of the first.
    """
    if not axes:
        raise InputError("vary: give at least one field with its values, like stages=1,2,3")
    names = [a.name for a in (*axes, *sets)]
    if twice := next((a.name for a in sets if names.count(a.name) > 1 or a.name in case.given), None):
        raise InputError(f"set: {twice}: is given twice")
    case = varied(case, {a.name: a.values[0] for a in sets})
    found = variants(case, axes, keep=keep)
    done = iter(attempts([(v.case, None) for v in found if v.case is not None], note, energy=energy))
    rows = []
    for v in found:
        of = v.refused if v.case is None else next(done)
        rows.append(Row(v.values, None, of) if isinstance(of, str) else Row(v.values, of))
    if all(row.outcome is None for row in rows):
        why = rows[0].refused
        raise InputError(f"vary: {why}" if why.partition(":")[0] in rows[0].values else why)
    fixed = keep and not any(a.name in problem_kinds() for a in axes)
    along = [
        name for a in (*axes, *sets) if a.name.startswith(HW) for name in moved(case.machine, a.name[len(HW) :], 1)
    ]
    named = {a.name for a in axes}
    shared = {n: v for n, v in kept(case, named).items() if n in TILE and n not in case.given} if fixed else {}
    return WhatIf(case, tuple(axes), tuple(sets), tuple(rows), shared, tuple(dict.fromkeys(along)))
