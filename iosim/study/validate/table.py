"""A CSV file as records whose cells are read by iosim's names; what is wrong is said with file, line and column."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from iosim.errors import InputError, nearest
from iosim.files import read_text
from iosim.study.validate.names import COLUMNS, IGNORED

MOST_BYTES = 2**24  # of a file
LEAST, MOST = 1e-9, 1e18  # of a number that is not 0: ratios of such ones, and their powers, are still numbers
MOST_COLUMNS = 4000  # Nsight Compute's own have some hundreds
_LONGEST = 60  # characters of a cell that a message repeats


@dataclass(frozen=True, slots=True)
class Record:
    """One line: cells by iosim's column names, or by the file's own where it has none."""

    file: str
    line: int
    cells: Mapping[str, str] = field(hash=False)
    headers: Mapping[str, str] = field(hash=False)  # what the file calls a column

    def error(self, column: str, problem: str) -> InputError:
        """An error about one cell."""
        return InputError(f"{self.file}:{self.line}: {self.headers.get(column, column)}: {problem}")

    def has(self, column: str) -> bool:
        """Whether there is something in the cell."""
        return bool(self.cells.get(column))

    def text(self, column: str) -> str:
        """What the cell holds; raises InputError where it is empty or missing."""
        if not self.has(column):
            raise self.error(column, "is empty" if column in self.cells else "the file has no such column")
        return self.cells[column]

    def word(self, column: str, known: Mapping[str, str] | Mapping[str, bool]) -> str | bool:
        """The meaning of a word of a table of aliases."""
        text = self.text(column)
        if text.casefold() not in known:
            raise self.error(column, f"{_short(text)} is not one of {', '.join(known)}{nearest(text, known)}")
        return known[text.casefold()]

    def number(self, column: str, *, zero: bool = True, unit: float = 1.0) -> float:
        """A number of at least 0 (over 0 with `zero` off), times `unit`; commas between thousands are read past."""
        text = self.text(column)
        plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text) else text
        try:
            number = float(plain)
        except ValueError:
            number = float("nan")
        if not isfinite(number) or number < 0 or (number == 0 and not zero):
            allowed = "a number of at least 0" if zero else "a number over 0"
            raise self.error(column, f"{_short(text)} is not {allowed}")
        if number and not LEAST <= number <= MOST:
            raise self.error(column, f"{_short(text)} is out of range; {LEAST:g} to {MOST:g} is allowed")
        return number * unit

    def whole(self, column: str, *, zero: bool = True) -> int:
        """A whole number of at least 0 (1 with `zero` off)."""
        number = self.number(column, zero=zero)
        if number != int(number):
            raise self.error(column, f"{_short(self.text(column))} is not a whole number")
        return int(number)


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")


def records(path: Path) -> list[Record]:
    """All lines of a CSV file, with iosim's names for its columns.

    Raises InputError for a file that cannot be read, has a column that no table knows, a line of another
    length, or none.
    """
    lines = csv_lines(path)
    number, header = next(lines)
    names = canonical(header, f"{path.name}:{number}")
    headers = dict(zip(names, header, strict=True))
    found = [Record(path.name, line, dict(zip(names, cells, strict=True)), headers) for line, cells in lines]
    if not found:
        raise InputError(f"{path}: has a header and no line below it")
    return found


def canonical(header: Sequence[str], where: str) -> list[str]:
    """iosim's name of each column; raises InputError for one that is unknown, and for one that is there twice."""
    folded = [name.strip().casefold() for name in header]
    if twice := next((name for name, times in Counter(folded).items() if times > 1), None):
        raise InputError(f"{where}: column {twice!r} is there twice")
    found = {name: name for name in folded if name in IGNORED}
    for column, aliases in COLUMNS.items():
        taken = next((a for a in aliases if a in folded and a not in found), None)
        if taken is not None:
            found[taken] = column
    for name in folded:
        if name not in found:
            known = [*(alias for row in COLUMNS.values() for alias in row), *IGNORED]
            raise InputError(f"{where}: column {name!r} is not known{nearest(name, known)}")
    return [found[name] for name in folded]


def _require_width(where: str, cells: int, header: int) -> None:
    """Raise InputError for a line that is not as wide as the header, and for a header that is too wide."""
    if header:
        raise InputError(f"{where}: {cells} cells; the header has {header}")
    if cells > MOST_COLUMNS:
        raise InputError(f"{where}: {cells} columns; at most {MOST_COLUMNS} are read")


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each line that is not blank; the first is the header.

    What a profiler prints before its table (lines that open with "==") is skipped.
    """
    lines = io.StringIO(read_text(path, MOST_BYTES, "a table of measurements", "CSV"), newline="")
    # A skipped line leaves an empty one, so that the numbers hold.
    reader = csv.reader(("\n" if line.startswith("==") else line for line in lines), strict=True)
    width = 0
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) != width:
                _require_width(f"{path.name}:{reader.line_num}", len(cells), width)
            width = len(cells)
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise InputError(f"{path.name}:{reader.line_num}: not CSV: {error}") from None
    if not width:
        raise InputError(f"{path}: is empty")
