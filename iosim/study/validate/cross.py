"""Cross-validation of the fitted constants: each fitted again without a part of its rows, and judged on that part.

One constant moves at a time, within half and one and a half times its standing value; the others stand.  Times are
simulated at `NODES` values and taken to be linear between them, so that every fold shares the same simulations.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from multiprocessing import get_context
from typing import Literal, TypeAlias

from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware
from iosim.kernels import load_kernel
from iosim.memory.triton import LAW, registers
from iosim.problem import Attention
from iosim.study.validate import metrics
from iosim.study.validate.rows import Row
from iosim.study.validate.score import host_floors

MACHINE = "h200-sxm"  # the rows of the other machines are nobody's fit
LOW, HIGH = 0.5, 1.5  # of the standing value: how far a constant may move
NODES = (0.5, 1.0, 1.5)  # of it, where times are simulated
TRIES = 81  # values tried between the ends
LEAST = 3  # rows of a fold; smaller ones say little
Source: TypeAlias = Literal["kernel", "machine", "law"]
Curve: TypeAlias = Callable[[float], float]  # of a constant's value: percentage error of one row


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant: where it stands, and which rows tell it.

    `owner` is the kernel whose file has `field`, MACHINE for a number of the profile, "" for the law of registers.
    `by` are what folds are made by.
    """

    name: str
    source: Source
    owner: str
    field: str
    rows: Callable[[Row], bool]
    by: tuple[str, ...] = ("d", "n")
    most: float = float("inf")

    def standing(self, machine: Hardware) -> float:
        """Its value now."""
        if self.source == "kernel":
            return load_kernel(self.owner).value(self.field)
        return float(getattr(LAW, self.field)) if self.source == "law" else _PROFILE[self.field](machine)


_PROFILE: Mapping[str, Callable[[Hardware], float]] = {
    "matrix.switch_cycles": lambda m: round(m.matrix.switch_ps * (m.clock_hz or 0) / 1e12),
    "registers.spill_l1_bytes_per_clock": lambda m: (m.spill_bytes_per_clock or (0.0,))[0],
}


def _calls(implementation: str, *, causal: bool | None = None) -> Callable[[Row], bool]:
    def picks(r: Row) -> bool:
        own = r.kind == "calls" and r.implementation == implementation and r.direction == "forward"
        a = r.problem
        return own and a is not None and a.n_q == a.n_k and causal in (None, a.causal)

    return picks


def _product(role: str) -> Callable[[Row], bool]:
    return lambda r: r.kernel is not None and r.kernel.role == role and r.measured["time"] >= 10e-6


def _tiles(r: Row) -> bool:
    return r.tile is not None and r.tile.registers is not None


def _tile(*, spills: bool, tall: bool | None = None) -> Callable[[Row], bool]:
    def picks(r: Row) -> bool:
        t = r.tile
        return _tiles(r) and t is not None and (t.spills != 0) is spills and tall in (None, t.block_q > 16 * t.warps)

    return picks


