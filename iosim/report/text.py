"""A comparison for a terminal of 80 columns: the problem, a table, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from iosim.hardware import Hardware
from iosim.memory.step import StepMemory
from iosim.problem import LAYOUT, Attention
from iosim.report.document import spread_pct
from iosim.report.interval import interval_lines
from iosim.report.layout import draw, paragraph
from iosim.report.rows import layout_words
from iosim.study.run import Comparison, Run
from iosim.words import count, digits, duration, kib, percent, ratio, size

if TYPE_CHECKING:
    from iosim.check.given import Inputs
    from iosim.study.batch import Batch


def render(comparison: Comparison, *, energy: bool = False, explained: bool = True) -> str:
    """The comparison as text; the problem and the table alone where it is not to be `explained`."""
    machines = list({r.hardware.name: r.hardware for r in comparison.runs}.values())
    parts = [*paragraph(headline(comparison.problem, comparison.runs[0].dataflow.computes))]
    if not explained:
        drawn = _table(comparison.runs, energy) if len(machines) == 1 else _machines_table(comparison.runs)
        return "\n".join([*parts, "", drawn])
    for machine in machines:
        parts += paragraph(machine_line(machine))
    if comparison.inputs is not None:
        parts += paragraph(inputs_line(comparison.inputs, comparison.runs[0].dataflow.computes))
    parts.append("")
    if len(machines) == 1:
        parts += [_table(comparison.runs, energy), *_sentences(comparison.runs, energy)]
    else:
        parts += [_machines_table(comparison.runs)]
        for machine in machines:
            runs = [r for r in comparison.runs if r.hardware is machine]
            choices = [f"Schedule of {_name(r)}: {words}." for r in runs if (words := _choices(r))]
            parts += paragraph(" ".join([f"{machine.name}: {_time_words(runs)}", *choices]))
        parts += interval_lines(comparison.runs)
        if energy:
            from iosim.report.energy import energies_table, energy_words

            parts += ["", energies_table(comparison.runs, _name), *energy_words(comparison.runs, _name)]
        parts += _check_words(comparison.runs)
    return "\n".join(parts) + "\n"


def heads_words(a: Attention) -> str:
    """ "1 head", "8 heads", "8 heads over 1 K/V head"."""
    heads = count(a.heads, "head", "heads")
    return heads if a.kv_heads == a.heads else f"{heads} over {count(a.kv_heads, 'K/V head', 'K/V heads')}"


def headline(a: Attention, computes: str = "forward", batch: Batch | None = None) -> str:
    """The problem in one line; with a batch, its sequences have the place of queries and keys."""
    if batch is not None:
        a = replace(a, n_q=max(s.q for s in batch.sequences), n_k=max(s.k for s in batch.sequences))
    length = f"N {a.n_q:,}" if a.n_q == a.n_k else f"{count(a.n_q, 'query', 'queries')}, {count(a.n_k, 'key', 'keys')}"
    width = f", d {a.d}" if a.d == a.d_v else f", d {a.d}, d_v {a.d_v}"
    width = "" if computes == "softmax" else width
    mask = "" if not a.causal else ", causal" if a.n_q == a.n_k else f", causal ({a.causal_align})"
    mask += "" if a.window is None else f", window {a.window:,}"
    later = a.window is not None and not a.causal and a.diagonal < a.n_k - 1  # keys after those of the first query
    mask += " (later keys are seen too; --causal hides them)" if later else ""
    mask += _changes(a)
    mask += "" if a.layout == LAYOUT else f", {a.layout}"
    mask += ", fp16 accumulator" if a.accumulator == "fp16" else ""
    mask += ", log-sum-exp written" if a.lse and computes == "forward" else ""
    what = "Softmax of the scores" if computes == "softmax" else f"Attention {computes}"
    what += " (forward and backward)" if computes == "training" else ""
    if batch is None:
        return f"{what}: batch {a.batch}, {heads_words(a)}, {length}{width}, {a.dtype}{mask}"
    keys = sum(s.k for s in batch.sequences)
    many = f"{count(len(batch.sequences), 'sequence', 'sequences')} of up to {length} ({keys:,} in all)"
    return f"{what}: {many}, {heads_words(a)}{width}, {a.dtype}{mask}{_cached(batch)}"


def _cached(batch: Batch) -> str:
    """How K and V lie."""
    if (c := batch.cache) is None:
        return ""
    kind = "" if c.dtype is None else f" in {c.dtype}, a scale a {c.scales}"
    shared = f", {c.shared:,} tokens shared" if c.shared else ""
    return f"; K/V cache{kind}, pages of {c.page}{shared}"


_BIASES = {"shared": "for all heads", "heads": "for each head", "full": "for each batch and head"}


def _changes(a: Attention) -> str:
    """What changes scores and weights, in words."""
    words = {
        f"{a.global_tokens:,} global tokens": a.global_tokens,
        f"soft-cap {a.softcap or 0:g}": a.softcap is not None,
        "ALiBi": a.alibi,
        f"a bias {_BIASES.get(a.bias or '', '')}": a.bias is not None,
        "sinks": a.sinks,
        f"dropout {a.dropout:g}": a.dropout,
    }
    if (mask := a.block_mask) is not None:
        words[f"{mask.left:,} of {len(mask.rows) * len(mask.rows[0]):,} blocks ({mask.origin})"] = True
    return "".join(f", {name}" for name, there in words.items() if there)


def inputs_line(inputs: Inputs, computes: str) -> str:
    """A user's own tensors in one line."""
    from iosim.check.given import turned_hint

    reads = "backward" if computes == "training" else computes
    names = ", ".join(t.name for t in inputs.used(reads).values())
    made = "; dO is random" if reads == "backward" and "dO" not in inputs.tensors else ""
    text = f"Inputs: {names} of {inputs.origin}" + (f" (SHA-256 {inputs.sha256[:12]}...)" if inputs.sha256 else "")
    return text + made + turned_hint(inputs.layout, inputs.tensors)


