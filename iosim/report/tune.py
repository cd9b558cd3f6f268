"""The answer of a search for a terminal of 80 columns, as JSON (iosim.tune/1), as CSV, and as Triton's configs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import iosim
from iosim.report.layout import WIDTH, csv_text, draw, paragraph, table
from iosim.report.text import STALL_WORDS, STARVED, UNIT_WORDS, headline, machine_line
from iosim.study.tune import RULES, SWITCHES, Candidate, Removed, Tuned
from iosim.words import count, duration, percent

SCHEMA = "iosim.tune/1"
PLACES = {"sram": "SRAM", "tmem": "tensor memory"}
LETTERS = {"producer": "P", "pingpong": "T", "overlap": "O"}
ORDER_WORDS = "order: P a producer, T groups in turns (ping-pong), O softmax under products; - switched off."
SMALL = 0.01  # a share of the time that is not worth a word


# ---------------------------------------------------------------- text


def render(t: Tuned) -> str:
    """The whole answer, the best first."""
    best = t.candidates[0]
    parts = [
        *paragraph(headline(t.problem, t.computes, t.batch)),
        *paragraph(machine_line(t.hardware)),
        "",
        *paragraph(f"Best for {t.dataflow}: {_headline(t, best)}"),
        "",
        _candidates(t, t.candidates),
        "Best for each number of stages:",
        _candidates(t, t.by_stages),
    ]
    if any(name in t.space for name in SWITCHES):
        parts += paragraph(ORDER_WORDS)
    moved = {tile: place for c in (*t.candidates, *t.by_stages) for tile, place in c.given.get("place", {}).items()}
    if moved:
        words = (f"{tile}:{place[0]} is {_moved(tile, place)}" for tile, place in moved.items())
        parts += paragraph(f"staged: {', '.join(words)}.")
    for text in _why(t):
        parts += paragraph(text)
    return "\n".join([*parts, "", *_counts(t)]) + "\n"


def _headline(t: Tuned, best: Candidate) -> str:
    """The best in words, and what it gains over the default."""
    f = best.footprint
    text = f"{_called(best)}: {duration(best.seconds)}, {f.sram_bytes / 1024:.4g} of {f.sram_capacity / 1024:.4g} KiB"
    text += f" SRAM, {count(f.resident, 'block', 'blocks')} resident ({f.limit})."
    if t.default is None:
        return text
    gain = 1 - best.makespan_ps / t.default.makespan_ps
    who = "the authors'" if t.kernel else "the default"
    if gain < 0:
        return f"{text} {who.capitalize()} schedule, which is outside of the search, is {percent(-gain)} faster."
    same = "the same time as" if gain < 0.0005 else f"{100 * gain:.1f} % less than"
    return f"{text} That is {same} {who} schedule ({_called(t.default)}: {duration(t.default.seconds)})."


def _called(c: Candidate) -> str:
    """A candidate in words: "256 x 64, 2,1 stages, 4 warp groups"."""
    s = c.schedule
    stages = ",".join(map(str, s.stages))
    text = f"{s.block_q} x {s.block_k}, {stages} {'stage' if stages == '1' else 'stages'}, "
    text += count(s.groups, "warp group", "warp groups")
    off = [f"no {name}" for name in SWITCHES if c.given.get(name) is False]
    return ", ".join([text, *off, *(_moved(tile, place) for tile, place in c.given.get("place", {}).items())])


def _moved(tile: str, place: str) -> str:
    """Where a tile was moved, in words."""
    return f"{tile} in {PLACES.get(place, place)}"


def _candidates(t: Tuned, rows: Sequence[Candidate]) -> str:
    """A table of candidates; what all of them leave as it is has no column."""
    with_order = any(name in t.space for name in SWITCHES)
    with_place = any(c.given.get("place") for c in (*t.candidates, *t.by_stages))
    names = ["tile", "stages", "groups", *["order"] * with_order, *["staged"] * with_place]
    with_over = not (with_order and with_place)  # there is no room for all
    made = table(*names, "KiB", "time", *["over"] * with_over, "busiest", "stall", left=0)
    made.padding = (0, 1, 0, 0)
    best = t.candidates[0].makespan_ps
    for c in rows:
        cells = [f"{c.schedule.block_q} x {c.schedule.block_k}", ",".join(map(str, c.schedule.stages))]
        cells.append(str(c.schedule.groups))
        if with_order:
            cells.append("".join(LETTERS[n] if c.given[n] else "-" for n in SWITCHES if n in t.space))
        if with_place:
            cells.append(" ".join(f"{tile}:{place[0]}" for tile, place in c.given.get("place", {}).items()))
        over = f"{100 * (c.makespan_ps / best - 1):.1f} %"
        cause, share = _stall(t, c)
        cells += [f"{c.footprint.sram_bytes / 1024:.4g}", duration(c.seconds), *[over] * with_over]
        made.add_row(*cells, f"{c.bound} {percent(_busy(c))}", f"{cause} {percent(share)}")
    return draw(made)


def _unit(t: Tuned) -> str:
    """The unit whose time is accounted for."""
    return "vector" if t.problem.dtype == "fp32" else "matrix"


def _account(t: Tuned, c: Candidate) -> dict[str, float]:
    """Seconds of the run in which that unit is busy, and stands still by cause; they add up to the whole."""
    unit = c.units[_unit(t)]
    each = unit.instances * 1e12
    return {"busy": unit.busy_ps / each, **{cause: ps / each for cause, ps in unit.stalls_ps.items()}}


def _stall(t: Tuned, c: Candidate) -> tuple[str, float]:
    waits = {cause: time for cause, time in _account(t, c).items() if cause != "busy"}
    cause = max(waits, key=lambda name: waits[name])
    return cause, waits[cause] / c.seconds


def _busy(c: Candidate) -> float:
    """The share of the run that the busiest unit is busy."""
    if c.bound == "launch":
        return c.launch_ps / c.makespan_ps
    unit = c.units[c.bound]
    return unit.busy_ps / (unit.instances * c.makespan_ps)


def _why(t: Tuned) -> Iterator[str]:
    """Why the best wins over the next one, and over the default."""
    best = t.candidates[0]
    others = [("the next", c) for c in t.candidates[1:2]]
    if t.default is not None and (t.default.schedule.as_dict() != best.schedule.as_dict()):
        others.append(("the authors' schedule" if t.kernel else "the default", t.default))
    for name, other in others:
        yield f"Against {name} ({_called(other)}, {duration(other.seconds)}): {_difference(t, best, other)}"
    most = f"keeps {UNIT_WORDS[best.bound]} busiest, for" if best.bound != "launch" else "is launched for"
    yield f"Times are predicted (fair fidelity). The best {most} {percent(_busy(best))} of the time."


def _difference(t: Tuned, best: Candidate, other: Candidate) -> str:
    """What the unit of the products does less or more of in the best."""
    if best.makespan_ps == other.makespan_ps:
        less = best.footprint.sram_bytes < other.footprint.sram_bytes
        return "both take the same time" + (", the best with less SRAM." if less else ".")
    ours, theirs = _account(t, best), _account(t, other)
    gained = {name: theirs[name] - ours[name] for name in ours}
    told = {name: gain for name, gain in gained.items() if abs(gain) >= SMALL * best.seconds}
    if not told:
        return f"they differ by {duration(abs(other.seconds - best.seconds))}, no cause by 1 % of the time."
    lines = []
    for sign, word in ((1, "less"), (-1, "more")):
        ranked = sorted((n for n in told if told[n] * sign > 0), key=lambda n: -abs(told[n]))
        if ranked:
            lines.append("; ".join(f"{duration(abs(told[n]))} {word} {_doing(t, n)}" for n in ranked))
    return f"in the best the {_unit(t)} units spend {'; but '.join(lines)}."


def _doing(t: Tuned, name: str) -> str:
    if name == "busy":
        return "on products"
    words = STARVED if name == "matrix" and _unit(t) == "matrix" else STALL_WORDS[name]
    return words if words.startswith("waiting") else f"waiting for {words}".replace("for that", "as")


def _counts(t: Tuned) -> Iterator[str]:
    """How many candidates each rule removed, and which."""
    ruled = sum(r.count for r in t.removed)
    yield from paragraph(
        f"{t.considered:,} candidates: the machine's rules remove {ruled:,}; {t.bounded:,} cannot be among the "
        f"best, as their busiest unit alone takes longer; {t.timed:,} were timed in {t.took:.1f} s."
    )
    for r in t.removed:
        yield f"{r.rule:<13}{r.count:>7,}  {_rule_words(t, r)}"
        if only := _only(t, r):
            yield from (f"{'':22}{line}" for line in wrap(only, WIDTH - 22))


def _rule_words(t: Tuned, r: Removed) -> str:
    return f"less than {percent(t.margin)} of SRAM left free" if r.rule == "margin" else RULES[r.rule]


def _only(t: Tuned, r: Removed) -> str:
    """The fields that tell the removed candidates from others: their values, where these are not all of the space."""
    parts = []
    for name, values in r.values.items():
        if name != "place" and len(values) < len(t.space[name]):
            words = [",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values]
            text = words[0] if len(words) == 1 else f"{words[0]} to {words[-1]}"
            parts.append(f"{name} {text}")
    return "only " + "; ".join(parts) if parts else ""


# ---------------------------------------------------------------- for programs


def document(t: Tuned, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer for JSON; `request` repeats what was asked for."""
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {t.hardware.name: t.hardware.profile_hash}},
        "problem": t.problem.as_dict() | ({} if t.batch is None else t.batch.as_dict()),
        "dataflow": t.dataflow,
        "hardware": t.hardware.name,
        "margin": t.margin,
        "space": {name: [_plain(v) for v in values] for name, values in t.space.items()},
        "considered": t.considered,
        "removed": {r.rule: r.count for r in t.removed},
        "bounded": t.bounded,
        "timed": t.timed,
        "candidates": [_candidate(c) for c in t.candidates],
        "by_stages": [_candidate(c) for c in t.by_stages],
        "default": None if t.default is None else _candidate(t.default),
    }


