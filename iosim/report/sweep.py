"""The rows of a sweep for a terminal of 80 columns, as JSON (schema iosim.sweep/1), CSV and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import iosim
from iosim.errors import InputError
from iosim.problem import Attention
from iosim.report.layout import WIDTH, csv_text, draw, paragraph, table
from iosim.study.batch import FIELDS
from iosim.study.sweep import Stored, Swept
from iosim.study.vary import HW
from iosim.words import count, digits, duration, size

SCHEMA = "iosim.sweep/1"
PROBLEM = (*(f.name for f in fields(Attention)), *FIELDS, "lengths")
PROBLEMS = 4  # whose fastest is told
SHOWN = 40  # rows of the table
HASHES = ("iosim", "profile_hash", "dataflow_hash")
FOLLOW = {"n_k": "n_q", "d_v": "d", "kv_heads": "heads"}  # not told where they are the same
NUMBERS = ("time", "DRAM", "SRAM")
LONGEST = 40  # characters of a cell
GAP = 3  # between columns
ERRORS = 5  # reasons that are told


def render(rows: Sequence[Stored], did: Swept | None, store: str) -> str:
    """What was done, and a table of the first rows with the fields that differ among all of them."""
    failed = [row for row in rows if row.error is not None]
    names = _differing(rows)
    lines = paragraph(_answer(rows, did, store, len(failed)) + _fastest(rows, names, store))
    lines += ["", _table(rows[:SHOWN], names)] if rows else []
    if len(rows) > SHOWN:
        lines += paragraph(f"{len(rows) - SHOWN:,} more rows: --csv prints all, --export keeps them in a file.")
    reasons = list(dict.fromkeys(str(row.error) for row in failed))
    for number, reason in enumerate(reasons[:ERRORS], 1):
        lines += paragraph(f"failed ({number}): {reason}")
    if len(reasons) > ERRORS:
        lines += paragraph(f"{len(reasons) - ERRORS} more reasons are in --csv.")
    return "\n".join(lines) + "\n"


def _answer(rows: Sequence[Stored], did: Swept | None, store: str, failed: int) -> str:
    said = count(len(rows), "configuration", "configurations")
    if did is None:
        return f"{said} in {store}, {failed:,} of them failed."
    rate = f" in {duration(did.seconds)}" if did.done else ""
    return f"{said}: {did.done:,} run now{rate}, {did.found:,} found in {store}; {failed:,} failed."


def _fastest(rows: Sequence[Stored], names: Sequence[str], store: str) -> str:
    """The fastest row, or that of each problem, as a larger one takes longer; nothing where only problems differ."""
    best: dict[str, Stored] = {}
    for row in filter(_time, rows):
        problem = json.dumps(row.inputs["problem"], sort_keys=True)
        best[problem] = min(best.get(problem, row), row, key=_time)
    if len(best) == 1:
        (row,) = best.values()
        return f" Fastest: {_name(row)}, {duration(_time(row) / 1e12)}."
    about = [name for name in names if name in PROBLEM]
    own = [name for name in names if name not in PROBLEM]
    if not own or not best:
        return ""
    said = [f"at {_words(row, about)}: {_words(row, own)}, {duration(_time(row) / 1e12)}"
            for row in list(best.values())[:PROBLEMS]]  # fmt: skip
    left = len(best) - len(said)
    more = f" {left:,} more problems: iosim pareto {store} compares each." if left else ""
    return f" Fastest {'; '.join(said)}.{more}"


def _words(row: Stored, names: Sequence[str]) -> str:
    """Fields of a row in words."""
    of = input_row(row)
    cells = ((name, _short(_cell(of.get(name)))) for name in names)
    return ", ".join(
        cell if name in ("hardware", "dataflow") else f"{_heading(name)} {cell}" for name, cell in cells if cell != "-"
    )


def _time(row: Stored) -> int:
    return int((row.result or {}).get("makespan_ps") or 0)


def _name(row: Stored) -> str:
    """What a row is about, in words."""
    p = row.inputs["problem"]
    values = row.inputs["machine"].get("values", {}) | row.inputs["schedule"]
    more = "".join(f", {name} {_plain(value)}" for name, value in values.items())
    size_ = f"n {p['n_q']:,}" if "lengths" not in p else count(len(p["lengths"]), "sequence", "sequences")
    return f"{row.inputs['dataflow']['name']} on {row.inputs['machine']['name']}, {size_}, d {p['d']}{more}"


def _table(rows: Sequence[Stored], names: Sequence[str]) -> str:
    given = [[_short(_cell(row.get(name))) for name in names] for row in map(input_row, rows)]
    reasons = list(dict.fromkeys(str(row.error) for row in rows if row.error is not None))
    numbers = [_numbers(row, reasons) for row in rows]
    heads = [_heading(name) for name in names]
    words = sum(name in ("hardware", "dataflow") for name in names)  # these come first
    columns = zip(
        *([*heads, *NUMBERS], *([*cells, *of] for cells, of in zip(given, numbers, strict=True))), strict=True
    )
    if sum(max(map(len, column)) + GAP for column in columns) - GAP > WIDTH:
        given = [[", ".join(f"{head} {cell}" for head, cell in zip(heads, cells, strict=True) if cell != "-")]
                 for cells in given]  # fmt: skip
        heads, words = ["configuration"], 1
    drawn = table(*heads, *NUMBERS, left=words)
    for cells, of in zip(given, numbers, strict=True):
        drawn.add_row(*cells, *of)
    return draw(drawn)


def _differing(rows: Sequence[Stored]) -> list[str]:
    """The fields that differ between rows, less those that only follow another."""
    cells: dict[str, set[str]] = {}
    apart: set[str] = set()
    for number, row in enumerate(rows):  # one by one, as there may be a million
        of = input_row(row)
        for name in {**cells, **of}:
            cells.setdefault(name, {_cell(None)} if number else set()).add(_cell(of.get(name)))
        apart.update(name for name, same in FOLLOW.items() if of.get(name) != of.get(same))
    followers = FOLLOW.keys() - apart
    return [name for name, found in cells.items() if len(found) > 1 and name not in followers and name not in HASHES]


def _heading(name: str) -> str:
    """A field's name in words; a machine's as its profile has it."""
    return name if name.startswith(HW) else name.removeprefix("schedule_").replace("n_q", "n").replace("_", " ")


def _cell(value: Any) -> str:
    return "-" if value is None else _shown(value)


def _short(cell: str) -> str:
    """A cell whose text, of many lengths, would fill the table; --csv has all of it."""
    return cell if len(cell) <= LONGEST else f"{cell[: LONGEST - 20]}... ({cell.count(',') + 1} in all)"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _numbers(row: Stored, reasons: Sequence[str]) -> tuple[str, str, str]:
    r = row.result
    if r is None:
        return f"failed ({reasons.index(str(row.error)) + 1})", "", ""
    time = "-" if r["makespan_ps"] is None else duration(r["makespan_ps"] / 1e12)
    return time, size(r["dram_read_bytes"] + r["dram_write_bytes"]), f"{digits(r['sram_used_bytes'] / 1024)} KiB"


# ---------------------------------------------------------------- rows


def input_row(row: Stored) -> dict[str, Any]:
    """What a row is about: flat."""
    i, given = row.inputs, {f"schedule_{name}": _plain(value) for name, value in row.inputs["schedule"].items()}
    machine = i["machine"]
    said = i["problem"]
    problem = {f.name: _plain(said[f.name]) for f in fields(Attention) if f.name in said}  # in their order
    problem |= {name: _plain(said[name]) for name in FIELDS if name in said}
    if "lengths" in said:
        problem["lengths"] = ",".join(f"{q}:{k}" for q, k in said["lengths"])
    values = {f"hw.{name}": _plain(value) for name, value in machine.get("values", {}).items()}
    return {"hardware": machine["name"], "dataflow": i["dataflow"]["name"], **problem, **values,
            "fidelity": i.get("fidelity"), **given, "iosim": i.get("iosim"), "profile_hash": machine.get("hash"),
            "dataflow_hash": i["dataflow"].get("hash")}  # fmt: skip


def flat(row: Stored) -> dict[str, Any]:
    """One row of the table: names as in the rows of iosim run; the schedule is the one chosen, where it ran."""
    r = dict(row.result or {})
    chosen = {f"schedule_{name}": _plain(value) for name, value in r.pop("schedule", {}).items()}
    made = input_row(row) | chosen
    if (ps := r.get("makespan_ps")) is not None:
        r["seconds"] = ps / 1e12
        r["tflops"] = r["flops_convention"] / ps if r["flops_convention"] else None
    return made | r | {"error": row.error, "key": row.key}


def _plain(value: Any) -> Any:
    """A value as one cell: stages of K and V that differ as 2/1."""
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def document(rows: Sequence[Stored], did: Swept | None, store: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """All rows; `request` repeats what was asked for."""
    machines = {row.inputs["machine"]["name"]: row.inputs["machine"].get("hash") for row in rows
                if not row.inputs["machine"].get("values")}  # fmt: skip
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": machines},
        "store": store,
        "done": None if did is None else {"now": did.done, "failed": did.failed, "found": did.found},
        "configurations": [
            {"key": row.key, "inputs": row.inputs, "result": row.result, "error": row.error} for row in rows
        ],
    }


def rows_as_csv(rows: Sequence[Stored]) -> str:
    """A header and one line a configuration."""
    return csv_text([flat(row) for row in rows])


def export(rows: Iterable[Stored], kind: str) -> bytes:
    """All rows as a file of this kind: csv or parquet."""
    made = list(rows)
    return rows_as_csv(made).encode() if kind == "csv" else _parquet([flat(row) for row in made])


def require_export(path: str) -> str:
    """The kind of file that a name asks for; raises InputError for one that cannot be made."""
    kind = path.rpartition(".")[2]
    if "." not in path or kind not in ("csv", "parquet"):
        raise InputError(f"export: {path!r} does not end with .csv or .parquet")
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise InputError("export: .parquet needs the package pyarrow: pip install 'iosim[parquet]'; .csv needs none")
    return kind


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import io

    import pyarrow as pa
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    made = {name: [v if v is None else _shown(v) for v in values] if _mixed(values) else values
            for name, values in columns.items()}  # fmt: skip
    out = io.BytesIO()
    parquet.write_table(pa.table(made), out)
    return out.getvalue()


def _mixed(values: Sequence[Any]) -> bool:
    """Whether a column has values of several kinds, which Parquet does not."""
    return (
        len({str if isinstance(v, str) else bool if isinstance(v, bool) else int for v in values if v is not None}) > 1
    )
