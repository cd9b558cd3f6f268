"""Where a sweep keeps its results as they come: one row a configuration, in one SQLite file.

SQLite and not Parquet: a Parquet file can't be added to, so each result would be a file, or lost until the end.
SQLite is in Python's standard library; a transaction is whole or not there after kill -9 (WAL); several processes may
write at once, and a key that is there twice is refused by the file itself.  WAL needs a local disk, not a network one.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from iosim.errors import InputError, OutputError

T = TypeVar("T")

KIND = 0x696F5377  # "ioSw", the file's application id
PATIENCE = 60.0  # seconds that a writer waits for another one
ASKED = 500  # keys in one question
COLUMNS = "key, inputs, result, error"
Text: TypeAlias = str | None
# What is read of a row is of these kinds; there may be more.
INPUTS: Mapping[str, Any] = {
    "problem": {"d": int, "d_v": int, "heads": int, "kv_heads": int, "dtype": str, "causal": bool,
                "window": int | None},
    "machine": {"name": str, "values": dict}, "dataflow": {"name": str}, "schedule": dict,
}  # fmt: skip
SIZES: Mapping[str, Any] = {"n_q": int, "n_k": int, "batch": int}  # of a problem that has no lengths
RESULT: Mapping[str, Any] = {
    "schedule": dict, "computes": Text, "makespan_ps": int | None, "dram_read_bytes": int, "dram_write_bytes": int,
    "sram_used_bytes": int, "flops_convention": int | float | None,
}  # fmt: skip
LARGEST = 2.0**100  # of a number
DEPTH = 12  # of containers in one another
TABLE = """CREATE TABLE IF NOT EXISTS configuration (
    key TEXT PRIMARY KEY, inputs TEXT NOT NULL, result TEXT, error TEXT, CHECK ((result IS NULL) <> (error IS NULL)))"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one configuration came to: `result` is JSON, or `error` says why there is none."""

    key: str
    inputs: str
    result: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A row of a store, read."""

    key: str
    inputs: Mapping[str, Any] = field(hash=False)
    result: Mapping[str, Any] | None = field(hash=False)
    error: str | None

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts rows by what they are about: dataflow, machine, problem and schedule, numbers by size."""
        i = self.inputs
        parts = (i["problem"], i["machine"].get("values") or {}, i["schedule"])
        values = ((name, _ordered(value)) for part in parts for name, value in sorted(part.items()))
        return i["dataflow"]["name"], i["machine"]["name"], _ordered(i["problem"].get("n_q")), (*values,), self.key


def _fits(found: Any, wanted: Any) -> bool:
    """Whether JSON has the fields that are wanted, of their kinds, and nothing else that no iosim writes."""
    if wanted is None:
        return found is None
    if not isinstance(wanted, dict):
        return isinstance(found, wanted) and _plain(found)
    known = isinstance(found, dict) and all(name in found and _fits(found[name], kind) for name, kind in wanted.items())
    return known and _plain(found)


def _sized(problem: Mapping[str, Any]) -> bool:
    """Whether a problem has its sizes, or the lengths of sequences: pairs of whole numbers."""
    if "lengths" not in problem:
        return _fits(problem, SIZES)
    lengths = problem["lengths"]
    pairs = isinstance(lengths, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in lengths)
    return pairs and all(isinstance(n, int) for pair in lengths for n in pair)


def _plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value is made of numbers that any machine holds, and of texts, in containers of a few levels."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_plain(one, depth - 1) for one in inner)
    return value is None or isinstance(value, str) or abs(value) < LARGEST


def _ordered(value: Any) -> tuple[int, float, str]:
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


