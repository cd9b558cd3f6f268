"""The report of latent attention: bytes of keys and values, and time, with absorbed matrices and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import machine_line
from iosim.study.latent import FORMS, Form, LatentStudy
from iosim.words import count, digits, duration, ratio, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN)
NOTES = (
    "absorbed: mla on the latent; expanded: split-kv or flash2 on keys and values of every head, which the cache has; "
    "anew: the same, on keys and values that each step makes of the latent, as a prefill of new tokens does.",
    "Products are what makes keys and values of latents, or absorbs that: their time is the least at the peaks of the "
    "matrix unit and of DRAM, not a run. Attention alone otherwise: no other projections, no MLP.",
    "There are no measured rows of latent attention here; this is not validated.",
)


def section(s: LatentStudy, request: Mapping[str, Any]) -> Section:
    """The report."""
    z = s.sizes
    subject = (f"{count(s.heads, 'head', 'heads')} of {z.nope} + {z.rope} numbers and values of {z.value}; a latent of "
               f"{z.rank} + {z.rope} a token; {count(s.batch, 'sequence', 'sequences')}")  # fmt: skip
    title = f"Decode on {s.machine.name}: time of a step over the context"
    return Section(
        name="latent",
        title="Latent attention: keys and values read, and time, absorbed and not",
        subject=(subject, machine_line(s.machine)),
        answer=tuple(_answer(s)),
        tables=(_table("decode", "Decode: one new token a sequence", s.decode),
                _table("prefill", f"Prefill of {s.prefill[0].queries:,} tokens, causal", s.prefill)),
        plots=(Plot("decode", title, partial(_draw, s)),),
        notes=NOTES,
        machines=(s.machine,),
        request=request,
    )  # fmt: skip


def _answer(s: LatentStudy) -> Iterator[str]:
    last = {f.form: f for f in s.decode[-len(FORMS) :]}
    absorbed, expanded = last["absorbed"], last["expanded"]
    yield (f"A token takes {size(absorbed.cache_bytes)} of cache as a latent, {size(expanded.cache_bytes)} expanded "
           f"({ratio(expanded.cache_bytes, absorbed.cache_bytes)}).")  # fmt: skip
    yield (f"Decoding with {absorbed.keys:,} tokens reads {size(absorbed.dram_bytes)} of it from DRAM absorbed, "
           f"{size(expanded.dram_bytes)} expanded.")  # fmt: skip
    for what, forms in (("decode", tuple(last.values())), ("prefill", s.prefill)):
        timed = [f for f in forms if f.seconds is not None]
        if timed:
            best, worst = (pick(timed, key=lambda f: f.seconds or 0) for pick in (min, max))
            yield (f"Fastest to {what} {best.keys:,} tokens: {best.form}, {duration(best.seconds or 0)} with its "
                   f"products; {worst.form} takes {ratio(worst.seconds or 0, best.seconds or 1)} that.")  # fmt: skip


def _table(name: str, title: str, forms: Sequence[Form]) -> Table:
    def time(seconds: float | None) -> str:
        return "-" if seconds is None else duration(seconds)

    columns = (
        Column("form", "form", words=True),
        Column("keys", "keys", show=lambda n: f"{n:,}"),
        Column("cache_bytes", "cache\na token", "B", "", size),
        Column("asked_bytes", "K, V\nasked", "B", "what all blocks load of them, and what of it is left to DRAM", size),
        Column("dram_bytes", "DRAM", "B", "", size),
        Column("seconds_attention", "attention", "s", "", time),
        Column("product_flops", "FLOPs of\nproducts", "FLOP", "", lambda n: f"{digits(n / 1e9)} G", wide=True),
        Column("product_bytes", "bytes of\nproducts", "B", "", size, wide=True),
        Column("seconds_products", "products\nat least", "s", "", time),
        Column("seconds", "together", "s", "", time),
        Column("dataflow", "dataflow", words=True, wide=True),
    )
    rows = tuple(
        {
            "form": f.form,
            "keys": f.keys,
            "cache_bytes": f.cache_bytes,
            "asked_bytes": f.asked_bytes,
            "dram_bytes": f.dram_bytes,
            "seconds_attention": f.run.seconds,
            "product_flops": f.products.flops,
            "product_bytes": f.products.bytes,
            "seconds_products": f.products.seconds,
            "seconds": f.seconds,
            "dataflow": f.run.dataflow.name,
        }
        for f in forms
    )
    return Table(name, title, columns, rows)


def _draw(s: LatentStudy, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for name, colour in zip(FORMS, COLOURS, strict=True):
        points = [(f.keys, 1e6 * f.seconds) for f in s.decode if f.form == name and f.seconds is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("step, us (attention and its products)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
