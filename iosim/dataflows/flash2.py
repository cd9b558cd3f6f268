"""FlashAttention-2: one block a Q tile, K and V tiles stream past it, O is written once.

Dao 2023 (arXiv 2307.08691), Algorithm 1.  The score tile and the running maximum, denominator and output stay
on chip; there is no N x N matrix in device memory.

In fp8 (FlashAttention-3, section 3.3) each tile of Q, K and V has a scale.  Scores are multiplied by those of Q and K.
The sums of P V are kept in units of the last V tile's scale, to which the factor that rescales them brings them; so
there is no further pass over them.  Before P is rounded it is multiplied by 2^8, for the sake of small weights.

With `pack_gqa` a tile has the queries of all heads that share K and V (FlashAttention-3), which it loads once for them.

A sink is where the running maximum begins, with a weight of 1.  Beside a window, tiles of global tokens come first.
"""

from __future__ import annotations

from math import inf, log

from iosim.dataflows.tiles import GAIN, QueryTile, Scores, drop, key_runs, mask_edges, operands, sinks_of
from iosim.problem import Attention
from iosim.program import Builder, Program, Tile, View, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "pack_gqa", "grid_order")
BACKWARD = "flash-backward"
TAKES = ("fp8", "fp16 accumulator", "soft-cap", "ALiBi", "bias", "sinks", "global tokens", "dropout", "block mask")


def flash2(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    tile = QueryTile.of(a, s)
    p, bq, bk = Builder("flash2"), tile.queries, s.block_k
    Q, K, V = operands(p, a)
    if a.is_fp8:
        SQ, SK, SV = p.scales("SQ", Q, bq), p.scales("SK", K, bk), p.scales("SV", V, bk)
    scores, sinks = Scores.of(p, a), sinks_of(p, a)
    scale = scores.scale
    O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.out_dtype, "out")
    with p.kernel("attention", **tile.grid(a)) as (b, kv, g, i):
        h = kv * a.group + g * tile.heads
        q = p.load("q", Q[tile.place(b, h, i)])
        m, l = _start(p, a, tile.rows, None if sinks is None else sinks[rows(h, 1)], scale)
        o = p.fill("o", shape=(tile.rows, a.d_v), value=0, dtype=a.accumulator)
        if a.is_fp8:
            sq = p.load("sq", SQ[b, h, rows(i, 1)])
            unit = p.fill("unit", shape=(1, 1), value=1)  # of o
            lift = p.fill("lift", shape=(1, 1), value=log(GAIN) / scale)
        for name, edges in key_runs(a, i, bq, bk):
            with p.loop(name, edges[0], edges[3]) as j:
                k = p.load("k", K[b, kv, rows(j, bk)])
                v = p.load("v", V[b, kv, rows(j, bk)])
                if a.is_fp8:
                    sk, sv = p.load("sk", SK[b, kv, rows(j, 1)]), p.load("sv", SV[b, kv, rows(j, 1)])
                bias = scores.load(p, b, h, i, j, bq, bk)
                with p.phase("qk"):
                    x = p.matmul("x", q, k.T, dtype=a.accumulator)
                with p.phase("softmax"):
                    if a.accumulator != "fp32":
                        x = p.cast("wide", x, "fp32")
                    if a.is_fp8:
                        p.mul(x, x, p.mul("sqk", sq, sk))
                    scores.change(p, x, bias, h, i, j, bq, bk, a.scale)
                    mask_edges(p, a, x, i, j, bq, bk, j, edges, tile.packed)
                    new = p.max("new", m, p.rowmax("top", x))
                    shrink = p.exp("shrink", m, new, scale=scale)
                    p.exp(x, x, p.sub("lifted", new, lift) if a.is_fp8 else new, scale=scale)
                    p.mul(l, l, shrink)
                    p.add(l, l, p.rowsum("sum", x))
                    p.copy(m, new)
                    if a.is_fp8:
                        p.mul(shrink, shrink, p.div(unit, unit, sv))
                        p.copy(unit, sv)
                    pr = p.cast("p", x, a.dtype)
                    drop(p, a, pr, b, h, i, j, bq, bk)
                with p.phase("rescale"):
                    p.mul(o, o, shrink)
                with p.phase("pv"):
                    p.matmul(o, pr, v, add=True)
        out = p.div("out", o, l)
        if a.dropout:
            p.scale(out, out, by=1 / (1 - a.dropout))
        if a.is_fp8:
            p.mul(out, out, unit)
            p.sub(m, m, lift)
        p.store(O[tile.place(b, h, i)], out)
        if a.lse:
            L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out")
            p.store(L.column(*tile.place(b, h, i)), p.add("lse", p.scale("ms", m, by=scale), p.log("ln", l)))
    return p.done()


def _start(p: Builder, a: Attention, bq: int, sinks: View | None, scale: float) -> tuple[Tile, Tile]:
    """Maximum and sum of rows before the first key; a sink, in units of unscaled scores, is there from the start."""
    m = p.fill("m", shape=(bq, 1), value=-inf if sinks is None else 0)
    l = p.fill("l", shape=(bq, 1), value=0 if sinks is None else GAIN if a.is_fp8 else 1)
    if sinks is not None:
        sink = p.load("sink", sinks)
        p.add(m, m, sink if scale == 1 else p.scale("unscaled", sink, by=1 / scale))
    return m, l
