"""Block-sparse masks: a table of 0 and 1 that says which blocks of scores there are, read from a file.

A table of R x C blocks divides the queries into R runs of ceil(n_q / R) rows and the keys into C runs of ceil(n_k / C).
"""

from __future__ import annotations

import io
import os
import zipfile
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from iosim.errors import InputError
from iosim.files import Bounded, read_bytes
from iosim.index import cdiv

MOST_BLOCKS = 1024  # on a side
_MOST_BYTES = 2**24  # of a file, and of an array in it
_MOST_TEXT = 2**22  # bytes of a mask as text: 1024 x 1024 marks with commas and blanks
_CHUNK = 2**20  # that is unpacked at a time
_ARRAYS = (".npy", ".npz")
_HOW = "a block mask is a table of 0 and 1: text (a line for each row), or a 2-D array of a .npy or .npz file"


@dataclass(frozen=True, slots=True)
class BlockMask:
    """`rows` has a byte of 0 or 1 for each block, from the first keys on; `origin` says where it is from."""

    rows: tuple[bytes, ...]
    origin: str = "table"

    @classmethod
    def of(cls, table: Sequence[Sequence[Any]] | Any, origin: str = "table") -> BlockMask:
        """A mask of rows of 0 and 1 (or False and True), also of an array; raises InputError for anything else."""
        rows = [list(row) for row in table]
        if not rows or len(rows) > MOST_BLOCKS or not 1 <= len(rows[0]) <= MOST_BLOCKS:
            size = f"{len(rows)} x {len(rows[0]) if rows else 0}"
            raise InputError(f"block_mask: {origin}: {size} blocks; 1 to {MOST_BLOCKS} on a side are allowed")
        for n, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise InputError(f"block_mask: {origin}: row {n} has {len(row)} blocks, row 0 has {len(rows[0])}")
            if bad := [x for x in row if x not in (0, 1)]:
                raise InputError(f"block_mask: {origin}: row {n} has {bad[0]!s:.20}; 0 and 1 are allowed")
        return cls(tuple(bytes(int(x) for x in row) for row in rows), origin)

    @property
    def left(self) -> int:
        """Blocks that are 1."""
        return sum(map(sum, self.rows))

    def size(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Rows and keys of a block."""
        return int(cdiv(n_q, len(self.rows))), int(cdiv(n_k, len(self.rows[0])))

    def require(self, n_q: int, n_k: int) -> None:
        """Raise InputError unless the table divides so many queries and keys."""
        for what, n, count in (("queries", n_q, len(self.rows)), ("keys", n_k, len(self.rows[0]))):
            if cdiv(n, cdiv(n, count)) != count:
                raise InputError(
                    f"block_mask: {self.origin}: {count} blocks of {cdiv(n, count)} {what} are more than the {n} there "
                    f"are; give a table that divides them"
                )

    def runs(self, row: int) -> list[tuple[int, int]]:
        """(first, end) of each run of blocks that are 1 in a row of the table."""
        out, start = [], 0
        for value, same in groupby(self.rows[row]):
            end = start + len(list(same))
            if value:
                out.append((start, end))
            start = end
        return out

    @property
    def turned(self) -> BlockMask:
        """The table with rows and columns exchanged: which blocks of queries each block of keys is seen by."""
        return BlockMask(tuple(bytes(column) for column in zip(*self.rows, strict=True)), self.origin)

    def boxes(self, n_q: int, n_k: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The runs as ranges of queries and of keys."""
        height, width = self.size(n_q, n_k)
        for row in range(len(self.rows)):
            for first, end in self.runs(row):
                yield (row * height, min((row + 1) * height, n_q)), (first * width, min(end * width, n_k))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: where it is from, its size and how many blocks are left."""
        return {"origin": self.origin, "rows": len(self.rows), "columns": len(self.rows[0]), "left": self.left}


def load_block_mask(file: str | os.PathLike[str]) -> BlockMask:
    """The mask of a file; raises InputError, with its name, for whatever is wrong."""
    path = Path(file)
    data = read_bytes(path, _MOST_BYTES, "a block mask", "text, .npy or .npz", f"block_mask: {path}")
    if data[:4] == b"PK\x03\x04" or data[:6] == b"\x93NUMPY":
        return BlockMask.of(_array(path, data), path.name)
    try:
        text = data.removeprefix(BOM_UTF8).decode("ascii")
    except UnicodeDecodeError:
        raise InputError(f"block_mask: {path}: is not a mask file; {_HOW}") from None
    table: list[list[Any]] = []
    if len(text) > _MOST_TEXT:
        raise InputError(f"block_mask: {path}: is larger than {_MOST_TEXT:,} bytes")
    for n, line in enumerate(text.splitlines(), 1):
        marks = "".join(line.replace(",", " ").split())
        if bad := set(marks) - {"0", "1"}:
            if path.suffix in _ARRAYS or not line.isprintable():
                raise InputError(f"block_mask: {path}: is not a mask file; {_HOW}")
            raise InputError(f"block_mask: {path}, line {n}: {sorted(bad)[0]!r}; 0 and 1 are allowed")
        if marks:
            table.append(list(map(int, marks)))
        if len(table) > MOST_BLOCKS:
            break  # which `of` says
    return BlockMask.of(table, path.name)


def _array(path: Path, data: bytes) -> Any:
    """The one 2-D array of a .npy or .npz file, as lists."""
    try:
        with catch_warnings():
            simplefilter("ignore")  # of a header that numpy reads with misgivings
            return _array_of(path, _member(path, data) if data[:2] == b"PK" else data)
    except InputError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds
        raise InputError(f"block_mask: {path}: cannot be read: {error!s:.100}; {_HOW}") from None


def _member(path: Path, data: bytes) -> bytes:
    """The one array of an archive, in npy format."""
    with zipfile.ZipFile(Bounded(io.BytesIO(data))) as archive:
        members = archive.infolist()
        if len(members) != 1:
            raise InputError(f"block_mask: {path}: has {len(members)} arrays; one is allowed")
        if members[0].file_size > _MOST_BYTES:
            raise InputError(f"block_mask: {path}: its array is larger than {_MOST_BYTES:,} bytes")
        with archive.open(members[0]) as member:
            return b"".join(iter(lambda: member.read(_CHUNK), b""))


def _array_of(path: Path, data: bytes) -> Any:
    import numpy as np

    with io.BytesIO(data) as stream:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = header(stream)
    if kind.kind not in "biuf":
        raise InputError(f"block_mask: {path}: has {kind}; numbers or truth values are allowed")
    if len(shape) != 2 or max(shape) > MOST_BLOCKS:
        raise InputError(
            f"block_mask: {path}: has the shape {shape}; two axes of 1 to {MOST_BLOCKS} blocks are allowed"
        )
    return np.load(io.BytesIO(data), allow_pickle=False).tolist()
