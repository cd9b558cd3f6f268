"""FlashAttention backward: P recomputed from the log-sum-exp; dK and dV summed on chip, dQ by fp32 adds in memory.

Dao 2023 (arXiv 2307.08691), Algorithm 2.  With D = rowsum(dO * O), tile by tile:

    P = exp(scale * Q K^T - L)    dV += P^T dO    dS = P * (dO V^T - D)    dQ += scale * dS K    dK += scale * dS^T Q

One block a key tile and query head; query tiles stream past it.  What several blocks add up goes to zeroed fp32
scratch and is converted to the data dtype at the end: dQ, and with grouped queries dK and dV.

What changed the scores changes them again: a soft-cap's slope, 1 - (score / cap)^2, multiplies dS.  Dropout makes the
same random numbers anew from each weight's place, for P and for dP; no mask is read.  A bias has a gradient too, dS
before that slope: stored tile by tile where every batch and head has a bias of its own, else added up in fp32.  That
of a sink is minus the sum of D times its weight, exp(sink - L): of L and D alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from iosim.dataflows.tiles import Edges, Scores, cap_slope, drop, is_masked, mask_edges, query_runs, sinks_of
from iosim.index import Ex, Index, cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Span, Tensor, Tile, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "grid_order")
COMPUTES = "backward"
TAKES = ("soft-cap", "ALiBi", "bias", "sinks", "global tokens", "dropout", "block mask")


def flash_backward(a: Attention, s: Schedule) -> Program:
    """(dQ, dK, dV) from Q, K, V, O, dO and L, each like the tensor that it is the gradient of (dO like O).

    With a bias and with sinks, which are inputs then, dbias and dsinks too.
    """
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
    scores = Scores.of(p, a)
    dB = _bias_gradient(p, a, bq, bk)
    _row_sums(p, a, bq, dO, D, dQs)
    if kind:
        _zero(p, bk, dKs, dVs)
    _gradients(p, s, _Operands(Q, K, V, dO, L, D, scores), _Sums(dQs, dKs, dVs, dB))
    _convert(p, a, bq, dQs, "dQ", by=a.scale)
    if kind:
        _convert(p, a, bk, dKs, "dK")
        _convert(p, a, bk, dVs, "dV")
    if (sinks := sinks_of(p, a)) is not None:
        _sink_gradient(p, a, bq, sinks, L, D)
    if dB is not None and dB.role == "scratch":
        _convert(p, a, bq, dB, "dbias", columns=bk)
    return p.done()


@dataclass(frozen=True, slots=True)
class _Operands:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    row_sums: Tensor
    scores: Scores


@dataclass(frozen=True, slots=True)
class _Sums:
    """Where gradients go; `dbias` is None without a bias."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None

    def store_bias(self, p: Builder, a: Attention, b: Ex, h: Ex, at: tuple[Span, Span], ds: Tile) -> None:
        """A tile of the bias's gradient, alone or as a part of it."""
        if self.dbias is not None:
            head = 0 if a.bias == "shared" else h
            p.store(self.dbias[b if a.bias == "full" else 0, head, *at], ds, add=a.bias != "full")


def _gradients(p: Builder, s: Schedule, of: _Operands, to: _Sums) -> None:
    """The kernel that all others are about."""
    a, bq, bk = of.scores.attention, s.block_q, s.block_k
    with p.kernel("gradients", b=a.batch, kv=a.kv_heads, g=a.group, j=cdiv(a.n_k, bk)) as (b, kv, g, j):
        h = kv * a.group + g
        k, v = p.load("k", of.k[b, kv, rows(j, bk)]), p.load("v", of.v[b, kv, rows(j, bk)])
        dk, dv = p.fill("dk", shape=(bk, a.d), value=0), p.fill("dv", shape=(bk, a.d_v), value=0)
        for name, edges in query_runs(a, j, bq, bk):
            with p.loop(name, edges[0], edges[3]) as i:
                q, do = p.load("q", of.q[b, h, rows(i, bq)]), p.load("do", of.do[b, h, rows(i, bq)])
                lse, di = p.load("lse", of.lse[b, h, rows(i, bq)]), p.load("di", of.row_sums[b, h, rows(i, bq)])
                bias = of.scores.load(p, b, h, i, j, bq, bk)
                with p.phase("qk"):
                    x = p.matmul("x", q, k.T)
                with p.phase("dp"):
                    dp = p.matmul("dp", do, v.T)
                with p.phase("softmax"):
                    slope, keep = _weights(p, of.scores, x, bias, lse, b, h, i, j, bq, bk, edges)
                    pr = p.cast("p", x if keep is None else p.mul("kept", x, keep), a.dtype)
                with p.phase("ds"):
                    if keep is not None:
                        p.scale(dp, p.mul(dp, dp, keep), by=1 / (1 - a.dropout))
                    p.mul(x, x, p.sub(dp, dp, di))
                    to.store_bias(p, a, b, h, (rows(i, bq), rows(j, bk)), x)
                    ds = p.cast("ds", x if slope is None else p.mul(x, x, slope), a.dtype)
                with p.phase("dv"):
                    p.matmul(dv, pr.T, do, add=True)
                with p.phase("dq"):
                    p.store(to.dq[b, h, rows(i, bq)], p.matmul("dq", ds, k), add=True)
                with p.phase("dk"):
                    p.matmul(dk, ds.T, q, add=True)
        summed = to.dk.role == "scratch"
        p.store(to.dk[b, kv, rows(j, bk)], p.scale(dk, dk, by=a.scale), add=summed)
        p.store(to.dv[b, kv, rows(j, bk)], p.scale(dv, dv, by=1 / (1 - a.dropout)) if a.dropout else dv, add=summed)


