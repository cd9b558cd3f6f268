"""The tile pipeline at several numbers of stages: bars of characters, JSON (iosim.timeline/1), CSV, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import iosim
from iosim.interpreters.recording import Recording, merged, shares, use_of
from iosim.report.layout import WIDTH, csv_text, paragraph
from iosim.report.text import STALL_WORDS
from iosim.study.pipeline import Case, Pipeline
from iosim.words import count, duration, kib, percent, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "iosim.timeline/1"
UNITS = ("copy", "dram", "l2", "sram", "matrix", "exp", "vector", "alu", "issue")  # in the order shown
LABELS = {"dram": "DRAM", "l2": "L2", "sram": "SRAM"}
LETTERS = {"data": "d", "buffer": "b", "matrix": "m", "vector": "v", "barrier": "y", "launch": "l", "tail": "t"}
MOST_SLOTS = 2  # blocks of a processor whose warp groups are drawn
BINS = 64  # of the curves


class Bar(NamedTuple):
    """A stretch of a track, in ps from the beginning of the window.

    `what` is a phase or tile (`kind` "work" or "load"), or the cause of a wait (`kind` "wait").
    """

    start: int
    end: int
    kind: str
    what: str
    turn: int | None
    block: int | None


class Track(NamedTuple):
    """One row: a unit, a warp group, or the loads of a tile."""

    kind: str
    name: str
    bars: list[Bar]


def tracks(p: Pipeline, recording: Recording) -> list[Track]:
    """The rows of one recording in the window: loads by tile, warp groups by block, units."""
    start, end = p.window(recording)
    out: dict[tuple[str, str], Track] = {}

    def put(kind: str, name: str, bar: Bar) -> None:
        a, b = max(bar.start, start), min(bar.end, end)
        if a < b:
            out.setdefault((kind, name), Track(kind, name, [])).bars.append(
                bar._replace(start=a - start, end=b - start)
            )

    for flight in recording.flights:
        who = flight.who
        if flight.direction == "read" and p.block in (None, who.block):
            arrived = recording.end if flight.arrived is None else flight.arrived
            put("load", f"load {who.phase}", Bar(flight.sent, arrived, "load", who.phase, who.turn, who.block))
    slots = sorted({slot for slot, _, _ in recording.groups})
    for (slot, role, rank), spells in recording.groups.items():
        number = _block_of(recording, slot)  # None: a place that got no block
        if number is not None and p.block in (None, number):
            alone = sum(key[:2] == (slot, role) for key in recording.groups) == 1
            name = f"{role or 'group'}" + ("" if alone else f" {rank}")
            name = name if len(slots) == 1 else f"b{number} {name}"
            for s in merged(spells):
                what = s.who.phase if s.who is not None else s.cause or ""
                turn = None if s.who is None else s.who.turn
                put("group", name, Bar(s.start, s.end, "work" if s.who else "wait", what, turn, number))
    for unit in UNITS:
        for s in merged(recording.units[unit]):
            work = s.cause is None
            mine = s.who is not None and p.block in (None, s.who.block)
            if work or unit == "matrix":
                what = (s.who.phase if s.who is not None and mine else "other blocks") if work else s.cause or ""
                where = s.who if work and mine else None
                turn, block = (None, None) if where is None else (where.turn, where.block)
                put("unit", unit, Bar(s.start, s.end, "work" if work else "wait", what, turn, block))
    return list(out.values())


def drawn(p: Pipeline, recording: Recording) -> list[Track]:
    """The tracks that are shown: of many resident blocks the warp groups and loads of the first ones only."""
    out = tracks(p, recording)
    first = tuple(f"b{n} " for n in recording.blocks[:MOST_SLOTS])
    many = len(recording.blocks) > 1 and p.block is None
    out = [t for t in out if t.kind != "group" or not many or t.name.startswith(first)]
    shown = set(recording.blocks[:MOST_SLOTS]) if many else {None, *recording.blocks}
    return [t if t.kind != "load" else t._replace(bars=[b for b in t.bars if b.block in shown]) for t in out]


def _block_of(recording: Recording, slot: int) -> int | None:
    """The block that a slot has first."""
    workers = (s for (n, role, _), spells in recording.groups.items() if n == slot and not role for s in spells)
    return next((s.who.block for s in workers if s.who is not None), None)


# ---------------------------------------------------------------- words


def title(p: Pipeline) -> str:
    """What is shown."""
    a = p.problem
    run = next(case.run for case in p.cases if case.run is not None)
    tile = f"{run.schedule.block_q} x {run.schedule.block_k} tiles"
    kernel = f", kernel {p.kernel}" if len(p.kernels) > 1 else ""
    return f"{p.flow.name} on {p.machine.name}{kernel}: N {a.n_q:,}, d {a.d}, {tile}, {p.fidelity} fidelity"


def what_of(p: Pipeline) -> str:
    """Which iterations are shown."""
    if not p.turns:
        return "the whole block (it has no loop)"
    if p.first == 0 and p.last == p.turns:
        return f"all {count(p.turns, 'iteration', 'iterations')}"
    return f"iterations {p.first} to {p.last - 1} of {p.turns}"


def heading(p: Pipeline, case: Case, recording: Recording) -> str:
    """The line above one case."""
    start, end = p.window(recording)
    blocks = count(len(recording.blocks), "block", "blocks")
    whole = duration(case.time.makespan_ps / 1e12)
    return f"{case.words}: {duration((end - start) / 1e12)} shown, {blocks} a processor; whole kernel {whole}"


def unit_of(recording: Recording) -> str:
    """The unit that the stalls are told of: the matrix unit, or vector lanes in a kernel without products."""
    return "matrix" if any(s.cause is None for s in recording.units["matrix"]) else "vector"


def verdict(p: Pipeline) -> list[str]:
    """What double buffering brought, in sentences."""
    cases = {case.stages: case for case in p.cases}
    out = []
    one, two, three = (cases.get((n,)) for n in (1, 2, 3))
    if one is not None and two is not None and one.recording is not None and two.recording is not None:
        out.append(_compared(p, one, two))
        if one.time.resident != two.time.resident:
            out.append(_resident(p, one, two))
    if two is not None and three is not None and two.recording is not None and three.recording is not None:
        times = duration(three.time.makespan_ps / 1e12), ratio(two.time.makespan_ps, three.time.makespan_ps)
        out.append(f"Three stages take {times[0]} ({times[1]} of two).")
    for case in p.cases:
        if case.recording is None:
            out.append(f"{case.words[0].upper()}{case.words[1:]} do not fit: {case.refusal}.")
    if p.fixed:
        out.append(f"One picture only: {p.fixed}.")
    return out


def _compared(p: Pipeline, one: Case, two: Case) -> str:
    before, after = one.time.makespan_ps, two.time.makespan_ps
    gain = f"brought {ratio(before, after)}" if before >= after else f"cost {ratio(after, before)} the time"
    waits = []
    for case in (one, two):
        if case.recording is None:
            continue
        start, end = p.window(case.recording)
        seen = shares(case.recording.units[unit_of(case.recording)], start, end)
        waits.append(percent(seen.get("data", 0) / max(1, end - start)))
    return (
        f"Double buffering {gain}: the kernel takes {duration(after / 1e12)} with two stages and "
        f"{duration(before / 1e12)} with one; in what is shown the {unit_of_words(p)} waits for data {waits[1]} of the "
        f"time with two stages and {waits[0]} with one."
    )


def unit_of_words(p: Pipeline) -> str:
    """Its name."""
    return f"{unit_of(p.shown[0][1])} unit"


def _resident(p: Pipeline, one: Case, two: Case) -> str:
    """That a block with more buffers has less company, which hides its loads as buffers would."""
    each = []
    for case in (one, two):
        time = case.time
        rounds = -(-time.blocks // (time.processors * time.resident))
        each.append(
            f"{kib(time.footprint.sram_bytes)} of SRAM, {count(time.resident, 'block', 'blocks')} resident on "
            f"{'an' if p.machine.called[0] in 'MS' else 'a'} {p.machine.called}, "
            f"{count(rounds, 'round', 'rounds')} for the {time.blocks:,} blocks"
        )
    return (
        f"One stage: {each[0]}; two: {each[1]}. Blocks that share a processor hide each other's loads, as a second "
        "buffer does."
    )


# ---------------------------------------------------------------- text


def render(p: Pipeline) -> str:
    """The rows as characters, each number of stages on the same time axis."""
    longest = max((w[1] - w[0] for w in (p.window(r) for _, r in p.shown)), default=1) or 1
    parts = [*paragraph(title(p)), *paragraph(" ".join(verdict(p))), ""]
    letters = _letters(p)
    for case, recording in p.shown:
        parts += [heading(p, case, recording), *_rows(p, recording, longest, letters), ""]
    parts += _legend(p, letters)
    return "\n".join(parts) + "\n"


LEFT, RIGHT = 13, 6
CELLS = WIDTH - LEFT - RIGHT


def _letters(p: Pipeline) -> dict[str, str]:
    """A capital letter for each phase of a warp group."""
    out: dict[str, str] = {}
    phases = (
        bar.what for _, r in p.shown for t in tracks(p, r) if t.kind == "group" for bar in t.bars if bar.kind == "work"
    )
    for name in dict.fromkeys(phases):
        free = [c for c in (*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ") if c.isalpha() and c not in out.values()]
        out[name] = free[0] if free else "#"
    return out


def _rows(p: Pipeline, recording: Recording, longest: int, letters: Mapping[str, str]) -> Iterator[str]:
    start, end = p.window(recording)
    for track in drawn(p, recording):
        if track.name in recording.chip:
            yield _levels(p, recording, track.name, longest)
            continue
        cells: list[dict[str, float]] = [{} for _ in range(CELLS)]
        for bar in track.bars:
            sign = _sign(track, bar, letters)
            for n, part in _cells(bar, longest):
                cells[n][sign] = cells[n].get(sign, 0) + part
        used = -(-(end - start) * CELLS // longest)
        line = "".join(_strongest(cell, n < used) for n, cell in enumerate(cells))
        busy = sum(bar.end - bar.start for bar in track.bars if bar.kind == "work")
        share = "" if track.kind == "load" else percent(min(1.0, busy / max(1, end - start)))
        yield f"{LABELS.get(track.name, track.name)[: LEFT - 1]:{LEFT}}{line}{share:>{RIGHT}}".rstrip()
    yield f"{'':{LEFT}}{_scale(longest)}".rstrip()


def _levels(p: Pipeline, recording: Recording, name: str, longest: int) -> str:
    """A row of the chip's bandwidth used, in tenths."""
    start, end = p.window(recording)
    values = use(p, recording, max(1, round((end - start) * CELLS / longest)))[name]
    line = "".join("." if x < 0.005 else str(min(9, int(10 * x))) for x in values)
    share = percent(sum(values) / len(values))
    return f"{LABELS[name]:{LEFT}}{line:{CELLS}}{share:>{RIGHT}}"


