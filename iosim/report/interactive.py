"""The tile pipeline as a part of the page: stages to switch between, zoom, hover and keys (page/timeline.js)."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from iosim.interpreters.recording import shares
from iosim.report import plots
from iosim.report.book import Extra
from iosim.report.timeline import cause_words, document, title, unit_of, verdict, what_of
from iosim.study.pipeline import Case, Pipeline
from iosim.words import count, duration, percent

_PAGE = Path(__file__).parent / "page"
HELP = (
    "Drag to move along time, wheel or pinch with Ctrl to zoom, double click to zoom in. With the picture focused: "
    "left and right go from bar to bar, up and down from row to row, + and - zoom, Home shows all, 1 to 9 choose "
    "stages."
)


def part(p: Pipeline, number: int = 0) -> Extra:
    """The part of the page; `number` tells several on one page apart."""
    name = f"timeline-{number + 1}" if number else "timeline"
    words = [f"{title(p)}; {what_of(p)}.", *verdict(p)]
    first = next(n for n, case in enumerate(p.cases) if case.recording is not None)
    chosen = next((n for n, case in enumerate(p.cases) if case.stages == (2,) and case.recording is not None), first)
    radios = "".join(_radio(name, n, case, checked=n == chosen) for n, case in enumerate(p.cases))
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}" title="{label}">{sign}</button>'
        for do, label, sign in (("in", "Zoom in", "+"), ("out", "Zoom out", "−"), ("left", "Earlier", "←"),
                                ("right", "Later", "→"), ("all", "Show all", "all"))
    )  # fmt: skip
    html = (
        "".join(f"<p>{escape(text)}</p>" for text in words)
        + f'<div class="timeline" data-from="{name}-data"><div class="controls"><fieldset><legend>Stages</legend>'
        + f'{radios}</fieldset><div class="zoom">{buttons}</div></div>'
        + f'<canvas tabindex="0" role="application" aria-roledescription="timeline" aria-describedby="{name}-help" '
        + f'aria-label="{escape(title(p))}"></canvas>'
        + '<p class="told" role="status" aria-live="polite"></p><div class="key"></div></div>'
        + f'<p class="legend" id="{name}-help">{escape(HELP)}</p>{_table(p)}'
        + f'<script type="application/json" id="{name}-data">{_data(p)}</script>'
    )
    own = number == 0  # once a page
    return Extra(
        name, f"Timeline: the tile pipeline on {p.machine.name}", html,
        _text("timeline.js") if own else "", _text("timeline.css") if own else "",
    )  # fmt: skip


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _radio(name: str, n: int, case: Case, *, checked: bool) -> str:
    state = " checked" if checked else "" if case.recording is not None else " disabled"
    tip = f' title="{escape(case.refusal)}"' if case.refusal else ""
    return f'<label{tip}><input type="radio" name="{name}-stages" value="{n}"{state}>{escape(case.words)}</label>'


def _data(p: Pipeline) -> str:
    """The spans and what paints them, as JSON that cannot end the script that it is in."""
    made = document(p, {}) | {
        "colours": plots.UNITS | {"other": plots.YELLOW, "grey": plots.GREY, "load": plots.UNITS["copy"]},
        "waits": {
            cause: {"colour": colour, "words": cause_words(cause)} for cause, (colour, _) in plots.STALLS.items()
        },
    }
    return json.dumps(made, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _table(p: Pipeline) -> str:
    """The numbers beside the picture, for those who do not see it too."""
    heads = (
        "stages",
        "kernel",
        "shown",
        "blocks a processor",
        f"{unit_of(p.shown[0][1])} unit busy",
        "largest wait of it",
    )
    rows = []
    for case in p.cases:
        if case.recording is None:
            rows.append([case.words, "does not fit", *["-"] * 4])
            continue
        start, end = p.window(case.recording)
        seen = shares(case.recording.units[unit_of(case.recording)], start, end)
        waits = {cause: ps for cause, ps in seen.items() if cause in plots.STALLS}
        busy = (end - start) - sum(waits.values())
        most = max(waits, key=lambda cause: waits[cause], default="")
        rows.append([
            case.words, duration(case.time.makespan_ps / 1e12), duration((end - start) / 1e12),
            count(len(case.recording.blocks), "block", "blocks"), percent(max(0, busy) / (end - start)),
            f"{cause_words(most)} {percent(waits[most] / (end - start))}" if most else "-",
        ])  # fmt: skip
    head = "".join(f'<th scope="col"{_words(n)}>{escape(text)}</th>' for n, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_words(n)}>{escape(cell)}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return (f'<div class="scroll" role="group" tabindex="0" aria-label="Pipeline by stages"><table><caption>By number '
            f"of stages</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")  # fmt: skip


def _words(n: int) -> str:
    return ' class="words"' if n in (0, 5) else ""
