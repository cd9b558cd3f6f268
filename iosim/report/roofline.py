"""The roofline report: a machine's ceilings, and the kernels of all dataflows as points under them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.io import DATAFLOW, MACHINE
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import headline, machine_line
from iosim.study.roofline import KernelPoint, Roofline
from iosim.words import digits, duration, percent, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from iosim.report.sections import Canvas

LOOKS = {"DRAM": plots.BLUE, "L2": plots.SKY, "SRAM": plots.PURPLE, "matrix": plots.VERMILION, "exp": plots.ORANGE,
         "vector": plots.GREY}  # fmt: skip
FAR, NEAR = 1.0, 10_000.0  # intensities that are drawn
NEIGHBOURS = 1.25  # as far apart marks may be, by ratio, that share a name


def section(r: Roofline, request: dict[str, Any]) -> Section:
    """The report."""
    drawn = [Plot("roofline", "Rooflines: ceilings, and kernels by what they do for each byte", partial(_draw, r),
                  4.8 * len(r.machines))]  # fmt: skip
    return Section(
        name="roofline",
        title="Roofline: what limits each kernel, and how near it comes",
        subject=(headline(r.problem), *map(machine_line, r.machines)),
        answer=tuple(_answer(r)),
        tables=(_ceilings(r), *((_points(r),) if r.points else ())),
        plots=tuple(drawn),
        notes=tuple(_notes(r)),
        machines=r.machines,
        request=request,
    )


def _answer(r: Roofline) -> Iterator[str]:
    for machine in r.machines:
        own = [p for p in r.points if p.machine == machine.name]
        if not own:
            yield f"{machine.name}: no kernel has a time, as its profile lacks numbers."
            continue
        tops = {c.name: c for c in r.ceilings[machine.name]}
        if "matrix" in tops:
            ridge = tops["matrix"].rate / tops["DRAM"].rate
            rate, dram = _rate(tops["matrix"].rate), size(round(tops["DRAM"].rate))
            yield (f"{machine.name}: from {digits(ridge)} FLOP a byte of DRAM on, the matrix units ({rate}) limit and "
                   f"not DRAM ({dram}/s).")  # fmt: skip
        for name in dict.fromkeys(p.dataflow for p in own):
            yield _words([p for p in own if p.dataflow == name])


def _words(points: list[KernelPoint]) -> str:
    parts = [f"{p.kernel}, {percent(p.rate / p.roof)} of what {_limit(p.bound)} allows" for p in points]
    return f"{points[0].dataflow} reaches: {'; '.join(parts)}."


def _limit(name: str) -> str:
    return {"DRAM": "DRAM", "L2": "the L2", "SRAM": "SRAM"}.get(name, f"the {name} unit")


def _rate(value: float) -> str:
    """Work a second with a unit."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}FLOP/s"
    return f"{digits(value / 1e6)} MFLOP/s"


def _notes(r: Roofline) -> Iterator[str]:
    yield ("A kernel's work is its matrix FLOPs as executed, whole tiles and masked parts too; of a softmax kernel its "
           "vector operations. Its time has the launch in it. The roof is the lowest ceiling for its bytes at every "
           "level; what it stays below is what the timeline's stalls explain.")  # fmt: skip
    yield ("The exp ceiling stands for fused kernels: with one exponential a score, the exp units allow 2 (d + d_v) "
           "FLOPs for each. The clock may be lower than the profile's under the power limit.")  # fmt: skip
    if r.left_out:
        yield f"Left out: {'; '.join(r.left_out)}."


# ---------------------------------------------------------------- tables


def _ceilings(r: Roofline) -> Table:
    columns = (
        MACHINE,
        Column("ceiling", "ceiling", words=True),
        Column("rate", "rate", "B/s or FLOP/s", "of the whole chip", str, wide=True),
        Column("shown", "rate", words=True),
        Column("ridge", "ridge", "FLOP/B", "intensity from which on the matrix units limit", digits),
        Column("words", "what", words=True),
    )
    rows: list[dict[str, Any]] = []
    for machine, tops in r.ceilings.items():
        matrix = next((c.rate for c in tops if c.name == "matrix"), None)
        for c in tops:
            shown = f"{size(round(c.rate))}/s" if c.memory else _rate(c.rate)
            ridge = matrix / c.rate if c.memory and matrix else None
            row = {"machine": machine, "ceiling": c.name, "rate": c.rate, "shown": shown, "ridge": ridge}
            rows.append(row | {"words": c.words})
    return Table("ceilings", "Ceilings", columns, tuple(rows), by="machine")


UNITS = ("dram", "l2", "sram", "matrix", "exp", "vector")


