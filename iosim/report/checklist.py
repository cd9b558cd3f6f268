"""The checklist for a terminal of 80 columns, as JSON (schema iosim.check/1) and as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import iosim
from iosim.report.layout import csv_text, draw, paragraph, table
from iosim.report.text import headline, machine_line
from iosim.study.checklist import Checklist, Line
from iosim.words import count, duration

SCHEMA = "iosim.check/1"


def render(found: Checklist) -> str:
    """The answer, the lines, their remedies, and what the guide says of this tile."""
    plan = found.plan
    s, uses = plan.schedule, plan.flow.uses
    words = [count(found.count("fail"), "fail", "fails"), count(found.count("warn"), "warning", "warnings"),
             count(found.count("pass"), "pass", "passes")]  # fmt: skip
    skipped = f", {found.count('skip')} skipped" if found.count("skip") else ""
    rows, cols = (s.block_q, s.block_k) if "block_q" in uses else (s.softmax_rows, s.softmax_cols)
    tile = f"{rows} x {cols}, {','.join(map(str, s.stages))} stage{'' if s.stages == (1,) else 's'}"
    time = "" if found.seconds is None else f", {duration(found.seconds)}"
    parts = [
        *paragraph(f"Check of {plan.flow.name} on {plan.machine.name} ({tile}{time}): {', '.join(words)}{skipped}"),
        *paragraph(headline(plan.problem, plan.flow.computes)),
        *paragraph(machine_line(plan.machine)),
        "",
        _table(found),
    ]
    for line in found.lines:
        if line.remedy:
            parts += paragraph(f"{line.name}: {line.remedy}.")
    parts += [""] if any(line.remedy for line in found.lines) else []
    for line in found.lines:
        if line.detail:
            parts += paragraph(f"{line.name}: {line.detail}.")
    for note in found.notes:
        parts += paragraph(note)
    parts += paragraph(f"Schedule: {plan.why}.")
    return "\n".join(parts) + "\n"


def _table(found: Checklist) -> str:
    drawn = table("", "status", "found", "wanted", left=4)
    for column in drawn.columns[:2]:
        column.no_wrap = True
    for line in found.lines:
        drawn.add_row(line.name, line.status, line.found, line.wanted)
    return draw(drawn)


def document(found: Checklist, request: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON; `request` repeats what was asked for."""
    plan = found.plan
    whole = plan.schedule.as_dict()
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {plan.machine.name: plan.machine.profile_hash}},
        "dataflow": plan.flow.name,
        "hardware": plan.machine.name,
        "problem": plan.problem.as_dict(),
        "schedule": {name: whole[name] for name in (*plan.flow.uses, "stages", "groups")} | {"why": plan.why},
        "seconds": found.seconds,
        "counts": {status: found.count(status) for status in ("pass", "warn", "fail", "skip")},
        "checks": [_fields(line) for line in found.lines],
        "notes": list(found.notes),
    }


def _fields(line: Line) -> dict[str, Any]:
    return asdict(line)


def rows_as_csv(found: Checklist) -> str:
    """A header and one line a check."""
    about = {"dataflow": found.plan.flow.name, "hardware": found.plan.machine.name}
    return csv_text([about | _fields(line) for line in found.lines])
