"""Predictions held against measurements: read files, predict every row, score families of them.

    from iosim.study.validate import validate
    print(validate(["mine.csv"], hardware="h200-sxm"))

Without files it takes the measurements that ship with iosim.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import as_file, files
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware
from iosim.study.validate.goals import Verdict, judge
from iosim.study.validate.names import VARIANTS
from iosim.study.validate.readers import read
from iosim.study.validate.rows import Row
from iosim.study.validate.score import Family, Score, families, score
from iosim.study.validate.table import Record

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = ("h200_attention.csv", "h200_counters.csv", "h200_triton_tiles.csv", "published_attention.csv")
MANY = 48  # rows from which on other processes are worth their start
CHUNK = 6  # consecutive rows for a process: the kernels of a call share a prediction
ASSUMED = "h200-sxm"  # the machine of a file that names none


@dataclass(frozen=True, repr=False)
class Validation:
    """Every measured number with its prediction.  `assumed` are files that name no machine: `ASSUMED` was taken."""

    scores: tuple[Score, ...]
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What `iosim validate` prints."""
        from iosim.report.validation import render

        return render(self)

    def __repr__(self) -> str:
        return f"<Validation of {len(self.scores)} numbers in {len(self.families)} families>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.notebook import printed
        from iosim.report.validation import render

        return printed(render(self))

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """Scored numbers by quantity, machine, kind, kernel, pass and head dimension."""
        return tuple(families(self.scores))

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The goals, each with what was reached."""
        return tuple(judge(self.scores))

    def apart(self, status: str) -> Counter[tuple[str, str]]:
        """How many numbers of a status other than "scored" there are, by implementation and quantity."""
        return Counter((s.row.implementation, s.quantity.words) for s in self.scores if s.status == status)

    def to_frame(self) -> pd.DataFrame:
        """One row a measured number."""
        import pandas as pd

        from iosim.report.validation import score_row

        return pd.DataFrame([score_row(s) for s in self.scores])


def validate(
    paths: Sequence[str | Path] = (), *, hardware: str | Hardware | None = None, shapes: Sequence[Record] = ()
) -> Validation:
    """Predict and score every row of the files, or of the measurements that ship with iosim when none are given.

    `hardware` is the machine of every row; without it, the one that a row's device or a file's name means.
    `shapes` are for Nsight Compute's files (iosim/study/validate/nsight.py).

    Raises InputError for a file that is not as it should be, with file, line and column.
    """
    from iosim.study.validate.nsight import is_nsight

    if shapes and not any(map(is_nsight, map(Path, paths))):
        raise InputError(f"{shapes[0].file}: changes nothing: only Nsight Compute's files lack their shapes")
    real = [Path(path).resolve() for path in paths]
    if twice := next((path for path, at in zip(paths, real, strict=True) if real.count(at) > 1), None):
        raise InputError(f"{twice}: is given twice")
    rows = [row for path in map(Path, paths) for row in read(path, shapes)] if paths else list(shipped_rows())
    given = load_hardware(hardware) if isinstance(hardware, str) else hardware
    assumed = () if given else tuple(dict.fromkeys(r.file for r in rows if not r.machine and not r.device))
    if given is None:
        rows = [replace(r, machine=ASSUMED) if not r.machine and not r.device else r for r in rows]
    else:
        rows = [replace(r, machine=given.name) for r in rows]
    machines = {name: given or _machine(name) for name in {r.machine for r in rows}}
    return Validation(tuple(s for own in _scores(rows, machines) for s in own), assumed)


def _scores(rows: Sequence[Row], machines: Mapping[str, Hardware | None]) -> list[tuple[Score, ...]]:
    """The scores of every row, in their order; many rows are shared out over all cores."""
    workers = os.cpu_count() or 1
    jobs = [(row, machines[row.machine]) for row in rows]
    if len(rows) < MANY or workers == 1:
        return [score(row, machine) for row, machine in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_score, jobs, chunksize=CHUNK))


def _score(job: tuple[Row, Hardware | None]) -> tuple[Score, ...]:
    return score(*job)


def _machine(name: str) -> Hardware | None:
    """A profile, or one with the few numbers in which a machine differs from it; None for "", which nobody knows."""
    profile, numbers = VARIANTS.get(name, (name, {}))
    machine = load_hardware(profile) if profile else None
    for number, value in numbers.items():
        machine = machine and machine.with_value(number, value)
    return machine


def shipped_rows() -> tuple[Row, ...]:
    """The measurements in iosim/data."""
    rows: list[Row] = []
    for name in SHIPPED:
        with as_file(files("iosim").joinpath("data", name)) as path:
            rows += read(path)
    return tuple(rows)
