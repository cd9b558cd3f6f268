"""Nsight Compute's own CSV: `ncu --csv --page raw`, with its line of units and commas between thousands.

It does not know attention shapes.  They come as records of the shape columns of any other file (n, d, batch, heads,
causal, ...; optional: impl, pass): one for all kernels, or several with an `id`, each of which holds from the kernel
of that ID on.  `--shape n=4096,d=128` makes one; FILE.shapes.csv beside FILE.csv, or --shapes, holds several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from iosim.errors import InputError
from iosim.study.validate import names
from iosim.study.validate.readers import direction, row
from iosim.study.validate.rows import Kernel, Row
from iosim.study.validate.table import Record, canonical, csv_lines, records

ID, NAME, DEVICE = "ID", "Kernel Name", "device__attribute_display_name"

# Quantity or field of a kernel -> metric, and its unit where iosim's is not the one that a file gives.
MEASURED = {
    "time": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
}
LAUNCH = {
    "grid": "launch__grid_size",
    "block": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "sram_bytes": "launch__shared_mem_per_block",
    "exp_instructions": "smsp__inst_executed_pipe_xu.sum",
}
RESIDENT = "launch__occupancy_limit_"  # blocks a processor by each limit
UNITS = {
    "": 1.0, "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0,
    "block": 1.0, "inst": 1.0, "register": 1.0, "thread": 1.0,
}  # fmt: skip


def is_nsight(path: Path) -> bool:
    """Whether a file is Nsight Compute's, by its header."""
    _, header = next(csv_lines(path))
    return ID in header and NAME in header


def read(path: Path, shapes: Sequence[Record]) -> tuple[Row, ...]:
    """All kernels of a file, in the order of their launches.

    Raises InputError where a metric, a unit or a shape is missing or is not understood.
    """
    lines = csv_lines(path)
    _, header = next(lines)
    if MEASURED["time"] not in header:
        raise InputError(f"{path}: has no metric {MEASURED['time']}; collect it with ncu --metrics")
    number, units = next(lines, (0, []))
    if not units or units[header.index(ID)]:
        raise InputError(f"{path}:{number}: the line of units is missing; write it with ncu --csv --page raw")
    scales = dict(zip(header, units, strict=True))
    named = {name: name for name in header}
    kernels = [Record(path.name, line, dict(zip(header, cells, strict=True)), named) for line, cells in lines]
    if not kernels:
        raise InputError(f"{path}: has no kernel")
    return tuple(_rows(kernels, scales, _by_id(path, shapes or _beside(path))))


def shape_record(text: str) -> Record:
    """`n=4096,d=128,heads=16` as a record; raises InputError for what is not one."""
    pairs = [part.partition("=") for part in text.split(",")]
    if bad := next((key for key, equals, value in pairs if not equals or not value.strip()), None):
        raise InputError(f"--shape: {bad!r} is not NAME=VALUE, like n=4096,d=128,heads=16,causal=yes")
    header = [key.strip() for key, _, _ in pairs]
    columns = canonical(header, "--shape")
    cells = {column: value.strip() for column, (_, _, value) in zip(columns, pairs, strict=True)}
    return Record("--shape", 1, cells, dict(zip(columns, header, strict=True)))


def _beside(path: Path) -> Sequence[Record]:
    sidecar = path.with_suffix(".shapes.csv")
    return records(sidecar) if sidecar.is_file() else ()


def _by_id(path: Path, shapes: Sequence[Record]) -> list[tuple[int, Record]]:
    """First ID and shape, in rising order."""
    if not shapes:
        raise InputError(
            f"{path}: Nsight Compute does not record attention shapes: give them with --shape n=4096,d=128 "
            f"or in {path.with_suffix('.shapes.csv').name} (columns id, n, d, batch, heads, causal, ...)"
        )
    if len(shapes) == 1 and not shapes[0].has("id"):
        return [(0, shapes[0])]
    found = [(record.whole("id"), record) for record in shapes]
    for (before, _), (after, record) in pairwise(found):
        if after <= before:
            raise record.error("id", f"{after} does not follow {before}; IDs must rise")
    return found


def _rows(kernels: Sequence[Record], units: dict[str, str], shapes: list[tuple[int, Record]]) -> Iterator[Row]:
    call, position, products, last = -1, 0, 0, None
    for record in kernels:
        launch = record.whole(ID)
        given = next((s for first, s in reversed(shapes) if first <= launch), None)
        if given is None:
            raise record.error(ID, f"{launch} is before the first shape's ({shapes[0][0]})")
        signature = record.text(NAME)
        name = names.kernel(signature)
        owner = names.implementation(given.text("implementation")) if given.has("implementation") else ""
        owner = owner or names.kernel_owner(name)
        way = direction(given) if given.has("direction") else "forward"
        if (key := (given.line, owner, way)) != last:
            call, position, products, last = call + 1, 0, 0, key
        role = names.kernel_role(name, way, products)
        kernel = Kernel(name=name, role=role, call=call, position=position, **_launch(record, units))
        made = row(given, "kernels", _measured(record, units), implementation=owner, direction=way, kernel=kernel)
        yield _as_of(made, record)
        position, products = position + 1, products + names.is_gemm(name)


def _as_of(made: Row, record: Record) -> Row:
    """The row of a shape, as one of the kernel's line and device."""
    device = record.cells.get(DEVICE, "")
    machine = names.machine(device or record.file)
    return replace(made, file=record.file, line=record.line, device=device, machine=machine)


def _measured(record: Record, units: dict[str, str]) -> dict[str, float]:
    found = {q: _value(record, metric, units) for q, metric in MEASURED.items() if metric in record.cells}
    limits = [_value(record, name, units) for name in record.cells if name.startswith(RESIDENT) and record.has(name)]
    return found | ({"occupancy": min(limits)} if limits else {})


def _launch(record: Record, units: dict[str, str]) -> dict[str, Any]:
    return {f: int(_value(record, metric, units)) for f, metric in LAUNCH.items() if metric in record.cells}


def _value(record: Record, metric: str, units: dict[str, str]) -> float:
    """A metric in SI units.  A rate per block or thread has the unit before the slash."""
    unit = re.split(r"/", units[metric])[0].casefold()
    if unit not in UNITS:
        raise record.error(metric, f"unit {units[metric]!r} is not one of {', '.join(filter(None, UNITS))}")
    return record.number(metric, unit=UNITS[unit])
