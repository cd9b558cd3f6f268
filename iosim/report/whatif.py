"""A what-if for a terminal of 80 columns, as JSON (schema iosim.whatif/1), as CSV, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import iosim
from iosim.report import plots
from iosim.report.energy import ESTIMATE, energy_document, energy_row, spread
from iosim.report.layout import WIDTH, csv_text, draw, paragraph, table
from iosim.report.text import STALL_WORDS, STARVED, UNIT_WORDS, headline, machine_line
from iosim.study.outcome import Outcome
from iosim.study.vary import HW, Case, Value, shown
from iosim.study.whatif import Row, WhatIf
from iosim.words import count, digits, duration, joules, kib, percent, size

SCHEMA = "iosim.whatif/1"
SAME = 0.005  # less than that is no change of time
SEEN = 0.01  # of the base's time, from which on a change of a stall is worth a word
WORDED = 16  # rows, up to which the terminal has a sentence for each
ROOM = 20  # columns for the values of the varied fields; wider ones are written below the table
CAUSES = {
    "data": plots.BLUE,
    "buffer": plots.SKY,
    "matrix": plots.PURPLE,
    "vector": plots.ORANGE,
    "barrier": plots.GREEN,
    "launch": plots.BLACK,
    "tail": plots.GREY,
}


# ---------------------------------------------------------------- text


def render(w: WhatIf) -> str:
    """The what-if as text."""
    parts = [*paragraph(subject(w.case)), *paragraph(machine_line(w.case.machine)), ""]
    parts += [*paragraph(answer(w)), "", _table(w)]
    parts += _notes(w)
    if any(a.name == "stages" for a in w.axes) and any(row.outcome and row.outcome.load_ps for row in w.rows):
        parts += ["", *_overlap(w)]
    parts += ["", *_changes(w)]
    return "\n".join(parts) + "\n"


def subject(case: Case) -> str:
    """The problem and what computes it, in one line."""
    flow = case.source.load()
    return f"{headline(case.problem, flow.computes, case.batch)}; {flow.name}, {case.fidelity} fidelity"


def answer(w: WhatIf) -> str:
    """What is fastest, and by how much."""
    base, best = w.base, w.fastest
    if best is None or best.outcome is None or best.outcome.seconds is None:
        return f"No time: {base.outcome.no_time if base.outcome else ''}."
    failed = sum(row.outcome is None for row in w.rows)
    text = f"Fastest: {named(best.values)}, {duration(best.outcome.seconds)}"
    ratio = w.ratio(best) or 1.0
    text += f", {digits(1 / ratio)}x as fast as {named(base.values)}" if best is not base else ", the base"
    near = [row for row in w.rows if row is not best and (w.ratio(row) or 2.0) < ratio * (1 + SAME)]
    if near and len(near) < len(w.rows) - 1:
        text += f"; no slower by {SAME:.1%}: {' and '.join(named(row.values) for row in near[:3])}"
    slow = max((w.ratio(row) or 0.0 for row in w.rows), default=1.0)
    if best is base and slow:
        text += f"; the slowest takes {digits(slow)}x as long" if slow - 1 >= SAME else "; no other takes longer"
    return text + (f". {count(failed, 'row', 'rows')} of {len(w.rows)} cannot run." if failed else ".")


def named(values: Mapping[str, Value]) -> str:
    """ "stages 2, block_k 64"."""
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())


Cells = dict[str, str]
GAP = 2  # between columns
LEAST = ("blocks", "SRAM", "DRAM")  # columns that are left out first where a table is too wide; --json has them


def _cells(w: WhatIf, row: Row) -> Cells:
    of, ratio = row.outcome, w.ratio(row)
    if of is None:
        return {"time": "cannot run"}
    return {
        "time": "unknown" if of.seconds is None else duration(of.seconds),
        "ratio": "-" if ratio is None else f"{digits(ratio)}x",
        "HBM": size(of.hbm_bytes),
        "DRAM": size(of.dram_bytes),
        "SRAM": kib(of.footprint.sram_bytes),
        "blocks": f"{of.footprint.resident}",
        **({} if of.energy is None else {"energy": joules(of.energy.joules)}),
        "busiest": f"{of.bound} {percent(of.busy[of.bound])}" if of.bound else "-",
        "stall": f"{of.stall} {percent(of.stalls[of.stall])}" if of.stall else "-",
    }


def _labels(w: WhatIf) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the columns that tell rows apart: the values varied, or numbers where these are long."""
    heads = [a.name.removeprefix(HW).replace(".", ".\n") for a in w.axes]
    values = [[shown(v) for v in row.values.values()] for row in w.rows]
    columns = zip(heads, zip(*values, strict=True), strict=True)
    width = sum(max(len(line) + 1 for line in [*head.split("\n"), *cells]) for head, cells in columns)
    return (heads, values) if width <= ROOM else (["row"], [[str(n)] for n in range(1, len(w.rows) + 1)])


