"""What all plots share: one colour for one thing everywhere, and how a figure becomes a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
OTHERS = (BLACK, ORANGE, GREY, YELLOW, PURPLE, GREEN)


def colour_of(dataflow: str, number: int = 0) -> str:
    """Of a dataflow or kernel; the `number` tells apart those that have none of their own."""
    return DATAFLOWS.get(dataflow, OTHERS[number % len(OTHERS)])


def figure(width: float = 8.0, height: float = 4.5) -> Figure:
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def image(drawn: Figure, kind: str = "png", dpi: int = 120) -> bytes:
    """A figure as the bytes of a PNG or SVG file, the same bytes each time."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "iosim", "svg.fonttype": "none"}):
        drawn.savefig(out, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()