class Store:
    """An open store; a new file is made unless `new` is off.  To be closed, or used with `closing`.

    Raises InputError for a file that is no store, OutputError for one that cannot be read or written.
    """

    def __init__(self, path: str, *, new: bool = True) -> None:
        self.path = path
        if not path:
            raise InputError("store: the file name is empty")
        if os.path.exists(path) and not os.path.isfile(path):
            raise InputError(f"store: {path}: is no plain file")
        if not new and not os.path.isfile(path):
            raise InputError(f"store: {path}: no such file")
        self.file = self._safely(lambda: sqlite3.connect(os.path.abspath(path), timeout=PATIENCE, isolation_level=None))
        try:
            self._safely(self._prepare)
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _prepare(self) -> None:
        (tables,) = self.file.execute("SELECT count(*) FROM sqlite_master").fetchone()  # first: others may make them
        (kind,) = self.file.execute("PRAGMA application_id").fetchone()
        ours = "type = 'index' OR type = 'table' AND name = 'configuration'"  # no view or trigger, which would run
        (foreign,) = self.file.execute(f"SELECT count(*) FROM sqlite_master WHERE NOT ({ours})").fetchone()  # noqa: S608
        if (kind != KIND and (kind or tables)) or foreign:
            raise InputError(f"store: {self.path}: is a database, but not of iosim sweep")
        # In a power cut the last results may be lost, the file not; kill -9 loses nothing that was written.
        self.file.execute("PRAGMA synchronous = NORMAL")
        if kind != KIND:
            self._into_wal()  # which the file remembers
            self.file.execute("BEGIN IMMEDIATE")
            self.file.execute(TABLE)
            self.file.execute(f"PRAGMA application_id = {KIND}")
            self.file.execute("COMMIT")

    def _into_wal(self) -> None:
        """Two that open a new file at once may be refused this without waiting, so it is tried again."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.file.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _safely(self, call: Callable[[], T]) -> T:
        """The call, with SQLite's errors as ours."""
        try:
            return call()
        except sqlite3.OperationalError as error:
            raise OutputError(f"store: {self.path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise InputError(f"store: {self.path}: {error}") from None
        except ValueError as error:  # a NUL in the name
            raise InputError(str(error) if isinstance(error, InputError) else f"store: {error}") from None

    def _rows(self, ask: str, values: Sequence[str] = ()) -> list[Any]:
        return self.file.execute(ask, values).fetchall()

    def known(self, keys: Sequence[str], *, failed: bool = True) -> set[str]:
        """Those of the keys that are there; those whose configuration `failed` only where asked for."""
        found: set[str] = set()
        more = "" if failed else " AND error IS NULL"
        for start in range(0, len(keys), ASKED):
            part = keys[start : start + ASKED]
            marks = ",".join("?" * len(part))
            ask = f"SELECT key FROM configuration WHERE key IN ({marks}){more}"  # noqa: S608 - marks are ours
            found.update(key for (key,) in self._safely(partial(self._rows, ask, part)))
        return found

    def add(self, answers: Iterable[Answer]) -> None:
        """Keep answers, all or none of them; of a key that is there already, only an error gives way."""
        rows = [(a.key, a.inputs, a.result, a.error) for a in answers]

        def write() -> None:
            self.file.execute("BEGIN IMMEDIATE")
            try:
                self.file.executemany(
                    "INSERT INTO configuration VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE "
                    "SET result = excluded.result, error = excluded.error WHERE configuration.error IS NOT NULL",
                    rows,
                )
                self.file.execute("COMMIT")
            except BaseException:
                if self.file.in_transaction:
                    self.file.execute("ROLLBACK")
                raise

        self._safely(write)

    def read(self, keys: Sequence[str] | None = None) -> Iterator[Stored]:
        """The rows of these keys, in their order, or all rows by what they are about.

        Raises InputError for a row that iosim did not write.
        """
        if keys is None:
            rows = self._safely(partial(self._rows, f"SELECT {COLUMNS} FROM configuration"))  # noqa: S608 - ours
            yield from sorted((self._stored(*row) for row in rows), key=lambda row: row.order)
            return
        for start in range(0, len(keys), ASKED):
            part = keys[start : start + ASKED]
            ask = f"SELECT {COLUMNS} FROM configuration WHERE key IN ({','.join('?' * len(part))})"  # noqa: S608 - as above
            found = {row[0]: row for row in self._safely(partial(self._rows, ask, part))}
            yield from (self._stored(*found[key]) for key in part if key in found)

    def _stored(self, key: str, inputs: str, result: str | None, error: str | None) -> Stored:
        try:
            read, found = json.loads(inputs), None if result is None else json.loads(result)
            wanted = None if result is None else RESULT
            if (
                not _fits(read, INPUTS)
                or not _sized(read["problem"])
                or not _fits(found, wanted)
                or not isinstance(error, Text)
            ):
                raise ValueError
            return Stored(key, read, found, error)
        except (ValueError, TypeError, RecursionError):
            raise InputError(f"store: {self.path}: row {str(key)[:12]!r} is not one of iosim's") from None


def open_store(path: str, *, new: bool = True) -> closing[Store]:
    """A store for a `with` statement."""
    return closing(Store(path, new=new))