def _points(r: Roofline) -> Table:
    columns = (
        MACHINE,
        DATAFLOW,
        Column("kernel", "kernel", words=True),
        Column("work", "work", "FLOP", "matrix FLOPs, of a softmax vector operations", str, wide=True),
        Column("asked_bytes", "asked", "B", "", size, wide=True),
        Column("dram_bytes", "DRAM", "B", "", size, wide=True),
        Column("time_s", "time", "s", "", duration, wide=True),
        Column("dram_intensity", "FLOP/B\nDRAM", "FLOP/B", "work a byte", digits),
        Column("asked_intensity", "FLOP/B\nasked", "FLOP/B", "work a byte", digits),
        Column("rate", "TFLOP/s", "FLOP/s", "reached", lambda x: digits(x / 1e12)),
        Column("bound", "roof", "", "the lowest ceiling", words=True),
        Column("roof", "allows", "FLOP/s", "TFLOP/s of the lowest ceiling", lambda x: digits(x / 1e12)),
        Column("share", "of\nroof", "", "reached over allowed", percent),
        *(Column(f"{unit}_busy", f"{unit}\nbusy", "", "share of the time", percent, wide=True) for unit in UNITS),
    )
    rows = tuple(
        {
            "machine": p.machine,
            "dataflow": p.dataflow,
            "kernel": p.kernel,
            "work": p.work,
            "asked_bytes": p.asked_bytes,
            "dram_bytes": p.dram_bytes,
            "time_s": p.time_ps / 1e12,
            "dram_intensity": p.dram_intensity,
            "asked_intensity": p.asked_intensity,
            "rate": p.rate,
            "bound": p.bound,
            "roof": p.roof,
            "share": p.rate / p.roof,
            **{f"{unit}_busy": p.busy.get(unit) for unit in UNITS},
        }
        for p in r.points
    )
    return Table("kernels", "Kernels", columns, rows, by="machine")


# ---------------------------------------------------------------- plot


def _draw(r: Roofline, canvas: Canvas) -> None:
    panels = canvas.subplots(len(r.machines), 1, squeeze=False)[:, 0]
    for ax, machine in zip(panels, r.machines, strict=True):
        _roofs(r, ax, machine.name)
        for number, p in enumerate(p for p in r.points if p.machine == machine.name):
            _point(ax, p, number)
        _labels(ax, [p for p in r.points if p.machine == machine.name])
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(FAR, NEAR)
        ax.set_xlabel("work a byte (FLOP/B): filled marks of DRAM, hollow ones asked for (L2)")
        ax.set_ylabel("TFLOP/s (softmax: 10^12 operations/s)")
        ax.set_title(machine.name, fontsize=10)
        ax.grid(visible=True, color="0.85", linewidth=0.6)
        plots.plain_log_axes(ax)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _roofs(r: Roofline, ax: Axes, machine: str) -> None:
    """Sloping and level ceilings, each with its name on it; memory ceilings end at the highest level one."""
    tops = r.ceilings[machine]
    flat = max((c.rate for c in tops if c.name in ("matrix", "vector")), default=1e15)
    for c in tops:
        colour = LOOKS[c.name]
        if c.memory:
            end = min(NEAR, flat / c.rate)
            xs = [FAR, max(end, FAR)]
            label = f"{c.name} {size(round(c.rate))}/s"
        else:
            xs, label = [FAR, NEAR], f"{c.name} {_rate(c.rate)}"
        style = {"matrix": "-", "exp": "--", "vector": ":", "DRAM": "-", "L2": "--", "SRAM": ":"}[c.name]
        ys = [c.at(x) / 1e12 for x in xs]
        ax.plot(xs, ys, color=colour, linestyle=style, label=label, linewidth=1.6, gid=plots.HOVER + label)


def _point(ax: Axes, p: KernelPoint, number: int) -> None:
    colour, marker = plots.colour_of(p.dataflow, number), plots.marker_of(p.dataflow, number)
    said = f"{p.dataflow}, {p.kernel}: {_rate(p.rate)}, {percent(p.rate / p.roof)} of {p.bound}"
    spots = [(p.asked_intensity, True)] + ([(p.dram_intensity, False)] if p.dram_intensity else [])
    if len(spots) == 2:
        ax.plot([x for x, _ in spots], [p.rate / 1e12] * 2, color=colour, linewidth=0.8, linestyle=":", zorder=2)
    for x, hollow in spots:
        text = f"{said}; {digits(x)} FLOP/B {'asked' if hollow else 'of DRAM'}"
        plots.mark(ax, x, p.rate / 1e12, text, colour, marker, hollow=hollow)


def _labels(ax: Axes, points: Sequence[KernelPoint]) -> None:
    """Names beside the marks; marks that lie together share one."""
    spots: list[tuple[float, float, list[str]]] = []
    for p in sorted(points, key=lambda p: -p.rate):
        name = p.dataflow if p.kernel == "attention" else f"{p.dataflow}: {p.kernel}"
        x, y = p.dram_intensity or p.asked_intensity, p.rate / 1e12
        near = (names for at, height, names in spots if max(x / at, at / x, height / y) < NEIGHBOURS)
        if (names := next(near, None)) is not None:
            names.append(name)
        else:
            spots.append((x, y, [name]))
    for x, y, names in spots:
        words = ", ".join(names)
        ax.annotate(words, (x, y), xytext=(4, -11), textcoords="offset points", fontsize=7)
