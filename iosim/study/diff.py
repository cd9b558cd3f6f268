"""Two results side by side: what differs in their inputs, bytes, time, bottleneck and check.

The documents are data from strangers: their size is bounded, and what is read of them is validated here by hand.
Entries of both are paired by what they are about (runs by machine and dataflow); numbers are compared by their place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NoReturn, TypeAlias

from iosim.errors import InputError
from iosim.files import read_text

MOST_BYTES = 16 * 2**20
MOST_ENTRIES = 100_000
MOST_VALUES = 2_000_000  # of one document
LARGEST = 2**63  # a number of a result; more is compared as text
LONGEST = 60  # characters of a text that a message repeats
LONGEST_NAME = 300  # characters of a value's dotted name

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where a schema keeps its entries, what tells them apart, and which parts of an entry are inputs."""

    entries: str
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


SHAPES = {
    "iosim.run/1": _Shape("runs", ("hardware", "dataflow"), inputs=("schedule",), ignored=("parts",)),
    "iosim.precision/1": _Shape(
        "rows", ("dataflow", "dtype", "accumulator"), ("scales", "incoherent"), inputs=("paper_rmse",)
    ),
    "iosim.validate/1": _Shape("families", ("family", "machine", "kind", "quantity"), inputs=("rows",)),
    "iosim.check/1": _Shape("checks", ("name",), inputs=("wanted", "threshold", "unit"), ignored=("remedy", "detail")),
}
SETTINGS = ("iosim", "pass", "provenance", "problem", "dataflow", "hardware", "schedule", "assumed_machine")
GROUPS = ("inputs", "bytes", "work", "time", "bottleneck", "check", "other")


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs: where (`entry` is empty for the whole document), in which group, and both values.

    None stands for a value that is null, and for one that is not there.
    """

    entry: str
    group: str
    name: str
    a: Scalar
    b: Scalar

    @property
    def ratio(self) -> float | None:
        """b over a, for two numbers that are not 0."""
        numbers = [x for x in (self.a, self.b) if isinstance(x, int | float) and not isinstance(x, bool)]
        ratio = numbers[1] / numbers[0] if len(numbers) == 2 and all(numbers) else inf
        return ratio if ratio and isfinite(ratio) else None


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two documents of one schema; entries that only one has are named."""

    schema: str
    files: tuple[str, str]
    compared: int
    changes: tuple[Change, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.diff import render
        from iosim.report.notebook import printed

        return printed(render(self))

    @property
    def same(self) -> bool:
        return not (self.changes or self.only_a or self.only_b)


def diff(a: str, b: str) -> Difference:
    """Compare two files.  Raises InputError for what cannot be read, is no result of iosim's, or of another kind."""
    first, second = load(a), load(b)
    if first["schema"] != second["schema"]:
        raise InputError(f"{b}: its schema is {first_words(second['schema'])}, that of {a} is "
                         f"{first_words(first['schema'])}: results of one kind are compared")  # fmt: skip
    shape = SHAPES[first["schema"]]
    changes = list(_differences("", *_settings_of_both(first, second, a, b)))
    left, right = _entries(first, shape, a), _entries(second, shape, b)
    both = [key for key in left if key in right]
    for key in both:
        changes += _differences(" ".join(key), _of_entry(left[key], shape, a), _of_entry(right[key], shape, b))
    return Difference(
        first["schema"],
        (a, b),
        len(both),
        tuple(changes),
        tuple(" ".join(key) for key in left if key not in right),
        tuple(" ".join(key) for key in right if key not in left),
    )


# ---------------------------------------------------------------- reading


def load(path: str) -> dict[str, Any]:
    """A document of a schema that can be compared; raises InputError, which names the file."""
    try:
        text = read_text(path, MOST_BYTES, "a result", "JSON")
        data = json.loads(text, parse_constant=_not_finite, object_pairs_hook=_once)
    except RecursionError:
        raise InputError(f"{path}: not valid JSON: nested too deeply") from None
    except InputError:
        raise
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise InputError(f"{path}: not valid JSON: {first_words(str(error), 100)}") from None
    if not isinstance(data, dict) or not isinstance(schema := data.get("schema"), str):
        raise InputError(f"{path}: is no JSON result of iosim's: it has no schema, like iosim.run/1")
    if schema not in SHAPES:
        raise InputError(f"{path}: its schema is {first_words(schema)}; compared are {', '.join(SHAPES)}")
    return data


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; raises ValueError for a key that is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {first_words(twice)!r} is there twice")
    return out


def first_words(text: object, most: int = LONGEST) -> str:
    """A text of a stranger's, short."""
    words = str(text)
    return words if len(words) <= most else words[: most - 3] + "..."


def _entries(document: Mapping[str, Any], shape: _Shape, path: str) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The entries by what tells them apart."""
    found = document.get(shape.entries)
    if not isinstance(found, list) or len(found) > MOST_ENTRIES:
        raise InputError(f"{path}: {shape.entries} is not a list of at most {MOST_ENTRIES:,} entries")
    out: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for number, entry in enumerate(found):
        where = f"{path}: {shape.entries}[{number}]"
        if not isinstance(entry, dict):
            raise InputError(f"{where} is not an object")
        for key in shape.keys:
            if not isinstance(entry.get(key), str):
                raise InputError(f"{where}.{key} is not a text")
        more = [f"{key} {entry[key]}" for key in shape.optional if entry.get(key) not in (None, "", False)]
        name = (*(entry[key] for key in shape.keys), *map(first_words, more))
        if name in out:
            raise InputError(f"{where}: {first_words(' '.join(name))} is there twice")
        out[name] = entry
    return out


Values: TypeAlias = dict[tuple[str, str], Scalar]  # by group and name


def _settings_of_both(first: Mapping[str, Any], second: Mapping[str, Any], a: str, b: str) -> tuple[Values, Values]:
    """The settings of both; what they say of a machine that only one of them has is left out."""
    machines = [set(found) if isinstance(found := d.get("hardware"), dict) else set[str]() for d in (first, second)]
    alone = machines[0] ^ machines[1]
    first_values, second_values = (
        {key: value for key, value in _settings(d, path).items() if not _is_of(key[1], alone)}
        for d, path in ((first, a), (second, b))
    )
    return first_values, second_values


def _is_of(name: str, machines: set[str]) -> bool:
    """Whether a setting is about one of these machines."""
    about = name.removeprefix("provenance.profile_hash.").removeprefix("hardware.")
    return about != name and any(about == machine or about.startswith(f"{machine}.") for machine in machines)


def _settings(document: Mapping[str, Any], path: str) -> Values:
    """What the whole document is about: inputs, the version that made it, and totals."""
    values = {name: document[name] for name in SETTINGS if name in document}
    out: Values = {("inputs", name): value for name, value in _flat(values, path) if name != "schedule.why"}
    request = document.get("request")
    for name in ("fidelity", "seed"):
        if isinstance(request, dict) and name in request:
            out["inputs", name] = _scalar(request[name])
    if "seconds" in document:
        out["time", "seconds"] = _scalar(document["seconds"])
    return out


def _of_entry(entry: Mapping[str, Any], shape: _Shape, path: str) -> Values:
    """All values of an entry, with the group that each is in."""
    known = {*shape.keys, *shape.optional, *shape.ignored}
    rest = {name: value for name, value in entry.items() if name not in known}
    out: Values = {}
    for name, value in _flat(rest, path):
        group = "inputs" if name.split(".")[0] in shape.inputs else _group(name)
        if name not in ("schedule.why", "time.tflops", "time.peak_share"):  # these follow from others
            out[group, name] = value
    if stall := _largest_stall(entry):
        out["bottleneck", "largest stall"] = stall
    return out


def _group(name: str) -> str:
    """What a value of a result is about, by its dotted name."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if name in ("time.bound", "time.reason") or "resident" in last:
        return "bottleneck"
    if first in ("units", "interval") or name == "time.makespan_ps" or (first == "kernels" and last != "makespan_ps"):
        return "other"
    if first in ("time", "kernels") or last in ("seconds", "makespan_ps"):
        return "time"
    if first == "check" or last in ("status", "found", "value") or last.endswith(("rmse", "max_abs", "_pct")):
        return "check"
    if first in ("traffic", "memory", "sram"):
        return "bytes"
    return "work" if first in ("flops", "bounds") else "other"


def _largest_stall(entry: Mapping[str, Any]) -> str:
    """What the matrix units of a run wait for most; empty where that is not there."""
    units = entry.get("units")
    matrix = units.get("matrix") if isinstance(units, dict) else None
    stalls = matrix.get("stalls_ps") if isinstance(matrix, dict) else None
    times = {k: v for k, v in stalls.items() if isinstance(v, int)} if isinstance(stalls, dict) else {}
    return max(times, key=lambda cause: times[cause]) if times else ""


def _flat(value: Any, path: str, name: str = "") -> Iterator[tuple[str, Scalar]]:
    """All scalars inside, by dotted name; entries of a list by their own `name` where they have one."""
    todo = [(name, value)]
    for _ in range(MOST_VALUES + 1):
        if not todo:
            return
        name, value = todo.pop()
        if len(name) > LONGEST_NAME:
            raise InputError(f"{path}: a value's name has over {LONGEST_NAME} characters: {first_words(name)}")
        dot = f"{name}." if name else ""
        if isinstance(value, dict):
            todo += [(dot + key, inside) for key, inside in reversed(value.items())]
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            called = [item.get("name") if isinstance(item, dict) else None for item in value]
            keys = called if all(isinstance(c, str) for c in called) and len(set(called)) == len(called) else None
            todo += [(f"{dot}{keys[n] if keys else n}", item) for n, item in reversed([*enumerate(value)])]
        else:
            yield name, _scalar(value)
    raise InputError(f"{path}: more than {MOST_VALUES:,} values")


def _scalar(value: Any) -> Scalar:
    """A value as it is compared; a list of scalars as one text, a number that is none of JSON's as its text."""
    if isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) < LARGEST:  # also 1e999
        return first_words(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value)


def _differences(entry: str, a: Values, b: Values) -> Iterator[Change]:
    """The values that differ, group by group."""
    keys = dict.fromkeys((*a, *b))
    for key in sorted(keys, key=lambda key: GROUPS.index(key[0])):
        left, right = a.get(key), b.get(key)
        same_kind = isinstance(left, bool) == isinstance(right, bool)
        if left != right or not same_kind:
            yield Change(entry, *key, left, right)