def _name(r: Run) -> str:
    """The dataflow; of a training step that of the forward pass."""
    return r.parts[0].dataflow.name if r.parts else r.dataflow.name


def machine_line(h: Hardware) -> str:
    """The machine in one line."""
    chip = f"{h.processors} {h.called}s" if h.processors else f"an unknown number of {h.called}s"
    hbm = f"{size(h.hbm.capacity_bytes)} {h.hbm.kind} at {size(h.hbm.bandwidth)}/s"
    return f"{h.name}: {h.title}; {chip} with {kib(h.sram.capacity_bytes)} SRAM each; {hbm}"


def _table(runs: Sequence[Run], energy: bool) -> str:
    """A column for each dataflow and, for two or more, how the first compares with the last."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for r in runs:
        table.add_column(_name(r), justify="right")
    if len(runs) > 1:
        names = f"{_name(runs[0])}/{_name(runs[-1])}"
        table.add_column(names if len(names) <= 18 else "first/last", justify="right")
    for label, cell, number in rows(runs, energy):
        cells = [cell(r) for r in runs]
        if len(runs) > 1:
            cells.append("" if number is None else ratio(number(runs[0]), number(runs[-1])))
        table.add_row(label, *cells)
    return draw(table)


Cell = Callable[[Run], str]
Number = Callable[[Run], float]


def rows(runs: Sequence[Run], energy: bool = False) -> Iterable[tuple[str, Cell, Number | None]]:
    """The lines of the table: a label, what a run says there, and the number behind it where runs are compared."""
    yield "extra memory", lambda r: size(r.ledger.extra_bytes), lambda r: r.ledger.extra_bytes
    if all(r.step is not None for r in runs):
        yield "peak memory", lambda r: size(r.ledger.peak_bytes), lambda r: r.ledger.peak_bytes
    yield "HBM read", lambda r: size(r.ledger.hbm_read_bytes), lambda r: r.ledger.hbm_read_bytes
    yield "HBM write", lambda r: size(r.ledger.hbm_write_bytes), lambda r: r.ledger.hbm_write_bytes
    yield "DRAM read + write", lambda r: size(dram(r)), dram
    yield "SRAM a block", _sram, None
    yield "resident blocks", _resident, None
    yield "tile, stages", _tile, None
    if all(r.parts for r in runs):
        yield "backward", lambda r: _tile(r.parts[1]), None
    if any(r.timeline is not None for r in runs):
        yield "time", _time, lambda r: r.seconds or 0
        yield "share of peak", lambda r: "-" if r.peak_share is None else percent(r.peak_share), None
        yield "busiest unit", _busiest, None
        yield "largest stall", _largest_stall, None
    else:
        yield "time", lambda _: "unknown", None
    if energy:
        from iosim.report.energy import energy_rows

        yield from energy_rows(runs)
    yield "check", _check, None
    yield "rows checked", _rows_checked, None
    if not all(r.fits for r in runs):
        yield "fits device memory", lambda r: "yes" if r.fits else f"no, {size(r.ledger.peak_bytes)}", None


def dram(r: Run) -> int:
    """Bytes that cross the DRAM interface either way."""
    return r.device.dram_read_bytes + r.device.dram_write_bytes


def _sram(r: Run) -> str:
    f = r.footprint
    return f"{f.sram_bytes / 1024:.4g} of {kib(f.sram_capacity)}"


def _resident(r: Run) -> str:
    return f"{r.footprint.resident} ({r.footprint.limit})"


def _tile(r: Run) -> str:
    s = r.schedule
    rows, cols = (s.block_q, s.block_k) if "block_q" in r.dataflow.uses else (s.softmax_rows, s.softmax_cols)
    return f"{rows} x {cols}, {','.join(map(str, s.stages))}"


def _time(r: Run) -> str:
    return "unknown" if r.seconds is None else duration(r.seconds)


def stall_of(r: Run) -> tuple[str, float] | None:
    """What the compute unit waits for most, and the share of the run that takes."""
    if r.timeline is None:
        return None
    unit = r.timeline.units[r.compute_unit]
    cause = max(unit.stalls_ps, key=lambda c: unit.stalls_ps[c])
    return cause, unit.stalls_ps[cause] / (unit.instances * r.timeline.makespan_ps)


def _busiest(r: Run) -> str:
    return "-" if r.timeline is None else f"{r.timeline.bound} {percent(busy_share(r))}"


def busy_share(r: Run) -> float:
    """The share of the run that its busiest unit is busy, over all instances."""
    if r.timeline is None:
        return 0.0
    if r.timeline.bound == "launch":
        return sum(k.launch_ps for k in r.timeline.kernels) / r.timeline.makespan_ps
    unit = r.timeline.units[r.timeline.bound]
    return unit.busy_ps / (unit.instances * r.timeline.makespan_ps)


def _largest_stall(r: Run) -> str:
    stall = stall_of(r)
    return "-" if stall is None else f"{stall[0]} {percent(stall[1])}"


def _check(r: Run) -> str:
    return "not asked for" if r.check is None else r.check.status


def _rows_checked(r: Run) -> str:
    if r.check is None:
        return "none"
    return percent(r.check.rows_checked / r.check.rows_total)


def _machines_table(runs: Sequence[Run]) -> str:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("machine", no_wrap=True)
    table.add_column("dataflow", no_wrap=True)
    for name in ("tile, stages", "extra", "HBM", "DRAM", "time", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in runs:
        table.add_row(
            r.hardware.name,
            _name(r),
            _tile(r),
            size(r.ledger.extra_bytes),
            size(r.ledger.hbm_read_bytes + r.ledger.hbm_write_bytes),
            size(dram(r)),
            _time(r),
            "-" if r.peak_share is None else percent(r.peak_share),
        )
    return draw(table)


# ---------------------------------------------------------------- sentences


def _sentences(runs: Sequence[Run], energy: bool) -> list[str]:
    out: list[str] = []
    if len(runs) > 1:
        out += paragraph(_traffic_words(runs[0], runs[-1]))
    for r in runs:
        if r.step is not None:
            out += paragraph(_step_words(r, r.step))
    if any(r.key_loads for r in runs):
        out += paragraph(_loads_words(runs))
    out += paragraph(_bounds_words(runs))
    if layout := layout_words(runs):
        out += paragraph(layout)
    out += paragraph(_time_words(runs))
    out += interval_lines(runs)
    if energy:
        from iosim.report.energy import energy_words

        out += energy_words(runs, _name)
    out += _check_words(runs)
    for r in runs:
        for part in r.parts or (r,):
            why = "; ".join(filter(None, (_choices(part), part.why)))
            out += paragraph(f"Schedule of {part.dataflow.name}: {why}.")
    return out


def _choices(r: Run) -> str:
    """What the dataflow's schedule settles beyond the tile, where it is not what all have."""
    s = r.schedule
    words = {
        "splits": _splits(r),
        "softmax": "" if s.softmax == "safe" else f"{s.softmax} softmax",
        "scores": "" if s.scores == "data" else f"S and P in {s.scores}",
        "grid_order": "" if s.grid_order == "natural" else f"blocks {s.grid_order}",
    }
    return ", ".join(text for name, text in words.items() if text and name in r.dataflow.uses)