_TILE = ("d", "block_q", "block_k", "warps")
_kernel = partial(Constant, source="kernel")
CONSTANTS: tuple[Constant, ...] = (
    *(Constant(f"triton registers: {name}", "law", "", name, _tiles, _TILE)
      for name in ("always", "depth", "live", "passing", "room", "spilled_scores", "spilled_outputs",
                   "spilled_passing", "spilled_one_stage")),
    _kernel("flash2: cycles.softmax", owner="flash2", field="settings.cycles.softmax", rows=_calls("flash2")),
    _kernel("flash2: cycles.enter", owner="flash2", field="settings.cycles.enter", rows=_calls("flash2")),
    _kernel("flash2: cycles.mask", owner="flash2", field="settings.cycles.mask", rows=_calls("flash2", causal=True)),
    _kernel("cudnn: cycles.softmax", owner="cudnn", field="settings.cycles.softmax", rows=_calls("cudnn")),
    _kernel("cudnn: cycles.mask", owner="cudnn", field="settings.cycles.mask", rows=_calls("cudnn", causal=True)),
    _kernel("triton: cycles.softmax", owner="triton", field="settings.cycles.softmax", rows=_tile(spills=False),
            by=_TILE),
    Constant("matrix.switch_cycles", "machine", MACHINE, "matrix.switch_cycles", _tile(spills=False, tall=True), _TILE),
    Constant("registers.spill_l1_bytes_per_clock", "machine", MACHINE, "registers.spill_l1_bytes_per_clock",
             _tile(spills=True), _TILE),
    _kernel("standard: softmax.code.filled", owner="standard", field="kernels.softmax.code.filled",
            rows=_calls("standard"), most=1.0),
    _kernel("standard: softmax.code.latency", owner="standard", field="kernels.softmax.code.latency",
            rows=_calls("standard")),
    _kernel("standard: scores.dram_share", owner="standard", field="kernels.scores.dram_share",
            rows=_product("matmul S"), most=1.0),
    _kernel("standard: output.dram_share", owner="standard", field="kernels.output.dram_share",
            rows=_product("matmul O"), most=1.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows left out: what they share, how many, and their mean absolute error in percent.

    `standing_pct` is with the constant as it stands, `left_out_pct` with `value`, fitted to the other rows.
    """

    left_out: str
    rows: int
    value: float
    standing_pct: float
    left_out_pct: float


@dataclass(frozen=True, slots=True)
class Crossed:
    """A constant, its error over all rows as it stands, the value that fits them best, and its folds."""

    constant: Constant
    rows: int
    standing: float
    standing_pct: float
    best: float
    best_pct: float
    folds: tuple[Fold, ...]

    @property
    def spread(self) -> tuple[float, float] | None:
        """Smallest and largest value over the folds."""
        values = [f.value for f in self.folds]
        return (min(values), max(values)) if values else None


def cross_validate(
    constants: Sequence[Constant] = CONSTANTS, rows: Sequence[Row] | None = None, note: Callable[[str], None] = print
) -> tuple[Crossed, ...]:
    """Every constant by its folds, from `rows` (default: the measurements that ship with iosim).

    Raises InputError where no row tells any constant.
    """
    from iosim.study.validate import shipped_rows

    machine = load_hardware(MACHINE)
    given = shipped_rows() if rows is None else rows
    used = [r for r in given if r.machine in ("", MACHINE) and r.problem is not None]
    used = [r for r in used if r.measured.get("time", 0) > host_floors().get(r.implementation, 0) * (r.kind == "calls")]
    chosen = {c.name: [r for r in used if c.rows(r)] for c in constants}
    found = []
    for number, c in enumerate(constants, 1):
        note(f"{c.name} ({number} of {len(constants)})")
        own = chosen[c.name]
        curves: list[Curve | None]
        if c.source == "law":
            points = [*map(_point, own), *(compiled() if rows is None else ())]
            curves, keys = [_law_curve(c, *point) for point in points], [_shape(tile) for tile, _ in points]
        else:
            curves, keys = _time_curves(c, own, machine), [_key(r) for r in own]
        kept = [(curve, key) for curve, key in zip(curves, keys, strict=True) if curve is not None]
        if kept:
            found.append(_crossed(c, c.standing(machine), [k[0] for k in kept], [k[1] for k in kept]))
    if not found:
        raise InputError("--cross: no row of these files tells a fitted constant")
    return tuple(found)


def _crossed(c: Constant, standing: float, curves: Sequence[Curve], keys: Sequence[Mapping[str, int]]) -> Crossed:
    low, high = LOW * standing, min(c.most, HIGH * standing)
    values = [standing, *(low + (high - low) * n / (TRIES - 1) for n in range(TRIES))]
    table = [[curve(v) for v in values] for curve in curves]

    def mean(rows: Sequence[int], value: int) -> float:
        return metrics.mape([table[r][value] for r in rows])

    def best(rows: Sequence[int]) -> int:
        return min(range(len(values)), key=lambda v: mean(rows, v))

    every = range(len(curves))
    folds = []
    for name in c.by:
        for level in sorted({key[name] for key in keys}):
            out = [r for r in every if keys[r][name] == level]
            rest = [r for r in every if keys[r][name] != level]
            if len(out) >= LEAST and len(rest) >= LEAST:
                v = best(rest)
                folds.append(Fold(f"{name} = {level}", len(out), values[v], mean(out, 0), mean(out, v)))
    top = best(every)
    return Crossed(c, len(curves), standing, mean(every, 0), values[top], mean(every, top), tuple(folds))


# ---------------------------------------------------------------- errors as functions of a constant

Point: TypeAlias = tuple[tuple[int, int, int, int, int], int]  # (d, block_q, block_k, stages, warps), need


def compiled() -> Iterator[Point]:
    """Tiles that Triton compiled (iosim/data): shape, and registers and spilled words together."""
    text = files("iosim").joinpath("data/triton_compiled.csv").read_text(encoding="utf-8")
    for r in csv.DictReader(text.splitlines()):
        d, q, k, stages, warps = (int(r[name]) for name in ("d", "block_m", "block_n", "stages", "warps"))
        yield (d, q, k, stages, warps), int(r["regs"]) + int(r["spills"])


def _point(r: Row) -> Point:
    t = r.tile
    if t is None or r.problem is None:
        raise InputError(f"{r.where}: is of no tile")
    return (r.problem.d, t.block_q, t.block_k, t.stages, t.warps), (t.registers or 0) + (t.spills or 0)


def _law_curve(c: Constant, tile: tuple[int, int, int, int, int], need: int) -> Curve:
    """Registers and spilled words together against those that were taken."""
    d, block_q, block_k, stages, warps = tile
    a = Attention(n_q=block_q, d=d)

    def error(value: float) -> float:
        law = replace(LAW, **{c.field: value})
        held, spilled = registers(a, block_q, block_k, stages, warps, law)
        return metrics.error_pct(held + spilled, need)

    return error


def _time_curves(c: Constant, rows: Sequence[Row], machine: Hardware) -> list[Curve | None]:
    standing = c.standing(machine)
    values = sorted({min(c.most, n * standing) for n in NODES})
    jobs = [(c.source, c.field, row, machine, value) for row in rows for value in values]
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        times = list(pool.map(_time, jobs, chunksize=len(values)))
    out: list[Curve | None] = []
    for n, row in enumerate(rows):
        own = times[n * len(values) : (n + 1) * len(values)]
        seconds = [t for t in own if t is not None]
        out.append(_line(values, seconds, row.measured["time"]) if len(seconds) == len(values) else None)
    return out


def _time(job: tuple[Source, str, Row, Hardware, float]) -> float | None:
    from iosim.study.validate.times import NoModelError, predicted_time

    source, field, row, machine, value = job
    try:
        if source == "machine":
            return predicted_time(row, machine.with_value(field, value))
        return predicted_time(row, machine, ((field, value),))
    except NoModelError:
        return None


def _line(values: Sequence[float], seconds: Sequence[float], measured: float) -> Curve:
    """Percentage error of a time that is linear between those at `values`."""
    ends = list(zip(values, seconds, strict=True))

    def error(value: float) -> float:
        (a, ta), (b, tb) = next((p for p in pairwise(ends) if value <= p[1][0]), (ends[-2], ends[-1]))
        return metrics.error_pct(ta + (tb - ta) * (value - a) / (b - a), measured)

    return error


def _shape(tile: tuple[int, int, int, int, int]) -> dict[str, int]:
    return dict(zip(("d", "block_q", "block_k", "stages", "warps"), tile, strict=True))


def _key(r: Row) -> dict[str, int]:
    """What a row's folds are made by."""
    if r.tile is not None:
        return _shape(_point(r)[0])
    if r.problem is None:
        raise InputError(f"{r.where}: has no shape")
    return {"d": r.problem.d, "n": r.problem.n_k}