def _numbered(w: WhatIf) -> bool:
    return _labels(w)[0] == ["row"]


def _table(w: WhatIf) -> str:
    """A line a row; what is the same in all is said in a sentence."""
    cells, (heads, values) = [_cells(w, row) for row in w.rows], _labels(w)
    columns = _fitting(
        [name for name in cells[w.rows.index(w.base)] if name not in _alike(w)],
        cells,
        sum(
            1 + max(len(line) for line in (*head.split("\n"), *own)) for head, *own in zip(heads, *values, strict=True)
        ),
    )
    drawn = table(*heads, *columns, left=0)
    drawn.padding = (0, 1, 0, 0)
    for own, of in zip(values, cells, strict=True):
        drawn.add_row(*own, *(of.get(name, "-") for name in columns))
    return draw(drawn)


def _fitting(columns: list[str], cells: Sequence[Cells], taken: int) -> list[str]:
    """The columns that fit beside `taken` characters, without those of LEAST, in turn, where not all do."""
    for least in LEAST:
        width = sum(GAP + max(len(of.get(name, "-")) for of in ({name: name}, *cells)) for name in columns)
        if taken + width - GAP <= WIDTH:
            break
        columns = [name for name in columns if name != least]
    return columns


def _alike(w: WhatIf) -> dict[str, str]:
    """What is the same in all rows that run."""
    cells = [_cells(w, row) for row in w.rows if row.outcome is not None]
    if not cells or len(w.rows) < 2:
        return {}
    return {
        name: text
        for name, text in cells[0].items()
        if name in ("HBM", "DRAM", "SRAM", "blocks") and all(other[name] == text for other in cells)
    }


def _notes(w: WhatIf) -> list[str]:
    same = {"HBM": "HBM traffic", "DRAM": "DRAM traffic", "SRAM": "SRAM a block", "blocks": "resident blocks"}
    parts = [f"ratio: time over that of {named(w.base.values)}"]
    if alike := _alike(w):
        parts.append(f"the same in all rows: {', '.join(f'{same[name]} {text}' for name, text in alike.items())}")
    if (of := w.base.outcome) is not None and of.energy is not None:
        parts.append(f"energy of the base {spread(of.energy)} by the ranges of its figures")
    if w.kept:
        parts.append(f"all rows keep {named(w.kept)} of the plain run (--rechoose lets each choose)")
    if w.sets:
        parts.append(f"set in all rows: {named({a.name: a.values[0] for a in w.sets})}")
    if w.moved:
        parts.append(f"{' and '.join(w.moved)} {'change' if len(w.moved) > 1 else 'changes'} along")
    estimated = [] if of is None or of.energy is None else paragraph(ESTIMATE)
    return [*paragraph("; ".join(parts) + "."), *estimated]


def _overlap(w: WhatIf) -> list[str]:
    """How much of the loads is hidden, what is left, and what the buffers cost."""
    heads, values = _labels(w)
    drawn = table(*heads, "loads", "hidden", "data stall left", "SRAM", "blocks (limit)", left=0)
    for own, row in zip(values, w.rows, strict=True):
        of = row.outcome
        if of is None or of.makespan_ps is None:
            continue
        drawn.add_row(
            *own,
            duration(of.load_ps / 1e12),
            "-" if of.hidden is None else percent(of.hidden),
            f"{duration(of.stalls['data'] * of.makespan_ps / 1e12)} ({percent(of.stalls['data'])})",
            kib(of.footprint.sram_bytes),
            f"{of.footprint.resident} ({of.footprint.limit})",
        )
    text = ("Overlap: what the loads of a processor take one after the other, the share of it that is hidden under "
            "work or other loads, and for how long the compute units still wait for data.")  # fmt: skip
    return [*paragraph(text), "", draw(drawn).rstrip("\n")]


