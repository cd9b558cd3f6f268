"""A validation for a terminal of 80 columns, as JSON (schema iosim.validate/1), as CSV, and as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

import iosim
from iosim.errors import InputError
from iosim.memory.peak import lacks_dq_sum
from iosim.report import plots
from iosim.report.layout import WIDTH, csv_text
from iosim.study.validate import ASSUMED, Validation, metrics
from iosim.study.validate.goals import AT_LEAST, Verdict
from iosim.study.validate.rows import Quantity
from iosim.study.validate.score import Family, Score

SCHEMA = "iosim.validate/1"
COLUMNS = 2  # of panels in a plot
LEGEND = (
    "Errors in percent of what was measured, by kernel, pass and head dimension: mean, median and worst of the "
    "absolute ones, and the mean of the signed ones (bias). Beside them the mean absolute error of a plain roofline "
    "(roof), and of compulsory bytes over bandwidth (B/BW)."
)
DQ_SUM = (
    "Peak memory of FlashAttention-1 is that of the paper's own kernel: where one tile holds all keys (256 up to d 64, "
    "128 above) it has no sum of dQ in fp32. The program that iosim run --pass training takes always has it."
)
BASELINES = ("roofline", "bandwidth")
HEADER = f"{'':35}{'rows':>4}{'mean':>7}{'median':>7}{'worst':>7}{'bias':>7}{'roof':>6}{'B/BW':>6}"


# ---------------------------------------------------------------- text


def render(v: Validation) -> str:
    """The validation as text."""
    rows = {id(s.row): s.row for s in v.scores}.values()
    files = Counter(row.file for row in rows)
    parts = wrap(
        f"Predictions held against {len(v.scores):,} measured numbers of {len(rows):,} rows: "
        + ", ".join(f"{name} {n}" for name, n in files.items()), WIDTH)  # fmt: skip
    if v.assumed:
        parts += wrap(
            f"{', '.join(v.assumed)}: no machine is named; {ASSUMED} is taken (--hw NAME takes another)", WIDTH
        )
    if any(
        s.quantity.name == "peak_bytes"
        and s.row.problem is not None
        and lacks_dq_sum(s.row.implementation, s.row.direction, s.row.problem)
        for s in v.scores
    ):
        parts += wrap(DQ_SUM, WIDTH)
    parts += ["", *_families(v.families), *_goals(v.verdicts), *_apart(v)]
    return "\n".join(parts) + "\n"


def _families(families: Sequence[Family]) -> Iterator[str]:
    if not families:
        yield from ("No row is modelled.", "")
        return
    yield from wrap(LEGEND, WIDTH)
    yield ""
    yield HEADER
    for (quantity, machine, kind), group in groupby(families, key=lambda f: (f.quantity.words, f.machine, f.kind)):
        yield f"{quantity}: {machine}, {kind}"
        for family in group:
            yield _family(family)
            rank, regret = family.sweep()
            if regret is not None:
                yield f"{'':4}rank correlation {_number(rank, 3)}, regret of the predicted best tile {regret:.1f} %"
    yield ""


def _family(f: Family) -> str:
    off = f.errors()
    numbers = [metrics.mape(off), metrics.median_ape(off), metrics.worst_ape(off)]
    lines = [metrics.mape(e) if (e := f.errors(b)) else None for b in BASELINES]
    cells = "".join(f"{n:7.1f}" for n in numbers) + f"{metrics.bias(off):+7.1f}"
    return f"  {f.label:33}{len(off):4}{cells}" + "".join("" if e is None else f"{e:6.1f}" for e in lines)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _goals(verdicts: Iterable[Verdict]) -> Iterator[str]:
    yield f"{'Goals':36}{'rows':>4}"
    for v in verdicts:
        word = {None: "no row", True: "met", False: "missed"}[v.met]
        start = f"  {v.goal.name:34}{v.rows:4}  {word:8}"
        yield from wrap(", ".join(_target(v, name) for name in v.goal.targets), WIDTH,
                        initial_indent=start, subsequent_indent=" " * len(start))  # fmt: skip
    yield ""


def _target(v: Verdict, name: str) -> str:
    """What was reached beside its target: "mean 3.2 <= 4", "rank 0.91 < 0.95"."""
    word, digits = ("rank", 3) if name == "spearman" else (name, 1)
    up = name in AT_LEAST
    if v.met is None:
        return f"{word} {'>=' if up else '<='} {v.goal.targets[name]:g}"
    sign = {(True, True): ">=", (True, False): "<", (False, True): "<=", (False, False): ">"}[up, v.meets(name)]
    return f"{word} {_number(v.reached[name], digits)} {sign} {v.goal.targets[name]:g}"


def _apart(v: Validation) -> Iterator[str]:
    """What was not scored, and why."""
    for status, words in (
        ("host-bound", "Host-bound calls, timed by events below what the host needs for a call (not scored)"),
        ("below floor", "Counters so small that other work's bytes hide theirs (not scored)"),
        ("not modelled", "Not modelled"),
    ):
        found = v.apart(status)
        if not found:
            continue
        yield from wrap(f"{words}: {found.total():,}", WIDTH)
        by_quantity: dict[str, list[str]] = {}
        for (implementation, quantity), n in found.items():
            by_quantity.setdefault(quantity, []).append(f"{implementation} {n}")
        for quantity, counts in by_quantity.items():
            yield from wrap(f"{quantity}: {', '.join(counts)}", WIDTH, initial_indent="  ", subsequent_indent="    ")


# ---------------------------------------------------------------- JSON and CSV


def document(v: Validation) -> dict[str, Any]:
    """The whole validation; errors are in percent, times in seconds."""
    return {
        "schema": SCHEMA,
        "iosim": iosim.__version__,
        "assumed_machine": dict.fromkeys(v.assumed, ASSUMED),
        "families": [_family_fields(f) for f in v.families],
        "goals": [_goal_fields(g) for g in v.verdicts],
        "rows": [score_row(s) for s in v.scores],
    }


def _family_fields(f: Family) -> dict[str, Any]:
    off = f.errors()
    rank, regret = f.sweep()
    lines = {f"{b}_mape_pct": metrics.mape(e) for b in BASELINES if (e := f.errors(b))}
    sweep = {"spearman": rank, "regret_pct": regret}
    return {
        "family": f.name,
        "machine": f.machine,
        "kind": f.kind,
        "quantity": f.quantity.name,
        "rows": len(off),
        "mape_pct": metrics.mape(off),
        "median_ape_pct": metrics.median_ape(off),
        "worst_ape_pct": metrics.worst_ape(off),
        "bias_pct": metrics.bias(off),
        **lines,
        **{name: value for name, value in sweep.items() if value is not None},
    }


def _goal_fields(v: Verdict) -> dict[str, Any]:
    return {
        "goal": v.goal.name,
        "quantity": v.goal.quantity,
        "rows": v.rows,
        "targets": dict(v.goal.targets),
        "reached": dict(v.reached),
        "met": v.met,
    }


def score_row(s: Score) -> dict[str, Any]:
    """One measured number as a flat row."""
    r, tile, kernel = s.row, s.row.tile, s.row.kernel
    sizes = ("batch", "heads", "kv_heads", "n_q", "n_k", "d", "d_v", "causal", "causal_align", "window", "dtype")
    return {
        "file": r.file,
        "line": r.line,
        "kind": r.kind,
        "machine": r.machine,
        "device": r.device,
        "implementation": r.implementation,
        "pass": r.direction,
        **{name: getattr(r.problem, name, None) for name in sizes},
        "kernel": None if kernel is None else kernel.name,
        "role": None if kernel is None else kernel.role,
        **{name: getattr(tile, name, None) for name in ("block_q", "block_k", "stages", "warps", "spills")},
        "quantity": s.quantity.name,
        "unit": s.quantity.unit,
        "measured": s.measured,
        "predicted": s.predicted,
        "error_pct": s.error_pct,
        **{name: getattr(s.baseline, name, None) for name in BASELINES},
        "status": s.status,
        "reason": s.reason,
    }


def as_csv(v: Validation) -> str:
    """A header and one line a measured number."""
    return csv_text([score_row(s) for s in v.scores])


# ---------------------------------------------------------------- plot


def plot(v: Validation) -> bytes:
    """Predicted against measured as a PNG: a panel a quantity and kind, logarithmic axes, one colour a family.

    Families with a 0 are left out.
    """
    drawn = [f for f in v.families if all(s.measured > 0 and (s.predicted or 0) > 0 for s in f.scores)]
    if not drawn:
        raise InputError("--plot: no row is modelled, so there is nothing to draw")
    panels: dict[tuple[Quantity, str], list[Family]] = {}
    for family in drawn:
        panels.setdefault((family.quantity, family.kind), []).append(family)
    lines = -(-len(panels) // COLUMNS)
    figure = plots.figure(9 * COLUMNS, 5.5 * lines)
    for position, ((quantity, kind), families) in enumerate(panels.items(), start=1):
        unit = f" ({quantity.unit})" if quantity.unit else ""
        axes = figure.add_subplot(lines, COLUMNS, position, xscale="log", yscale="log")
        axes.set(title=f"{quantity.words}: {kind}", xlabel=f"measured{unit}", ylabel=f"predicted{unit}")
        for number, f in enumerate(families):
            points = [(s.measured, s.predicted or 0.0) for s in f.scores]
            colour, label = _colour(number, len(families)), f"{f.machine} {f.label}"
            axes.plot(*zip(*points, strict=True), linestyle="", marker="o", markersize=4, color=colour, label=label)
        ends = axes.get_xlim()
        axes.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return plots.image(figure, dpi=100)


def _colour(number: int, of: int) -> tuple[float, ...]:
    """Evenly spaced hues."""
    from matplotlib.colors import hsv_to_rgb

    red, green, blue = hsv_to_rgb((number / of, 0.85, 0.55 + 0.3 * (number % 2)))
    return float(red), float(green), float(blue)
