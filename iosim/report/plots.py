"""What all plots share: one colour for one thing everywhere, and how a figure becomes a file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_DECADES = 300  # the span of an axis, by ratio, below which it is labelled between powers of 10
HOVER = "hover: "  # begins the id of a mark that says its value

# Okabe and Ito's colours, which differ for all kinds of colour vision and in lightness, so also in grey.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#000000", "#8A8A8A"

UNITS = {
    "dram": BLUE,
    "l2": SKY,
    "copy": GREEN,
    "sram": PURPLE,
    "matrix": VERMILION,
    "exp": ORANGE,
    "alu": YELLOW,
    "vector": YELLOW,
    "issue": GREY,
}
STALLS = {  # by cause: colour and hatching
    "data": (BLUE, "/////"),
    "buffer": (SKY, "\\\\\\\\\\"),
    "matrix": (VERMILION, "....."),
    "vector": (ORANGE, "xxxxx"),
    "barrier": (PURPLE, "|||||"),
    "launch": (GREY, "-----"),
    "tail": (GREY, ""),
}
DATAFLOWS = {
    "standard": VERMILION,
    "flash1": GREEN,
    "flash2": BLUE,
    "flash3": PURPLE,
    "split-kv": SKY,
}
MARKERS = {"standard": "o", "flash1": "v", "flash2": "^", "flash3": "D", "split-kv": "P"}
OTHERS = (BLACK, ORANGE, GREY, YELLOW, PURPLE, GREEN)


def colour_of(dataflow: str, number: int = 0) -> str:
    """Of a dataflow or kernel; the `number` tells apart those that have none of their own."""
    return DATAFLOWS.get(dataflow, OTHERS[number % len(OTHERS)])


def marker_of(dataflow: str, number: int = 0) -> str:
    """As `colour_of`: the shape of a dataflow's marks."""
    return MARKERS.get(dataflow, "XhpH"[number % 4])


def figure(width: float = 8.0, height: float = 4.5) -> Figure:
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def image(drawn: Figure, kind: str = "png", dpi: int = 120) -> bytes:
    """A figure as the bytes of a PNG or SVG file, the same bytes each time."""
    from matplotlib import rc_context

    out = io.BytesIO()
    made_by = {"Date": None, "Creator": "iosim"} if kind == "svg" else {"Software": "iosim"}
    with rc_context({"svg.hashsalt": "iosim", "svg.fonttype": "none"}):
        drawn.savefig(out, format=kind, dpi=dpi, metadata=made_by)
    return _said(out.getvalue()) if kind == "svg" else out.getvalue()


def _said(svg: bytes) -> bytes:
    """Marks whose id says their value get a title that does, which a browser shows under the pointer."""
    return re.sub(rb'<g id="' + HOVER.encode() + rb'([^"]*)">', rb'<g class="mark"><title>\1</title>', svg)


# ---------------------------------------------------------------- what axes and lines share


def series(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    label: str,
    colour: str,
    style: str = "-",
    marker: str = "o",
    *,
    hollow: bool = False,
    said: Callable[[Any, Any], str] = "{}, {}".format,
) -> None:
    """A line with a mark at each point, which in an SVG says its value."""
    face = "white" if hollow else colour
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": face}
    axes.plot(*zip(*points, strict=True), linestyle=style or "none", label=label, zorder=2, **look)
    for x, y in points:
        mark(axes, x, y, f"{label}, {said(x, y)}", colour, marker, hollow=hollow)


def mark(axes: Axes, x: float, y: float, text: str, colour: str, marker: str = "o", *, hollow: bool = False) -> None:
    """A point that in an SVG says `text`."""
    face = "white" if hollow else colour
    axes.plot([x], [y], marker=marker, markersize=5, color=colour, markerfacecolor=face, zorder=3, gid=HOVER + text)


def lengths_axis(axes: Axes, lengths: Sequence[int], label: str = "N (queries and keys)") -> None:
    """A logarithmic axis of N, or of another size that doubles, labelled at the values themselves."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [f"{n:,}" for n in lengths], rotation=30 if len(lengths) > 6 else 0)
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(visible=True, color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)


def bytes_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis of bytes in decimal units."""
    from iosim.words import size

    _log_axis(axes, lambda y: size(round(y)))
    axes.set_ylabel(f"{label} (bytes, decimal units)")


def linear_bytes_axis(axes: Axes, label: str) -> None:
    """A linear axis of bytes from 0, in decimal units."""
    from matplotlib.ticker import FuncFormatter

    from iosim.words import size

    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(round(y)).replace(".00 ", " ").replace(".0 ", " ")))
    axes.set_ylabel(f"{label} (bytes, decimal units)")
    axes.grid(visible=True, axis="y", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)


def seconds_axis(axes: Axes, label: str = "time") -> None:
    """A logarithmic axis of seconds."""
    from iosim.words import duration

    _log_axis(axes, duration)
    axes.set_ylabel(label)


def _log_axis(axes: Axes, words: Callable[[float], str]) -> None:
    """A logarithmic vertical axis in words: at powers of 10, and at 2 and 5 between where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high < FEW_DECADES * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words(y).replace(".00 ", " ").replace(".0 ", " ")))
    axes.yaxis.set_minor_locator(NullLocator())


def plain_log_axes(axes: Axes) -> None:
    """Plain numbers on two logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_axisbelow(True)