def _changes(w: WhatIf) -> list[str]:
    out: list[str] = []
    numbered = _numbered(w)
    rows = [row for row in w.rows if row is not w.base]
    chosen = rows if len(rows) < WORDED else [r for r in rows if r is w.fastest or r.outcome is None]
    for row in chosen:
        number = f"{w.rows.index(row) + 1}: " if numbered else ""
        out += paragraph(f"{number}{named(row.values)}: {change(w, row)}.")
    if len(rows) > len(chosen):
        out += paragraph("--json and --csv say for each row what changed.")
    return [*_numbers(w), *out] if numbered else out


def _numbers(w: WhatIf) -> list[str]:
    return paragraph(f"Base, row {w.rows.index(w.base) + 1}: {named(w.base.values)}.")


def change(w: WhatIf, row: Row) -> str:
    """What is different from the base, in words: time, bottleneck, stalls, residency, traffic, tile."""
    of, base = row.outcome, w.base.outcome
    if of is None or base is None:
        return row.refused
    if row is w.base:
        return "the base"
    parts = [*_time_change(of, base), *_tile_change(w, of, base)]
    if of.footprint.resident != base.footprint.resident:
        parts.append(f"resident blocks {base.footprint.resident} -> {of.footprint.resident} ({of.footprint.limit})")
    for name, new, old in (("HBM", of.hbm_bytes, base.hbm_bytes), ("DRAM", of.dram_bytes, base.dram_bytes)):
        if old and abs(new / old - 1) > SEEN:
            parts.append(f"{name} traffic {size(old)} -> {size(new)}")
    return "; ".join(parts)


def _time_change(of: Outcome, base: Outcome) -> list[str]:
    if of.makespan_ps is None or base.makespan_ps is None:
        return ["no time is known"]
    ratio = of.makespan_ps / base.makespan_ps
    fast = f"{digits(1 / ratio)}x as fast" if ratio < 1 else f"{digits(ratio)}x as long"
    parts = ["the same time" if abs(ratio - 1) < SAME else fast]
    old, new = percent(base.busy[base.bound]), percent(of.busy[of.bound])
    if of.bound != base.bound:
        parts.append(f"the busiest unit is {UNIT_WORDS[of.bound]} ({new}), no longer {UNIT_WORDS[base.bound]} ({old})")
    else:
        steady = f"{new}" if old == new else f"{old} -> {new}"
        parts.append(f"the busiest unit stays {UNIT_WORDS[of.bound]} ({steady})")
    return [*parts, *_stall_change(of, base)]


def _stall_change(of: Outcome, base: Outcome) -> list[str]:
    """The largest change in what the compute units do or wait for, in time."""
    span, other = base.makespan_ps or 0, of.makespan_ps or 0
    times = {cause: (share * span, of.stalls[cause] * other) for cause, share in base.stalls.items()}
    unit = base.compute_unit
    if of.compute_unit == unit:
        times[unit + " busy"] = base.busy[unit] * span, of.busy[unit] * other
    name = max(times, key=lambda key: abs(times[key][1] - times[key][0]))
    old, new = times[name]
    if abs(new - old) < SEEN * span:
        return []
    what = f"{unit} work" if name.endswith("busy") else _waits(name, unit)
    return [f"the {unit} units' largest change: {what}, {_ps(old)} -> {_ps(new)}"]


def _waits(cause: str, unit: str) -> str:
    """What the units `unit` wait for, as a noun."""
    if cause == "tail":
        return "no block left to run"
    return STARVED if cause == unit == "matrix" else STALL_WORDS[cause]


def _ps(time: float) -> str:
    return duration(time / 1e12) if time >= 1 else "0"


def _tile_change(w: WhatIf, of: Outcome, base: Outcome) -> list[str]:
    """Sizes that are not varied and differ all the same, as each row chooses its own."""
    uses = w.case.source.load().uses
    names = [n for n in (*uses, "stages") if n not in w.base.values]
    new = {n: (getattr(base.schedule, n), getattr(of.schedule, n)) for n in names}
    changed = [f"{n} {shown(old)} -> {shown(now)}" for n, (old, now) in new.items() if old != now]
    return [f"chooses {', '.join(changed)}"] if changed else []


# ---------------------------------------------------------------- JSON and CSV


