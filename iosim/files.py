"""Files that others wrote, read as a whole: what kind of file it is and its size are known before memory is taken.

This module imports nothing heavy, so any module may use it.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from typing import IO, Any

from iosim.errors import InputError, show

MOST_DOTS = 100  # on a line of TOML: Python's parser takes time and memory by the square of a key's parts
MOST_AT_ONCE = 2**22  # bytes of an archive: a directory of 50,000 members and more


def read_bytes(path: str | os.PathLike[str], most: int, what: str, kind: str, origin: str = "") -> bytes:
    """The content of a plain file of at most `most` bytes; `what` is it ("a profile"), of which `kind` ("TOML").

    Raises InputError, which `origin` opens, by default the path.
    """
    origin = origin or os.fspath(path)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            is_now = "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
            raise InputError(f"{origin}: {is_now}; {what} is a {kind} file")
        data, size = b"", status.st_size
        if size <= most:
            with open(path, "rb") as file:
                data = file.read(most + 1)  # a file of /proc says that it has 0 bytes
            size = max(size, len(data))
        if size > most:
            raise InputError(f"{origin}: {size} bytes; {what} has at most {most}")
    except OSError as error:
        raise InputError(f"{origin}: cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except ValueError as error:  # a path with a NUL byte
        raise InputError(f"{origin}: cannot be read: {error}") from None
    return data


def read_text(path: str | os.PathLike[str], most: int, what: str, kind: str, origin: str = "") -> str:
    """As `read_bytes`, as text: UTF-8, which a byte order mark may open, with the line ends that it has."""
    try:
        return read_bytes(path, most, what, kind, origin).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = origin or os.fspath(path)
        raise InputError(f"{place}: not UTF-8 at byte {error.start}; {what} is a {kind} file") from None


def toml(text: str, origin: str) -> dict[str, Any]:
    """The data of a TOML text; raises InputError, which `origin` opens and which repeats the line that is wrong."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MOST_DOTS:
            raise InputError(f"{origin}: line {number} has more than {MOST_DOTS} dots; it is too long")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{origin}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and integers of more digits than Python converts
        words = str(error).replace("Cannot overwrite a value", "this key is given twice")
        where = re.search(r"at line (\d+)", words)
        lines = text.replace("\r\n", "\n").split("\n")
        line = lines[int(where[1]) - 1].strip() if where else ""
        raise InputError(f"{origin}: not valid TOML: {words}{': ' + show(line) if line else ''}") from None


class Bounded:
    """A file for zipfile, which reads an archive's whole directory at once, however large that says it is."""

    def __init__(self, file: IO[bytes], most: int = MOST_AT_ONCE) -> None:
        self.file, self.most = file, most
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def seekable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Bytes from here on; raises ValueError for a size, or a rest of the file, that is too large."""
        if size < 0:
            here = self.file.tell()
            size = self.file.seek(0, os.SEEK_END) - here
            self.file.seek(here)
        if size > self.most:
            raise ValueError(f"a directory of {size:,} bytes; at most {self.most:,} are read")
        return self.file.read(size)
