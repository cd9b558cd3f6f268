"""Multi-head latent attention with absorbed matrices: all heads share one latent, which is K and, in part, V.

DeepSeek-AI 2024 (arXiv 2405.04434, section 2.1).  The matrix that makes a head's keys from the latent is absorbed into
its query, the one that makes its values into the output: a query of d = 512 + 64 then meets the cache itself, one row
of 512 latent numbers and 64 of the rotated key for each token, and V is the first d_v = 512 columns of K.  So each tile
is loaded once, and serves both products.

In decoding (one query) the rows of a tile are heads, of which all read the same keys: the cache is read once for
block_q of them.  The keys are then dealt to `splits` blocks, as in split-kv.  In prefill the rows are queries of one
head.  Without absorption it is plain attention (flash2, split-kv) of d = 192 and d_v = 128 with as many key/value heads
as heads, whose K and V take heads * (192 + 128) numbers a token where the latent takes 576.

Scores are scaled by 1 / sqrt(d) of the problem, where a model scales by its 192: other values, the same bytes and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from iosim.dataflows.split_kv import COMBINED, MOST, combine
from iosim.dataflows.tiles import key_tiles, mask_edges
from iosim.dtypes import dtype
from iosim.index import cdiv, least, most
from iosim.memory.onchip import CapacityError
from iosim.problem import Attention
from iosim.program import Builder, Program, Span, rows
from iosim.schedule import Schedule

if TYPE_CHECKING:
    from iosim.dataflows import Also, Rule
    from iosim.hardware import Hardware

ROWS = (64, 32, 16)  # heads in a tile
USES = ("block_q", "block_k", "splits", "grid_order")


def refuses(a: Attention) -> str:
    """Why a problem is no latent attention; empty where it is."""
    if a.n_q == 1 and (a.window is not None or (a.causal and a.diagonal < a.n_k - 1)):
        return "n_q: mla is not written for a mask that hides keys from the one query of a decoding step"
    if a.kv_heads != 1 or a.d_v >= a.d:
        field, have = ("kv_heads", a.kv_heads) if a.kv_heads != 1 else ("d_v", a.d_v)
        return (
            f"{field}: mla is not written for {field} {have}: all heads share one key/value head, whose V is the first "
            f"d_v columns of K (--kv-heads 1 --d 576 --d-v 512)"
        )
    return ""


def mla(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes and the splits of schedule `s`."""
    p, bq, bk = Builder("mla"), s.block_q, s.block_k
    Q = p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in")
    K = p.tensor("K", (a.batch, 1, a.n_k, a.d), a.dtype, "in")
    parts = s.splits > 1
    if parts:
        O = p.tensor("O parts", (s.splits, a.batch, a.heads, a.n_q, a.d_v), "fp32", "scratch")
        L = p.tensor("L parts", (s.splits, a.batch, a.heads, a.n_q), "fp32", "scratch")
    else:
        O = p.tensor("O", (a.batch, a.heads, a.n_q, a.d_v), a.dtype, "out")
        L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out") if a.lse else O
    if decoding := a.n_q == 1:
        a = replace(a, causal=False)  # it hides nothing, and rows are no queries
    latent, turned = Span(0, a.d_v), Span(a.d_v, a.d - a.d_v)  # columns
    run = cdiv(cdiv(a.n_k, bk), s.splits)  # key tiles of a split
    grid = {"i": cdiv(a.heads, bq)} if decoding else {"h": a.heads, "i": cdiv(a.n_q, bq)}
    with p.kernel("parts" if parts else "attention", b=a.batch, **grid, t=s.splits) as (b, *at, t):
        i = at[-1]
        place = (b, rows(i, bq), 0) if decoding else (b, at[0], rows(i, bq))
        to = (t, *place) if parts else place
        qc, qr = p.load("qc", Q[(*place, latent)]), p.load("qr", Q[(*place, turned)])
        m = p.fill("m", shape=(bq, 1), value=-inf)
        l = p.fill("l", shape=(bq, 1), value=0)
        o = p.fill("o", shape=(bq, a.d_v), value=0)
        lo, *_, hi = edges = key_tiles(a, 0 if decoding else i, bq, bk)
        with p.loop("j", most(lo, t * run), least(hi, (t + 1) * run)) as j:
            c = p.load("c", K[b, 0, rows(j, bk), latent])
            r = p.load("r", K[b, 0, rows(j, bk), turned])
            with p.phase("qk"):
                x = p.matmul("x", qc, c.T)
                p.matmul(x, qr, r.T, add=True)
            with p.phase("softmax"):
                mask_edges(p, a, x, 0 if decoding else i, j, bq, bk, j, edges)
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
                p.matmul(o, pr, c, add=True)
        p.store(O[to], p.div("out", o, l))
        if L is not O:
            p.store(L[to], p.add("lse", p.scale("ms", m, by=a.scale), p.log("ln", l)))
    if parts:
        combine(p, a, s, O, L, over_heads=decoding)
    return p.done()


def plan(a: Attention, hardware: Hardware, given: Mapping[str, Any], rule: Rule) -> tuple[Schedule, str]:
    """The general rule's tile, in decoding the tallest; two warp groups share its rows, and splits fill the machine.

    64 x 512 sums of O are more than one warp group's registers hold: each of the two has all rows, and half of the
    columns (as in DeepSeek's FlashMLA).  In decoding the splits are those with the fewest bytes loaded in a row.
    """

    def also(s: Schedule) -> Mapping[str, Any]:
        groups = {} if "groups" in given else {"groups": 2, "along_rows": {"qk": 1, "pv": 1}}
        return groups if "splits" in given or a.n_q > 1 else {**groups, "splits": _splits(a, hardware, s)}

    if a.n_q > 1 or "block_q" in given:
        s, why = rule(also)
    else:
        s, why = _tallest(a, also, rule)
    return s, f"{why}; two warp groups share its rows" if s.groups == 2 else why


def _tallest(a: Attention, also: Also, rule: Rule) -> tuple[Schedule, str]:
    """The most heads in a tile that fit, as each tile reads the cache once; splits then fill the machine."""
    tried = [tall for tall in ROWS if tall < 2 * max(a.heads, ROWS[-1])]
    for tall in tried:
        try:
            s, why = rule(also, rows=(tall,))
        except CapacityError:
            if tall == tried[-1]:
                raise
        else:
            return s, f"block_q {tall} heads, the most that fit; {why.partition('; ')[2]}; {s.splits} splits"
    raise AssertionError("the last one returns or raises")


def _splits(a: Attention, hardware: Hardware, s: Schedule) -> int:
    """No processor gets a second block by splitting; of these the fewest bytes: of keys, then of results."""
    tiles, blocks = int(cdiv(a.n_k, s.block_k)), a.batch * int(cdiv(a.heads, s.block_q))
    room = max(1, min(tiles, MOST, (hardware.processors or 1) // blocks))
    keys, results = s.block_k * a.d * dtype(a.dtype).bytes, min(s.block_q, COMBINED) * (a.d_v + 1) * 4
    return min(range(1, room + 1), key=lambda n: int(cdiv(tiles, n)) * keys + (n * results if n > 1 else 0))
