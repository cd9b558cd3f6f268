"""Softmax by rows of a matrix in device memory: a kernel that `standard` and the softmax dataflows share.

Three kinds, after Milakov and Gimelshein 2018 (arXiv 1805.02867), whose Algorithms 1 to 3 they are:

    naive   sum of exp(x); then exp(x) / sum.  Overflows on large scores
    safe    maximum; sum of exp(x - maximum); then exp(x - maximum) / sum
    online  maximum and sum in one pass, the sum rescaled where the maximum grows; then as the safe one

A row that fits in one tile is read once and written once, whatever the kind.  A longer one is read again in every
pass: 2 reads and a write of each element for the naive and the online kind, 3 and a write for the safe one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias

from iosim.dataflows.tiles import is_masked, mask_keys
from iosim.index import Ex, cdiv
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, Tile, View, rows
from iosim.schedule import Schedule


def softmax_alone(name: str, kind: str, a: Attention, s: Schedule) -> Program:
    """P = softmax(S) as a program; S, taken as it is, unscaled, and P (batch, heads, n_q, n_k) in the data dtype."""
    p = Builder(name)
    shape = (a.batch, a.heads, a.n_q, a.n_k)
    S = p.tensor("S", shape, a.dtype, "in")
    P = p.tensor("P", shape, a.dtype, "out")
    L = p.tensor("L", shape[:3], "fp32", "out") if a.lse else None
    row_softmax(p, a, s, kind, S, P, L)
    return p.done()


def row_softmax(
    p: Builder,
    a: Attention,
    s: Schedule,
    kind: str,
    S: Tensor,
    P: Tensor,
    L: Tensor | None,
    sinks: Tensor | None = None,
    *,
    once: bool = False,
    gain: int = 1,
    masked: bool = False,
) -> None:
    """The kernel: P = gain softmax(S) with the masks of `a`, and L = log(sum(exp(S))) by rows where it is asked for.

    `sinks`: a logit a head that counts in the sum.  `once`: the papers count the operands once (see Kernel).  `masked`:
    S has the masks already.
    """
    own = s.of("softmax")
    r, c = own.softmax_rows, own.softmax_cols
    with p.kernel("softmax", operands_once=once, b=a.batch, h=a.heads, i=cdiv(a.n_q, r)) as (b, h, i):

        def scores(name: str, j: Ex) -> Tile:
            x = p.load(name, S[b, h, rows(i, r), rows(j, c)])
            with p.phase(f"mask {name}"):
                if (not masked and is_masked(a)) or a.n_k % c:
                    mask_keys(p, a, x, i, j, r, c, visited=masked)
            return x

        def tile(j: Ex) -> View:
            return P[b, h, rows(i, r), rows(j, c)]

        def probabilities(e: Tile) -> Tile:
            p.div(e, e, l)
            return e if gain == 1 else p.scale(e, e, by=gain)

        sink = None if sinks is None else p.load("sink", sinks[rows(h, 1)])
        top = None if kind == "naive" else sink  # counts in the maximum
        if c >= a.n_k:
            x = scores("x", 0)
            m = p.fill("m", shape=(r, 1), value=0) if kind == "naive" else p.rowmax("m", x)
            if top is not None:
                p.max(m, m, top)
            e = p.exp("e", x, m)
            l = p.rowsum("l", e)
            _add_sink(p, l, m, sink)
            p.store(tile(0), probabilities(e))
        else:
            m = p.fill("m", shape=(r, 1), value=0 if kind == "naive" else -inf)
            if top is not None:
                p.max(m, m, top)
            l = p.fill("l", shape=(r, 1), value=0)
            _PASSES[kind](p, scores, m, l, cdiv(a.n_k, c))
            _add_sink(p, l, m, sink)
            with p.loop("j3", 0, cdiv(a.n_k, c)) as j:
                x = scores("x3", j)
                with p.phase("probabilities"):
                    e = p.exp("e3", x, m)
                    p.store(tile(j), probabilities(e))
        if L is not None:
            p.store(L[b, h, rows(i, r)], p.add("lse", m, p.log("ln", l)))


def _add_sink(p: Builder, l: Tile, m: Tile, sink: Tile | None) -> None:
    """The sink's weight in the sum l."""
    if sink is not None:
        p.add(l, l, p.exp("sink weight", sink, m))


Scores: TypeAlias = Callable[[str, Ex], Tile]


def _naive(p: Builder, scores: Scores, m: Tile, l: Tile, tiles: int) -> None:
    """The sum l of exp(x), for an m of 0."""
    with p.loop("j1", 0, tiles) as j:
        x = scores("x1", j)
        with p.phase("denominator"):
            p.add(l, l, p.rowsum("sum", p.exp("e1", x, m)))


def _safe(p: Builder, scores: Scores, m: Tile, l: Tile, tiles: int) -> None:
    """The maximum m in one pass, the sum l of exp(x - m) in another."""
    with p.loop("j1", 0, tiles) as j:
        x = scores("x1", j)
        with p.phase("maximum"):
            p.max(m, m, p.rowmax("top", x))
    with p.loop("j2", 0, tiles) as j:
        x = scores("x2", j)
        with p.phase("denominator"):
            p.add(l, l, p.rowsum("sum", p.exp("e2", x, m)))


def _online(p: Builder, scores: Scores, m: Tile, l: Tile, tiles: int) -> None:
    """The maximum m and the sum l of exp(x - m) in one pass."""
    with p.loop("j1", 0, tiles) as j:
        x = scores("x1", j)
        with p.phase("statistics"):
            new = p.max("new", m, p.rowmax("top", x))
            p.mul(l, l, p.exp("shrink", m, new))
            p.add(l, l, p.rowsum("sum", p.exp("e1", x, new)))
            p.copy(m, new)


_PASSES = {"naive": _naive, "safe": _safe, "online": _online}
