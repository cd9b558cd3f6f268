"""Standard attention: three kernels, S = Q K^T and P = softmax(S) written to device memory.

A library's matrix product, row softmax and matrix product.  The products run in square-ish output tiles over
steps of the inner dimension.  The softmax keeps a row on chip where it fits; a longer row is read three times, or
twice by the kinds "naive" and "online" (see row_softmax).  A mask saves no work here: it is applied by the softmax.
S and P are stored in the data dtype, or in fp32, and then P is cast for the second product.

A library may run as kernels of their own ("scale", "copy" and "mask" among the schedule's `separate`) the scaling of
Q, a copy of each operand into the layout that its products take, and the mask; and it may walk the scores in bands.

A soft-cap, ALiBi and a bias are applied to scores before they are stored.  Dropout is a kernel of its own, which reads
P and writes it again, with a byte an element that the gradient needs.

In fp8 (the baseline of FlashAttention-3's Table 3) a head's Q, K and V have one scale each, S is in fp16, and P in fp8,
multiplied by 2^8.
"""

from __future__ import annotations

from math import gcd

from iosim.dataflows.elementwise import STRIDED, elementwise, tiling
from iosim.dataflows.row_softmax import row_softmax
from iosim.dataflows.tiles import GAIN, Scores, drop, is_masked, mask_keys, operand, operands, sinks_of
from iosim.errors import InputError
from iosim.index import cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, rows
from iosim.schedule import Schedule

USES = ("block_q", "block_k", "block_d", "softmax", "softmax_rows", "softmax_cols", "scores", "separate", "band")
BACKWARD = "standard-backward"
TAKES = ("fp8", "fp16 accumulator", "soft-cap", "ALiBi", "bias", "sinks", "global tokens", "dropout", "block mask")