def _sign(track: Track, bar: Bar, letters: Mapping[str, str]) -> str:
    if bar.kind == "wait":
        return LETTERS[bar.what]
    if track.kind == "group":
        return letters[bar.what]
    return ">" if track.kind == "load" else "#"


def _cells(bar: Bar, longest: int) -> Iterator[tuple[int, float]]:
    """The cells that a bar touches, and how much of each it covers."""
    a, b = bar.start * CELLS / longest, bar.end * CELLS / longest
    n = int(a)
    while n < min(b, CELLS):
        yield n, min(b, n + 1) - max(a, n)
        n += 1


def _strongest(cell: Mapping[str, float], used: bool) -> str:
    """What fills most of a cell; work wins over an equal wait."""
    if not used:
        return " "
    idle = 1 - sum(cell.values())
    best = max(cell, key=lambda sign: (round(cell[sign], 6), not sign.islower()), default="")
    return best if best and cell[best] >= idle - 1e-6 else "."


def _scale(longest: int) -> str:
    """Times below the cells."""
    step = _step(longest / 5)
    line, n = "", 0
    while (at := round(n * step * CELLS / longest)) + 8 <= CELLS:
        line = f"{line:{at}}|{n * step / 1e6:g}"
        n += 1
    return f"{line} us"


def _step(least: float) -> int:
    """1, 2 or 5 times a power of ten, in ps."""
    power = 1
    while power * 10 <= least:
        power *= 10
    return next((power * n for n in (1, 2, 5) if power * n >= least), power * 10)


