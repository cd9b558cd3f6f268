"""FlashAttention backward: P recomputed from the log-sum-exp; dK and dV summed on chip, dQ by fp32 adds in memory.

Dao 2023 (arXiv 2307.08691), Algorithm 2.  With D = rowsum(dO * O), tile by tile:

    P = exp(scale * Q K^T - L)    dV += P^T dO    dS = P * (dO V^T - D)    dQ += scale * dS K    dK += scale * dS^T Q

One block a key tile and query head; query tiles stream past it.  What several blocks add up goes to zeroed fp32
scratch and is converted to the data dtype at the end: dQ, and with grouped queries dK and dV.
"""

from __future__ import annotations

from iosim.dataflows.tiles import mask_edges, query_tiles
from iosim.index import cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "grid_order")
COMPUTES = "backward"


def flash_backward(a: Attention, s: Schedule) -> Program:
    """(dQ, dK, dV) from Q, K, V, O, dO and L, each like the tensor that it is the gradient of (dO like O)."""
    p, bq, bk = Builder("flash-backward"), s.block_q, s.block_k
    like_q, like_o = (a.batch, a.heads, a.n_q, a.d), (a.batch, a.heads, a.n_q, a.d_v)
    like_k, like_v = (a.batch, a.kv_heads, a.n_k, a.d), (a.batch, a.kv_heads, a.n_k, a.d_v)
    Q, dO = p.tensor("Q", like_q, a.dtype, "in"), p.tensor("dO", like_o, a.dtype, "in")
    K, V = p.tensor("K", like_k, a.dtype, "in"), p.tensor("V", like_v, a.dtype, "in")
    L = p.tensor("L", like_q[:3], "fp32", "in")
    D = p.tensor("D", like_q[:3], "fp32", "scratch")
    dQs = p.tensor("dQ sum", like_q, "fp32", "scratch")
    kind, dtype = (" sum", "fp32") if a.group > 1 else ("", a.dtype)
    dKs = p.tensor(f"dK{kind}", like_k, dtype, "scratch" if kind else "out")
    dVs = p.tensor(f"dV{kind}", like_v, dtype, "scratch" if kind else "out")
    _row_sums(p, a, bq, dO, D, dQs)
    if kind:
        _zero(p, bk, dKs, dVs)
    with p.kernel("gradients", b=a.batch, kv=a.kv_heads, g=a.group, j=cdiv(a.n_k, bk)) as (b, kv, g, j):
        h = kv * a.group + g
        k, v = p.load("k", K[b, kv, rows(j, bk)]), p.load("v", V[b, kv, rows(j, bk)])
        dk, dv = p.fill("dk", shape=(bk, a.d), value=0), p.fill("dv", shape=(bk, a.d_v), value=0)
        lo, left, right, hi = query_tiles(a, j, bq, bk)
        with p.loop("i", lo, hi) as i:
            q, do = p.load("q", Q[b, h, rows(i, bq)]), p.load("do", dO[b, h, rows(i, bq)])
            lse, di = p.load("lse", L[b, h, rows(i, bq)]), p.load("di", D[b, h, rows(i, bq)])
            with p.phase("qk"):
                x = p.matmul("x", q, k.T)
            with p.phase("dp"):
                dp = p.matmul("dp", do, v.T)
            with p.phase("softmax"):
                mask_edges(p, a, x, i, j, bq, bk, i, (lo, left, right, hi))
                p.exp(x, x, p.scale("top", lse, by=1 / a.scale), scale=a.scale)
                pr = p.cast("p", x, a.dtype)
            with p.phase("ds"):
                ds = p.cast("ds", p.mul(x, x, p.sub(dp, dp, di)), a.dtype)
            with p.phase("dv"):
                p.matmul(dv, pr.T, do, add=True)
            with p.phase("dq"):
                p.store(dQs[b, h, rows(i, bq)], p.matmul("dq", ds, k), add=True)
            with p.phase("dk"):
                p.matmul(dk, ds.T, q, add=True)
        p.store(dKs[b, kv, rows(j, bk)], p.scale(dk, dk, by=a.scale), add=bool(kind))
        p.store(dVs[b, kv, rows(j, bk)], dv, add=bool(kind))
    _convert(p, a, bq, dQs, "dQ", by=a.scale)
    if kind:
        _convert(p, a, bk, dKs, "dK")
        _convert(p, a, bk, dVs, "dV")
    return p.done()


def _row_sums(p: Builder, a: Attention, bq: int, dO: Tensor, D: Tensor, dQs: Tensor) -> None:
    """D = rowsum(dO * O); dQ starts from 0."""
    O = p.tensor("O", dO.shape, a.dtype, "in")
    with p.kernel("row sums", b=a.batch, h=a.heads, i=cdiv(a.n_q, bq)) as (b, h, i):
        o, do = p.load("o", O[b, h, rows(i, bq)]), p.load("do", dO[b, h, rows(i, bq)])
        p.store(D[b, h, rows(i, bq)], p.rowsum("di", p.mul("product", o, do)))
        p.store(dQs[b, h, rows(i, bq)], p.fill("zero", shape=(bq, a.d), value=0))


def _zero(p: Builder, block: int, *tensors: Tensor) -> None:
    """Give (batch, heads, n, d) tensors of one n a base to add to."""
    batch, heads, n, _ = tensors[0].shape
    with p.kernel("zero", b=batch, h=heads, j=cdiv(n, block)) as (b, h, j):
        for t in tensors:
            p.store(t[b, h, rows(j, block)], p.fill(f"no {t.name}", shape=(block, t.shape[3]), value=0))


def _convert(p: Builder, a: Attention, block: int, sums: Tensor, name: str, by: float = 1) -> None:
    """An output in the data dtype from (batch, heads, n, d) sums in fp32."""
    out = p.tensor(name, sums.shape, a.dtype, "out")
    with p.kernel(f"convert {name}", b=sums.shape[0], h=sums.shape[1], j=cdiv(sums.shape[2], block)) as (b, h, j):
        x = p.load("sum", sums[b, h, rows(j, block)])
        p.store(out[b, h, rows(j, block)], p.cast("out", x if by == 1 else p.scale(x, x, by=by), a.dtype))