def _candidate(c: Candidate) -> dict[str, Any]:
    f = c.footprint
    return {
        "schedule": fields_of(c),
        "sram": {
            "used_bytes": f.sram_bytes,
            "capacity_bytes": f.sram_capacity,
            "kernel": f.kernel,
            "items": dict(f.items),
            "resident_blocks": f.resident,
            "resident_limit": f.limit,
        },
        "time": {"seconds": c.seconds, "makespan_ps": c.makespan_ps, "bound": c.bound},
        "units": {
            name: {"instances": u.instances, "busy_ps": u.busy_ps, "stalls_ps": dict(u.stalls_ps)}
            for name, u in c.units.items()
        },
    }


def fields_of(c: Candidate) -> dict[str, Any]:
    """The fields of a candidate, as `iosim.run(schedule=...)` takes them."""
    return {name: _plain(value) for name, value in c.given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return dict(value) if isinstance(value, Mapping) else value


def schedules(t: Tuned) -> str:
    """The schedules alone as a JSON list, best first."""
    return json.dumps([fields_of(c) for c in t.candidates], indent=1) + "\n"


def configs(t: Tuned) -> str:
    """A list of triton.Config to paste, best first."""
    warps = t.hardware.warps_per_group
    lines = [
        f'    triton.Config({{"BLOCK_M": {c.schedule.block_q}, "BLOCK_N": {c.schedule.block_k}}}, '
        f"num_warps={warps * c.schedule.groups}, num_stages={c.schedule.stages[0]}),"
        for c in t.candidates
    ]
    return "\n".join(["configs = [", *lines, "]"]) + "\n"


def rows_as_csv(t: Tuned) -> str:
    """A header and one line a candidate, best first."""
    return csv_text(
        [
            {
                "rank": rank,
                **{name: _cell(c.given.get(name)) for name in t.space},
                "sram_bytes": c.footprint.sram_bytes,
                "resident_blocks": c.footprint.resident,
                "makespan_ps": c.makespan_ps,
                "bound": c.bound,
                "bound_busy_share": _busy(c),
                "largest_stall": _stall(t, c)[0],
                "largest_stall_share": _stall(t, c)[1],
            }
            for rank, c in enumerate(t.candidates, 1)
        ]
    )


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return " ".join(f"{tile}:{place}" for tile, place in value.items()) if isinstance(value, Mapping) else value
