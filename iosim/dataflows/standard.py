"""Standard attention: three kernels, S = Q K^T and P = softmax(S) written to device memory.

A library's matrix product, row softmax and matrix product.  The products run in square-ish output tiles over
steps of the inner dimension.  The softmax keeps a row on chip where it fits; a longer row is read three times
(maximum, denominator, output).  A causal mask saves no work here: it is applied by the softmax.
"""

from __future__ import annotations

from math import inf

from iosim.dataflows.tiles import mask_keys
from iosim.index import Ex, cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, Tile, View, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "block_d", "softmax_rows", "softmax_cols")


def standard(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    p = Builder("standard")
    Q = p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in")
    K = p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in")
    V = p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in")
    S = p.tensor("S", (a.batch, a.heads, a.n_q, a.n_k), a.dtype, "scratch")
    P = p.tensor("P", (a.batch, a.heads, a.n_q, a.n_k), a.dtype, "scratch")
    O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.dtype, "out")
    L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out") if a.lse else None
    bq, bk, step = s.block_q, s.block_k, s.block_d
    heads = {"b": a.batch, "kv": a.kv_heads, "g": a.group}

    with p.kernel("scores", operands_once=True, **heads, i=cdiv(a.n_q, bq), j=cdiv(a.n_k, bk)) as (
        b,
        kv,
        g,
        i,
        j,
    ):
        h = kv * a.group + g
        x = p.fill("x", shape=(bq, bk), value=0)
        with p.loop("t", 0, cdiv(a.d, step)) as t:
            q = p.load("q", Q[b, h, rows(i, bq), rows(t, step)])
            k = p.load("k", K[b, kv, rows(j, bk), rows(t, step)])
            with p.phase("qk"):
                p.matmul(x, q, k.T, add=True)
        p.store(S[b, h, rows(i, bq), rows(j, bk)], p.scale("s", x, by=a.scale))

    softmax(p, a, s, S, P, L)

    cols = min(bk, a.d_v)
    with p.kernel("output", operands_once=True, **heads, i=cdiv(a.n_q, bq), c=cdiv(a.d_v, cols)) as (
        b,
        kv,
        g,
        i,
        c,
    ):
        h = kv * a.group + g
        o = p.fill("o", shape=(bq, cols), value=0)
        with p.loop("t", 0, cdiv(a.n_k, step)) as t:
            pr = p.load("p", P[b, h, rows(i, bq), rows(t, step)])
            v = p.load("v", V[b, kv, rows(t, step), rows(c, cols)])
            with p.phase("pv"):
                p.matmul(o, pr, v, add=True)
        p.store(O[b, h, rows(i, bq), rows(c, cols)], o)
    return p.done()


def softmax(p: Builder, a: Attention, s: Schedule, S: Tensor, P: Tensor, L: Tensor | None) -> None:
    """P = softmax(S) by rows, and their log-sum-exp: in one pass where a row tile spans all keys, else in three."""
    r, c = s.softmax_rows, s.softmax_cols
    with p.kernel("softmax", operands_once=True, b=a.batch, h=a.heads, i=cdiv(a.n_q, r)) as (b, h, i):

        def scores(name: str, j: Ex) -> Tile:
            x = p.load(name, S[b, h, rows(i, r), rows(j, c)])
            with p.phase(f"mask {name}"):
                if a.causal or a.n_k % c:
                    mask_keys(p, a, x, i, j, r, c)
            return x

        def tile(j: Ex) -> View:
            return P[b, h, rows(i, r), rows(j, c)]

        if c >= a.n_k:
            x = scores("x", 0)
            m = p.rowmax("m", x)
            e = p.exp("e", x, m)
            l = p.rowsum("l", e)
            p.store(tile(0), p.div(e, e, l))
        else:
            m = p.fill("m", shape=(r, 1), value=-inf)
            l = p.fill("l", shape=(r, 1), value=0)
            tiles = cdiv(a.n_k, c)
            with p.loop("j1", 0, tiles) as j:
                x = scores("x1", j)
                with p.phase("maximum"):
                    p.max(m, m, p.rowmax("top", x))
            with p.loop("j2", 0, tiles) as j:
                x = scores("x2", j)
                with p.phase("denominator"):
                    p.add(l, l, p.rowsum("sum", p.exp("e2", x, m)))
            with p.loop("j3", 0, tiles) as j:
                x = scores("x3", j)
                with p.phase("probabilities"):
                    e = p.exp("e3", x, m)
                    p.store(tile(j), p.div(e, e, l))
        if L is not None:
            p.store(L[b, h, rows(i, r)], p.add("lse", m, p.log("ln", l)))
