"""Estimated joules: rows of the table of runs, the sentences below it, JSON and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report.layout import draw, paragraph, table
from iosim.study.energy import LEVELS, UNITS, EnergyUse, Part
from iosim.words import digits, joules, percent

if TYPE_CHECKING:
    from iosim.study.run import Run

PARTS = (*LEVELS, *UNITS)
WORDS = {
    "hbm": "HBM", "l2": "L2", "sram": "SRAM", "tmem": "tensor memory", "registers": "registers",
    "matrix": "matrix unit", "vector": "vector lanes", "exp": "exp unit",
}  # fmt: skip
ESTIMATE = (
    "Energy is an estimate: counted bytes and operations times the profile's picojoules of each, most of them right "
    "within a factor of two; what a chip draws standing still is not in it."
)
SHORT = {"tmem": "TMEM", "registers": "regs", "matrix": "mma", "vector": "vec", "exp": "exp"}


def energy_rows(runs: Sequence[Run]) -> Iterable[tuple[str, Callable[[Run], str], Callable[[Run], float] | None]]:
    """Label, cell, and the number whose ratio is shown."""
    yield "energy, estimated", lambda r: joules(r.energy.joules), lambda r: r.energy.joules
    yield "  low to high", lambda r: spread(r.energy), None
    for name in PARTS:
        if any(_part(r.energy, name) for r in runs):
            yield f"  {WORDS[name]}", partial(_cell, name), partial(_joules_of, name)


def energies_table(runs: Sequence[Run], named: Callable[[Run], str]) -> str:
    """A line a run: its joules, and the share of each part."""
    there = [name for name in PARTS if any(_part(r.energy, name) for r in runs)]
    made = table("machine", "dataflow", "energy", *(SHORT.get(n, WORDS[n]) for n in there), left=2)
    made.padding = (0, 1, 0, 0)
    for r in runs:
        shares = [percent(_joules(r.energy, n) / r.energy.counted).replace(" ", "") for n in there]
        made.add_row(r.hardware.name, named(r), joules(r.energy.joules), *shares)
    return draw(made)


def energy_words(runs: Sequence[Run], named: Callable[[Run], str]) -> list[str]:
    """What the joules are worth, where most of them go, and whether the power limit binds."""
    out = [ESTIMATE]
    several = len({r.hardware.name for r in runs}) > 1
    for r in runs:
        who = f"{named(r)} on {r.hardware.name}" if several else named(r)
        out.append(f"Energy of {who}: {_where(r)}; {_bound(r)}.")
    return [line for text in out for line in paragraph(text)]


def _where(r: Run) -> str:
    most = max(r.energy.parts, key=lambda p: p.joules)
    the = "" if most.name in ("hbm", "sram", "tmem") else "the "
    text = f"{joules(r.energy.joules)} ({spread(r.energy)})"
    text += f", of which {percent(most.joules / r.energy.counted)} goes to {the}{WORDS[most.name]}"
    return text + (f", {digits(r.energy.joules / r.seconds)} W on average" if r.seconds else "")


def _bound(r: Run) -> str:
    """The power limit, and whether it binds."""
    e, tdp = r.energy, r.hardware.energy.tdp_w
    if e.bound_joules is None:
        why = "it has no time" if tdp is not None else "the profile knows no TDP"
        return f"no bound from power, as {why}"
    limit = f"TDP x time ({digits(tdp or 0)} W) allows {joules(e.bound_joules)}"
    if e.bound_binds:
        return f"{limit}, which binds: its parts add up to {joules(e.counted)}"
    return limit + (", which bounds the high end" if e.high == e.bound_joules else "")


def spread(e: EnergyUse) -> str:
    """Low and high end with one unit: "95.0-365 mJ"."""
    low, high = joules(e.low), joules(e.high)
    same = low.split()[1] == high.split()[1]
    return f"{low.split()[0]}-{high}" if same else f"{low}-{high}"


def shares(e: EnergyUse) -> str:
    """The parts by their share, largest first: "HBM 40 %, SRAM 25 %"."""
    parts = sorted(e.parts, key=lambda p: -p.joules)
    return ", ".join(f"{WORDS[p.name]} {percent(p.joules / e.counted)}" for p in parts)


def energy_document(e: EnergyUse) -> dict[str, Any]:
    """What `iosim run --json` says of a run's energy."""
    return {
        "confidence": "estimate",
        "joules": e.joules,
        "low_joules": e.low,
        "high_joules": e.high,
        "counted_joules": e.counted,
        "bound_joules": e.bound_joules,
        "bound_binds": e.bound_binds,
        "parts": {p.name: _entry(p) for p in e.parts},
        "kernels": {name: {p.name: _entry(p) for p in parts} for name, parts in e.kernels.items()},
    }


def _entry(p: Part) -> dict[str, Any]:
    return {"count": p.count, "unit": p.unit, "joules": p.joules, "low_joules": p.low, "high_joules": p.high}


def energy_row(e: EnergyUse) -> dict[str, Any]:
    """CSV columns."""
    return {
        "energy_joules": e.joules,
        "energy_low_joules": e.low,
        "energy_high_joules": e.high,
        "energy_bound_joules": e.bound_joules,
        **{f"energy_{name}_joules": _joules(e, name) for name in PARTS},
    }


def _part(e: EnergyUse, name: str) -> Part | None:
    return next((p for p in e.parts if p.name == name), None)


def _joules(e: EnergyUse, name: str) -> float:
    part = _part(e, name)
    return 0.0 if part is None else part.joules


def _joules_of(name: str, r: Run) -> float:
    return _joules(r.energy, name)


def _cell(name: str, r: Run) -> str:
    part = _part(r.energy, name)
    return "-" if part is None else joules(part.joules)
