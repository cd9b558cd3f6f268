"""Each measured number beside its prediction, and the errors of a family of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias

from iosim.hardware import Hardware
from iosim.memory.onchip import resident_blocks
from iosim.memory.peak import splits
from iosim.study.validate import metrics
from iosim.study.validate.baseline import Roofline, baselines
from iosim.study.validate.predict import NotModelled, predict
from iosim.study.validate.rows import QUANTITIES, Kind, Quantity, Row

Status: TypeAlias = Literal["scored", "host-bound", "below floor", "not modelled"]


@dataclass(frozen=True, slots=True)
class Score:
    """One quantity of one row.  `predicted` is None where nothing models it, and `reason` says why.

    `splits` is into how many the implementation cuts the keys.  Only "scored" ones count.  "host-bound": an event-timed
    call so short that the host's time is what was measured.
    """

    row: Row
    quantity: Quantity
    measured: float
    predicted: float | None
    status: Status
    reason: str = ""
    baseline: Roofline | None = None
    splits: int = 1

    @property
    def error_pct(self) -> float | None:
        """Signed error of the prediction."""
        return None if self.predicted is None else metrics.error_pct(self.predicted, self.measured)


def score(row: Row, machine: Hardware | None) -> tuple[Score, ...]:
    """All quantities of one row; independent of every other row."""
    row = row if machine is None else replace(row, measured={**_derived(row, machine), **row.measured})
    lines = {} if machine is None else baselines(row, machine)
    parts = 1
    if machine is not None and machine.processors is not None and row.problem is not None:
        parts = splits(row.implementation, row.direction, row.problem, machine.processors)
    out = []
    for name, given in predict(row, machine).items():
        quantity = QUANTITIES[name]
        measured = row.measured[quantity.source]
        predicted, reason = (None, given.reason) if isinstance(given, NotModelled) else (_printed(given, row.step), "")
        status: Status = "not modelled" if predicted is None else "scored"
        out.append(Score(
            row=row, quantity=quantity, measured=measured,
            predicted=predicted, status=_unscored(row, quantity, measured) or status, reason=reason,
            baseline=lines.get(name), splits=parts,
        ))  # fmt: skip
    return tuple(out)


def _printed(value: float, step: int) -> float:
    """A number as one is printed that is rounded down to whole steps."""
    return value if step == 1 else value // step * step


def _unscored(row: Row, quantity: Quantity, measured: float) -> Status | None:
    """Why a number is set apart whatever was predicted."""
    if quantity.source == "time" and row.kind == "calls" and measured < host_floors().get(row.implementation, 0):
        return "host-bound"
    return "below floor" if measured < quantity.floor else None


@cache
def host_floors() -> Mapping[str, float]:
    """Seconds by implementation, below which an event-timed call shows the host's time (iosim/data)."""
    text = files("iosim").joinpath("data/host_floors.csv").read_text(encoding="utf-8")
    return {line["implementation"]: float(line["floor_ms"]) * 1e-3 for line in csv.DictReader(text.splitlines())}