def _legend(p: Pipeline, letters: Mapping[str, str]) -> Iterator[str]:
    groups = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    seen = {bar.what for _, r in p.shown for t in tracks(p, r) for bar in t.bars if bar.kind == "wait"}
    waits = ", ".join(f"{LETTERS[c]} {cause_words(c)}" for c in LETTERS if c in seen)
    yield from paragraph(
        f"Shown: {what_of(p)}. Loads: > from issue to arrival. Units: # busy, . idle. Warp groups: {groups}."
    )
    yield from paragraph(f"Waits of warp groups and of the matrix unit: {waits}. A character is what fills most of its "
                         "time; percentages are of all of it.")  # fmt: skip


def cause_words(cause: str) -> str:
    return {"launch": "start of the block", "tail": "no block left", "barrier": "a barrier or turn"}.get(
        cause, STALL_WORDS[cause].removeprefix("waiting for ")
    )


# ---------------------------------------------------------------- JSON and CSV


def document(p: Pipeline, request: Mapping[str, Any]) -> dict[str, Any]:
    """The spans for JSON; `request` repeats what was asked for.

    A span is [start_ps, length_ps, what, iteration, block]: `what` is a place in `names`, iteration and block may be
    null; times count from the beginning of the window.
    """
    names: dict[tuple[str, str], int] = {}
    stages = [_case(p, case, names) for case in p.cases]
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "machines": {p.machine.name: p.machine.profile_hash}},
        "problem": p.problem.as_dict(),
        "dataflow": p.flow.name,
        "hardware": p.machine.name,
        "kernel": p.kernel,
        "kernels": list(p.kernels),
        "fidelity": p.fidelity,
        "iterations": {"first": p.first, "last": p.last, "of": p.turns},
        "words": verdict(p),
        "span_columns": ["start_ps", "length_ps", "what", "iteration", "block"],
        "names": [{"kind": kind, "name": name} for kind, name in names],
        "stages": stages,
    }


