"""FlashAttention-2: one block a Q tile, K and V tiles stream past it, O is written once.

Dao 2023 (arXiv 2307.08691), Algorithm 1.  The score tile and the running maximum, denominator and output stay
on chip; there is no N x N matrix in device memory.
"""

from __future__ import annotations

from math import inf

from iosim.dataflows.tiles import key_tiles, mask_edges
from iosim.index import cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "grid_order")
BACKWARD = "flash-backward"


def flash2(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    p, bq, bk = Builder("flash2"), s.block_q, s.block_k
    Q = p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in")
    K = p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in")
    V = p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in")
    O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.dtype, "out")
    with p.kernel("attention", b=a.batch, kv=a.kv_heads, g=a.group, i=cdiv(a.n_q, bq)) as (b, kv, g, i):
        h = kv * a.group + g
        q = p.load("q", Q[b, h, rows(i, bq)])
        m = p.fill("m", shape=(bq, 1), value=-inf)
        l = p.fill("l", shape=(bq, 1), value=0)
        o = p.fill("o", shape=(bq, a.d_v), value=0)
        lo, left, right, hi = key_tiles(a, i, bq, bk)
        with p.loop("j", lo, hi) as j:
            k = p.load("k", K[b, kv, rows(j, bk)])
            v = p.load("v", V[b, kv, rows(j, bk)])
            with p.phase("qk"):
                x = p.matmul("x", q, k.T)
            with p.phase("softmax"):
                mask_edges(p, a, x, i, j, bq, bk, j, (lo, left, right, hi))
                new = p.max("new", m, p.rowmax("top", x))
                shrink = p.exp("shrink", m, new, scale=a.scale)
                p.exp(x, x, new, scale=a.scale)
                p.mul(l, l, shrink)
                p.add(l, l, p.rowsum("sum", x))
                p.copy(m, new)
                pr = p.cast("p", x, a.dtype)
            with p.phase("rescale"):
                p.mul(o, o, shrink)
            with p.phase("pv"):
                p.matmul(o, pr, v, add=True)
        p.store(O[b, h, rows(i, bq)], p.div("out", o, l))
        if a.lse:
            L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out")
            p.store(L[b, h, rows(i, bq)], p.add("lse", p.scale("ms", m, by=a.scale), p.log("ln", l)))
    return p.done()
