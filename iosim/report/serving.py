"""The report of serving: decode time and bytes over context and batch, what bounds, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.serve import ATTENTION_ONLY, cache_line, layers_line, model_notes
from iosim.report.text import machine_line
from iosim.study.capacity import MEASURED, MEMORY, Capacity
from iosim.words import count, digits, duration, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION, plots.PURPLE, plots.SKY, plots.BLACK, plots.GREY)


def section(c: Capacity, request: Mapping[str, Any]) -> Section:
    """The report."""
    context, batch = c.at
    drawn = (
        Plot("decode", f"Decode on {c.server.hardware.name}: time of a step over the context", partial(_draw, c)),
        Plot("chunks", f"New tokens a sequence, {count(batch, 'sequence', 'sequences')} of {context:,} tokens",
             partial(_draw_chunks, c)),
    )  # fmt: skip
    return Section(
        name="serving",
        title="Serving: attention of decode steps over context and batch, and what fits in device memory",
        subject=(layers_line(c.server.layers), machine_line(c.server.hardware), cache_line(c.server)),
        answer=tuple(_answer(c)),
        tables=(_decode(c), _chunks(c), _rooms(c), _held(c)),
        plots=drawn,
        notes=(ATTENTION_ONLY, *model_notes(c.server), *_notes(c)),
        machines=(c.server.hardware,),
        request=request,
    )


def _answer(c: Capacity) -> Iterator[str]:
    context, batch = c.at
    step = c.decode[c.at]
    yield (f"One token for each of {count(batch, 'sequence', 'sequences')} of {context:,} tokens takes "
           f"{duration(step.seconds)}, {digits(step.tokens / step.seconds)} tokens a second, and reads "
           f"{size(round(step.kv_bytes / step.tokens))} of K and V a token; bound by {step.bound}.")  # fmt: skip
    bound = sorted({s.bound for s in c.decode.values()})
    if len(bound) == 1:
        yield f"All of these decode steps are bound by {bound[0]}, whatever the context and the batch."
    if c.crossing is not None:
        what = c.chunks[c.crossing].bound
        yield (f"Memory stops to bound at {count(c.crossing, 'new token', 'new tokens')} a sequence (of those tried): "
               f"from there {what} does.")  # fmt: skip
    elif c.chunks:
        yield f"Up to {max(c.chunks):,} new tokens a sequence memory goes on to bound."
    room = next(r for r in c.rooms if r.context == context)
    held = f" beside {size(c.reserved)} of other things" if c.reserved else " if nothing else is there"
    yield f"{count(room.sequences, 'sequence', 'sequences')} of {context:,} tokens fit in device memory{held}."


def _decode(c: Capacity) -> Table:
    columns = (
        Column("context", "context", show=lambda n: f"{n:,}"),
        Column("batch", "batch", show=lambda n: f"{n:,}"),
        Column("seconds", "step", "s", "one new token a sequence, all layers", duration),
        Column("tokens_per_s", "tokens/s", show=digits),
        Column("kv_bytes_per_token", "K and V\na token", "B", "", size),
        Column("dram_bytes_per_s", "DRAM/s", "B/s", "", size),
        Column("tflops", "TFLOP/s", "", "convention", digits),
        Column("bound", "bound", words=True),
        Column("fits", "fits", words=True),
    )
    rows = tuple(
        {
            "context": context,
            "batch": batch,
            "seconds": s.seconds,
            "tokens_per_s": s.tokens / s.seconds,
            "kv_bytes_per_token": round(s.kv_bytes / s.tokens),
            "dram_bytes_per_s": round(s.dram_bytes / s.seconds),
            "tflops": s.flops / s.seconds / 1e12,
            "bound": s.bound,
            "fits": "yes" if c.fits(context, batch) else "no",
        }
        for (context, batch), s in c.decode.items()
    )
    return Table("decode", "Decode", columns, rows)


def _chunks(c: Capacity) -> Table:
    context, batch = c.at
    columns = (
        Column("new", "new tokens", "", "of each sequence: speculation, or a chunk of a prompt", lambda n: f"{n:,}"),
        Column("seconds", "step", "s", "all layers", duration),
        Column("tokens_per_s", "tokens/s", show=digits),
        Column("flop_per_byte", "FLOP/byte", "", "convention FLOPs by DRAM bytes", digits),
        Column("tflops", "TFLOP/s", show=digits),
        Column("bound", "bound", words=True),
        *((Column("unpacked_seconds", "unpacked", "s", "a tile a query head, not one for all of a K/V head", duration),)
          if c.unpacked else ()),
    )  # fmt: skip
    rows = tuple(
        {
            "new": new,
            "seconds": s.seconds,
            "tokens_per_s": s.tokens / s.seconds,
            "flop_per_byte": s.flops / s.dram_bytes,
            "tflops": s.flops / s.seconds / 1e12,
            "bound": s.bound,
            **({"unpacked_seconds": c.unpacked[new].seconds} if c.unpacked else {}),
        }
        for new, s in c.chunks.items()
    )
    title = f"Where memory stops to bound: {count(batch, 'sequence', 'sequences')} of {context:,} tokens"
    return Table("chunks", title, columns, rows)


def _rooms(c: Capacity) -> Table:
    columns = (
        Column("context", "context", show=lambda n: f"{n:,}"),
        Column("bytes", "a sequence", "B", "K and V in all layers, in whole pages", size),
        Column("sequences", "sequences\nthat fit", show=lambda n: f"{n:,}"),
    )
    rows = tuple({"context": r.context, "bytes": r.bytes, "sequences": r.sequences} for r in c.rooms)
    kept = f", {size(c.reserved)} reserved" if c.reserved else ""
    title = f"What fits in {size(c.server.hardware.hbm.capacity_bytes)}{kept}"
    return Table("rooms", title, columns, rows)


def _held(c: Capacity) -> Table:
    columns = (
        Column("kernel", "kernel", words=True),
        Column("batch", "batch", show=lambda n: f"{n:,}"),
        Column("heads", "heads"),
        Column("kv_heads", "K/V heads"),
        Column("context", "context", show=lambda n: f"{n:,}"),
        Column("measured_seconds", "measured", "s", "", duration),
        Column("predicted_seconds", "predicted", "s", "split-kv, balanced, as measured: after a flush", duration),
        Column("error_pct", "error", "%", "", lambda e: f"{e:+.0f} %"),
        Column("host_bound", "host-\nbound", words=True),
    )
    rows = tuple(
        {
            "kernel": h.kernel,
            "batch": h.problem.batch,
            "heads": h.problem.heads,
            "kv_heads": h.problem.kv_heads,
            "context": h.problem.n_k,
            "measured_seconds": h.measured,
            "predicted_seconds": h.predicted,
            "error_pct": h.error_pct,
            "host_bound": "yes" if h.host_bound else "no",
        }
        for h in c.held
    )
    return Table("held", f"Decode calls measured on an H200, beside {MEASURED} here", columns, rows)


def _notes(c: Capacity) -> Iterator[str]:
    scored = [abs(h.error_pct) for h in c.held if not h.host_bound]
    fits = "of weights, activations and the rest only what --reserve says is left out"
    yield (f"Validated as far as measurements go: {len(scored)} decode calls on one H200 with one length each, without "
           f"pages (mean error {sum(scored) / len(scored):.0f} %, worst {max(scored):.0f} %); not validated beyond. "
           f"What fits counts the cache alone: {fits}.")  # fmt: skip
    windows = [layer.shape.window for layer in c.server.layers if layer.shape.window]
    if windows:
        yield "Sliding layers keep the tokens of their window alone."


def _draw(c: Capacity, canvas: Canvas) -> None:
    axes = canvas.add_subplot()
    for n, batch in enumerate(c.batches):
        own = [(context, c.decode[context, batch].seconds) for context in c.contexts]
        name = f"batch {batch}"
        plots.series(axes, own, name, COLOURS[n % len(COLOURS)], said=lambda x, y: f"{x:,}: {duration(y)}")
        over = [(x, y) for x, y in own if not c.fits(x, batch)]
        for x, y in over:
            plots.mark(axes, x, y, f"{name}, {x:,}: does not fit", COLOURS[n % len(COLOURS)], hollow=True)
    plots.seconds_axis(axes, "time of a step, all layers")
    plots.lengths_axis(axes, c.contexts, "context (tokens; hollow: does not fit in device memory)")
    axes.legend()


def _draw_chunks(c: Capacity, canvas: Canvas) -> None:
    axes = canvas.add_subplot()
    for colour, name, wanted in ((plots.BLUE, "memory", True), (plots.VERMILION, "processors", False)):
        own = [
            (n, s.flops / s.seconds / 1e12) for n, s in c.chunks.items() if (s.bound in (*MEMORY, "launch")) == wanted
        ]
        if own:
            plots.series(axes, own, f"bound by {name}", colour, "", said=lambda x, y: f"{x:,}: {digits(y)} TFLOP/s")
    axes.set_ylabel("TFLOP/s (convention)")
    axes.set_ylim(bottom=0)
    plots.lengths_axis(axes, list(c.chunks), "new tokens a sequence")
    axes.legend()