def _splits(r: Run) -> str:
    """Into how many splits the keys are cut, or the queries of a head that several blocks share."""
    number = r.schedule.splits
    if r.dataflow.name.startswith("flash1"):
        return f"queries of a head in {number} parts" if number > 1 else ""
    return f"keys in {count(number, 'split', 'splits')}"


def _traffic_words(a: Run, b: Run) -> str:
    moved = [r.ledger.hbm_read_bytes + r.ledger.hbm_write_bytes for r in (a, b)]
    more, less = (a, b) if moved[0] >= moved[1] else (b, a)
    text = (
        f"{_name(less)} asks device memory for {size(min(moved))}, {_name(more)} for {size(max(moved))}"
        f" ({ratio(max(moved), min(moved))})"
    )
    extra = [f"{_name(r)} keeps {size(r.ledger.extra_bytes)}" for r in (a, b) if r.ledger.extra_bytes]
    if extra:
        text += f"; {' and '.join(extra)} of intermediate results there"
    return text + "."


def _step_words(r: Run, step: StepMemory) -> str:
    """What a training step holds when it holds most, tensors of one size together."""
    alike: dict[int, list[str]] = {}
    for t in step.alive:
        alike.setdefault(t.bytes, []).append(t.tensor)
    parts = [f"{', '.join(names)} ({size(each)}{' each' if len(names) > 1 else ''})" for each, names in alike.items()]
    peak = f"{size(step.peak_bytes)} ({digits(step.peak_bytes / 2**20)} MiB)"
    runs = f"{', '.join(step.kernels)} {'run' if len(step.kernels) > 1 else 'runs'}"
    return f"Training with {_name(r)} holds most while {runs}: {peak}, which is {'; '.join(parts)}."