def _derived(row: Row, machine: Hardware) -> dict[str, float]:
    """Resident blocks, from registers and SRAM as they were measured."""
    if row.tile is not None and row.tile.registers is not None and "smem_bytes" in row.measured:
        registers, threads = row.tile.registers, row.tile.warps * machine.warp_size
        sram = int(row.measured["smem_bytes"])
    elif row.kernel is not None and None not in (row.kernel.registers, row.kernel.block, row.kernel.sram_bytes):
        registers, threads = row.kernel.registers or 0, row.kernel.block or 0
        sram = (row.kernel.sram_bytes or 0) - machine.sram.reserved_per_block_bytes
    else:
        return {}
    unit = machine.registers_per_warp_unit
    taken = -(-registers * machine.warp_size // unit) * unit * threads // machine.warp_size
    return {"occupancy": resident_blocks(machine, max(0, sram), 0, taken, threads)[0]} if taken else {}


@dataclass(frozen=True, slots=True)
class Family:
    """Scores of one quantity of like rows: kernel, pass, head dimension, machine and kind of measurement."""

    machine: str
    kind: Kind
    what: str  # implementation, pass and, for one kernel of a call, its role
    d: int
    quantity: Quantity
    scores: tuple[Score, ...]

    @property
    def name(self) -> str:
        """The whole family in one line of words."""
        return f"{self.machine} {self.kind}: {self.label}: {self.quantity.words}"

    @property
    def label(self) -> str:
        """Kernel, pass and head dimension."""
        return f"{self.what} d={self.d}"

    def errors(self, of: str = "predicted") -> list[float]:
        """Signed errors in percent of the prediction, or of a baseline ("roofline", "bandwidth")."""
        return errors(self.scores, of)

    def sweep(self) -> tuple[float | None, float | None]:
        """Spearman's correlation and regret of a tile sweep."""
        return sweep(self.scores)


def errors(scores: Iterable[Score], of: str = "predicted") -> list[float]:
    """Signed errors of all scores that have such a prediction."""
    found = []
    for s in scores:
        value = s.predicted if of == "predicted" else getattr(s.baseline, of, None)
        if value is not None:
            found.append(metrics.error_pct(value, s.measured))
    return found


def sweep(scores: Sequence[Score]) -> tuple[float | None, float | None]:
    """The lowest rank correlation and the largest regret of the tile sweeps in `scores`; None where there are none.

    One sweep is all tiles of one kernel for one problem on one machine.  A sweep of one tile ranks nothing.
    """
    groups: dict[object, list[Score]] = {}
    for s in scores:
        if s.row.tile is not None and s.quantity.source == "time" and s.predicted is not None:
            groups.setdefault((s.row.machine, s.row.implementation, s.row.problem, s.quantity.name), []).append(s)
    pairs = [([s.predicted or 0.0 for s in g], [s.measured for s in g]) for g in groups.values() if len(g) > 1]
    ranks = [r for p, m in pairs if (r := metrics.spearman(p, m)) is not None]
    return min(ranks, default=None), max((metrics.regret_pct(p, m) for p, m in pairs), default=None)


STEP_PCT = 5.0  # of time, that a further stage has to change to count as a step


def stage_steps(scores: Iterable[Score]) -> list[tuple[float, float]]:
    """(measured, predicted) change of time in percent from a tile to that of one more stage and all else alike.

    Steps that change the measured time by more than `STEP_PCT`.
    """
    tiles = {(s.row.machine, s.row.implementation, s.row.problem, *_of_tile(s)): s for s in scores if s.row.tile}
    out = []
    for (*alike, stages), s in tiles.items():
        after = tiles.get((*alike, stages + 1))  # type: ignore[arg-type]
        if after is None or s.predicted is None or after.predicted is None:
            continue
        step = 100 * (after.measured / s.measured - 1), 100 * (after.predicted / s.predicted - 1)
        if abs(step[0]) > STEP_PCT:
            out.append(step)
    return out


def _of_tile(s: Score) -> tuple[int, int, int, int]:
    """Rows, columns, warps and, last, stages."""
    t = s.row.tile
    return (0, 0, 0, 0) if t is None else (t.block_q, t.block_k, t.warps, t.stages)


def families(scores: Iterable[Score]) -> Iterator[Family]:
    """The families of all scored numbers, ordered by quantity, machine, kind, kernel and head dimension."""
    groups: dict[tuple[str, str, Kind, int, str], list[Score]] = {}
    for s in scores:
        if s.status == "scored" and s.row.problem is not None:
            what = f"{s.row.implementation} {s.row.direction}"
            if s.row.kernel is not None:
                what += f" {s.row.kernel.role or s.row.kernel.name}"
            groups.setdefault((s.quantity.name, s.row.machine, s.row.kind, s.row.problem.d, what), []).append(s)
    order = list(QUANTITIES)
    for key in sorted(groups, key=lambda k: (order.index(k[0]), k[1], k[2], k[4], k[3])):
        quantity, machine, kind, d, what = key
        yield Family(machine, kind, what, d, QUANTITIES[quantity], tuple(groups[key]))
