"""The traffic report: what dataflows ask of device memory and what reaches DRAM, over N and over the size of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.problem import Attention
from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import headline, machine_line
from iosim.study.io import Io, Moved, tensor_flows
from iosim.words import digits, kib, ratio, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas


def section(io: Io, request: dict[str, Any]) -> Section:
    """The report."""
    machine = io.machines[0].name
    tiled = f"Traffic over the size of a tile, N {io.tiled.n_q:,}, {machine}"
    drawn = [Plot("io", f"Traffic over N on {machine}: asked for, and what reaches DRAM", partial(_draw, io)),
             Plot("tensors", f"Traffic by tensor, N {io.lengths[-1]:,}, {machine}", partial(_bars, io))]  # fmt: skip
    if io.tiles:
        drawn.append(Plot("tiles", tiled, partial(_draw_tiles, io), 3.5))
    return Section(
        name="io",
        title="Traffic: what attention moves between device memory and the chip",
        subject=(_shape(io), *map(machine_line, io.machines)),
        answer=tuple(_answer(io)),
        tables=(_traffic(io), _tensors(io), *((_tiles(io, tiled),) if io.tiles else ())),
        plots=tuple(drawn),
        notes=tuple(_notes(io)),
        machines=io.machines,
        request=request,
    )


def _shape(io: Io) -> str:
    lengths = ", ".join(f"{n:,}" for n in io.lengths)
    a = Attention(n_q=io.lengths[-1], **io.shape)
    return headline(a).replace(f"N {a.n_q:,}", f"N {lengths}", 1)


def _answer(io: Io) -> Iterator[str]:
    machine, n = io.machines[0], io.lengths[-1]
    own = {name: m for (where, name, at), m in io.runs.items() if where == machine.name and at == n}
    if not own:
        return
    best = min(own, key=lambda name: own[name].asked_bytes)
    text = f"At N = {n:,} on {machine.name} {best} asks device memory for {size(own[best].asked_bytes)}"
    if "standard" in own and best != "standard":
        s = own["standard"]
        text += f", standard for {size(s.asked_bytes)} ({ratio(s.asked_bytes, own[best].asked_bytes)})"
        text += f"; {size(own[best].dram_bytes)} and {size(s.dram_bytes)} of it reach DRAM"
        text += f" ({ratio(s.dram_bytes, own[best].dram_bytes)})"
    else:
        text += f", of which {size(own[best].dram_bytes)} reach DRAM"
    yield f"{text}. Inputs and outputs once are {size(own[best].least_bytes)}."
    if own[best].dram_bytes < 1.5 * own[best].least_bytes < own[best].asked_bytes:
        yield (f"{best} reads K and V again for each query tile, {ratio(own[best].asked_bytes, own[best].least_bytes)} "
               f"the least in all, but the L2 gives most of it: DRAM sees "
               f"{ratio(own[best].dram_bytes, own[best].least_bytes)} the least.")  # fmt: skip
    if own[best].bound_bytes:
        b = own[best].run.bounds
        yield (f"The lower bound {b.formula} for {b.m:,} elements of SRAM is {size(own[best].bound_bytes or 0)}: "
               f"{best} asks for {ratio(own[best].asked_bytes, own[best].bound_bytes or 0)} as much.")  # fmt: skip


def _notes(io: Io) -> Iterator[str]:
    if all(machine.l2 is not None for machine in io.machines):
        yield ("What is asked reaches the L2, and DRAM sees what the L2 leaves: it begins empty, and a kernel finds in "
               "it what the one before has left.")  # fmt: skip
    yield ("The bound is Saha and Ye's (arXiv 2402.07443), min(N^2 d^2 / M, N^2 d / sqrt(M)), its constant taken as 1 "
           "and M one processor's SRAM; it stands where inputs and outputs are less. It bounds what is asked, not "
           "DRAM, as the L2 is shared.")  # fmt: skip
    methods = {m.run.device.method for m in io.runs.values()}
    if "closed form" in methods:
        yield "Where simulating the L2 would take long, a closed form has taken its place (within 7 % of it)."
    if io.left_out:
        yield f"Left out: {'; '.join(io.left_out)}."


# ---------------------------------------------------------------- tables

MACHINE = Column("machine", "machine", words=True)
DATAFLOW = Column("dataflow", "dataflow", words=True)
N = Column("n", "N", show=lambda n: f"{n:,}")


def _traffic(io: Io) -> Table:
    least, flop = "over inputs and outputs once", "convention FLOPs a byte"
    columns = (
        MACHINE,
        DATAFLOW,
        N,
        Column("tile", "tile", "rows", "query rows x key rows", wide=True),
        Column("asked_bytes", "asked", "B", "all loads and stores of all blocks, as the L2 sees them", size),
        Column("dram_read_bytes", "DRAM\nread", "B", "", size, wide=True),
        Column("dram_write_bytes", "DRAM\nwritten", "B", "", size, wide=True),
        Column("dram_bytes", "DRAM", "B", "read and written", size),
        Column("least_bytes", "least", "B", "inputs and outputs once", size, wide=True),
        Column("asked_ratio", "asked\n/least", "", least, digits),
        Column("dram_ratio", "DRAM\n/least", "", least, digits),
        Column("bound_bytes", "bound", "B", "lower bound for what is asked", size, wide=True),
        Column("bound_ratio", "asked\n/bound", "", "over the lower bound", digits),
        Column("asked_intensity", "FLOP/B\nasked", "FLOP/B", flop, digits),
        Column("dram_intensity", "FLOP/B\nDRAM", "FLOP/B", flop, digits),
    )
    rows = [_row(machine, name, n, m) for (machine, name, n), m in io.runs.items()]
    return Table("traffic", "Traffic by dataflow and level", columns, tuple(rows), by="machine")


def _row(machine: str, name: str, n: int, m: Moved) -> dict[str, Any]:
    s, bound = m.run.schedule, m.bound_bytes
    return {
        "machine": machine,
        "dataflow": name,
        "n": n,
        "tile": f"{s.block_q} x {s.block_k}",
        "asked_bytes": m.asked_bytes,
        "dram_read_bytes": m.run.device.dram_read_bytes,
        "dram_write_bytes": m.run.device.dram_write_bytes,
        "dram_bytes": m.dram_bytes,
        "least_bytes": m.least_bytes,
        "asked_ratio": m.asked_bytes / m.least_bytes,
        "dram_ratio": m.dram_bytes / m.least_bytes,
        "bound_bytes": bound,
        "bound_ratio": None if bound is None else m.asked_bytes / bound,
        "asked_intensity": m.flops / m.asked_bytes,
        "dram_intensity": m.flops / m.dram_bytes,
    }


def _tensors(io: Io) -> Table:
    n = io.lengths[-1]
    columns = (
        MACHINE,
        DATAFLOW,
        Column("tensor", "tensor", words=True),
        Column("direction", "direction", words=True),
        Column("asked_bytes", "asked", "B", "all loads or stores of all blocks", size),
        Column("times", "times", "", "asked over the tensor's size", digits),
        Column("dram_read_bytes", "DRAM read", "B", "", size),
        Column("dram_write_bytes", "DRAM written", "B", "", size),
    )
    rows = tuple(
        {
            "machine": machine,
            "dataflow": name,
            "tensor": f.tensor,
            "direction": f.direction,
            "asked_bytes": f.asked_bytes,
            "times": f.asked_bytes / f.tensor_bytes,
            "dram_read_bytes": f.dram_read_bytes,
            "dram_write_bytes": f.dram_write_bytes,
        }
        for (machine, name, at), m in io.runs.items()
        if at == n
        for f in tensor_flows(m.run)
    )
    return Table("tensors", f"Traffic by tensor, N {n:,}", columns, rows, by="machine")


def _tiles(io: Io, title: str) -> Table:
    columns = (
        DATAFLOW,
        Column("field", "tile", words=True),
        Column("rows", "rows", "rows"),
        Column("asked_bytes", "asked", "B", "all loads and stores of all blocks", size),
        Column("dram_bytes", "DRAM", "B", "read and written", size),
        Column("asked_intensity", "FLOP/B\nasked", "FLOP/B", "convention FLOPs a byte", digits),
        Column("sram_bytes", "SRAM\na block", "B", "with the largest tile in the other direction that fits", kib),
        Column("why", "does not fit", words=True, wide=True),
    )
    rows = tuple(
        {
            "dataflow": t.dataflow,
            "field": t.field,
            "rows": t.rows,
            "asked_bytes": t.asked_bytes,
            "dram_bytes": t.dram_bytes,
            "asked_intensity": io.tiled.flops / t.asked_bytes,
            "sram_bytes": t.sram_bytes,
            "why": t.why,
        }
        for t in io.tiles
    )
    return Table("tiles", title, columns, rows)


# ---------------------------------------------------------------- plots


def _draw(io: Io, canvas: Canvas) -> None:
    axes = canvas.subplots()
    machine = io.machines[0].name
    alike: dict[tuple[tuple[int, int, int], ...], list[str]] = {}  # names of dataflows that move the same
    for name in io.dataflows:
        own = [m for (where, flow, _), m in io.runs.items() if (where, flow) == (machine, name)]
        alike.setdefault(tuple((m.run.problem.n_q, m.asked_bytes, m.dram_bytes) for m in own), []).append(name)
    for number, (name, *others) in enumerate(alike.values()):
        own = [m for (where, flow, _), m in io.runs.items() if (where, flow) == (machine, name)]
        names = ", ".join([name, *others])
        lengths = [m.run.problem.n_q for m in own]
        look = plots.colour_of(name, number), plots.marker_of(name, number)
        for what, values, style, hollow in (
            ("asked", [m.asked_bytes for m in own], "-", False),
            ("DRAM", [m.dram_bytes for m in own], ":", True),
        ):
            points = list(zip(lengths, values, strict=True))
            plots.series(axes, points, f"{names}: {what}", look[0], style, look[1], hollow=hollow, said=_said)
    some = [m for (where, flow, _), m in io.runs.items() if (where, flow) == (machine, io.dataflows[0])]
    least = [(m.run.problem.n_q, m.least_bytes) for m in some]
    axes.plot(*zip(*least, strict=True), color=plots.BLACK, linewidth=2, label="inputs and outputs once", zorder=1)
    if bound := [(m.run.problem.n_q, m.bound_bytes) for m in some if m.bound_bytes]:
        axes.plot(*zip(*bound, strict=True), color=plots.GREY, linestyle="--", label="lower bound (asked)", zorder=1)
    plots.lengths_axis(axes, io.lengths)
    plots.bytes_axis(axes, "traffic")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _said(n: float, b: float) -> str:
    return f"N {n:,}: {size(round(b))}"


TENSORS = {  # hatches tell them apart in grey
    "Q": (plots.SKY, ""), "K": (plots.BLUE, "//"), "V": (plots.GREEN, "\\\\"), "O": (plots.ORANGE, ""),
    "S": (plots.VERMILION, "xx"), "P": (plots.PURPLE, ".."),
}  # fmt: skip


def _bars(io: Io, canvas: Canvas) -> None:
    """Two bars a dataflow, asked and DRAM, in parts by tensor; a logarithmic axis would make parts lie."""
    axes = canvas.subplots(1, 2)
    machine, n = io.machines[0].name, io.lengths[-1]
    own = {name: m for (where, name, at), m in io.runs.items() if (where, at) == (machine, n)}
    for place, (ax, what) in enumerate(zip(axes, ("asked", "DRAM, read and written"), strict=True)):
        for at, (name, m) in enumerate(own.items()):
            bottom = 0
            parts: dict[str, int] = {}
            for f in tensor_flows(m.run):
                moved = f.dram_read_bytes + f.dram_write_bytes if place else f.asked_bytes
                parts[f.tensor] = parts.get(f.tensor, 0) + moved
            for tensor, moved in parts.items():
                colour, hatch = TENSORS.get(tensor, (plots.GREY, "++"))
                gid = f"{plots.HOVER}{name}, {tensor}: {size(moved)}"
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                ax.bar([at], [moved], 0.7, bottom, gid=gid, label=tensor, **look)
                bottom += moved
            ax.annotate(size(bottom), (at, bottom), ha="center", va="bottom", fontsize=7)
        ax.set_xticks(range(len(own)), list(own), rotation=30)
        ax.set_title(what, fontsize=10)
        plots.linear_bytes_axis(ax, "traffic")
    handles, labels = axes[0].get_legend_handles_labels()
    alike = {("rest" if t not in TENSORS else t): h for h, t in reversed(list(zip(handles, labels, strict=True)))}
    shown = [t for t in (*TENSORS, "rest") if t in alike]
    axes[1].legend([alike[t] for t in shown], shown, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _draw_tiles(io: Io, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for name in dict.fromkeys(t.dataflow for t in io.tiles):
        own = [t for t in io.tiles if t.dataflow == name]
        colour, marker = plots.colour_of(name), plots.marker_of(name)
        label = f"{name} over {own[0].field}"
        fits, over = [t for t in own if not t.why], [t for t in own if t.why]
        plots.series(axes, [(t.rows, t.asked_bytes) for t in own], f"{label}, asked", colour, "-", marker, said=_rows)
        if fits:
            points = [(t.rows, t.dram_bytes or 0) for t in fits]
            plots.series(axes, points, f"{label}, DRAM", colour, ":", marker, hollow=True, said=_rows)
        for n, t in enumerate(over):
            label = "does not fit on chip" if n == 0 else ""
            axes.plot([t.rows], [t.asked_bytes], "x", color=plots.BLACK, markersize=9, label=label, zorder=4)
    sizes = sorted({t.rows for t in io.tiles})
    plots.lengths_axis(axes, sizes, "rows of the tile")
    plots.bytes_axis(axes, "traffic")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _rows(rows: float, b: float) -> str:
    return f"{rows:,} rows: {size(round(b))}"