def _weights(
    p: Builder, scores: Scores, x: Tile, bias: Tile | None, lse: Tile, b: Ex, h: Ex, i: Index, j: Ex, bq: int, bk: int,
    edges: Edges,
) -> tuple[Tile | None, Tile | None]:  # fmt: skip
    """Make scores weights in place; the slope of a soft-cap, and 1 where dropout keeps a weight (None without them)."""
    a = scores.attention
    by = scores.cap(p, x, a.scale)
    slope = cap_slope(p, a, x)
    by = scores.add(p, x, bias, h, i, j, bq, bk, by)
    mask_edges(p, a, x, i, j, bq, bk, i, edges)
    p.exp(x, x, lse if by == 1 else p.scale("top", lse, by=1 / by), scale=by)
    if not a.dropout:
        return slope, None
    keep = p.fill("keep", shape=x.shape, value=1)
    drop(p, a, keep, b, h, i, j, bq, bk)
    return slope, keep


def _bias_gradient(p: Builder, a: Attention, bq: int, bk: int) -> Tensor | None:
    """Where tiles of the bias's gradient go: fp32 sums, or where none has several parts the gradient itself.

    It starts from 0 where there are sums, and where a mask leaves tiles out.
    """
    if a.bias is None:
        return None
    whole = a.bias == "full"
    dB = p.tensor(
        "dbias" if whole else "dbias sum",
        a.bias_shape,
        a.out_dtype if whole else "fp32",
        "out" if whole else "scratch",
    )
    if not whole or is_masked(a):
        batch, heads, n, keys = dB.shape
        with p.kernel("zero dbias", b=batch, h=heads, i=cdiv(n, bq), j=cdiv(keys, bk)) as (b, h, i, j):
            p.store(dB[b, h, rows(i, bq), rows(j, bk)], p.fill("no dbias", shape=(bq, bk), value=0))
    return dB


def _sink_gradient(p: Builder, a: Attention, bq: int, sinks: Tensor, L: Tensor, D: Tensor) -> None:
    """The gradient of each head's sink."""
    out = p.tensor("dsinks", (a.heads,), "fp32", "out")
    with p.kernel("dsinks", h=a.heads) as (h,):
        sink = p.load("sink", sinks[rows(h, 1)])
        total = p.fill("total", shape=(1, 1), value=0)
        with p.loop("b", 0, a.batch) as b, p.loop("n", 0, cdiv(a.n_q, bq)) as n:
            lse, di = p.load("lse", L[b, h, rows(n, bq)]), p.load("di", D[b, h, rows(n, bq)])
            with p.phase("sum"):
                top = p.max("top", lse, sink)  # L, and in rows beyond n_q, where D is 0, nothing that overflows
                part = p.mul("part", p.exp("weight", sink, top), di)
                p.sub(total, total, p.rowsum("sum", part.T))
        p.store(out[rows(h, 1)], total)


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


def _convert(
    p: Builder, a: Attention, block: int, sums: Tensor, name: str, by: float = 1, columns: int | None = None
) -> None:
    """An output in the data dtype from (batch, heads, n, d) sums in fp32, on tiles of so many `columns`, or all."""
    out = p.tensor(name, sums.shape, a.dtype, "out")
    batch, heads, n, width = sums.shape
    columns = columns or width
    grid = {"b": batch, "h": heads, "j": cdiv(n, block)} | ({"c": cdiv(width, columns)} if columns < width else {})
    with p.kernel(f"convert {name}", **grid) as (b, h, j, *c):
        view: tuple[Ex | Span, ...] = (b, h, rows(j, block), *(rows(at, columns) for at in c))
        x = p.load("sum", sums[view])
        p.store(out[view], p.cast("out", x if by == 1 else p.scale(x, x, by=by), a.dtype))
