"""The trend report: predicted time and speed-up over N, where FlashAttention starts to pay, and why not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.io import DATAFLOW, MACHINE, N
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import headline, machine_line
from iosim.study.trend import BASE, CAUSES, GUIDE, PAYS, Point, Trend
from iosim.words import count, digits, duration, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from iosim.report.sections import Canvas

WORDS = {
    "launch": "the launch of kernels",
    "idle": "processors without a block",
    "latency": "waiting for data (latency and bandwidth)",
    "vector": "softmax and other vector work",
    "operands": "operands that come from SRAM",
}
MOST = 2  # dataflows for which a terminal has room with launches and without
LEAST_SHARE = 0.00995  # that is shown as a number
LOOKS = {  # colours and hatches, which tell causes apart in grey
    "busy": (plots.VERMILION, ""),
    "vector": (plots.ORANGE, "//"),
    "operands": (plots.PURPLE, "\\\\"),
    "latency": (plots.BLUE, ".."),
    "idle": (plots.GREY, ""),
    "launch": (plots.BLACK, "xx"),
}


def section(t: Trend, request: dict[str, Any]) -> Section:
    """The report."""
    lengths = ", ".join(f"{n:,}" for n in t.lengths)
    drawn = []
    tables = (_times(t), *((_speed_ups(t),) if any(name == BASE for _, name, _ in t.points) else ()), _waits(t))
    if t.points:
        rows = len(t.timed)
        drawn = [
            Plot(
                "trend", "Predicted time over N, and how many times as fast as standard", partial(_draw, t), 3.4 * rows
            ),
            Plot("waits", "What the compute units do: share of the run, by N", partial(_draw_waits, t), 3.2 * rows),
        ]
    return Section(
        name="trend",
        title="Time over N: where FlashAttention starts to pay, and why not before",
        subject=(
            headline(t.problem).replace(f"N {t.problem.n_q:,}", f"N {lengths}", 1),
            *map(machine_line, t.machines),
        ),
        answer=tuple(_answer(t)),
        tables=(*(tables if t.points else ()), _measured(t)),
        plots=tuple(drawn),
        notes=tuple(_notes(t)),
        machines=t.machines,
        request=request,
    )


def _answer(t: Trend) -> Iterator[str]:
    for machine in t.machines:
        if machine.name in t.unknown:
            yield f"{machine.name}: no time, as {t.unknown[machine.name]}."
            continue
        names = [name for name in t.dataflows(machine.name) if name.startswith("flash") and name != "flash1"]
        best = min(names, key=lambda name: t.points[machine.name, name, t.lengths[-1]].time_ps, default=None)
        if best is None or (machine.name, BASE, t.lengths[-1]) not in t.points:
            continue
        yield " ".join(_gains(t, machine.name, best))
        yield _why(t, machine.name, best)


def _gains(t: Trend, machine: str, name: str) -> Iterator[str]:
    first, last = t.lengths[0], t.lengths[-1]
    gains = [t.speed_up(machine, name, n) or 0 for n in (first, last)]
    yield (f"{machine}: {name} is {digits(gains[0])}x as fast as {BASE} at N = {first:,} and {digits(gains[1])}x at "
           f"N = {last:,}.")  # fmt: skip
    pays, bare = (t.pays_from(machine, name, launches=launches) for launches in (True, False))
    if pays is None:
        yield f"It is not {PAYS}x as fast at the longest N, so that it does not pay here."
    elif pays > first:
        yield f"It pays (at least {PAYS}x) from N = {pays:,} on."
    else:
        yield f"It pays (at least {PAYS}x) at every N of the list."
    base, own = (t.points[machine, flow, first] for flow in (BASE, name))
    saved, launches = base.time_ps - own.time_ps, base.launch_ps - own.launch_ps
    if saved > 0 and launches > 0:
        yield (f"What it saves at N = {first:,} is {duration(saved / 1e12)}, of which "
               f"{duration(min(saved, launches) / 1e12)} are launches ({_launches(t, machine, BASE)} kernels against "
               f"{_launches(t, machine, name)}); without them it pays "
               f"{'nowhere' if bare is None else f'from N = {bare:,} on'}.")  # fmt: skip


def _launches(t: Trend, machine: str, name: str) -> int:
    timeline = t.points[machine, name, t.lengths[0]].run.timeline
    return len(timeline.kernels) if timeline is not None else 0


def _why(t: Trend, machine: str, name: str) -> str:
    """What short sequences lose, and what long ones."""
    short, long = (t.points[machine, name, n] for n in (t.lengths[0], t.lengths[-1]))
    kernels = short.run.timeline.kernels if short.run.timeline is not None else ()
    blocks = min((k.blocks for k in kernels), default=0)
    units = short.run.hardware.processors or 0
    lost = sorted(short.waits, key=lambda cause: -short.waits[cause])[:2]
    text = f"Why little is gained before: at N = {t.lengths[0]:,} the compute units of {machine} work "
    shares = [f"{percent(short.waits[cause])} goes to {WORDS[cause]}" for cause in lost]
    text += f"{percent(short.busy)} of the time; {' and '.join(shares)}"
    if blocks < units:
        text += f" ({count(blocks, 'block', 'blocks')} for {units} {short.run.hardware.called}s)"
    text += f". At N = {t.lengths[-1]:,} they work {percent(long.busy)}"
    return f"{text}, and most of their wait is {WORDS[long.largest]} ({percent(long.waits[long.largest])})."


def _notes(t: Trend) -> Iterator[str]:
    yield ("The guide says: short sequences gain little, as launch, scheduling and synchronisation dominate; N = 2,048 "
           "clearly, 4,096 strongly, 16,384 most; to be measured on the target. It gives no times.")  # fmt: skip
    yield ("Times are predictions (fair fidelity), each dataflow with the tile that the default rule takes; they hold "
           "for these shapes, as more heads give short sequences more blocks.")  # fmt: skip
    if any(machine.name.startswith("mp31") for machine in t.machines):
        yield "Many of MP31's rates are estimates, and no measured MP31 kernel has been at hand."
    if t.left_out:
        yield f"Left out: {'; '.join(t.left_out)}."


# ---------------------------------------------------------------- tables


def _times(t: Trend) -> Table:
    names = list(dict.fromkeys(name for _, name, _ in t.points))
    columns = (MACHINE, N, *(Column(f"{name}_s", name, "s", "", duration) for name in names))
    rows = []
    for machine in t.timed:
        for n in t.lengths:
            own = {name: t.points.get((machine, name, n)) for name in names}
            times = {f"{name}_s": None if p is None else p.time_ps / 1e12 for name, p in own.items()}
            rows.append({"machine": machine, "n": n, **times})
    return Table("times", "Predicted time", columns, tuple(rows), by="machine")


def _speed_ups(t: Trend) -> Table:
    names = [name for name in dict.fromkeys(name for _, name, _ in t.points) if name != BASE]
    bare = f"{BASE}'s time over it, launches left out of both"
    columns = (
        MACHINE,
        N,
        *(Column(f"{name}_speed_up", name, "", f"{BASE}'s time over it", _times_as) for name in names),
        *(
            Column(f"{name}_speed_up_without_launch", f"{name}\nno launch", "", bare, _times_as, wide=len(names) > MOST)
            for name in names
        ),
        Column("guide", "guide", "", "what the guide says of the gain", words=True),
    )
    rows = []
    for machine in t.timed:
        for n in t.lengths:
            row: dict[str, Any] = {"machine": machine, "n": n, "guide": GUIDE.get(n)}
            for name in names:
                row[f"{name}_speed_up"] = t.speed_up(machine, name, n)
                row[f"{name}_speed_up_without_launch"] = t.speed_up(machine, name, n, launches=False)
            rows.append(row)
    return Table("speed-ups", f"How many times as fast as {BASE}", columns, tuple(rows), by="machine")


def _times_as(value: float) -> str:
    return f"{digits(value)}x"


def _waits(t: Trend) -> Table:
    columns = (
        MACHINE,
        DATAFLOW,
        N,
        Column("time_s", "time", "s", "", duration),
        Column("launch_s", "launch\ntime", "s", "", duration, wide=True),
        Column("blocks", "blocks", "", "of the smallest grid", lambda n: f"{n:,}"),
        Column("busy", "busy", "", "shares of the run, of all compute units", _share),
        *(Column(cause, cause, "", WORDS[cause], _share) for cause in CAUSES),
    )
    rows = tuple(
        {
            "machine": machine,
            "dataflow": name,
            "n": n,
            "time_s": p.time_ps / 1e12,
            "launch_s": p.launch_ps / 1e12,
            "blocks": _blocks(p),
            "busy": p.busy,
            **p.waits,
        }
        for (machine, name, n), p in t.points.items()
    )
    return Table("waits", "What the compute units do, and what they wait for", columns, rows, by="machine")


MEASURED = (BASE, "flash2", "cudnn")


def _measured(t: Trend) -> Table:
    columns = (
        Column("batch", "batch"),
        Column("heads", "heads"),
        N,
        *(Column(f"{name}_s", name, "s", "time of a call", duration) for name in MEASURED),
        *(
            Column(f"{name}_speed_up", f"{name}\nfaster", "", "standard's time over it", _times_as)
            for name in MEASURED[1:]
        ),
        Column("host_bound", "host's time", "", "calls so short that they show the host's time", words=True),
    )
    rows = []
    for m in t.measured:
        own = m.seconds
        row: dict[str, Any] = {"batch": m.problem.batch, "heads": m.problem.heads, "n": m.problem.n_q}
        row |= {f"{name}_s": own.get(name) for name in MEASURED}
        row |= {f"{name}_speed_up": own[BASE] / own[name] if name in own else None for name in MEASURED[1:]}
        rows.append(row | {"host_bound": ", ".join(m.host_bound)})
    d = t.measured[0].problem.d if t.measured else 0
    return Table(
        "measured", f"Measured: PyTorch 2.11 on one H200, forward, fp16, d = {d}, no mask", columns, tuple(rows)
    )


def _share(value: float) -> str:
    """Whole percents, and what is less than one."""
    return percent(value) if value == 0 or value >= LEAST_SHARE else "<1 %"


def _blocks(p: Point) -> int:
    return min(k.blocks for k in p.run.timeline.kernels) if p.run.timeline is not None else 0


# ---------------------------------------------------------------- plots


def _draw(t: Trend, canvas: Canvas) -> None:
    panels = canvas.subplots(len(t.timed), 2, squeeze=False)
    for (left, right), machine in zip(panels, t.timed, strict=True):
        for number, name in enumerate(t.dataflows(machine)):
            look = plots.colour_of(name, number), "-", plots.marker_of(name, number)
            own = [(n, t.points[machine, name, n].time_ps / 1e12) for n in t.lengths if (machine, name, n) in t.points]
            plots.series(left, own, name, *look, said=partial(_said, machine, duration))
            gains = [(n, gain) for n, _ in own if (gain := t.speed_up(machine, name, n)) is not None]
            if name != BASE and gains:
                plots.series(right, gains, name, *look, said=partial(_said, machine, _times_as))
        plots.seconds_axis(left)
        right.axhline(1, color=plots.GREY, linewidth=1)
        right.set_ylim(bottom=0)
        right.set_ylabel(f"times as fast as {BASE}")
        for ax in (left, right):
            plots.lengths_axis(ax, t.lengths)
            ax.tick_params(axis="x", labelrotation=45, labelsize=8)
            ax.set_title(machine, fontsize=10)
        left.legend(fontsize=8)


def _said(machine: str, words: Callable[[float], str], n: int, value: float) -> str:
    return f"{machine}, N {n:,}: {words(value)}"


def _draw_waits(t: Trend, canvas: Canvas) -> None:
    """Stacked bars over N: the dataflow that is fastest at the longest N, and standard."""
    panels = canvas.subplots(len(t.timed), 2, squeeze=False)
    for row, machine in zip(panels, t.timed, strict=True):
        names = t.dataflows(machine)
        best = min(names, key=lambda name: t.points[machine, name, t.lengths[-1]].time_ps)
        for ax, name in zip(row, dict.fromkeys((BASE if BASE in names else names[0], best)), strict=False):
            _stack(t, ax, machine, name)
        row[0].set_ylabel("share of the run")
    handles, labels = panels[0][0].get_legend_handles_labels()
    alike = dict(zip(labels, handles, strict=True))
    canvas.legend(alike.values(), alike, fontsize=8, loc="outside right upper")


def _stack(t: Trend, ax: Axes, machine: str, name: str) -> None:
    own = {n: p for n in t.lengths if (p := t.points.get((machine, name, n))) is not None}
    bottom = [0.0] * len(own)
    for what, (colour, hatch) in LOOKS.items():
        shares = [p.busy if what == "busy" else p.waits[what] for p in own.values()]
        label = "busy" if what == "busy" else WORDS[what].replace(" (", "\n(")
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        for at, (n, share) in enumerate(zip(own, shares, strict=True)):
            gid = f"{plots.HOVER}{machine}, {name}, N {n:,}, {what}: {percent(share)}"
            ax.bar([at], [share], 0.8, bottom[at], label=label, gid=gid, **look)
            bottom[at] += share
    ax.set_xticks(range(len(own)), [f"{n:,}" for n in own], rotation=45, fontsize=8)
    ax.set_xlabel("N (queries and keys)")
    ax.set_ylim(0, 1)
    ax.set_title(f"{name} on {machine}", fontsize=10)
