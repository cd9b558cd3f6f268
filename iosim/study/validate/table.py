"""A CSV file as records whose cells are read by iosim's names; what is wrong is said with file, line and column."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from iosim.errors import InputError, nearest
from iosim.study.validate.names import COLUMNS, IGNORED

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
    if twice := next((name for name in folded if folded.count(name) > 1), None):
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


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each line that is not blank; the first is the header.

    What a profiler prints before its table (lines that open with "==") is skipped.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # A skipped line leaves an empty one, so that the numbers hold.
            reader = csv.reader(("\n" if line.startswith("==") else line for line in file), strict=True)
            width = 0
            for cells in reader:
                if not cells:
                    continue
                if width and len(cells) != width:
                    raise InputError(f"{path.name}:{reader.line_num}: {len(cells)} cells; the header has {width}")
                width = len(cells)
                yield reader.line_num, [cell.strip() for cell in cells]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; a CSV file is needed") from None
    except csv.Error as error:
        raise InputError(f"{path.name}:{reader.line_num}: not CSV: {error}") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not width:
        raise InputError(f"{path}: is empty")