def _case(p: Pipeline, case: Case, names: dict[tuple[str, str], int]) -> dict[str, Any]:
    if case.recording is None:
        return {"stages": list(case.stages), "fits": False, "reason": case.refusal}
    start, end = p.window(case.recording)

    def span(bar: Bar) -> list[int | None]:
        what = names.setdefault((bar.kind, bar.what), len(names))
        return [bar.start, bar.end - bar.start, what, bar.turn, bar.block]

    bins = use(p, case.recording)
    return {
        "stages": list(case.stages),
        "fits": True,
        "reason": None,
        "kernel_ps": case.time.makespan_ps,
        "window_ps": [start, end],
        "processors": case.time.processors,
        "blocks": list(case.recording.blocks),
        "tracks": [
            {"kind": t.kind, "name": t.name, "spans": [span(bar) for bar in t.bars]} for t in tracks(p, case.recording)
        ],
        "sram": {
            "capacity_bytes": case.recording.sram_capacity,
            "allocated_bytes": case.recording.sram_bytes * len(case.recording.blocks),
            "in_use": [list(step) for step in sram(p, case.recording)],
        },
        "bandwidth": {name: [round(x, 4) for x in values] for name, values in bins.items()},
    }


def sram(p: Pipeline, recording: Recording) -> list[tuple[int, int]]:
    """(ps from the beginning of the window, bytes in use from then on)."""
    start, end = p.window(recording)
    steps = recording.sram()
    before = [held for time, held in steps if time <= start]
    return [(0, before[-1] if before else 0), *((t - start, held) for t, held in steps if start < t < end)]


def use(p: Pipeline, recording: Recording, bins: int = BINS) -> dict[str, list[float]]:
    """Share of the bandwidth used in each bin of the window: of DRAM and L2 by the whole chip, of the copy engine."""
    start, end = p.window(recording)
    copy = [(s.start, s.end) for s in recording.units["copy"] if s.cause is None]
    return {
        name: use_of(spans, start, max(end, start + 1), bins)
        for name, spans in {**recording.chip, "copy": copy}.items()
    }


def rows_as_csv(p: Pipeline) -> str:
    """A header and one line a span."""
    return csv_text(
        [
            {
                "stages": ",".join(map(str, case.stages)),
                "track": track.name,
                "kind": bar.kind,
                "what": bar.what,
                "start_ps": bar.start,
                "end_ps": bar.end,
                "iteration": bar.turn,
                "block": bar.block,
            }
            for case, recording in p.shown
            for track in tracks(p, recording)
            for bar in track.bars
        ]
    )


