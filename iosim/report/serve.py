"""A replayed trace as a Section: tokens a second, bytes a token, and what bounds the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import heads_words, machine_line
from iosim.study.serving import Layer, Replayed, Server, Step
from iosim.words import count, digits, duration, percent, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

SHOWN = 10  # slowest steps that the table of steps has, where there are more
ATTENTION_ONLY = (
    "Attention only: no projections, no MLP, no sampling, no gaps between kernels. A server's own steps take longer."
)
UNVALIDATED = (
    "Not validated: there are no measurements of mixed batches to hold this against. Of batches of one length, the "
    "decode rows measured on an H200 are what there is (iosim report serving says how far they are off)."
)


def section(r: Replayed, path: str, request: Mapping[str, Any]) -> Section:
    """The report."""
    return Section(
        name="serve",
        title=f"Attention of {count(len(r.steps), 'step', 'steps')} of a server: {path}",
        subject=(layers_line(r.server.layers), machine_line(r.server.hardware), cache_line(r.server)),
        answer=tuple(_answer(r)),
        tables=(bounds(r), _steps(r)),
        plots=(Plot("steps", "Time and K/V bytes of each step", partial(_draw, r)),),
        notes=(ATTENTION_ONLY, *model_notes(r.server), UNVALIDATED),
        machines=(r.server.hardware,),
        request=request,
    )


def layers_line(layers: Sequence[Layer]) -> str:
    """The layers in words."""
    kinds = [
        f"{layer.count} {layer.kind}" + (f" (window {w:,})" if (w := layer.shape.window) else "") for layer in layers
    ]
    a = layers[0].shape
    word = "layer" if sum(layer.count for layer in layers) == 1 else "layers"
    return f"{' and '.join(kinds)} {word}; {heads_words(a)}, d {a.d}, {a.dtype}"


def cache_line(server: Server) -> str:
    """The K/V cache in words."""
    c = server.cache
    shared = f", the first {c.shared:,} tokens of all sequences in the same pages" if c.shared else ""
    kind = "" if c.dtype is None else f" in {c.dtype} with fp32 scales by {c.scales},"
    page = f"pages of {count(c.page, 'token', 'tokens')} ({size(c.page * server.token_bytes)})"
    return f"K/V cache:{kind} {size(server.token_bytes)} a token in all layers, {page}{shared}"


def model_notes(server: Server) -> Iterator[str]:
    """How steps are modelled."""
    yield ("Model: all requests of a step are one launch a layer, blocks with most keys first, one tile for all; keys "
           f"are cut by {server.dataflow}{f' (rule {server.rule})' if server.dataflow == 'split-kv' else ''}. A block "
           "looks its pages up in the block table before its first copy; how rows lie in pages costs nothing more. "
           "Times are computed for rounded lengths and scaled to the true ones.")  # fmt: skip
    if server.packed:
        yield ("The query heads of a K/V head are rows of one tile, which reads K and V once for them; so kernels do "
               "for many lengths (FlashAttention-3's pack_gqa).")  # fmt: skip


def _answer(r: Replayed) -> Iterator[str]:
    kv, dram = sum(s.kv_bytes for s in r.steps), sum(s.dram_bytes for s in r.steps)
    decoded = sum(s.decoding for s in r.steps)
    yield (f"{digits(r.tokens / r.seconds)} tokens a second of attention: {count(r.tokens, 'token', 'tokens')} "
           f"({decoded:,} decoded) in {duration(r.seconds)}, {duration(r.seconds / len(r.steps))} a step.")  # fmt: skip
    yield (f"{size(round(kv / r.tokens))} of K and V a token; {size(round(dram / r.seconds))}/s cross the DRAM "
           f"interface, {percent(dram / r.seconds / r.server.hardware.hbm.bandwidth)} of its peak.")  # fmt: skip
    bound = _by_bound(r)
    most = max(bound, key=lambda name: sum(s.picoseconds for s in bound[name]))
    share = sum(s.picoseconds for s in bound[most]) / 1e12 / r.seconds
    yield f"Bound by {most} in {count(len(bound[most]), 'step', 'steps')}, {percent(share)} of the time."
    if saved := sum(s.saved_bytes for s in r.steps):
        yield f"The shared prefix saves {percent(saved / (saved + dram))} of what DRAM would read and write."


def _by_bound(r: Replayed) -> dict[str, list[Step]]:
    out: dict[str, list[Step]] = {}
    for s in r.steps:
        out.setdefault(s.bound, []).append(s)
    return out


def bounds(r: Replayed) -> Table:
    """Steps by what bounds them."""
    columns = (
        Column("bound", "bound by", "", "the busiest unit, however busy", words=True),
        Column("steps", "steps", show=lambda n: f"{n:,}"),
        Column("seconds", "time", "s", "", duration),
        Column("tokens", "tokens", show=lambda n: f"{n:,}"),
        Column("kv_bytes", "K and V", "B", "what requests attend to, once", size),
        Column("dram_bytes", "DRAM", "B", "both ways", size),
        Column("tflops", "TFLOP/s", "", "convention", digits),
    )
    rows = []
    for name, steps in _by_bound(r).items():
        seconds = sum(s.picoseconds for s in steps) / 1e12
        rows.append(
            {
                "bound": name,
                "steps": len(steps),
                "seconds": seconds,
                "tokens": sum(s.tokens for s in steps),
                "kv_bytes": sum(s.kv_bytes for s in steps),
                "dram_bytes": sum(s.dram_bytes for s in steps),
                "tflops": sum(s.flops for s in steps) / seconds / 1e12,
            }
        )
    return Table("bounds", "What bounds the steps", columns, tuple(rows))


def _steps(r: Replayed) -> Table:
    columns = (
        Column("step", "step", show=lambda n: f"{n:,}"),
        Column("requests", "requests", show=lambda n: f"{n:,}"),
        Column("decoding", "decoding", "", "requests with one new token", lambda n: f"{n:,}"),
        Column("tokens", "tokens", show=lambda n: f"{n:,}"),
        Column("seconds", "time", "s", "", duration),
        Column("kv_bytes", "K and V", "B", "what requests attend to, once", size),
        Column("kv_written_bytes", "written", "B", "K and V of new tokens", size, wide=True),
        Column("dram_bytes", "DRAM", "B", "both ways", size),
        Column("pages", "pages", "", "that hold its sequences' tokens", lambda n: f"{n:,}", wide=True),
        Column("table_bytes", "block\ntable", "B", "read by blocks", size, wide=True),
        Column("bound", "bound", words=True),
    )
    slowest = sorted(r.steps, key=lambda s: (-s.picoseconds, s.number))[:SHOWN]
    title = "The slowest steps" if len(r.steps) > SHOWN else "Steps"
    shown = slowest if len(r.steps) > SHOWN else r.steps
    return Table("steps", title, columns, tuple(step_row(s) for s in shown))


def step_row(s: Step) -> dict[str, Any]:
    """One step as a flat row."""
    return {
        "step": s.number,
        "requests": s.requests,
        "decoding": s.decoding,
        "tokens": s.tokens,
        "seconds": s.seconds,
        "kv_bytes": s.kv_bytes,
        "kv_written_bytes": s.written_bytes,
        "dram_bytes": s.dram_bytes,
        "pages": s.pages,
        "table_bytes": s.table_bytes,
        "bound": s.bound,
    }


def rows_as_csv(r: Replayed) -> str:
    """A header and one line for every step."""
    from iosim.report.layout import csv_text

    return csv_text([step_row(s) for s in r.steps])


def _draw(r: Replayed, canvas: Canvas) -> None:
    time = canvas.add_subplot()
    numbers = range(len(r.steps))
    time.step(numbers, [s.seconds for s in r.steps], where="mid", color=plots.BLUE, label="time")
    plots.seconds_axis(time, "time of a step")
    time.set_xlabel("step of the trace")
    time.grid(visible=True, color="0.85", linewidth=0.6)
    moved = time.twinx()
    moved.step(numbers, [s.kv_bytes for s in r.steps], where="mid", color=plots.ORANGE, label="K and V")
    plots.bytes_axis(moved, "K and V")
    time.legend(handles=[*time.get_lines(), *moved.get_lines()], loc="best")