def _each(values: Mapping[str, float]) -> str:
    """One number where all are alike, else each with its name."""
    if len(set(values.values())) == 1:
        return digits(next(iter(values.values())))
    return " and ".join(f"{digits(value)} ({name})" for name, value in values.items())


def _loads_words(runs: Sequence[Run]) -> str:
    """How often K and V are loaded, where query heads share them."""
    parts = []
    for r in (r for r in runs if r.key_loads):
        hbm = _each({name: n.hbm for name, n in r.key_loads.items()})
        dram = _each({name: n.dram for name, n in r.key_loads.items()})
        group = f"the {r.problem.group} query heads of a group"
        once = "anew for each of" if any(n.per_head for n in r.key_loads.values()) else "once for"
        parts.append(f"{_name(r)} loads each byte {hbm} times, {once} {group}, {dram} of them from DRAM")
    return f"Shared keys and values: {'; '.join(parts)}."


def _bounds_words(runs: Sequence[Run]) -> str:
    b = runs[0].bounds
    times = " and ".join(f"{ratio(r.accesses, b.compulsory)} ({_name(r)})" for r in runs)
    text = f"HBM accesses are {times} what inputs and outputs need once"
    if runs[0].dataflow.computes == "forward" and b.theta >= b.compulsory:
        theta = " and ".join(ratio(r.accesses, b.theta) for r in runs)
        text += f", and {theta} the lower bound {b.formula} for M = {b.m:,} elements of SRAM"
        text += " (Saha & Ye 2024, constant taken as 1)"
    return text + "."


