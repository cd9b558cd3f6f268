"""The ledger against counts that share nothing with it: closed forms by hand, and walks over real arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from iosim.dataflows import dataflow_names, load_dataflow
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.flash_backward import flash_backward
from iosim.dataflows.standard import standard
from iosim.dtypes import dtype
from iosim.index import Ex, Index, at, least, most
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import Method, dram_flows
from iosim.memory.launch import requests
from iosim.memory.units import cut
from iosim.problem import Attention
from iosim.program import Builder, Compute, Load, Loop, Node, Program, Span, Store, Tensor, View
from iosim.schedule import Schedule
from tests.dataflow_checks import suited

if TYPE_CHECKING:
    from numpy.typing import NDArray

Dataflow: TypeAlias = Callable[[Attention, Schedule], Program]

# ---------------------------------------------------------------- the walk: block by block, node by node


class Walk:
    """Runs every block of a program in Python, slices arrays as a kernel would, and counts; no zeros."""

    def __init__(self, program: Program) -> None:
        self.by_tensor: dict[str, dict[str, int]] = {}
        self.work: dict[str, dict[str, int]] = {}
        self.touched: dict[int, NDArray[np.bool_]] = {}  # by the node's id: which elements of its tensor
        for kernel in program.kernels:
            self.kernel = kernel.name
            for block in product(*(range(n) for _, n in kernel.grid)):
                self.body(kernel.body, dict(zip((axis for axis, _ in kernel.grid), block, strict=True)))

    def body(self, body: tuple[Node, ...], env: dict[str, int]) -> None:
        for node in body:
            if isinstance(node, Loop):
                for value in range(at(node.lo, env), at(node.hi, env)):
                    self.body(node.body, {**env, node.index: value})
            elif node.when is None or at(node.when.lo, env) <= env[node.when.index] < at(node.when.hi, env):
                self.run(node, env)

    def run(self, node: Load | Store | Compute, env: dict[str, int]) -> None:
        if isinstance(node, Compute):
            for unit, amount in node.work.items():
                add(self.work, self.kernel, unit, amount)
            return
        tensor, part = node.view.tensor, []
        for ix in node.view.index:
            start, size = (at(ix.start, env), ix.size) if isinstance(ix, Span) else (at(ix, env), 1)
            part.append(slice(max(0, start), max(0, start + size)))
        mask = self.touched.setdefault(id(node), np.zeros(tensor.shape, bool))[tuple(part)]
        mask[...] = True
        direction = "read" if isinstance(node, Load) else "add" if node.add else "write"
        add(self.by_tensor, tensor.name, direction, mask.size * dtype(tensor.dtype).bytes)

    def touched_bytes(self, node: Load | Store) -> int:
        mask = self.touched.get(id(node))
        return 0 if mask is None else int(mask.sum()) * dtype(node.view.tensor.dtype).bytes


def add(table: dict[str, dict[str, int]], row: str, column: str, amount: int) -> None:
    if amount:
        cells = table.setdefault(row, {})
        cells[column] = cells.get(column, 0) + amount


def assert_agrees(program: Program, *, no_gaps: bool) -> None:
    counted, walk = ledger(program), Walk(program)
    assert counted.by_tensor == walk.by_tensor
    work = {kernel: {k: v for k, v in units.items() if v} for kernel, units in counted.work.items()}
    assert {kernel: units for kernel, units in work.items() if units} == walk.work
    for flow in counted.flows:
        touched = walk.touched_bytes(flow.node)
        assert touched <= flow.unique_bytes <= flow.hbm_bytes
        assert touched == flow.unique_bytes or not no_gaps


# ---------------------------------------------------------------- problems and schedules


@st.composite
def problems(draw: st.DrawFn, longest: int = 40) -> Attention:
    n_q = draw(st.integers(1, longest))
    kv_heads = draw(st.integers(1, 2))
    return Attention(
        n_q=n_q,
        n_k=draw(st.just(n_q) | st.integers(1, longest)),
        d=draw(st.sampled_from([1, 3, 8])),
        d_v=draw(st.sampled_from([1, 5, 8])),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        causal=draw(st.booleans()),
        causal_align=draw(st.sampled_from(["bottom-right", "top-left"])),
        dtype=draw(st.sampled_from(["fp16", "fp32"])),
        lse=draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn, largest: int = 17) -> Schedule:
    size = st.integers(1, largest)
    return Schedule(
        block_q=draw(size),
        block_k=draw(size),
        block_d=draw(size),
        softmax_rows=draw(st.integers(1, 3)),
        softmax_cols=draw(st.integers(1, 60)),
    )


# ---------------------------------------------------------------- closed forms by hand


def sees(a: Attention, query: int, key: int) -> bool:
    """Whether a query sees a key: FlashAttention's and PyTorch's definitions, from their documentation."""
    if not a.causal:
        return True
    return key <= query + (a.n_k - a.n_q if a.causal_align == "bottom-right" else 0)


def query_tiles(a: Attention, block_q: int) -> Iterator[range]:
    return (range(q, min(q + block_q, a.n_q)) for q in range(0, a.n_q, block_q))


def keys_streamed(a: Attention, s: Schedule) -> int:
    """Key rows that the query tiles of one head load: whole tiles, cut at n_k, up to the last one seen."""
    total = 0
    for tile in query_tiles(a, s.block_q):
        for k in range(0, a.n_k, s.block_k):
            if sees(a, tile[-1], k):
                total += min(k + s.block_k, a.n_k) - k
    return total


@given(problems(), schedules())
def test_flash2_moves_what_its_paper_says(a: Attention, s: Schedule) -> None:
    # Each query tile is loaded once and its output stored once; each query head streams its keys and values.
    counted, e, heads = ledger(flash2(a, s)), dtype(a.dtype).bytes, a.batch * a.heads
    keys = heads * keys_streamed(a, s) * e
    expected = {
        "Q": {"read": heads * a.n_q * a.d * e},
        "K": {"read": keys * a.d},
        "V": {"read": keys * a.d_v},
        "O": {"write": heads * a.n_q * a.d_v * e},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    assert counted.by_tensor == {name: row for name, row in expected.items() if any(row.values())}
    data = sum(v for name, row in expected.items() for v in row.values() if name != "L")
    assert counted.paper_hbm_bytes == data
    assert counted.extra_bytes == 0
    # Two products on whole tiles for each (query tile, key tile) pair.
    pairs = sum(sees(a, t[-1], k) for t in query_tiles(a, s.block_q) for k in range(0, a.n_k, s.block_k))
    assert counted.executed_flops == heads * pairs * 2 * s.block_q * s.block_k * (a.d + a.d_v)


@given(problems(), schedules())
def test_standard_moves_what_its_tiles_ask_for(a: Attention, s: Schedule) -> None:
    # scores: every (query tile, key tile) loads its rows of Q and K in full.  softmax: S once, or three times
    # where a row is longer than its tile.  output: every (query tile, column tile) loads its rows of P and V.
    counted, e, heads = ledger(standard(a, s)), dtype(a.dtype).bytes, a.batch * a.heads
    q_tiles, k_tiles = ceil(a.n_q / s.block_q), ceil(a.n_k / s.block_k)
    c_tiles = ceil(a.d_v / min(s.block_k, a.d_v))
    matrix = heads * a.n_q * a.n_k * e
    expected = {
        "Q": {"read": heads * a.n_q * a.d * k_tiles * e},
        "K": {"read": heads * a.n_k * a.d * q_tiles * e},
        "V": {"read": heads * a.n_k * a.d_v * q_tiles * e},
        "S": {"write": matrix, "read": matrix * (1 if s.softmax_cols >= a.n_k else 3)},
        "P": {"write": matrix, "read": matrix * c_tiles},
        "O": {"write": heads * a.n_q * a.d_v * e},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    assert counted.by_tensor == {name: row for name, row in expected.items() if any(row.values())}
    # The papers: S and P written and read once, Q and O once a query head, K and V once a key/value head.
    rows = a.heads * a.n_q * (a.d + a.d_v) + a.kv_heads * a.n_k * (a.d + a.d_v)
    assert counted.paper_hbm_bytes == 4 * matrix + a.batch * rows * e
    assert counted.extra_bytes == 2 * matrix


@given(problems(), schedules(), st.sampled_from([flash2, standard]), st.sampled_from(["simulated", "closed form"]))
def test_without_an_l2_dram_is_hbm_and_with_a_large_one_inputs_and_results_cross_once(
    a: Attention, s: Schedule, dataflow: Dataflow, method: Method
) -> None:
    program = dataflow(a, s)
    counted = ledger(program)
    none = dram_flows(program, counted, None, {})
    assert (none.dram_read_bytes, none.dram_write_bytes) == (counted.hbm_read_bytes, counted.hbm_write_bytes)
    assert (none.l2_read_bytes, none.l2_write_bytes) == (0, 0)

    resident = {kernel.name: 4 for kernel in program.kernels}
    large = dram_flows(program, counted, 2**40, resident, method=method)
    e, scores = dtype(a.dtype).bytes, a.batch * a.heads * a.n_q * a.n_k
    lse = 4 * a.batch * a.heads * a.n_q if a.lse else 0
    # Keys that some query sees, in whole tiles, cut at n_k: flash2 skips the tiles after them.
    seen = max((k + 1 for k in range(a.n_k) if sees(a, a.n_q - 1, k)), default=0)
    keys = a.n_k if dataflow is standard else min(a.n_k, ceil(seen / s.block_k) * s.block_k)
    inputs = a.batch * (a.heads * a.n_q * a.d + a.kv_heads * keys * (a.d + a.d_v)) * e
    output = a.batch * a.heads * a.n_q * a.d_v * e + lse
    matrix = scores * e if dataflow is standard else 0
    assert (large.dram_read_bytes, large.dram_write_bytes) == (inputs, output + 2 * matrix)
    assert (large.l2_read_bytes, large.l2_write_bytes) == (counted.hbm_read_bytes, counted.hbm_write_bytes)


@given(
    problems(),
    schedules(),
    st.sampled_from([flash2, standard, flash_backward]),
    st.integers(1, 20),
    st.integers(0, 4000),
    st.integers(1, 3),
    st.sampled_from(["simulated", "closed form"]),
)
def test_an_l2_never_adds_traffic_nor_goes_below_what_is_compulsory(
    a: Attention, s: Schedule, dataflow: Dataflow, blocks: int, size: int, partitions: int, method: Method
) -> None:
    # A larger cache, or fewer replicas, may well read more: which units share a set changes.
    program = dataflow(a, s)
    counted = ledger(program)
    resident = {kernel.name: blocks for kernel in program.kernels}
    behind = dram_flows(program, counted, size, resident, partitions=partitions, method=method)
    all_fits = dram_flows(program, counted, 2**40, resident, method="simulated")
    slack = len(counted.flows) if method == "closed form" else 0  # it rounds each flow
    assert all_fits.dram_read_bytes - slack <= behind.dram_read_bytes <= counted.hbm_read_bytes + counted.hbm_add_bytes
    assert all_fits.dram_write_bytes <= behind.dram_write_bytes <= counted.hbm_write_bytes + counted.hbm_add_bytes
    for f in behind.flows:
        assert f.dram_read_bytes <= (f.flow.hbm_bytes if f.flow.direction != "write" else 0)
        assert f.dram_write_bytes <= (f.flow.hbm_bytes if f.flow.direction != "read" else 0)


@pytest.mark.parametrize("name", dataflow_names())
@settings(max_examples=10, deadline=None)
@given(problems(longest=24), schedules(largest=9), st.integers(64, 600))
def test_the_units_that_a_cache_keeps_cover_the_tiles_exactly(
    name: str, a: Attention, s: Schedule, largest: int
) -> None:
    # One block at a time: no requests meet, and what they ask for in units is what the ledger counts.
    a = suited(name, a)
    assume(not load_dataflow(name).refusal(a))
    program = load_dataflow(name)(a, s)
    units, by_flow = cut(program, largest), []
    for kernel in program.kernels:
        asked, _ = requests(kernel, 1, 1)
        by_flow += [int(units[r.node.view.tensor.name].accesses(r)[2].sum()) for r in asked]
    assert by_flow == [f.hbm_bytes for f in ledger(program).flows]


# ---------------------------------------------------------------- the walk agrees


@pytest.mark.parametrize("name", dataflow_names())
@settings(max_examples=20, deadline=None)
@given(
    a=problems(longest=24),
    s=schedules(largest=9),
    window=st.none() | st.integers(1, 24),
    splits=st.integers(1, 4),
    softmax=st.sampled_from(["safe", "online"]),
)
def test_the_ledger_is_what_a_walk_over_every_block_counts(
    name: str, a: Attention, s: Schedule, window: int | None, splits: int, softmax: str
) -> None:
    a, s = suited(name, replace(a, window=window)), replace(s, splits=splits, softmax=softmax)
    assume(not load_dataflow(name).refusal(a))
    runs = name == "flash1" and splits > 1  # a run of query tiles is taken to begin at its first
    assert_agrees(load_dataflow(name)(a, s), no_gaps=not runs)


INDICES = ("g", "i", "j", "k")  # two grid axes, two nested loops


@st.composite
def starts(draw: st.DrawFn, names: tuple[str, ...], low: int = -4) -> Ex:
    """An affine expression."""
    e: Ex = draw(st.integers(low, 6))
    for name in names:
        e = e + Index(name) * draw(st.sampled_from([0, 0, 1, 2, 3, 4, -2]))
    return e


@st.composite
def limits(draw: st.DrawFn, names: tuple[str, ...]) -> Ex:
    """A loop bound: floors and ceilings of affine expressions, cut from below and above."""
    e = draw(starts(names)) // draw(st.integers(1, 5))
    e = least(e, draw(st.integers(0, 5) | starts(names))) if draw(st.booleans()) else least(e, 5)
    bound: Ex = most(e, draw(st.integers(-1, 2)))
    return bound


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One kernel with loads, fp32 reductions and stores at every depth of a random nest, guarded or not."""
    p = Builder("random")
    X = p.tensor("X", (draw(st.integers(1, 9)), draw(st.integers(1, 12)), 5), "fp16", "in")
    Y = p.tensor("Y", (draw(st.integers(1, 12)), 4), "fp32", "out")
    with p.kernel("zero"):
        p.store(Y[Span(0, 12)], p.fill("z", shape=(12, 4), value=0))
    with p.kernel("nest", g=draw(st.integers(1, 4)), i=draw(st.integers(1, 6))):
        moves(draw, p, X, Y, INDICES[:2])
        with p.loop("j", draw(limits(INDICES[:2])), draw(limits(INDICES[:2]))):
            moves(draw, p, X, Y, INDICES[:3])
            with p.loop("k", draw(limits(INDICES[:3])), draw(limits(INDICES[:3]))):
                moves(draw, p, X, Y, INDICES)
    return p.done()


def moves(draw: st.DrawFn, p: Builder, x: Tensor, y: Tensor, names: tuple[str, ...]) -> None:
    rows, guard = draw(st.integers(1, 4)), Index(draw(st.sampled_from(names)))
    view = View(x, (draw(starts(names)), Span(draw(starts(names)), rows), Span(0, 5)))
    lo, hi = draw(limits(names)), draw(limits(names))
    depth = len(names)
    with p.phase(f"phase {depth}"), p.when(guard, lo, hi) if draw(st.booleans()) else nullcontext():
        tile = p.load(f"x{depth}", view)
        out = p.matmul(f"y{depth}", tile, p.fill(f"w{depth}", shape=(5, 4), value=1))
        p.store(y[Span(draw(starts(names)), rows)], out, add=True)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_the_ledger_of_any_program_is_what_a_walk_counts(program: Program) -> None:
    assert_agrees(program, no_gaps=False)
