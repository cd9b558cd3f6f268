"""Tables and paragraphs for a terminal of 80 columns, and tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 80


def table(*columns: str, left: int = 1) -> Table:
    """An empty table with the style of all of ours; the first `left` columns hold words, the others numbers."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right", no_wrap=number >= left)
    return made


def draw(drawn: Table, width: int = WIDTH) -> str:
    """A table as text."""
    console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def paragraph(text: str) -> list[str]:
    """The lines of a paragraph."""
    return wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV: a header with every key, and one line a row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
