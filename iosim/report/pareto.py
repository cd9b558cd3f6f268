"""Pareto fronts for a terminal of 80 columns, as JSON (schema iosim.pareto/1), CSV and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import iosim
from iosim.report.layout import csv_text, draw, paragraph, table
from iosim.report.sweep import flat
from iosim.study.pareto import Front, Pareto, Point
from iosim.words import count, digits, duration, size

SCHEMA = "iosim.pareto/1"
SHOWN = 20  # rows of one front
MOST_PANELS = 6
LINEAR = 12  # an axis of times that differ by less begins at 0


def render(found: Pareto, store: str) -> str:
    """A paragraph, and a table for each front."""
    best = sum(len(front.best) for front in found.fronts)
    points = best + sum(len(front.beaten) for front in found.fronts)
    left_out = [words for n, words in ((found.failed, f"{found.failed:,} that failed"),
                                       (found.untimed, f"{found.untimed:,} without a time")) if n]  # fmt: skip
    rest = f", besides {' and '.join(left_out)}" if left_out else ""
    lines = paragraph(f"{best:,} of {count(points, 'configuration', 'configurations')} in {store} are beaten by no "
                      f"other in time, SRAM of a block and DRAM traffic together{rest}.")  # fmt: skip
    for front in found.fronts:
        lines += ["", *paragraph(f"{_title(front)}: {len(front.best):,} of {len(front.best) + len(front.beaten):,}")]
        lines += ["", _table(front).rstrip("\n")]
        if len(front.best) > SHOWN:
            lines += paragraph(f"{len(front.best) - SHOWN:,} more are in --csv.")
    return "\n".join(lines) + "\n"


def _title(front: Front) -> str:
    """The problem and the machine."""
    p = front.row.inputs["problem"]
    if "lengths" in p:
        sizes = [count(len(p["lengths"]), "sequence", "sequences"), f"d {p['d']}"]
        sizes += [f"page {p['page']}"] if "page" in p else []
    else:
        sizes = [f"n {p['n_q']:,}"] + ([f"n_k {p['n_k']:,}"] if p["n_k"] != p["n_q"] else []) + [f"d {p['d']}"]
    sizes += [f"{name} {p[name]}" for name in ("batch", "heads") if p.get(name, 1) != 1]
    sizes += [f"kv_heads {p['kv_heads']}"] if p["kv_heads"] != p["heads"] else []
    sizes += [p["dtype"]] + (["causal"] if p["causal"] else []) + ([f"window {p['window']}"] if p["window"] else [])
    passes = (front.row.result or {}).get("computes")
    return f"{', '.join(sizes)}, {passes}, on {front.row.inputs['machine']['name']}"


def _choices(point: Point) -> str:
    """The fields of the schedule and the machine, in words."""
    row = point.row
    chosen = (row.result or {}).get("schedule", {}) | row.inputs["schedule"]
    words = [f"{name} {_plain(chosen[name])}" for name in ("block_q", "block_k", "stages", "groups", "splits") if
             name in chosen and (name not in ("groups", "splits") or chosen[name] != 1)]  # fmt: skip
    words += [f"{name} {_plain(value)}" for name, value in row.inputs["schedule"].items()
              if name not in ("block_q", "block_k", "stages", "groups", "splits")]  # fmt: skip
    words += [f"{name} {value}" for name, value in row.inputs["machine"].get("values", {}).items()]
    return ", ".join(words)


def _plain(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(front: Front) -> str:
    drawn = table("dataflow", "schedule", "time", "SRAM", "DRAM", left=2)
    for point in front.best[:SHOWN]:
        drawn.add_row(point.row.inputs["dataflow"]["name"], _choices(point), duration(point.time_ps / 1e12),
                      f"{digits(point.sram_bytes / 1024)} KiB", size(point.dram_bytes))  # fmt: skip
    return draw(drawn)


def document(found: Pareto, store: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Every front with its points, and how many are beaten."""
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__},
        "store": store,
        "failed": found.failed,
        "untimed": found.untimed,
        "fronts": [
            {
                "problem": front.row.inputs["problem"],
                "hardware": front.row.inputs["machine"]["name"],
                "computes": (front.row.result or {}).get("computes"),
                "beaten": len(front.beaten),
                "points": [_point(point) for point in front.best],
            }
            for front in found.fronts
        ],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "key": point.row.key,
        "dataflow": point.row.inputs["dataflow"]["name"],
        "schedule": (point.row.result or {}).get("schedule"),
        "hw": point.row.inputs["machine"].get("values", {}),
        "seconds": point.time_ps / 1e12,
        "sram_used_bytes": point.sram_bytes,
        "dram_bytes": point.dram_bytes,
    }


def rows_as_csv(found: Pareto) -> str:
    """One row a point that is beaten by none."""
    return csv_text([flat(point.row) for front in found.fronts for point in front.best])


def plot(found: Pareto, kind: str) -> bytes:
    """A panel a front: time against SRAM, DRAM traffic as the size of a mark, beaten points in grey."""
    from iosim.report.plots import figure, image, seconds_axis

    fronts = found.fronts[:MOST_PANELS]
    across = min(2, len(fronts))
    down = -(-len(fronts) // across)
    drawn = figure(max(8.0, 6.5 * across), 4.4 * down + 0.3)
    for number, front in enumerate(fronts, 1):
        axes = drawn.add_subplot(down, across, number)
        _panel(axes, front)
        if _spread(front) < LINEAR:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda y, _: duration(y) if y else "0")
            axes.set_ylabel("time")
        else:
            seconds_axis(axes)
        axes.set_xlim(left=0)
        axes.set_xlabel("SRAM of a block (KiB)")
        axes.set_title(_title(front), fontsize=9)
        axes.grid(visible=True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    rest = f" (first {MOST_PANELS} of {len(found.fronts)})" if len(found.fronts) > len(fronts) else ""
    drawn.suptitle("Not beaten in time, SRAM and DRAM traffic together; a larger mark has more DRAM traffic" + rest,
                   fontsize=10)  # fmt: skip
    return image(drawn, kind)


def _spread(front: Front) -> float:
    """The longest time over the shortest."""
    times = [p.time_ps for p in (*front.best, *front.beaten)]
    return max(times) / max(1, min(times))


def _panel(axes: Any, front: Front) -> None:
    from iosim.report.plots import GREY, colour_of, marker_of

    most = max(p.dram_bytes for p in (*front.best, *front.beaten)) or 1

    def marks(points: Sequence[Point]) -> dict[str, Any]:
        return {
            "x": [p.sram_bytes / 1024 for p in points],
            "y": [p.time_ps / 1e12 for p in points],
            "s": [20 + 100 * p.dram_bytes / most for p in points],
        }

    names = list(dict.fromkeys(p.row.inputs["dataflow"]["name"] for p in (*front.best, *front.beaten)))
    for number, name in enumerate(names):
        best, beaten = ([p for p in points if p.row.inputs["dataflow"]["name"] == name]
                        for points in (front.best, front.beaten))  # fmt: skip
        shape = marker_of(name, number)
        if beaten:
            axes.scatter(**marks(beaten), color=GREY, marker=shape, alpha=0.4, linewidths=0, label=f"{name}, beaten")
        if best:
            axes.scatter(**marks(best), color=colour_of(name, number), marker=shape, alpha=0.8, edgecolors="black",
                         linewidths=0.6, label=name, zorder=3)  # fmt: skip
    for handle in axes.legend(fontsize=8).legend_handles:
        handle.set_sizes([45])