def document(w: WhatIf, request: Mapping[str, Any]) -> dict[str, Any]:
    """The whole what-if; `request` repeats what was asked for."""
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {w.case.machine.name: w.case.machine.profile_hash}},
        "dataflow": w.case.source.load().name,
        "hardware": w.case.machine.name,
        "problem": w.case.problem.as_dict() | ({} if w.case.batch is None else w.case.batch.as_dict()),
        "fidelity": w.case.fidelity,
        "vary": {a.name: [_plain(v) for v in a.values] for a in w.axes},
        "set": {a.name: _plain(a.values[0]) for a in w.sets},
        "kept": {name: _plain(value) for name, value in w.kept.items()},
        "moved": list(w.moved),
        "base": w.rows.index(w.base),
        "rows": [_row(w, row) for row in w.rows],
    }


def _plain(value: Value) -> Any:
    """A value for JSON; one number of stages as one."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


def _row(w: WhatIf, row: Row) -> dict[str, Any]:
    of = row.outcome
    values = {name: _plain(value) for name, value in row.values.items()}
    if of is None:
        return {"values": values, "runs": False, "reason": row.refused}
    schedule = of.schedule.as_dict()
    names = dict.fromkeys((*w.case.source.load().uses, "stages", "groups"))
    return {
        "values": values,
        "runs": True,
        "seconds": of.seconds,
        "makespan_ps": of.makespan_ps,
        "ratio": w.ratio(row),
        "hbm_bytes": of.hbm_bytes,
        "dram_bytes": of.dram_bytes,
        "sram_bytes": of.footprint.sram_bytes,
        "resident_blocks": of.footprint.resident,
        "resident_limit": of.footprint.limit,
        "bound": of.bound or None,
        "busy": dict(of.busy),
        "compute_unit": of.compute_unit,
        "stalls": dict(of.stalls),
        **({} if of.energy is None else {"energy": energy_document(of.energy)}),
        "load_ps": of.load_ps,
        "loads_hidden": of.hidden,
        "schedule": {name: schedule[name] for name in names},
        "change": change(w, row),
    } | ({} if of.makespan_ps is not None else {"reason": of.no_time})


def rows_as_csv(w: WhatIf) -> str:
    """A header and one line a row."""
    return csv_text([_flat(_row(w, row)) | _energy_row(row) for row in w.rows])


def _energy_row(row: Row) -> dict[str, Any]:
    of = row.outcome
    return {} if of is None or of.energy is None else energy_row(of.energy)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    nested = ("values", "schedule", "busy", "stalls")
    out = dict(row["values"])
    out |= {name: value for name, value in row.items() if name not in (*nested, "energy")}
    for name in nested[1:]:
        out |= {f"{name}_{key}": value for key, value in row.get(name, {}).items()}
    return out


# ---------------------------------------------------------------- plot


def plot(w: WhatIf, kind: str) -> bytes:
    """A bar a row as long as its time: work of the compute units, and what they wait for."""
    rows = [row for row in w.rows if row.outcome is not None and row.outcome.makespan_ps is not None]
    longest = max((row.outcome.seconds or 0.0 for row in rows if row.outcome), default=0.0)
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "")) if longest >= s)
    figure = plots.figure(9.0, 1.6 + 0.4 * len(rows))
    axes = figure.add_subplot()
    labels = [named(row.values) for row in rows]
    left = [0.0] * len(rows)
    for label, colour, of in _segments([row.outcome for row in rows if row.outcome]):
        lengths = [share * (row.outcome.seconds or 0) / scale for share, row in zip(of, rows, strict=True)
                   if row.outcome]  # fmt: skip
        if max(lengths, default=0.0) * scale < SAME * longest:
            left = [a + b for a, b in zip(left, lengths, strict=True)]
            continue
        axes.barh(labels, lengths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel=f"predicted time ({unit})", title=f"{w.case.source.load().name} on {w.case.machine.name}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return plots.image(figure, kind)


def _segments(of: Sequence[Outcome]) -> list[tuple[str, str, list[float]]]:
    """(label, colour, share in each row): work, and each cause of waiting."""
    work = [o.busy[o.compute_unit] for o in of]
    return [(f"{of[0].compute_unit} work", plots.VERMILION, work)] + [
        (_waits(cause, of[0].compute_unit), colour, [o.stalls[cause] for o in of]) for cause, colour in CAUSES.items()
    ]