def standard(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    if a.is_fp8 and s.separate:
        raise InputError(f"separate: {', '.join(s.separate)}: fp8 is scaled, copied and masked by no kernel of its own")
    p = Builder("standard")
    Q, K, V = operands(p, a)
    if a.is_fp8:
        SQ, SK, SV = p.scales("SQ", Q, a.n_q), p.scales("SK", K, a.n_k), p.scales("SV", V, a.n_k)
    changes, sinks = Scores.of(p, a), sinks_of(p, a)
    matrix = (a.batch, a.heads, a.n_q, a.n_k)
    S = p.tensor("S", matrix, s.scores_dtype(a.score_dtype), "scratch")
    P = p.tensor("P", matrix, s.scores_dtype(a.dtype), "scratch")
    O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.out_dtype, "out")
    L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out") if a.lse else None
    if "copy" in s.separate:
        Q, K, V = (_copied(p, a, X) for X in (Q, K, V))
    scaled = "scale" in s.separate
    if scaled:
        before, Q = Q, p.tensor("Q scaled", Q.shape, a.dtype, "scratch")
        elementwise(p, "scale", Q, (before,), lambda q: p.scale("qs", q, by=a.scale))
    own = s.of("scores")
    bq, bk, step = own.block_q, own.block_k, own.block_d
    tiles, across = cdiv(a.n_q, bq), cdiv(a.n_k, bk)
    band = gcd(tiles, own.band)
    grid = {"b": a.batch, "kv": a.kv_heads, "g": a.group}
    grid |= {"i": tiles, "j": across} if band == 1 else {"above": tiles // band, "j": across, "i": band}

    with p.kernel("scores", operands_once=True, **grid) as (b, kv, g, *at):
        h = kv * a.group + g
        i, j = at if band == 1 else (at[0] * band + at[2], at[1])
        x = p.fill("x", shape=(bq, bk), value=0, dtype=a.accumulator)
        with p.loop("t", 0, cdiv(a.d, step)) as t:
            q = p.load("q", Q[b, h, rows(i, bq), rows(t, step)])
            k = p.load("k", K[b, kv, rows(j, bk), rows(t, step)])
            with p.phase("qk"):
                p.matmul(x, q, k.T, add=True)
        if a.is_fp8:
            p.mul(x, x, p.mul("sqk", p.load("sq", SQ[b, h, rows(0, 1)]), p.load("sk", SK[b, kv, rows(0, 1)])))
        if a.accumulator != "fp32" and changes.scale == 1:
            x = p.cast("wide", x, "fp32")
        bias = changes.load(p, b, h, i, j, bq, bk)
        left = changes.change(p, x, bias, h, i, j, bq, bk, 1 if scaled else a.scale)
        p.store(S[b, h, rows(i, bq), rows(j, bk)], p.scale("s", x, by=left))

    separate = "mask" in s.separate and is_masked(a)
    if separate:
        S = _masked(p, a, S)
    gain = GAIN if a.is_fp8 else 1
    row_softmax(p, a, s, s.softmax, S, P, L, sinks, once=True, gain=gain, masked=separate)

    if a.dropout:
        P = _dropped(p, a, P)

    _output(p, a, s, O, P, V, SV if a.is_fp8 else None)
    return p.done()


def _output(p: Builder, a: Attention, s: Schedule, O: Tensor, P: Tensor, V: Tensor, SV: Tensor | None) -> None:
    """The kernel O = P V; `SV` are the scales of V in fp8."""
    own = s.of("output")
    bq, step, cols = own.block_q, own.block_d, min(own.block_k, a.d_v)
    grid = {"b": a.batch, "kv": a.kv_heads, "g": a.group, "i": cdiv(a.n_q, bq), "c": cdiv(a.d_v, cols)}
    with p.kernel("output", operands_once=True, **grid) as (b, kv, g, i, c):
        h = kv * a.group + g
        o = p.fill("o", shape=(bq, cols), value=0, dtype=a.accumulator)
        with p.loop("t", 0, cdiv(a.n_k, step)) as t:
            pr = p.load("p", P[b, h, rows(i, bq), rows(t, step)])
            v = p.load("v", V[b, kv, rows(t, step), rows(c, cols)])
            pr = operand(p, pr, a.dtype)
            with p.phase("pv"):
                p.matmul(o, pr, v, add=True)
        if SV is not None:
            p.mul(o, o, p.scale("sv / gain", p.load("sv", SV[b, kv, rows(0, 1)]), by=1 / GAIN / (1 - a.dropout)))
        p.store(O[b, h, rows(i, bq), rows(c, cols)], o)


def _copied(p: Builder, a: Attention, X: Tensor) -> Tensor:
    """A copy of X, made by a kernel of its own."""
    copied = p.tensor(f"{X.name} copied", X.shape, a.dtype, "scratch")
    elementwise(p, f"copy {X.name}", copied, (X,), lambda x: p.cast("copied", x, a.dtype), STRIDED)
    return copied


def _masked(p: Builder, a: Attention, S: Tensor) -> Tensor:
    """S with the masks of `a`, made by a kernel of its own."""
    masked = p.tensor("S masked", S.shape, S.dtype, "scratch")
    grid, r, cols = tiling(S.shape, STRIDED)
    with p.kernel("mask", operands_once=True, **grid) as (b, h, i, j):
        view = b, h, rows(i, r), rows(j, cols)
        x = p.load("x", S[view])
        mask_keys(p, a, x, i, j, r, cols)
        p.store(masked[view], x)
    return masked


def _dropped(p: Builder, a: Attention, P: Tensor) -> Tensor:
    """P after dropout, made by a kernel of its own, and a byte an element that says what is kept, for the gradient."""
    dropped = p.tensor("P dropped", P.shape, P.dtype, "scratch")
    kept = p.tensor("kept", P.shape, "fp8_e4m3", "scratch")  # of one byte: 0 and 1
    grid, r, cols = tiling(P.shape)
    with p.kernel("dropout", operands_once=True, **grid) as (b, h, i, j):
        view = b, h, rows(i, r), rows(j, cols)
        x = p.load("x", P[view])
        one = p.fill("one", shape=(r, cols), value=1, dtype="fp8_e4m3")
        drop(p, a, one, b, h, i, j, r, cols)
        p.store(kept[view], one)
        y = p.mul("y", x, one)
        p.store(dropped[view], y if a.is_fp8 else p.scale(y, y, by=1 / (1 - a.dropout)))  # fp8 has no room: see output
    return dropped