# ---------------------------------------------------------------- picture


DASHES = ("dotted", "solid", "dashed", "dashdot")
HIDDEN = (
    "dram",
    "l2",
    "alu",
)  # units that are no row of their own: DRAM and L2 are curves, the ALU is with the vectors
ROW = 0.22  # inches
CURVE = 1.0


def plot(p: Pipeline) -> Figure:
    """Bars of each number of stages on one time axis; below them SRAM in use and bandwidth used."""
    from matplotlib.figure import Figure

    shown = p.shown
    rows = [_rows_of(p, recording) for _, recording in shown]
    heights = [ROW * (1 + sum(row.height for row in some)) for some in rows] + [CURVE] * 3
    words = [title(p), *(line for text in verdict(p) for line in wrap(text, 205))]
    figure = Figure(figsize=(13, sum(heights) + 0.33 * len(heights) + 0.17 * len(words) + 0.8), layout="constrained")
    axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0])
    longest = max(w[1] - w[0] for w in (p.window(r) for _, r in shown))
    for ax, (case, recording), some in zip(axes, shown, rows, strict=False):
        _gantt(ax, recording, some, longest)
        ax.set_title(heading(p, case, recording), fontsize=9, loc="left", pad=3, weight="bold")
    _curves(axes[len(shown) :], p)
    axes[-1].set_xlim(0, longest / 1e6)
    axes[-1].set_xlabel(f"time from the start of what is shown ({what_of(p)}), us", fontsize=8)
    figure.suptitle("\n".join(words), fontsize=8, x=0.005, ha="left", linespacing=1.4)
    _key(figure, p)
    return figure


class Row(NamedTuple):
    """A row of the picture: a name, and lanes of (track, bars) below one another."""

    name: str
    height: float
    lanes: list[tuple[Track, list[Bar]]]


def _rows_of(p: Pipeline, recording: Recording) -> list[Row]:
    """Loads that are in flight at one time lie below one another; the ALU shares the row of the vector lanes."""
    out = []
    found = drawn(p, recording)
    alu = next((t for t in found if t.name == "alu"), None)
    for track in found:
        if track.name in HIDDEN:
            continue
        lanes = [(track, row) for row in _apart(track.bars)] if track.kind == "load" else [(track, track.bars)]
        if track.name == "vector" and alu is not None:
            lanes = [(track, track.bars + alu.bars)]
        out.append(Row(LABELS.get(track.name, track.name), max(1.0, 0.62 * len(lanes)), lanes))
    return out


def _gantt(ax: Axes, recording: Recording, rows: Sequence[Row], longest: int) -> None:
    """The rows of one recording, from the top down."""
    special = {s.who.phase for s in recording.units["exp"] if s.cause is None and s.who is not None}
    products = {s.who.phase for s in recording.units["matrix"] if s.cause is None and s.who is not None}
    top, ticks = 0.0, []
    for row in rows:
        each = row.height / len(row.lanes)
        ticks.append(top + row.height / 2)
        for n, (track, bars) in enumerate(row.lanes):
            where = (top + n * each + 0.07 * each, 0.86 * each)
            for kind, what in dict.fromkeys((bar.kind, bar.what) for bar in bars):
                some = [bar for bar in bars if (bar.kind, bar.what) == (kind, what)]
                style = _style(track, kind, what, products, special)
                ax.broken_barh([(bar.start / 1e6, (bar.end - bar.start) / 1e6) for bar in some], where, **style)
                if track.kind != "unit" and kind != "wait":
                    _name(ax, some, where, longest, track.kind)
        top += row.height
    ax.set_ylim(top, 0)
    ax.set_yticks(ticks, [row.name for row in rows], fontsize=7)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=7)
    ax.grid(axis="x", color="0.85", linewidth=0.5)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _style(track: Track, kind: str, what: str, products: set[str], special: set[str]) -> dict[str, Any]:
    from iosim.report.plots import GREY, STALLS, YELLOW
    from iosim.report.plots import UNITS as COLOURS

    if kind == "wait":
        colour, hatch = STALLS[what]
        return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linewidth": 0.3, "alpha": 0.75}
    if track.kind == "group":
        colour = COLOURS["matrix"] if what in products else COLOURS["exp"] if what in special else YELLOW
    else:
        colour = COLOURS["copy" if track.kind == "load" else track.name] if what != "other blocks" else GREY
    return {"facecolor": colour, "edgecolor": "white" if track.kind != "unit" else colour, "linewidth": 0.3}


