"""What every report is made of: a Section of an answer, tables and plots; its forms as text, JSON, CSV and pictures.

A report makes one Section; the command line prints it, `iosim report all` puts several on one page.  A table holds raw
values, in the unit that its column names, and the column says how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

import iosim
from iosim.hardware import Hardware
from iosim.report.layout import csv_text, draw, paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    Canvas: TypeAlias = Figure | SubFigure

SCHEMA = "iosim.report/1"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `key` in JSON and CSV, `head` on paper (a line break is one there), the `unit` of its raw values.

    `counts` says in words what is counted, where the head does not say all.  `show` makes a value readable.  `words`
    are written from the left; a terminal has no room for what is `wide`.
    """

    key: str
    head: str
    unit: str = ""
    counts: str = ""
    show: Callable[[Any], str] = str
    words: bool = False
    wide: bool = False

    def shown(self, value: Any) -> str:
        """A value as people read it; "-" where there is none."""
        return "-" if value is None else self.show(value)

    @property
    def title(self) -> str:
        """The head in one line."""
        return self.head.replace("\n", " ").strip()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of raw values by column key; `name` is that of its CSV file.

    Where the column called `by` has several values, a terminal shows a table for each.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    by: str = ""

    def __post_init__(self) -> None:
        keys = {c.key for c in self.columns}
        if wrong := next((row for row in self.rows if row.keys() != keys), None):
            raise ValueError(f"table {self.name}: columns {sorted(keys)}, but a row of {sorted(wrong)}")

    def cells(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[c.shown(row[c.key]) for c in self.columns] for row in self.rows]

    @property
    def alone(self) -> Table:
        """Without the column `by` where it has but one value."""
        if len({row[self.by] for row in self.rows} if self.by else ()) != 1:
            return self
        columns = tuple(c for c in self.columns if c.key != self.by)
        return replace(self, columns=columns, rows=tuple(_only(row, columns) for row in self.rows), by="")

    def narrow(self) -> dict[str, Table]:
        """What a terminal shows of it, by the value of the column `by` ("" where there is none, or one)."""
        columns = tuple(c for c in self.columns if not c.wide and c.key != self.by)
        values = dict.fromkeys(row.get(self.by) for row in self.rows)
        return {
            str(value) if len(values) > 1 else "": replace(
                self,
                columns=columns,
                rows=tuple(_only(row, columns) for row in self.rows if row.get(self.by) == value),
                by="",
            )
            for value in values
        }

    @property
    def legend(self) -> str:
        """What the columns count, where they say so; columns that count alike stand together."""
        alike: dict[str, list[str]] = {}
        for c in self.columns:
            if c.counts:
                alike.setdefault(c.counts, []).append(c.title)
        return "; ".join(f"{', '.join(names)}: {counts}" for counts, names in alike.items())


def _only(row: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    return {c.key: row[c.key] for c in columns}


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture: what it shows in words (also for those who do not see it), and a function that draws it."""

    name: str
    title: str
    draw: Callable[[Canvas], None]
    height: float = 4.5  # inches, of 8 in width


@dataclass(frozen=True, slots=True)
class Section:
    """The result of a report.

    `answer` are sentences, the answer first; `subject` says in a line each what it is about; `notes` are what a reader
    should know of how the numbers were had.
    """

    name: str
    title: str
    subject: tuple[str, ...]
    answer: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    notes: tuple[str, ...] = ()
    machines: tuple[Hardware, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- text


def text(section: Section) -> str:
    """For a terminal of 80 columns."""
    parts = [*paragraph(section.title)]
    for line in section.subject:
        parts += paragraph(line)
    parts.append("")
    for sentence in section.answer:
        parts += paragraph(sentence)
    for table in section.tables:
        for value, shown in table.narrow().items():
            parts += ["", *paragraph(f"{table.title}: {value}" if value else table.title), "", _drawn(shown)]
        parts += paragraph(f"{shown.legend}.") if shown.legend else []
    parts += [""] if section.notes else []
    for note in section.notes:
        parts += paragraph(note)
    return "\n".join(parts) + "\n"


def _drawn(table: Table) -> str:
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for c in table.columns:
        made.add_column(c.head, justify="left" if c.words else "right", no_wrap=not c.words, vertical="top")
    for cells in table.cells():
        made.add_row(*cells)
    return draw(made).rstrip("\n")


# ---------------------------------------------------------------- JSON, CSV, Markdown


def document(section: Section) -> dict[str, Any]:
    """For JSON (schema iosim.report/1): raw values, in the units that the columns name."""
    return {
        "schema": SCHEMA,
        "report": section.name,
        "request": dict(section.request),
        "provenance": {
            "iosim": iosim.__version__,
            "profile_hash": {machine.name: machine.profile_hash for machine in section.machines},
        },
        "title": section.title,
        "subject": list(section.subject),
        "answer": list(section.answer),
        "tables": {table.name: _table_document(table) for table in section.tables},
        "notes": list(section.notes),
    }


def _table_document(table: Table) -> dict[str, Any]:
    columns = [{"key": c.key, "title": c.title, "unit": c.unit, "counts": c.counts} for c in table.columns]
    return {"title": table.title, "columns": columns, "rows": [dict(row) for row in table.rows]}


def table_csv(table: Table) -> str:
    """One table: a header of keys and one line a row."""
    return csv_text([_only(row, table.columns) for row in table.rows])


def csv(section: Section) -> str:
    """All tables in one: the first column says which, and cells that a table does not have are empty."""
    return csv_text([{"table": t.name} | _only(row, t.columns) for t in section.tables for row in t.rows])


def markdown(section: Section, pictures: Mapping[str, str]) -> str:
    """As Markdown; `pictures` are files by the names of plots."""
    lines = [f"## {plain(section.title)}", "", *(f"{plain(line)}  " for line in section.subject), ""]
    lines += [*(plain(sentence) for sentence in section.answer), ""]
    for plot in section.plots:
        lines += [f"![{plain(plot.title)}]({pictures[plot.name]})", ""]
    for table in (table.alone for table in section.tables):
        lines += [f"### {plain(table.title)}", ""]
        lines.append(_line([c.title for c in table.columns]))
        lines.append(_line(["---" if c.words else "---:" for c in table.columns]))
        lines += [_line([plain(cell) for cell in cells]) for cells in table.cells()]
        lines += ["", *([f"{plain(table.legend)}.", ""] if table.legend else [])]
    return "\n".join([*lines, *(plain(note) for note in section.notes), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(words: str) -> str:
    """Text in which no character means anything to Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else " " if c == "\n" else c for c in words)


# ---------------------------------------------------------------- pictures


def picture(section: Section, kind: str) -> bytes:
    """All plots of a section in one PNG or SVG file, one below the other."""
    from iosim.report import plots

    heights = [plot.height for plot in section.plots]
    figure = plots.figure(8.0, sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    for plot, part in zip(section.plots, parts[:, 0], strict=True):
        plot.draw(part)
    return plots.image(figure, kind)


def plot_images(plot: Plot, kinds: Sequence[str]) -> list[bytes]:
    """One plot as files of several kinds, PNG or SVG; it is laid out once."""
    from iosim.report import plots

    figure = plots.figure(8.0, plot.height)
    plot.draw(figure)
    out = []
    for kind in kinds:
        out.append(plots.image(figure, kind))
        figure.set_layout_engine("none")
    return out
