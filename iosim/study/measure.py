"""Attention calls to be timed on a user's GPU, and the CSV file that `iosim validate` reads.

The calls are those of the shipped measurements (iosim/data/h200_attention.csv), all or some of its sections, or those
that a file of shapes lists.  A `Caller` times one; `iosim.gpu.calls.AttentionCalls` does, and tests pass another.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Protocol

from iosim.errors import InputError, IosimError, nearest
from iosim.problem import Attention
from iosim.study.validate import names, readers
from iosim.study.validate.table import Record, records

IMPLEMENTATIONS = ("flash2", "cudnn", "efficient", "standard")
COLUMNS = ("section", "impl", "pass", "dtype", "batch", "heads", "kv_heads", "n_q", "n_k", "d", "causal", "ms",
           "ms_p20", "ms_p80", "peak_extra_bytes", "causal_align")  # fmt: skip
WORDS = {"forward": "fwd", "backward": "bwd", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call of an implementation; whichever way its causal mask is aligned is seen when it ran."""

    section: str
    implementation: str
    direction: str
    problem: Attention

    def __str__(self) -> str:
        a = self.problem
        keys = "" if a.n_k == a.n_q else f", {a.n_k} keys"
        mask = ", causal" if a.causal else ""
        return f"{self.implementation} {self.direction} {a.batch} x {a.heads} heads, N {a.n_q}{keys}, d {a.d}{mask}"


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of many runs of a call, what it held at its peak, and the causal alignment that it computed."""

    ms: float
    ms_p20: float
    ms_p80: float
    peak_extra_bytes: int
    causal_align: str = ""


class CallError(IosimError):
    """An implementation can't run a call, or computed something else."""


class Caller(Protocol):
    """Times attention calls."""

    def time(self, call: Call) -> Timed:
        """Run and check one; raises CallError with the reason."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls with their times, and the reason why others have none."""

    timed: tuple[tuple[Call, Timed], ...]
    failed: tuple[tuple[Call, str], ...]


def planned(sections: Sequence[str] = ()) -> tuple[Call, ...]:
    """The calls of the shipped measurements; of these sections, or of all.  Raises InputError for an unknown one."""
    with as_file(files("iosim").joinpath("data/h200_attention.csv")) as path:
        calls = tuple(_calls(records(path)))
    known = list(dict.fromkeys(c.section for c in calls))
    for section in sections:
        if section not in known:
            raise InputError(f"--sections: {section!r} is not one of {', '.join(known)}{nearest(section, known)}")
    return tuple(c for c in calls if not sections or c.section in sections)


def planned_from(path: Path) -> tuple[Call, ...]:
    """The calls that a CSV file lists: n_q and d, and any other of the columns of `COLUMNS`.

    Without `impl` each line stands for all implementations, without `pass` for a forward.  Times in it are read past.
    """
    return tuple(_calls(records(path)))


def _calls(lines: Sequence[Record]) -> Iterator[Call]:
    for record in lines:
        for column in ("d_v", "window"):
            if record.has(column):
                raise record.error(column, "can't be measured: the file written has no such column")
        direction = readers.direction(record) if record.has("direction") else "forward"
        if direction not in ("forward", "backward"):
            raise record.error("direction", f"{record.text('direction')!r} can't be measured; fwd and bwd can")
        problem = readers.shape(record)
        if problem.dtype not in WORDS:
            raise record.error("dtype", f"{problem.dtype} can't be measured; float16, bfloat16 and float32 can")
        for implementation in _implementations(record):
            yield Call(record.cells.get("section") or "shapes", implementation, direction, problem)


def _implementations(record: Record) -> tuple[str, ...]:
    if not record.has("implementation"):
        return IMPLEMENTATIONS
    name = names.implementation(record.text("implementation"))
    if name not in IMPLEMENTATIONS:
        allowed = f"{', '.join(IMPLEMENTATIONS)}{nearest(name, IMPLEMENTATIONS)}"
        raise record.error("implementation", f"{name!r} can't be measured; these can: {allowed}")
    return (name,)


def measure(calls: Sequence[Call], caller: Caller, note: Callable[[str], object] = lambda _: None) -> Measured:
    """Time all calls, one after the other; one that fails is left out, with the reason."""
    timed, failed = [], []
    for number, call in enumerate(calls, start=1):
        note(f"{number} of {len(calls)}: {call}")
        try:
            timed.append((call, caller.time(call)))
        except CallError as error:
            failed.append((call, str(error)))
    return Measured(tuple(timed), tuple(failed))


def as_csv(measured: Measured) -> str:
    """The calls that ran, one a line, in the columns of iosim/data/h200_attention.csv and `causal_align`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(call, timed) for call, timed in measured.timed)
    return out.getvalue()


def _row(call: Call, timed: Timed) -> dict[str, object]:
    a = call.problem
    return {
        "section": call.section,
        "impl": call.implementation,
        "pass": WORDS[call.direction],
        "dtype": WORDS[a.dtype],
        "batch": a.batch,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "n_q": a.n_q,
        "n_k": a.n_k,
        "d": a.d,
        "causal": int(a.causal),
        "ms": f"{timed.ms:.5f}",
        "ms_p20": f"{timed.ms_p20:.5f}",
        "ms_p80": f"{timed.ms_p80:.5f}",
        "peak_extra_bytes": timed.peak_extra_bytes,
        "causal_align": timed.causal_align,
    }


def summary(measured: Measured) -> str:
    """How many calls were timed, and a line for each that was not."""
    lines = [f"{len(measured.timed)} calls measured, {len(measured.failed)} left out"]
    lines += [f"  {call}: {reason}" for call, reason in measured.failed]
    return "\n".join(lines) + "\n"
