"""A batch of sequences of different lengths, as a Section: what it takes, what padding would, and what an order brings.

Not validated: there are no measurements of batches of different lengths to hold this against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from iosim.report.sections import Column, Section, Table
from iosim.report.text import heads_words, machine_line
from iosim.study.ragged import Cache, Ragged, Step, token_bytes
from iosim.words import count, digits, duration, percent, ratio, size

UNVALIDATED = (
    "Not validated as such: the shipped measurements have batches of one length only (decode and GQA rows are in the "
    "README). Alike sequences run as an ordinary batch does."
)
BIG_TAIL = 0.10
ORDERS = {"natural": "as given", "longest-first": "longest blocks first"}


def section(r: Ragged, request: Mapping[str, Any]) -> Section:
    """The report."""
    return Section(
        name="lengths",
        title=f"Attention of {_sequences_words(len(r.step.sequences))}, one launch",
        subject=(_shape(r), machine_line(r.engine.hardware)),
        answer=tuple(_answer(r)),
        tables=(_costs(r), _orders(r), _sequences(r)),
        plots=(),
        notes=tuple(_notes(r)),
        machines=(r.engine.hardware,),
        request=request,
    )


def _sequences_words(n: int) -> str:
    return "1 sequence" if n == 1 else f"{n:,} sequences of their own lengths"


def _shape(r: Ragged) -> str:
    a, (queries, keys) = r.shape, r.rows(r.step)
    mask = (", causal" if a.causal else "") + (f", window {a.window:,}" if a.window else "")
    longest = max(s.k for s in r.step.sequences)
    return (f"{heads_words(a)}, d {a.d}, {a.dtype}{mask}; {queries:,} query rows and {keys:,} key rows packed, the "
            f"longest {longest:,} keys; {r.engine.dataflow}, tile {_tile(r.step)}")  # fmt: skip


def _tile(step: Step) -> str:
    return f"{step.schedule.block_q}x{step.schedule.block_k}"


def _answer(r: Ragged) -> Iterator[str]:
    s, p = r.step, r.padded
    yield (f"{duration(s.seconds)}, {digits(s.flops / s.seconds / 1e12)} TFLOP/s; padded to the longest "
           f"{duration(p.seconds)} ({ratio(p.seconds, s.seconds)}), with {ratio(p.dram_bytes, s.dram_bytes)} the DRAM "
           f"bytes and {ratio(p.flops, s.flops)} the FLOPs. Busiest: {s.bound}.")  # fmt: skip
    best, (order, persistent) = r.orders[r.best], r.best
    yield (f"The longest of {s.launch.time.blocks:,} blocks has {s.launch.longest} key tiles, a block in the mean "
           f"{digits(s.launch.mean)}; processors have no block for {percent(s.tail_share)} of the time.")  # fmt: skip
    if best.seconds < 0.995 * s.seconds:
        name = ORDERS[order] + (", persistent" if persistent else "")
        yield f"Best order: {name}, {duration(best.seconds)} ({ratio(s.seconds, best.seconds)} as fast)."
    else:
        yield "Another order, or a persistent grid, brings less than 0.5 %."
    failed = [f"{q:,}:{k:,}" for (q, k), c in r.checks.items() if c.status == "failed"]
    if failed:
        yield f"CHECK FAILED for {', '.join(failed)}."
    elif r.checks:
        worst = max((c.max_abs_error or 0.0) for c in r.checks.values())
        classes = len(set(s.sequences))
        some = f"{len(r.checks)} of " if len(r.checks) < classes else "all " if classes > 1 else ""
        yield (f"Numbers of {some}{count(classes, 'class', 'classes')} of sequences are within their bounds of "
               f"float64 (worst error {worst:.1g}).")  # fmt: skip


def _costs(r: Ragged) -> Table:
    columns = (
        Column("layout", "", words=True),
        Column("query_rows", "query\nrows", show=lambda n: f"{n:,}"),
        Column("key_rows", "key\nrows", show=lambda n: f"{n:,}"),
        Column("asked_bytes", "asked", "B", "loads and stores of all blocks", size),
        Column("dram_bytes", "DRAM", "B", "both ways", size),
        Column("flops", "FLOPs", "", "convention, of the pairs that are not masked", lambda n: digits(n / 1e9) + " G"),
        Column("executed_flops", "done", "", "of whole tiles", lambda n: digits(n / 1e9) + " G"),
        Column("seconds", "time", "s", "", duration),
    )
    rows = []
    for name, step in (("packed", r.step), ("padded", r.padded)):
        queries, keys = r.rows(step)
        rows.append(
            {
                "layout": name,
                "query_rows": queries,
                "key_rows": keys,
                "asked_bytes": step.hbm_read_bytes + step.hbm_write_bytes,
                "dram_bytes": step.dram_bytes,
                "flops": step.flops,
                "executed_flops": step.executed_flops,
                "seconds": step.seconds,
            }
        )
    return Table("packed", "Packed, and padded to the longest", columns, tuple(rows))


def _orders(r: Ragged) -> Table:
    columns = (
        Column("order", "order of blocks", words=True),
        Column("grid", "grid", words=True),
        Column("seconds", "time", "s", "", duration),
        Column("tail_share", "no block", "", "share of processors' time in the launch with the keys", percent),
    )
    rows = tuple(
        {
            "order": ORDERS[order],
            "grid": "persistent" if persistent else "a block each",
            "seconds": step.seconds,
            "tail_share": step.tail_share,
        }
        for (order, persistent), step in r.orders.items()
    )
    return Table("orders", "What the order of blocks brings", columns, rows)


def _sequences(r: Ragged) -> Table:
    columns = (
        Column("queries", "queries", show=lambda n: f"{n:,}"),
        Column("keys", "keys", show=lambda n: f"{n:,}"),
        Column("sequences", "sequences", show=lambda n: f"{n:,}"),
        Column("blocks", "blocks", "", "of each", lambda n: f"{n:,}"),
        Column("splits", "splits", "", "of the keys", str),
        Column("cache_bytes", "K and V", "B", "of each", size),
        *((Column("pages", "pages", "", "of each", lambda n: f"{n:,}"),
           Column("last_page", "last page", "", "how full", percent)) if r.engine.cache else ()),
    )  # fmt: skip
    a, s = r.shape, r.step
    rows = []
    for (lengths, splits), times in Counter(zip(s.sequences, s.splits, strict=True)).items():
        rows.append(
            {
                "queries": lengths.q,
                "keys": lengths.k,
                "sequences": times,
                "blocks": r.engine.blocks(lengths, s.schedule) * splits,
                "splits": splits,
                "cache_bytes": token_bytes(a, r.engine.cache) * lengths.k,
                **_pages(r.engine.cache, lengths.k),
            }
        )
    shown = sorted(rows, key=lambda row: (-row["keys"], -row["queries"]))
    return Table("sequences", "Sequences by length", columns, tuple(shown))


def _pages(cache: Cache | None, keys: int) -> dict[str, Any]:
    """Pages of one sequence, and how full its last one is."""
    if cache is None:
        return {}
    return {"pages": cache.pages(keys), "last_page": ((keys - 1) % cache.page + 1) / cache.page}


def _notes(r: Ragged) -> Iterator[str]:
    yield ("Model: each sequence is the ordinary dataflow's program, all with one tile, and their blocks share one "
           "grid. Each sequence stands behind an L2 of its own. Reading the offsets of sequences is not counted. "
           f"Simulating every processor may change times by {r.step.launch.time.spread_pct} %.")  # fmt: skip
    if r.engine.packed:
        yield "The query heads of a K/V head are rows of one tile, so that K and V are loaded once for them."
    if (cache := r.engine.cache) is not None:
        kind = "" if cache.dtype is None else f" The cache is in {cache.dtype}, with fp32 scales by {cache.scales}."
        held = size(cache.page * token_bytes(r.shape, cache))
        yield (f"A page of {count(cache.page, 'token', 'tokens')} holds {held} of K and V. Blocks read "
               f"{size(r.step.table_bytes)} of the block table, 4 B a page, and know where their keys are one "
               f"access to it later, {r.step.schedule.cycles['enter']} cycles; of a last page the rows that are "
               f"there are read.{kind}")  # fmt: skip
    if r.step.saved_bytes:
        yield f"Of the shared prefix, {size(r.step.saved_bytes)} come from the L2 and not from DRAM."
    if any(n > 1 for n in r.step.splits):
        yield f"Keys are split by the rule {r.engine.rule}; one more launch combines the parts."
    yield UNVALIDATED
