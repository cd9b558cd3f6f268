"""A sensitivity for a terminal of 80 columns, as JSON (schema iosim.sensitivity/1), as CSV, and as a tornado plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import iosim
from iosim.hardware import without_unit
from iosim.report import plots
from iosim.report.energy import ESTIMATE, energy_document, shares, spread
from iosim.report.layout import csv_text, draw, paragraph, table
from iosim.report.text import UNIT_WORDS, machine_line
from iosim.report.whatif import subject
from iosim.study.sensitivity import DOUBLINGS, LEAST, STEP, WORTH, Effect, Sensitivity
from iosim.words import digits, duration, joules, percent

SCHEMA = "iosim.sensitivity/1"
LEGEND = (
    f"elasticity: percent of time for 1 % more, from {STEP - 1:.0%} down and up; 2x: how many times as fast with twice "
    f"as much, or half of what costs (cycles, us, watts, shares of issue); enough: from there on, another doubling or "
    f"halving brings less than {WORTH:.0%}, and that unit is the busiest. The schedule stays as it is."
)


# ---------------------------------------------------------------- text


def render(s: Sensitivity) -> str:
    """The sensitivity as text."""
    parts = [*paragraph(subject(s.case)), *paragraph(machine_line(s.case.machine)), ""]
    parts += [*paragraph(_answer(s)), ""]
    if s.mattering:
        parts += [_table(s), *paragraph(LEGEND + _along(s)), ""]
    parts += [*_rest(s), *_energy(s)]
    return "\n".join(parts) + "\n"


def _answer(s: Sensitivity) -> str:
    base = f"{duration(s.base.seconds or 0)}; the busiest unit is {UNIT_WORDS[s.base.bound]}"
    base += f" ({percent(s.base.busy[s.base.bound])})."
    if not s.mattering:
        return f"{base} None of the numbers tried changes the time."
    gains = [e for e in s.mattering if e.better is not None]
    best = min(gains, key=lambda e: e.better or 1.0, default=None)
    top = max(s.mattering, key=lambda e: abs(e.elasticity))
    less = "less" if top.elasticity < 0 else "more"
    text = f"{base} 1 % more {without_unit(top.name)} takes {digits(abs(top.elasticity))} % {less} time"
    if best is None or best.better is None or best.better > 1:
        return text + "."
    much = "half the" if best.is_cost else "twice the"
    return f"{text}; most of all would bring {much} {without_unit(best.name)}: {digits(1 / best.better)}x."


def _table(s: Sensitivity) -> str:
    drawn = table("number", "now", "elasticity", "2x", "enough", "then", left=1)
    drawn.padding = (0, 1, 0, 0)
    for e in s.mattering:
        drawn.add_row(
            without_unit(e.name),
            _amount(e.value, e.unit),
            f"{e.elasticity:+.2f}",
            "-" if e.better is None else f"{1 / e.better:.2f}x",
            _enough(e),
            e.then or "-",
        )
    return draw(drawn)


def _enough(e: Effect) -> str:
    if e.enough is not None:
        return _amount(e.enough, e.unit)
    if e.better is None:
        return "-"
    return "now" if 1 / e.better - 1 < WORTH else f"over {2**DOUBLINGS}x"


def _amount(value: float, unit: str) -> str:
    """ "1,600 GB/s", "24 /clock"."""
    number = f"{value:g}" if value == int(value) and value < 1000 else digits(value)
    return f"{number} {unit}".strip()


def _along(s: Sensitivity) -> str:
    parts = [f"{without_unit(e.name)} {', '.join(_short(e.along))}" for e in s.mattering if e.along]
    return f" Along go: with {'; with '.join(parts)}." if parts else ""


def _short(names: tuple[str, ...]) -> list[str]:
    """Names; the matrix rates, of which there are many, as one."""
    rates = [n for n in names if ".tflops." in n]
    return [without_unit(n) for n in names if n not in rates] + (["the matrix rates"] if rates else [])


def _rest(s: Sensitivity) -> list[str]:
    """Capacities, numbers without effect, and those that are not used."""
    out: list[str] = []
    limit = f"{s.base.footprint.resident} ({s.base.footprint.limit})"
    for c in s.capacities:
        if c.needed is None:
            continue
        gain = "" if c.doubled is None else f"; twice the room takes {digits(c.doubled)}x the time"
        out += paragraph(f"{without_unit(c.name)}: {_amount(c.value, c.unit)} now; one more block is resident from "
                         f"{_amount(c.needed, c.unit)} on{gain}.")  # fmt: skip
    idle = [without_unit(c.name) for c in s.capacities if c.needed is None]
    if idle:
        out += paragraph(f"Resident blocks: {limit}. More of one of these alone makes it no more: {', '.join(idle)}.")
    none = [without_unit(e.name) for e in s.effects if e.swing < LEAST]
    if none:
        out += paragraph(f"A tenth changes time by less than {LEAST:.2%}: {', '.join(none)}.")
    if s.unread:
        out += paragraph(f"Not used here: {', '.join(without_unit(name) for name in s.unread)}.")
    return out


def _energy(s: Sensitivity) -> list[str]:
    """The joules of the base, and what the figures of each part are worth: joules are linear in them."""
    e = s.base.energy
    if e is None:
        return []
    text = f"Energy: {joules(e.joules)} ({spread(e)}). "
    if e.bound_binds:
        text += (
            f"TDP x time binds: the parts add up to {joules(e.counted)}, and 1 % more of one of them changes nothing."
        )
    else:
        text += f"1 % more picojoules of a part takes its share more: {shares(e)}."
    return [*paragraph(text), *paragraph(ESTIMATE)]


# ---------------------------------------------------------------- JSON and CSV


def document(s: Sensitivity, request: Mapping[str, Any]) -> dict[str, Any]:
    """The whole sensitivity; `request` repeats what was asked for."""
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {s.case.machine.name: s.case.machine.profile_hash}},
        "dataflow": s.case.source.load().name,
        "hardware": s.case.machine.name,
        "problem": s.case.problem.as_dict(),
        "fidelity": s.case.fidelity,
        "step": STEP,
        "worth": WORTH,
        "base": {
            "seconds": s.base.seconds,
            "makespan_ps": s.base.makespan_ps,
            "bound": s.base.bound,
            "busy": dict(s.base.busy),
        },
        **_energy_document(s),
        "effects": [effect_row(e) for e in s.effects],
        "capacities": [asdict(c) for c in s.capacities],
        "unread": list(s.unread),
    }


def _energy_document(s: Sensitivity) -> dict[str, Any]:
    e = s.base.energy
    return {} if e is None else {"energy": energy_document(e) | {"elasticities": e.elasticities}}


def effect_row(e: Effect) -> dict[str, Any]:
    """One number as a flat row; ratios are of the base's time."""
    return {
        "name": e.name,
        "unit": e.unit,
        "value": e.value,
        "elasticity": e.elasticity,
        "ratio_less": e.less,
        "ratio_more": e.more,
        "ratio_better": e.better,
        "better_is": "half" if e.is_cost else "double",
        "enough": e.enough,
        "then_bound": e.then or None,
        "along": list(e.along),
    }


def rows_as_csv(s: Sensitivity) -> str:
    """A header and one line a number that was tried by degrees."""
    return csv_text([{**effect_row(e), "along": " ".join(e.along)} for e in s.effects])


# ---------------------------------------------------------------- plot


def plot(s: Sensitivity, kind: str) -> bytes:
    """A tornado: for each number that matters, the change of time with a tenth less and a tenth more."""
    effects = s.mattering
    figure = plots.figure(8.0, 1.8 + 0.32 * len(effects))
    axes = figure.add_subplot()
    labels = [f"{without_unit(e.name)} ({_amount(e.value, e.unit)})" for e in effects]
    for label, colour, name in ((f"{STEP - 1:.0%} less", plots.ORANGE, "less"), (f"{STEP - 1:.0%} more", plots.BLUE,
                                                                                "more")):  # fmt: skip
        ends = [getattr(e, name) for e in effects]
        axes.barh(labels, [0.0 if end is None else 100 * (end - 1) for end in ends], color=colour, label=label)
    axes.axvline(0, color=plots.BLACK, linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="change of time (%)", title=f"{s.case.source.load().name} on {s.case.machine.name}")
    axes.legend(frameon=False, fontsize=8)
    return plots.image(figure, kind)
