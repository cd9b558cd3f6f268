"""Two results side by side for a terminal of 80 columns, as JSON (schema iosim.diff/1) and as CSV."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.text import Text

import iosim
from iosim.report.layout import csv_text, draw, paragraph, table
from iosim.study.diff import GROUPS, Change, Difference, Scalar, first_words
from iosim.words import count, digits, duration, kib, size

SCHEMA = "iosim.diff/1"
SHOWN = 40  # rows of a table for one pair
NAME, VALUE = 30, 20  # characters


def render(found: Difference) -> str:
    """The answer in a line, and a table for the inputs and for each pair that differs."""
    pairs = count(found.compared, "pair", "pairs")
    names = [_clean(name, 200) for name in found.files]
    if found.same:
        text = f"No difference between {names[0]} and {names[1]} ({pairs} of {found.schema})."
        return "\n".join(paragraph(text)) + "\n"
    parts = paragraph(f"{_summary(found)} (A: {names[0]}, B: {names[1]}, {found.schema}, {pairs}).")
    for change in (c for c in found.changes if c.name in ("time.seconds", "seconds")):
        times = f"{_value(change, change.a)} in A, {_value(change, change.b)} in B"
        ratio = "" if change.ratio is None else f" ({digits(change.ratio)}x)"
        parts += paragraph(f"{_clean(change.entry, 40) or 'time'}: {times}{ratio}")
    for title, only in (("Only in A", found.only_a), ("Only in B", found.only_b)):
        if only:
            parts += paragraph(f"{title}: {', '.join(_clean(name, 60) for name in only[:20])}"
                               + (f" and {len(only) - 20} more" if len(only) > 20 else "") + ".")  # fmt: skip
    hidden: Counter[str] = Counter()
    for entry in dict.fromkeys(change.entry for change in found.changes):
        own = [change for change in found.changes if change.entry == entry]
        shown = [change for change in own if change.group != "other" or not _has_groups(found)][:SHOWN]
        hidden[entry] = len(own) - len(shown)
        if shown:
            parts += ["", _table(_clean(entry, 40) or "both as a whole", shown).rstrip("\n")]
    if rest := sum(hidden.values()):
        parts += [""] * any(hidden.values())
        parts += paragraph(f"{count(rest, 'more value differs', 'more values differ')}, by unit, kernel and tensor: "
                           "--json or --csv has all.")  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def _has_groups(found: Difference) -> bool:
    """Whether the schema's values fall into groups; a run's do."""
    return found.schema == "iosim.run/1"


def _summary(found: Difference) -> str:
    """How many values differ, group by group."""
    groups = Counter(change.group for change in found.changes)
    words = [f"{groups[name]} in {name}" for name in GROUPS if groups[name]]
    unpaired = len(found.only_a) + len(found.only_b)
    words += [f"{count(unpaired, 'entry', 'entries')} without a partner"] if unpaired else []
    return f"Differences: {', '.join(words)}"


def _table(title: str, changes: list[Change]) -> str:
    drawn = table(title, "A", "B", "B/A", left=1)
    drawn.columns[0].no_wrap = True
    group = ""
    for change in changes:
        if change.group != group:
            group = change.group
            drawn.add_row(Text(group), "", "", "")
        ratio = "" if change.ratio is None else f"{digits(change.ratio)}x"
        drawn.add_row(Text("  " + _clean(change.name, NAME)), *(Text(_value(change, v)) for v in (change.a, change.b)),
                      ratio if change.group != "inputs" else "")  # fmt: skip
    return draw(drawn)


def _value(change: Change, value: Scalar) -> str:
    """A value with the unit that its name says."""
    last = change.name.rpartition(".")[2]
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, str):
        return _clean(value, VALUE if "hash" not in change.name else 12)
    if abs(value) >= 1e13:
        return f"{value:.3e}"
    if value >= 0 and change.name.startswith("sram."):
        return kib(int(value))
    if value >= 0 and last.endswith("bytes"):
        return size(int(value))
    if value >= 0 and last.endswith("_ps"):
        return duration(value / 1e12)
    if value >= 0 and last.endswith("seconds"):
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _clean(text: str, most: int) -> str:
    """A stranger's text as one short line that a terminal can be given."""
    return first_words("".join(c if c.isprintable() else "?" for c in text), most)


def document(found: Difference, request: dict[str, Any]) -> dict[str, Any]:
    """For JSON; `request` repeats what was asked for."""
    return {
        "schema": SCHEMA,
        "request": request,
        "provenance": {"iosim": iosim.__version__},
        "of": found.schema,
        "a": found.files[0],
        "b": found.files[1],
        "same": found.same,
        "pairs": found.compared,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "changes": [_fields(change) for change in found.changes],
    }


def _fields(change: Change) -> dict[str, Any]:
    return {
        "entry": change.entry,
        "group": change.group,
        "name": change.name,
        "a": change.a,
        "b": change.b,
        "ratio": change.ratio,
    }


def rows_as_csv(found: Difference) -> str:
    """A header and one line a value that differs."""
    if not found.changes:
        return "entry,group,name,a,b,ratio\n"
    return csv_text([_fields(change) for change in found.changes])
