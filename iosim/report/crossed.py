"""A cross-validation for a terminal of 80 columns, as JSON (schema iosim.validate-cross/1), and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import iosim
from iosim.report.layout import WIDTH, csv_text
from iosim.study.validate.cross import HIGH, LOW, MACHINE, Crossed, Fold

SCHEMA = "iosim.validate-cross/1"
LEGEND = (
    "Each constant fitted again without a part of the rows that tell it, the others standing, and judged on that part: "
    "mean absolute error in percent with the constant as it stands, and as fitted to the rest. A constant may move "
    f"from {LOW:g} to {HIGH:g} times its value; a spread as wide says that the rows do not tell it."
)


def render(found: Sequence[Crossed]) -> str:
    """The cross-validation as text."""
    lines = [*wrap(LEGEND, WIDTH), "", f"{'constant':38}{'stands':>8}{'fits best':>11}{'spread over folds':>20}"]
    for c in found:
        spread = "-" if c.spread is None else f"{c.spread[0]:.4g} to {c.spread[1]:.4g}"
        lines.append(f"{c.constant.name:38}{c.standing:8.4g}{c.best:11.4g}{spread:>20}")
    lines += ["", f"{'left out':44}{'rows':>6}{'fitted':>9}{'standing':>10}{'left out':>10}"]
    for c in found:
        lines.append(f"{c.constant.name:44}{c.rows:6}{c.best:9.4g}{c.standing_pct:10.1f}{c.best_pct:>10.1f}")
        lines += [
            f"  {f.left_out:42}{f.rows:6}{f.value:9.4g}{f.standing_pct:10.1f}{f.left_out_pct:10.1f}" for f in c.folds
        ]
    return "\n".join(lines) + "\n"


def document(found: Sequence[Crossed]) -> dict[str, Any]:
    """All of it; errors are in percent."""
    return {
        "schema": SCHEMA,
        "provenance": {"iosim": iosim.__version__, "machine": MACHINE},
        "constants": [_constant(c) for c in found],
    }


def _constant(c: Crossed) -> dict[str, Any]:
    return {
        "constant": c.constant.name, "rows": c.rows, "value": c.standing, "mape_pct": c.standing_pct,
        "best_value": c.best, "best_mape_pct": c.best_pct, "spread": None if c.spread is None else list(c.spread),
        "folds": [_fold(f) for f in c.folds],
    }  # fmt: skip


def _fold(f: Fold) -> dict[str, Any]:
    return {
        "left_out": f.left_out, "rows": f.rows, "value": f.value, "standing_mape_pct": f.standing_pct,
        "mape_pct": f.left_out_pct,
    }  # fmt: skip


def as_csv(found: Sequence[Crossed]) -> str:
    """One row a fold."""
    return csv_text(list(_rows(found)))


def _rows(found: Sequence[Crossed]) -> Iterator[dict[str, Any]]:
    for c in found:
        for f in c.folds:
            yield {"constant": c.constant.name, "standing": c.standing, **_fold(f)}
