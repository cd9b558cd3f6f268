"""What a layout costs, in words and as JSON: for each tensor the load or store that it costs most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from iosim.words import digits, size

if TYPE_CHECKING:
    from iosim.memory.cache import DramFlow
    from iosim.memory.rows import RowCost
    from iosim.study.run import Run


def worst_rows(flows: Iterable[DramFlow]) -> dict[str, RowCost]:
    """By tensor, the rows of the load or store that moves most bytes of it."""
    most: dict[str, tuple[int, RowCost]] = {}
    for f in flows:
        if f.rows is not None and f.flow.hbm_bytes > most.get(f.flow.tensor, (-1,))[0]:
            most[f.flow.tensor] = f.flow.hbm_bytes, f.rows
    return {tensor: rows for tensor, (_, rows) in most.items()}


def layout_words(runs: Sequence[Run]) -> str:
    """What the layout costs each run, tensors that it costs the same together; empty where all are contiguous."""
    said: dict[str, list[str]] = {}
    for r in runs:
        alike: dict[str, list[str]] = {}
        for tensor, rows in worst_rows(r.device.flows).items():
            alike.setdefault(_words(rows), []).append(tensor)
        if alike:
            text = "; ".join(f"{', '.join(tensors)}: {words}" for words, tensors in alike.items())
            said.setdefault(text, []).append(r.dataflow.name)
    if not said:
        return ""
    parts = [text if len(said) == 1 else f"in {' and '.join(names)} {text}" for text, names in said.items()]
    machine = runs[0].hardware
    known = all(value is not None for value in machine.grain.values())
    note = "" if known else f" (pieces of memory as on an H200: {machine.name}'s are not known)"
    return f"Layout {runs[0].problem.layout}{note}: {'; '.join(parts)}."


def _words(rows: RowCost) -> str:
    p, c = rows.pattern, rows.cost
    lie = f"rows of {size(p.width)}" + (f", {size(p.pitch)} apart" if p.rows > 1 else "")
    factors = {"bytes of L2 sectors": c.sectors, "bytes of DRAM": c.moved, "time of DRAM": c.time}
    costs = [f"{digits(factor)} times the {what}" for what, factor in factors.items() if factor > 1.005]
    return f"{lie}, cost {', '.join(costs)} of one run" if costs else f"{lie}, cost no more than one run"


def layout_fields(r: Run) -> dict[str, Any]:
    """The same for the JSON document."""
    found = {
        tensor: {
            "row_bytes": rows.pattern.width,
            "pitch_bytes": rows.pattern.pitch,
            "neighbours_together": rows.together,
            "neighbours_found": rows.found,
            "l2_factor": rows.cost.sectors,
            "dram_factor": rows.cost.moved,
            "dram_time_factor": rows.cost.time,
        }
        for tensor, rows in worst_rows(r.device.flows).items()
    }
    return {"rows": found} if found else {}