def _time_words(runs: Sequence[Run]) -> str:
    timed = [r for r in runs if r.seconds is not None]
    if not timed:
        return f"No time: {runs[0].no_time}."
    slow, fast = max(timed, key=lambda r: r.seconds or 0), min(timed, key=lambda r: r.seconds or 0)
    stall = stall_of(fast)
    fidelity = timed[0].timeline.fidelity if timed[0].timeline is not None else ""
    text = f"Predicted ({fidelity} fidelity): {_name(fast)} {_takes(fast)}"
    if slow is not fast:
        text += f", {_name(slow)} {_takes(slow)} ({ratio(slow.seconds or 0, fast.seconds or 1)})"
    if stall is not None and fast.timeline is not None:
        text += f"; the busiest unit of {_name(fast)} is {UNIT_WORDS[fast.timeline.bound]}"
        text += f" ({percent(busy_share(fast))} of the time), the largest stall of its {fast.compute_unit} units is"
        why = STARVED if stall[0] == "matrix" and fast.compute_unit == "matrix" else STALL_WORDS[stall[0]]
        text += f" {why} ({percent(stall[1])})"
    spreads = [f"{spread_pct(r)} % for {_name(r)}" for r in timed if spread_pct(r)]
    doubt = f" Simulating every processor (--fidelity chip) could differ by {', '.join(spreads)}." if spreads else ""
    if any(r.timeline.extrapolated for r in timed if r.timeline is not None):
        doubt += " Long loops whose state does not recur are taken to go on as they do after some iterations."
    return f"{text}.{doubt}"


def _takes(r: Run) -> str:
    time = duration(r.seconds or 0)
    if r.fits:
        return f"takes {time}"
    return f"would take {time} if the {size(r.ledger.peak_bytes)} that it needs fitted in device memory"


UNIT_WORDS = {
    "dram": "DRAM",
    "l2": "the L2",
    "copy": "the copy engine",
    "sram": "SRAM",
    "matrix": "the matrix unit",
    "exp": "the exp unit",
    "vector": "the vector unit",
    "alu": "the unit for maxima and conversions",
    "issue": "the issue of instructions",
    "launch": "the launch of kernels",
}
STARVED = "operands that come from SRAM"
STALL_WORDS = {
    "data": "waiting for data",
    "buffer": "waiting for a free buffer",
    "matrix": "matrix work",
    "vector": "softmax and other vector work",
    "barrier": "waiting for another warp group",
    "launch": "the launch of kernels",
    "tail": "that no block is left to run",
}


def _check_words(runs: Sequence[Run]) -> list[str]:
    out = []
    checked = {_name(r): r for r in runs if r.check is not None}
    for r in checked.values():
        if r.check is not None:
            out += paragraph(f"Check of {_name(r)}: {r.check.detail}")
    return out
