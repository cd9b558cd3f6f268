"""FlashAttention: K and V tiles outside, Q tiles inside; O and the row statistics are read and written in every step.

Dao et al. 2022 (arXiv 2205.14135), Algorithm 1 as written: its B_c is `block_k`, its B_r `block_q`.  One block a batch
and query head.  O stays normalised, in the data dtype, and so is rounded once for every key tile; maximum m and
denominator l go through device memory in fp32.  With `splits`, as many blocks share a head, each with a run of its
query tiles, as FlashAttention 1.0 has it.  The first pass starts from nothing and visits every query tile, so
that rows that see no key become 0; later ones leave out query tiles that see no key of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from math import inf
from typing import TYPE_CHECKING, Any

from iosim.dataflows.tiles import mask_edges, query_tiles
from iosim.dtypes import dtype
from iosim.index import cdiv, least, most
from iosim.memory.onchip import Footprint, footprints
from iosim.problem import Attention
from iosim.program import Builder, Program, Tensor, rows
from iosim.schedule import MAX_BLOCK, MAX_GROUPS, Schedule

if TYPE_CHECKING:
    from iosim.dataflows import Rule
    from iosim.hardware import Hardware

USES = ("block_q", "block_k", "splits")
BACKWARD = "flash-backward"
STEP = 16  # rows of a matrix instruction's tile


def flash1(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    p, bq, bk, heads = Builder("flash1"), s.block_q, s.block_k, (a.batch, a.heads)
    q_tiles, k_tiles = cdiv(a.n_q, bq), cdiv(a.n_k, bk)
    Q = p.tensor("Q", (*heads, a.n_q, a.d), a.dtype, "in")
    K = p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in")
    V = p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in")
    O = p.tensor("O", (*heads, a.n_q, a.d_v), a.dtype, "out")
    M = p.tensor("m", (*heads, a.n_q), "fp32", "scratch")
    D = p.tensor("l", (*heads, a.n_q), "fp32", "scratch")
    run = cdiv(q_tiles, s.splits)  # of query tiles; no block is left without one
    grid = {"b": a.batch, "kv": a.kv_heads, "g": a.group} | ({"part": cdiv(q_tiles, run)} if s.splits > 1 else {})
    with p.kernel("attention", operands_once=False, **grid) as (b, kv, g, *part), p.loop("j", 0, k_tiles) as j:
        h = kv * a.group + g
        k = p.load("k", K[b, kv, rows(j, bk)])
        v = p.load("v", V[b, kv, rows(j, bk)])
        lo, left, right, hi = query_tiles(a, j, bq, bk)
        if a.causal:
            lo = least(lo, j * q_tiles)  # 0 in the first pass
        if a.window is not None:
            hi = most(hi, (1 - j) * q_tiles)  # all of them in the first pass
        edges, ends = (lo, left, right, hi), (lo, hi)
        if part:  # tiles are counted from the first one of the run
            edges = lo - part[0] * run, left - part[0] * run, right - part[0] * run, hi - part[0] * run
            first = least(run, most(0, edges[0]))
            ends = first, most(first, least(run, edges[3]))
        with p.loop("i", *ends) as step:
            i = step + part[0] * run if part else step
            q = p.load("q", Q[b, h, rows(i, bq)])
            with p.when(j, 1, k_tiles):
                o = p.load("o", O[b, h, rows(i, bq)])
                m = p.load("m", M[b, h, rows(i, bq)])
                l = p.load("l", D[b, h, rows(i, bq)])
            with p.phase("clear"), p.when(j, 0, 1):
                p.fill(o, shape=o.shape, value=0)
            with p.phase("start"), p.when(j, 0, 1):
                p.fill(m, shape=m.shape, value=-inf)
                p.fill(l, shape=l.shape, value=0)
            with p.phase("qk"):
                x = p.matmul("x", q, k.T)
            with p.phase("softmax"):
                mask_edges(p, a, x, i, j, bq, bk, step, edges)
                top = p.rowmax("top", x)
                p.exp(x, x, top, scale=a.scale)
                new = p.max("new", m, top)
                grow = p.exp("grow", top, new, scale=a.scale)
                p.mul(l, l, p.exp("shrink", m, new, scale=a.scale))
                total = p.add("total", l, p.mul("part", grow, p.rowsum("sum", x)))
                pr = p.cast("p", x, a.dtype)
            with p.phase("pv"):
                y = p.matmul("y", pr, v)
            with p.phase("update"):
                p.store(M[b, h, rows(i, bq)], new)
                p.store(D[b, h, rows(i, bq)], total)
                old = p.mul("old", o, l)
                p.store(O[b, h, rows(i, bq)], p.div(old, p.add(old, old, p.mul(y, y, grow)), total))
    if a.lse:
        _log_sum_exp(p, a, bq, M, D)
    return p.done()


def _log_sum_exp(p: Builder, a: Attention, bq: int, M: Tensor, D: Tensor) -> None:
    """L = m * scale + log l, in a kernel of its own."""
    L = p.tensor("L", (a.batch, a.heads, a.n_q), "fp32", "out")
    with p.kernel("log-sum-exp", b=a.batch, h=a.heads, i=cdiv(a.n_q, bq)) as (b, h, i):
        m = p.load("m", M[b, h, rows(i, bq)])
        l = p.load("l", D[b, h, rows(i, bq)])
        p.store(L[b, h, rows(i, bq)], p.add("lse", p.scale("ms", m, by=a.scale), p.log("ln", l)))


def plan(a: Attention, hardware: Hardware, given: Mapping[str, Any], rule: Rule) -> tuple[Schedule, str]:
    """The paper's tiles: block_k = ceil(M / 4d), block_q = min(block_k, d), in steps of a matrix instruction's tile.

    M is the SRAM left after staging and statistics, in elements of the data dtype; for 4d, a row of Q, K, V and O
    stands.  One buffer of each tile, as the algorithm has no prefetch; as many warp groups as hold the scores in
    registers.
    """
    row, size = 2 * (a.d + a.d_v), dtype(a.dtype).bytes
    largest = min(cdiv(hardware.sram.block_capacity_bytes // size, row), a.n_k + STEP - 1, MAX_BLOCK)
    settled: dict[str, Any] = {}
    for block_k in [given["block_k"]] if "block_k" in given else range(_step(largest), 0, -STEP):
        block_q = _step(min(block_k, a.d, a.n_q + STEP - 1))
        for groups in (1, 2, 4, MAX_GROUPS):
            settled = {"block_q": block_q, "block_k": block_k, "stages": (1,), "groups": groups, **given}
            s = Schedule(**settled)
            prints = footprints(flash1(a, s), s, hardware)
            room = _room(prints["attention"]) // size
            if block_k <= max(given.get("block_k", 0), _step(cdiv(room, row))) and all(f.fits for f in prints.values()):
                s, why = rule(**settled)
                own = {"block_q", "block_k", "stages"} - given.keys()
                return s, _why(a, s, own, room, min(_step(largest), _step(cdiv(room, row)))) if own else why
    return rule(**settled)


def _step(n: int) -> int:
    return max(STEP, n // STEP * STEP)


def _room(f: Footprint) -> int:
    """Bytes of SRAM that are left for Q, K, V and O."""
    return f.sram_capacity - sum(n for name, n in f.items.items() if name.split()[0] not in ("q", "k", "v", "o"))


def _why(a: Attention, s: Schedule, own: AbstractSet[str], room: int, paper: int) -> str:
    """Which rule chose the fields `own` of schedule `s`; `paper` is the paper's block_k for a `room` of M elements."""
    keys = f"block_k {s.block_k} as given"
    if "block_k" in own:
        row = "4d" if a.d == a.d_v else "2(d + d_v)"
        least = "" if s.block_k == paper else ", reduced until it fits"
        least = ", no more than there are keys" if s.block_k >= a.n_k else least
        keys = f"block_k {s.block_k} is ceil(M / {row}) in steps of {STEP}{least} (M = {room:,} elements of SRAM)"
    queries = f"block_q {s.block_q} {'is min(block_k, d)' if 'block_q' in own else 'as given'}"
    return f"{keys}; {queries}; {'the one stage of the algorithm' if 'stages' in own else 'stages as given'}"