def _apart(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Bars in as few rows as they need not to overlap in."""
    rows: list[list[Bar]] = []
    for bar in bars:
        row = next((row for row in rows if row[-1].end <= bar.start), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return rows


def _name(ax: Axes, bars: Sequence[Bar], where: tuple[float, float], longest: int, kind: str) -> None:
    """The phase and iteration of each bar that has room for it."""
    for bar in bars:
        number = "" if bar.turn is None else f" {bar.turn}"
        full, short = f"{bar.what}{number}", number.strip() or bar.what
        room = (bar.end - bar.start) / longest * 210  # characters that fit
        text = full if len(full) + 1 <= room else short if len(short) + 1 <= room else ""
        if text:
            middle = (bar.start + bar.end) / 2e6, where[0] + where[1] / 2
            white = kind == "load"
            ax.text(*middle, text, fontsize=5.5, ha="center", va="center_baseline", color="white" if white else "black")


def _curves(axes: Sequence[Axes], p: Pipeline) -> None:
    """SRAM in use and bandwidth used over time, one line a number of stages."""
    from iosim.report.plots import BLACK, BLUE, GREY, VERMILION

    colours = dict(zip((case.stages for case in p.cases), (GREY, BLUE, VERMILION, BLACK), strict=False))
    dashes = dict(zip((case.stages for case in p.cases), DASHES, strict=False))
    held, l2, dram = axes
    for case, recording in p.shown:
        start, end = p.window(recording)
        style: dict[str, Any] = {
            "color": colours[case.stages], "linestyle": dashes[case.stages], "linewidth": 1.3, "label": case.words
        }  # fmt: skip
        steps = sram(p, recording)
        steps.append((end - start, steps[-1][1]))
        held.step([t / 1e6 for t, _ in steps], [h / 1024 for _, h in steps], where="post", **style)
        edges = [(end - start) * n / BINS / 1e6 for n in range(BINS + 1)]
        for ax, name in ((l2, "l2"), (dram, "dram")):
            values = [100 * x for x in use(p, recording).get(name, [0.0] * BINS)]
            ax.step(edges, [*values, values[-1]], where="post", **style)
    held.axhline(p.shown[0][1].sram_capacity / 1024, color=BLACK, linewidth=0.6)
    held.annotate("capacity", (1, p.shown[0][1].sram_capacity / 1024), xycoords=("axes fraction", "data"), fontsize=6,
                  ha="right", va="bottom")  # fmt: skip
    held.set_ylim(0, p.shown[0][1].sram_capacity / 1024 * 1.15)
    for ax, label in ((held, "SRAM in\nuse, KiB"), (l2, "L2 used,\n%"), (dram, "DRAM used,\n%")):
        ax.set_ylabel(label, fontsize=7)
        ax.tick_params(labelsize=7)
        ax.grid(color="0.85", linewidth=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in (l2, dram):
        ax.set_ylim(0, 105)
    held.legend(fontsize=7, ncols=len(p.shown), loc="lower right", frameon=True)


def _key(figure: Figure, p: Pipeline) -> None:
    """What colours and hatchings mean."""
    from matplotlib.patches import Patch

    from iosim.report.plots import STALLS, YELLOW
    from iosim.report.plots import UNITS as COLOURS

    seen = {bar.what for _, r in p.shown for t in tracks(p, r) for bar in t.bars if bar.kind == "wait"}
    patches = [
        Patch(facecolor=COLOURS["copy"], label="load in flight"),
        Patch(facecolor=COLOURS["matrix"], label="matrix products"),
        Patch(facecolor=COLOURS["exp"], label="softmax (exp)"),
        Patch(facecolor=YELLOW, label="other vector work"),
    ]
    patches += [
        Patch(facecolor="white", edgecolor=colour, hatch=hatch, label=f"waits: {cause_words(cause)}")
        for cause, (colour, hatch) in STALLS.items()
        if cause in seen
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=5, fontsize=7, frameon=False)
