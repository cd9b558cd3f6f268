"""Errors by number format for a terminal of 80 columns, as JSON (schema iosim.precision/1) and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import iosim
from iosim.report.layout import csv_text, draw, paragraph
from iosim.study.precision import BLOCK, D, N, Precision, Row, flat
from iosim.words import digits

SCHEMA = "iosim.precision/1"
_SHORT = {"fp8_e4m3": "fp8"}


def render(result: Precision) -> str:
    """The table and what its words mean."""
    seeds = f"seed {result.seed}" if result.seeds == 1 else f"seeds {result.seed} to {result.seed + result.seeds - 1}"
    head = f"Error of O against float64: {result.queries:,} queries, N {result.n:,}, d {result.d}, one head, {seeds}"
    parts = [*paragraph(head), "", _table(result)]
    for text in _notes(result):
        parts += paragraph(text)
    return "\n".join(parts) + "\n"


def _table(result: Precision) -> str:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    for name in ("dataflow", "data", "sums", "scale", "turn"):
        table.add_column(f"\n{name}", no_wrap=True)
    with_paper = any(row.paper_rmse is not None for row in result.rows)
    for name in ("normal\nrmse", "\nmax", "outliers\nrmse", "\nmax", *(("\npaper", "\nratio") if with_paper else ())):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    for names, row in _merged(result.rows):
        table.add_row(
            names,
            _SHORT.get(row.dtype, row.dtype),
            row.accumulator,
            row.scales,
            "yes" if row.incoherent else "",
            *(_short(x) for e in row.errors.values() for x in (e.rmse, e.max_abs)),
            *(("" if row.paper_rmse is None else _short(row.paper_rmse),) if with_paper else ()),
            *(("" if row.ratio is None else digits(row.ratio),) if with_paper else ()),
        )
    return draw(table)


def _short(x: float) -> str:
    """Two digits, without a leading zero in the exponent: 1.9e-4."""
    return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _merged(rows: tuple[Row, ...]) -> Iterator[tuple[str, Row]]:
    """Rows of one algorithm's versions that compute the same as one (flash2/3), with the figure that the paper has."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        errors = tuple((e.rmse, e.max_abs) for e in row.errors.values())
        kind = row.dataflow.rstrip("0123456789"), row.dtype, row.accumulator, row.scales, row.incoherent
        groups.setdefault((kind, errors), []).append(row)
    for ((stem, *_), _), same in groups.items():
        names = "/".join([same[0].dataflow, *(row.dataflow.removeprefix(stem) for row in same[1:])])
        yield names, next((row for row in same if row.paper_rmse is not None), same[0])


def _notes(result: Precision) -> Iterator[str]:
    """What the columns mean; what explains the figures; what is left out."""
    yield ("normal: Q, K, V from N(0, 1); outliers: one entry in 1000 has another N(0, 100) added. Both are rounded to "
           "the data's format, which is part of the error.")  # fmt: skip
    if any(row.scales for row in result.rows):
        yield (f"scale of fp8: one for each block of {BLOCK} rows, or one for the head (per tensor); turn: Q and K "
               "times one random orthogonal matrix (incoherent processing), which leaves Q K^T as it is.")  # fmt: skip
    if any(row.paper_rmse is not None for row in result.rows):
        yield ("paper: RMSE of FlashAttention-3's Table 3 for outliers; ratio: ours over it. The paper gives no "
               "shape: N 8,192 and d 128 are our assumption. A few rows make most of the error, so that it varies "
               "with the seed by 13 to 20 % (standard deviation).")  # fmt: skip
    if (result.n, result.d) != (N, D):
        yield (f"FlashAttention-3's figures (its Table 3) stand beside ours only at N {N:,} and d {D}, the shape that "
               "we take for the paper's.")  # fmt: skip
    elif any(row.dataflow == "standard" and row.dtype == "fp16" for row in result.rows):
        yield ("standard in fp16 rounds S, which costs most where scores are large: 1.3 times flash2's error over 16 "
               "seeds. Rounded twice, before and after its scaling, as unfused code often does, it would be 1.6 times; "
               "the paper has 1.7.")  # fmt: skip
    if result.left_out:
        yield f"Left out: {'; '.join(result.left_out)}."


def document(result: Precision, request: Mapping[str, Any]) -> dict[str, Any]:
    """The result for JSON; `request` repeats what was asked for."""
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__},
        "problem": {name: getattr(result, name) for name in ("n", "d", "queries", "seed", "seeds")}
        | {"block_rows": BLOCK},
        "rows": [flat(row) for row in result.rows],
        "left_out": list(result.left_out),
    }


def rows_as_csv(result: Precision) -> str:
    """A header and one line a dataflow and format."""
    return csv_text([flat(row) for row in result.rows])
