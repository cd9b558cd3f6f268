"""Split-KV (flash-decoding): several blocks share the keys of a query tile; a second kernel combines their results.

Dao, Haziza, Massa and Sizov 2023 (Flash-Decoding for long-context inference).  With few queries FlashAttention-2 has
too few blocks to fill a machine: here the key tiles are dealt to `splits` blocks in equal runs.  Each leaves its own
normalised O and log-sum-exp in device memory, in fp32; exp(L_t - L) is then the weight of split t.  A split without a
key that is seen leaves O = 0 and L = -inf, and so has no weight.  One split needs no second kernel: it is flash2.

A sink counts once, where the results are combined.  Of each loop over key tiles (several with global tokens or a block
mask) a block has those of its run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from iosim.dataflows.flash2 import flash2
from iosim.dataflows.tiles import QueryTile, Scores, drop, key_runs, mask_edges, query_tiles_of, sinks_of
from iosim.dtypes import dtype
from iosim.index import cdiv, least, most
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, rows
from iosim.schedule import Schedule

if TYPE_CHECKING:
    from iosim.dataflows import Rule
    from iosim.hardware import Hardware

USES = ("block_q", "block_k", "splits", "pack_gqa", "grid_order")
BACKWARD = "flash-backward"
TAKES = ("soft-cap", "ALiBi", "bias", "sinks", "global tokens", "dropout", "block mask")
COMBINED = 8  # heads of a block that combines results of one query
MOST = 128  # splits by default: their results are combined one after another


def split_kv(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes and the splits of schedule `s`."""
    if s.splits == 1:
        return replace(flash2(a, s), name="split-kv")
    tile = QueryTile.of(a, s)
    p, bq, bk = Builder("split-kv"), tile.queries, s.block_k
    Q = p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in")
    K = p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in")
    V = p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in")
    scores, sinks = Scores.of(p, a), sinks_of(p, a)
    scale = scores.scale
    Ot = p.tensor("O parts", (s.splits, a.batch, a.heads, a.n_q, a.d_v), "fp32", "scratch")
    Lt = p.tensor("L parts", (s.splits, a.batch, a.heads, a.n_q), "fp32", "scratch")
    run = cdiv(cdiv(a.n_k, bk), s.splits)  # key tiles of a split
    with p.kernel("parts", **tile.grid(a), t=s.splits) as (b, kv, g, i, t):
        h = kv * a.group + g * tile.heads
        place = tile.place(b, h, i)
        q = p.load("q", Q[place])
        m = p.fill("m", shape=(tile.rows, 1), value=-inf)
        l = p.fill("l", shape=(tile.rows, 1), value=0)
        o = p.fill("o", shape=(tile.rows, a.d_v), value=0)
        for name, edges in key_runs(a, i, bq, bk):
            with p.loop(name, most(edges[0], t * run), least(edges[3], (t + 1) * run)) as j:
                k = p.load("k", K[b, kv, rows(j, bk)])
                v = p.load("v", V[b, kv, rows(j, bk)])
                bias = scores.load(p, b, h, i, j, bq, bk)
                with p.phase("qk"):
                    x = p.matmul("x", q, k.T)
                with p.phase("softmax"):
                    scores.change(p, x, bias, h, i, j, bq, bk, a.scale)
                    mask_edges(p, a, x, i, j, bq, bk, j, edges, tile.packed)
                    new = p.max("new", m, p.rowmax("top", x))
                    shrink = p.exp("shrink", m, new, scale=scale)
                    p.exp(x, x, new, scale=scale)
                    p.mul(l, l, shrink)
                    p.add(l, l, p.rowsum("sum", x))
                    p.copy(m, new)
                    pr = p.cast("p", x, a.dtype)
                    drop(p, a, pr, b, h, i, j, bq, bk)
                with p.phase("rescale"):
                    p.mul(o, o, shrink)
                with p.phase("pv"):
                    p.matmul(o, pr, v, add=True)
        p.store(Ot[(t, *place)], p.div(o, o, l))
        p.store(Lt.column(t, *place), p.add("lse", p.scale("ms", m, by=scale), p.log("ln", l)))
    combine(p, a, s, Ot, Lt, sinks)
    return p.done()


