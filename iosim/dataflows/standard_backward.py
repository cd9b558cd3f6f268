"""Standard attention backward: five kernels over the P that the forward pass kept; dP and dS in device memory.

What a library does without fusion, with dO the gradient of O:

    dV = P^T dO    dP = dO V^T    dS = P * (dP - rowsum(dP * P))    dK = scale * dS^T Q    dQ = scale * dS K

A library may run as kernels of their own ("product", "copy" and "scale" among the schedule's `separate`) the product
P * dP before the softmax's gradient, which then reads it in place of dP; a copy of dK, which its product leaves
transposed; and the scaling of dQ.  Kernels run in the order above, that of PyTorch, which takes the gradient of a
product's second operand first; copies and scaling come last.

P, dP and dS are N x N matrices in the data dtype, or in fp32 and cast for the products.  Key/value heads that several
query heads share take the sum over these heads inside the product.  P is 0 where a mask hides a key, so that no mask is
applied again, and none saves work.

After dropout the forward pass has kept P with what is dropped taken out, which dV is made from, and a byte for each
weight; a kernel of its own takes the dropped ones out of dP.  The gradient of a bias is dS, added up over batches and
heads that share it.  The slope of a soft-cap, 1 - (score / cap)^2, multiplies dS after that; scores were not kept
without a bias in them, so that a product makes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iosim.dataflows.elementwise import STRIDED, elementwise, tiling
from iosim.dataflows.tiles import Scores, cap_slope, operand
from iosim.index import Ex, cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, Tile, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "block_d", "softmax_rows", "softmax_cols", "scores", "separate")
COMPUTES = "backward"
TAKES = ("soft-cap", "ALiBi", "bias", "global tokens", "dropout", "block mask")


def standard_backward(a: Attention, s: Schedule) -> Program:
    """(dQ, dK, dV) from Q, K, V, dO and P (batch, heads, n_q, n_k), each like the tensor that it is the gradient of.

    With dropout also from P dropped and what was kept of it, with a bias dbias too.
    """
    p = Builder("standard-backward")
    like_q, like_o = (a.batch, a.heads, a.n_q, a.d), (a.batch, a.heads, a.n_q, a.d_v)
    like_k, like_v = (a.batch, a.kv_heads, a.n_k, a.d), (a.batch, a.kv_heads, a.n_k, a.d_v)
    scores, kept = (a.batch, a.heads, a.n_q, a.n_k), s.scores_dtype(a.dtype)
    Q, dO = p.tensor("Q", like_q, a.dtype, "in"), p.tensor("dO", like_o, a.dtype, "in")
    K, V = p.tensor("K", like_k, a.dtype, "in"), p.tensor("V", like_v, a.dtype, "in")
    P = p.tensor("P", scores, kept, "in")
    dP, dS = p.tensor("dP", scores, kept, "scratch"), p.tensor("dS", scores, kept, "scratch")
    dQ = p.tensor("dQ", like_q, a.dtype, "out")
    dK, dV = p.tensor("dK", like_k, a.dtype, "out"), p.tensor("dV", like_v, a.dtype, "out")
    _over_queries(p, a, s, dV, p.tensor("P dropped", scores, kept, "in") if a.dropout else P, dO, 1)
    own = s.of("dP")
    bq, bk, step = own.block_q, own.block_k, own.block_d
    heads = {"b": a.batch, "kv": a.kv_heads, "g": a.group}
    with p.kernel("dP", operands_once=True, **heads, i=cdiv(a.n_q, bq), j=cdiv(a.n_k, bk)) as (b, kv, g, i, j):
        h = kv * a.group + g
        x = p.fill("x", shape=(bq, bk), value=0)
        with p.loop("t", 0, cdiv(a.d_v, step)) as t:
            do = p.load("do", dO[b, h, rows(i, bq), rows(t, step)])
            v = p.load("v", V[b, kv, rows(j, bk), rows(t, step)])
            with p.phase("product"):
                p.matmul(x, do, v.T, add=True)
        p.store(dP[b, h, rows(i, bq), rows(j, bk)], x)
    if a.dropout:
        dP = _dropped(p, a, dP)
    product = "product" in s.separate
    if product:
        PdP = p.tensor("P dP", scores, kept, "scratch")
        elementwise(p, "product", PdP, (P, dP), lambda pr, dp: p.mul(pr, pr, dp))
    _softmax_gradient(p, a, s, P, PdP if product else dP, dS, product=product)
    if a.bias is not None:
        _bias_gradient(p, a, dS)
    if a.softcap is not None:
        dS = _through_cap(p, a, s, Q, K, dS)
    copied = "copy" in s.separate
    strided = p.tensor("dK strided", like_k, a.dtype, "scratch") if copied else dK
    _over_queries(p, a, s, strided, dS, Q, a.scale)
    own = s.of("dQ")
    bq, step, cols = own.block_q, own.block_d, min(own.block_k, a.d)
    scaled = "scale" in s.separate
    made = p.tensor("dQ unscaled", like_q, a.dtype, "scratch") if scaled else dQ
    with p.kernel("dQ", operands_once=True, **heads, i=cdiv(a.n_q, bq), c=cdiv(a.d, cols)) as (b, kv, g, i, c):
        h = kv * a.group + g
        x = p.fill("x", shape=(bq, cols), value=0)
        with p.loop("t", 0, cdiv(a.n_k, step)) as t:
            ds = p.load("ds", dS[b, h, rows(i, bq), rows(t, step)])
            k = p.load("k", K[b, kv, rows(t, step), rows(c, cols)])
            ds = operand(p, ds, a.dtype)
            with p.phase("product"):
                p.matmul(x, ds, k, add=True)
        p.store(made[b, h, rows(i, bq), rows(c, cols)], p.scale("out", x, by=1 if scaled else a.scale))
    if copied:
        elementwise(p, "copy", dK, (strided,), lambda x: p.cast("copied", x, a.dtype), STRIDED)
    if scaled:
        elementwise(p, "scale", dQ, (made,), lambda x: p.scale("scaled", x, by=a.scale))
    return p.done()


def _dropped(p: Builder, a: Attention, dP: Tensor) -> Tensor:
    """dP without the weights that dropout took, the others divided by the share of those left."""
    kept = p.tensor("kept", dP.shape, "fp8_e4m3", "in")  # of one byte: 0 and 1
    out = p.tensor("dP dropped", dP.shape, dP.dtype, "scratch")

    def drop(dp: Tile, keep: Tile) -> Tile:
        return p.scale(dp, p.mul(dp, dp, keep), by=1 / (1 - a.dropout))

    elementwise(p, "dropout gradient", out, (dP, kept), drop)
    return out


def _bias_gradient(p: Builder, a: Attention, dS: Tensor) -> None:
    """The sum of dS over the batches and heads that share a bias, in a kernel of its own."""
    out = p.tensor("dbias", a.bias_shape, a.out_dtype, "out")
    grid, r, cols = tiling(out.shape)
    axes = {"n": a.batch if out.shape[0] == 1 else 1, "m": a.heads if out.shape[1] == 1 else 1}
    with p.kernel("dbias", operands_once=True, **grid) as (b, h, i, j):
        total = p.fill("total", shape=(r, cols), value=0)
        with _repeated(p, "n", axes["n"]) as n, _repeated(p, "m", axes["m"]) as m:
            ds = p.load("ds", dS[b + n, h + m, rows(i, r), rows(j, cols)])
            with p.phase("sum"):
                p.add(total, total, ds)
        p.store(out[b, h, rows(i, r), rows(j, cols)], total)


def _through_cap(p: Builder, a: Attention, s: Schedule, Q: Tensor, K: Tensor, dS: Tensor) -> Tensor:
    """dS times the slope of the soft-cap at scores that a product makes anew."""
    out = p.tensor("dS through cap", dS.shape, dS.dtype, "scratch")
    own = s.of("cap gradient")
    bq, bk, step = own.block_q, own.block_k, own.block_d
    grid = {"b": a.batch, "kv": a.kv_heads, "g": a.group, "i": cdiv(a.n_q, bq), "j": cdiv(a.n_k, bk)}
    with p.kernel("cap gradient", operands_once=True, **grid) as (b, kv, g, i, j):
        h = kv * a.group + g
        x = p.fill("x", shape=(bq, bk), value=0)
        with p.loop("t", 0, cdiv(a.d, step)) as t:
            q = p.load("q", Q[b, h, rows(i, bq), rows(t, step)])
            k = p.load("k", K[b, kv, rows(j, bk), rows(t, step)])
            with p.phase("qk"):
                p.matmul(x, q, k.T, add=True)
        Scores(a, None).cap(p, x, a.scale)
        slope = cap_slope(p, a, x)
        ds = p.load("ds", dS[b, h, rows(i, bq), rows(j, bk)])
        p.store(out[b, h, rows(i, bq), rows(j, bk)], ds if slope is None else p.mul(slope, slope, ds))
    return out


def _over_queries(p: Builder, a: Attention, s: Schedule, out: Tensor, A: Tensor, B: Tensor, by: float) -> None:
    """out = by * A^T B, summed over the query heads of a group; A (batch, heads, n_q, n_k), B (.., n_q, d or d_v)."""
    name = out.name.removesuffix(" strided")
    own, n = s.of(name), out.shape[3]
    bk, step, cols = own.block_k, own.block_d, min(own.block_k, n)
    grid = {"b": a.batch, "kv": a.kv_heads, "j": cdiv(a.n_k, bk), "c": cdiv(n, cols)}
    with p.kernel(name, operands_once=True, **grid) as (b, kv, j, c):
        x = p.fill("x", shape=(bk, cols), value=0)
        with _repeated(p, "g", a.group) as g, p.loop("t", 0, cdiv(a.n_q, step)) as t:
            left = p.load(A.name.lower(), A[b, kv * a.group + g, rows(t, step), rows(j, bk)])
            right = p.load(B.name.lower(), B[b, kv * a.group + g, rows(t, step), rows(c, cols)])
            left = operand(p, left, a.dtype)
            with p.phase("product"):
                p.matmul(x, left.T, right, add=True)
        p.store(out[b, kv, rows(j, bk), rows(c, cols)], x if by == 1 else p.scale("out", x, by=by))


@contextmanager
def _repeated(p: Builder, index: str, times: int) -> Iterator[Ex]:
    """A loop, over the query heads of a group for one; none for one time."""
    if times == 1:
        yield 0
    else:
        with p.loop(index, 0, times) as n:
            yield n


def _softmax_gradient(
    p: Builder, a: Attention, s: Schedule, P: Tensor, dP: Tensor, dS: Tensor, *, product: bool
) -> None:
    """dS = P * (dP - rowsum(dP * P)) by rows: in one pass where a row tile spans all keys, else in two.

    With `product` dP stands for P * dP, and dS = dP - P * rowsum(dP).
    """
    own = s.of("dS")
    r, c = own.softmax_rows, own.softmax_cols
    with p.kernel("dS", operands_once=True, b=a.batch, h=a.heads, i=cdiv(a.n_q, r)) as (b, h, i):

        def operands(n: str, j: Ex) -> tuple[Tile, Tile]:
            view = b, h, rows(i, r), rows(j, c)
            return p.load(f"p{n}", P[view]), p.load(f"dp{n}", dP[view])

        def row_sum(name: str, pr: Tile, dp: Tile) -> Tile:
            return p.rowsum(name, dp if product else p.mul("product", pr, dp))

        def output(pr: Tile, dp: Tile, total: Tile, j: Ex) -> None:
            if product:
                grad = p.sub("gradient", dp, p.mul("part", pr, total))
            else:
                grad = p.sub("shifted", dp, total)
                p.mul(grad, grad, pr)
            p.store(dS[b, h, rows(i, r), rows(j, c)], grad)

        if c >= a.n_k:
            pr, dp = operands("", 0)
            output(pr, dp, row_sum("total", pr, dp), 0)
            return
        total = p.fill("total", shape=(r, 1), value=0)
        with p.loop("j1", 0, cdiv(a.n_k, c)) as j:
            pr, dp = operands("1", j)
            with p.phase("row sum"):
                p.add(total, total, row_sum("sum", pr, dp))
        with p.loop("j2", 0, cdiv(a.n_k, c)) as j:
            pr, dp = operands("2", j)
            with p.phase("gradient"):
                output(pr, dp, total, j)
