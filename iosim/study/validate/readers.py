"""Readers of measurement files.  The columns say which kind a file is.

    calls      one attention call a line: h200_attention.csv
    kernels    one kernel a line, from hardware counters: h200_counters.csv, and Nsight Compute's own CSV (nsight.py)
    tiles      one point of a tile sweep of Triton's FlashAttention a line: h200_triton_tiles.csv
    published  one number of a paper a line, `metric` naming it: published_attention.csv

All name files of iosim/data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from iosim.errors import InputError
from iosim.problem import Attention
from iosim.study.validate import names
from iosim.study.validate.rows import Kernel, Kind, Row, Tile
from iosim.study.validate.table import Record, records

MIB = 2**20
SHAPE = ("batch", "heads", "kv_heads", "n_q", "n_k", "d", "d_v", "window")

# The columns by which a kind is known, the most telling first.
KINDS: Mapping[str, tuple[str, ...]] = {
    "tiles": ("block_q", "block_k", "stages", "warps"),
    "published": ("metric", "value"),
    "kernels": ("kernel name", "time us"),
    "calls": ("implementation", "time ms"),
}


def read(path: Path, shapes: Sequence[Record] = ()) -> tuple[Row, ...]:
    """All measurements of a file, in its order.

    `shapes` gives Nsight Compute's kernels their attention shapes; see nsight.py.  Raises InputError, one line that
    names the file, the line and the column, for whatever is not as it should be.
    """
    from iosim.study.validate import nsight

    if nsight.is_nsight(path):
        return nsight.read(path, shapes)
    lines = records(path)
    readers: Mapping[str, Callable[[Sequence[Record]], Iterator[Row]]] = {
        "tiles": lambda rs: map(_tile, rs), "published": lambda rs: map(_published, rs),
        "kernels": _kernels, "calls": lambda rs: map(_call, rs),
    }  # fmt: skip
    kind = next((k for k, needed in KINDS.items() if all(c in lines[0].cells for c in needed)), None)
    if kind is None:
        wanted = "; ".join(f"{k} have {', '.join(names.COLUMNS[c][-1] for c in needed)}" for k, needed in KINDS.items())
        raise InputError(f"{path}: is no kind of measurement that iosim knows: {wanted}")
    return tuple(readers[kind](lines))


def shape(record: Record, *, lse: bool = False) -> Attention:
    """The problem of a line.

    n_k and kv_heads default to n_q and heads.  Without a column `causal_align` a mask is top-left aligned, as
    PyTorch's is_causal is: it matters only where n_q and n_k differ.  The shape of an fp8 row, which iosim does not
    model, is given in fp16.
    """
    given: dict[str, Any] = {name: record.whole(name, zero=False) for name in SHAPE if record.has(name)}
    for name in ("n_q", "d"):
        record.text(name)
    given["dtype"] = "fp16" if _fp8(record) or not record.has("dtype") else record.word("dtype", names.DTYPES)
    given["causal"] = record.word("causal", names.FLAGS) if record.has("causal") else False
    given["causal_align"] = record.cells.get("causal_align") or "top-left"
    try:
        return Attention(**given, lse=lse)
    except InputError as error:
        column, _, problem = str(error).partition(": ")
        raise record.error(column, problem) from None


def direction(record: Record) -> str:
    """forward, backward or both."""
    return str(record.word("direction", names.DIRECTIONS))


def _fp8(record: Record) -> bool:
    return record.has("dtype") and record.word("dtype", names.DTYPES) == "fp8"


def row(record: Record, kind: Kind, measured: Mapping[str, float], **known: Any) -> Row:
    """A row with what all kinds read alike; `known` replaces or adds fields."""
    device = record.cells.get("device", "")
    where = direction(record) if "direction" not in known else known["direction"]
    fp8 = _fp8(record)
    fields: dict[str, Any] = {
        "device": device,
        "machine": names.machine(device or record.file),
        "direction": where,
        "unmodelled": "fp8 is not modelled" if fp8 else "",
        "note": record.cells.get("note", ""),
    }
    if "problem" not in known:
        fields["problem"] = None if fp8 else shape(record, lse=where == "backward")
    if "implementation" not in known:
        fields["implementation"] = names.implementation(record.text("implementation"))
    return Row(file=record.file, line=record.line, kind=kind, measured=dict(measured), **(fields | known))


def _call(record: Record) -> Row:
    measured = {}
    if record.has("time ms") or not record.has("note"):  # a note says why a call has no time
        measured["time"] = record.number("time ms", zero=False, unit=1e-3)
    if record.has("peak_extra_bytes"):
        measured["peak_extra_bytes"] = record.whole("peak_extra_bytes")
    return row(record, "calls", measured)


COUNTERS = ("dram_read_bytes", "dram_write_bytes", "l2_bytes")


def _kernels(lines: Sequence[Record]) -> Iterator[Row]:
    """Consecutive lines of one implementation, pass and shape are the kernels of one call."""
    same = ("implementation", "direction", "dtype", *SHAPE, "causal", "causal_align", "device")
    for call, (_, group) in enumerate(groupby(lines, key=lambda r: [r.cells.get(name) for name in same])):
        products = 0
        for position, record in enumerate(group):
            name = record.text("kernel name")
            role = names.kernel_role(name, direction(record), products)
            products += names.is_gemm(name)
            measured = {"time": record.number("time us", zero=False, unit=1e-6)}
            measured |= {c: record.whole(c) for c in COUNTERS if c in record.cells}
            yield row(record, "kernels", measured, kernel=Kernel(
                name=name, role=role, call=call, position=position,
                grid=_optional(record, "grid"), block=_optional(record, "block"),
                registers=_optional(record, "registers"), sram_bytes=_optional(record, "kernel sram"),
                exp_instructions=_optional(record, "exp instructions"),
            ))  # fmt: skip


def _optional(record: Record, column: str) -> int | None:
    return record.whole(column) if record.has(column) else None


def _tile(record: Record) -> Row:
    """A sweep's kernel is Triton's and computes a forward, unless columns say otherwise.

    A tile without a time has a note: that it does not launch, with the SRAM that it asked for, or what else went wrong.
    """
    note = record.cells.get("note", "")
    measured: dict[str, float] = {}
    if note and not record.has("time ms"):
        if note.startswith("does not launch"):
            measured["launches"] = 0
        if found := re.search(r"OutOfResources\((\d+), \d+, 'shared memory'\)", note):
            measured["smem_bytes"] = int(found[1])
    else:
        measured = {
            "launches": 1,
            "time": record.number("time ms", zero=False, unit=1e-3),
            "smem_bytes": record.whole("smem_bytes"),
            "registers": record.whole("registers", zero=False),
        }
    sizes = {name: record.whole(name, zero=False) for name in ("block_q", "block_k", "stages", "warps")}
    tile = Tile(**sizes, registers=_optional(record, "registers"), spills=_optional(record, "spills"))
    known: dict[str, Any] = {"tile": tile, "note": note}
    if not record.has("implementation"):
        known["implementation"] = "triton"
    if not record.has("direction"):
        known["direction"] = "forward"
    return row(record, "tiles", measured, **known)


def _published(record: Record) -> Row:
    metric = str(record.word("metric", {name: name for name in names.METRICS}))
    if metric == "rmse":
        return row(record, "published", {"rmse": record.number("value")}, problem=None,
                   unmodelled="numeric errors are not predicted")  # fmt: skip
    value = record.number("value", zero=False)
    if metric == "memory_mb":  # the only paper that prints it means MiB (its note says how that is known)
        return row(record, "published", {"peak_bytes": value * MIB}, step=MIB)
    seconds = value * 1e-3 if metric == "ms" else paper_flops(shape(record), direction(record)) / (value * 1e12)
    return row(record, "published", {"time": seconds})


def paper_flops(a: Attention, what: str) -> float:
    """FLOPs as the papers count them: forward 4 * batch * heads * n_q * n_k * d, causal exactly half of it."""
    forward = 2 * a.batch * a.heads * a.n_q * a.n_k * (a.d + a.d_v) / (2 if a.causal else 1)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[what]