def combine(
    p: Builder,
    a: Attention,
    s: Schedule,
    Ot: Tensor,
    Lt: Tensor,
    sinks: Tensor | None = None,
    *,
    over_heads: bool = False,
) -> None:
    """O = sum over t of exp(L_t - L) O_t, with L = log(sum of exp(L_t)): an online softmax over the splits.

    A tile has query rows of one head, or, `over_heads`, heads of the one query that there is.  With `sinks` it begins
    at the head's.
    """
    bq = min(s.block_q, COMBINED) if over_heads else s.block_q
    O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.dtype, "out")
    grid = {"i": cdiv(a.heads, bq)} if over_heads else {"h": a.heads, "i": cdiv(a.n_q, bq)}
    with p.kernel("combine", b=a.batch, **grid) as (b, *at):
        place = (b, rows(at[0], bq), 0) if over_heads else (b, at[0], rows(at[1], bq))
        m = p.fill("m", shape=(bq, 1), value=-inf if sinks is None else 0)
        l = p.fill("l", shape=(bq, 1), value=0 if sinks is None else 1)
        o = p.fill("o", shape=(bq, a.d_v), value=0)
        if sinks is not None:
            p.add(m, m, p.load("sink", sinks[rows(at[0], 1)]))
        with p.loop("t", 0, s.splits) as t:
            lt = p.load("lt", Lt[(t, *place)])
            ot = p.load("ot", Ot[(t, *place)])
            with p.phase("weights"):
                new = p.max("new", m, lt)
                shrink = p.exp("shrink", m, new)
                weight = p.exp("weight", lt, new)
                p.mul(l, l, shrink)
                p.add(l, l, weight)
                p.copy(m, new)
            with p.phase("sum"):
                p.mul(o, o, shrink)
                p.add(o, o, p.mul("part", ot, weight))
        out = p.div("out", o, l)
        p.store(O[place], p.scale(out, out, by=1 / (1 - a.dropout)) if a.dropout else out)
        if a.lse:
            L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out")
            p.store(L[place], p.add("lse", m, p.log("ln", l)))


def plan(a: Attention, hardware: Hardware, given: Mapping[str, Any], rule: Rule) -> tuple[Schedule, str]:
    """The general rule's tile, and the splits with the fewest bytes loaded one after another, see `_in_a_row`.

    No processor gets a second block by splitting.  The rule knows no launch times and no bandwidth that blocks share:
    of 8192 keys of one head on MP31 it takes 22 splits, where the time model is 5 % faster with 14.
    """
    if "splits" in given:
        return rule()

    def room(s: Schedule) -> int:
        return min(int(cdiv(a.n_k, s.block_k)), MOST, int(cdiv(hardware.processors or 1, query_tiles_of(a, s))))

    s, why = rule(lambda s: {"splits": min(range(1, room(s) + 1), key=lambda n: _in_a_row(a, s, n))})
    units = f"{hardware.called}s"
    if s.splits > 1:
        return s, f"{why}; the splits are those with the fewest bytes loaded in a row, of keys and then of results"
    if s.block_k >= a.n_k:
        return s, f"{why}; no second split, as the keys are one tile"
    if hardware.processors is None:
        return s, f"{why}; no second split, as the number of {units} is unknown"
    if room(s) == 1:
        return s, f"{why}; no second split, as the grid gives each of {hardware.processors} {units} a block"
    return s, f"{why}; no second split, as combining the results would load more than it saves"


def _in_a_row(a: Attention, s: Schedule, splits: int) -> int:
    """Bytes of the tiles that are loaded one after another: K and V of one split, then the results of all of them."""
    keys = s.block_k * (a.d + a.d_v) * dtype(a.dtype).bytes
    results = 0 if splits == 1 else splits * s.block_q * (a.d_v + 1) * 4
    return int(cdiv(cdiv(a.n_k, s.block_k), splits)) * keys + results
