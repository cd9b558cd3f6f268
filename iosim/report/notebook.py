"""Results as a notebook shows them: tables as HTML without a style of their own, so in the notebook's light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from iosim.report import text
from iosim.report.sections import Section
from iosim.study.run import Comparison

_LEFT, _RIGHT = ' style="text-align:left"', ' style="text-align:right"'


def comparison(found: Comparison) -> str:
    """The lines of `iosim run`, a column a run; below it the schedules."""
    runs = found.runs
    machines = list({r.hardware.name: r.hardware for r in runs}.values())
    names = [(r.parts or (r,))[0].dataflow.name for r in runs]  # of a training step that of the forward pass
    heads = names if len(machines) == 1 else [f"{n} on {r.hardware.name}" for n, r in zip(names, runs, strict=True)]
    rows = [[label, *(cell(r) for r in runs)] for label, cell, _ in text.rows(runs)]
    words = [text.headline(found.problem, runs[0].dataflow.computes), *map(text.machine_line, machines)]
    why = [f"{name}: {r.why}." for name, r in zip(heads, runs, strict=True) if r.why]
    return _paragraphs(words) + table(["", *heads], rows, 1) + _paragraphs(why)


def section(found: Section) -> str:
    """The answer and the tables of a report."""
    out = _paragraphs([found.title, *found.answer])
    for one in (t.alone for t in found.tables):
        left = [c.words for c in one.columns]
        out += _paragraphs([one.title]) + table([c.title for c in one.columns], one.cells(), left)
        out += _paragraphs([f"{one.legend}."] if one.legend else [])
    return out + _paragraphs(found.notes)


def printed(words: str) -> str:
    """What a terminal would show, its columns kept."""
    return f'<pre style="line-height:1.25">{escape(words)}</pre>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int | Sequence[bool]) -> str:
    """A table of words; `left` says which columns are written from the left, or how many are."""
    sides = [n < left for n in range(len(heads))] if isinstance(left, int) else list(left)
    style = [_LEFT if side else _RIGHT for side in sides]

    def cells(kind: str, row: Sequence[str]) -> str:
        inner = "".join(f"<{kind}{s}>{escape(cell)}</{kind}>" for s, cell in zip(style, row, strict=True))
        return f"<tr>{inner}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', heads)}</thead><tbody>{body}</tbody></table>"


def _paragraphs(words: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in words)
