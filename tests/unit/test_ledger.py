"""ledger: golden numbers, each with its derivation, and the cases that a dataflow of today does not have."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest

from iosim.dataflows import load_dataflow
from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.index import Index
from iosim.interpreters.ledger import ledger, union_bytes
from iosim.problem import Attention
from iosim.program import Builder, Load, Program, Span, line, rows, walk
from iosim.schedule import Schedule

TILES = Schedule(block_q=128, block_k=128)
N = 4096


def copy(n: int, blocks: int) -> Program:
    """Copies X (n, 2) in fp16 to Y by tiles of four rows."""
    p = Builder("copy")
    X, Y = p.tensor("X", (n, 2), "fp16", "in"), p.tensor("Y", (n, 2), "fp16", "out")
    with p.kernel("copy", i=blocks) as (i,):
        p.store(Y[rows(i, 4)], p.load("x", X[rows(i, 4)]))
    return p.done()


def test_what_lies_outside_the_tensor_costs_nothing() -> None:
    # 4, 4, 2, 0 and 0 rows of 2 fp16 elements: 10 * 2 * 2 bytes.
    assert ledger(copy(10, blocks=5)).by_tensor == {"X": {"read": 40}, "Y": {"write": 40}}


def test_a_flow_names_its_node() -> None:
    program = copy(8, blocks=2)
    counted = ledger(program)
    node = next(n for n, _ in walk(program.kernels[0].body) if isinstance(n, Load))
    flow = counted.flow("copy", node)
    assert (flow.tensor, flow.direction, flow.text) == ("X", "read", line(node))
    assert (flow.hbm_bytes, flow.unique_bytes, flow.statistic) == (32, 32, False)


def test_flash2_at_4096() -> None:
    counted = ledger(flash2(Attention(n_q=N, d=128), TILES))
    matrix = N * 128 * 2  # one of Q, K, V, O: 1,048,576 bytes
    # Q once; K and V once for each of the 4096 / 128 = 32 query tiles; O once.
    assert counted.by_tensor == {
        "Q": {"read": matrix},
        "K": {"read": 32 * matrix},
        "V": {"read": 32 * matrix},
        "O": {"write": matrix},
    }
    assert counted.hbm_read_bytes == 68_157_440  # 65 * 1,048,576
    assert counted.paper_hbm_bytes == 69_206_016  # 66 * 1,048,576
    assert counted.executed_flops == 4 * N * N * 128
    assert (counted.extra_bytes, counted.allocated_bytes) == (0, matrix)
    assert counted.peak_bytes == counted.io_bytes == 4 * matrix


def test_standard_at_4096() -> None:
    counted = ledger(standard(Attention(n_q=N, d=128), TILES))
    assert counted.extra_bytes == 4 * N * N  # S and P, 2 bytes an element each
    # S and P written and read once each, Q, K, V and O once: (4 N^2 + 4 N d) elements of 2 bytes.
    assert counted.paper_hbm_bytes == (4 * N * N + 4 * N * 128) * 2
    # The softmax kernel holds S and P; the output kernel P and O, which is smaller.
    assert counted.allocated_bytes == 4 * N * N
    assert counted.peak_bytes == 4 * N * N + 3 * N * 128 * 2
    assert counted.executed_flops == 4 * N * N * 128


def test_flash1_at_4096_by_its_papers_convention() -> None:
    # K/V blocks of 192 rows: ceil(4096 / 192) = 22 passes.  K and V once; Q read and O written in each of 22 passes,
    # O read in 21: 2 + 22 + 22 + 21 = 67 matrices.  The statistics m and l, 4 bytes a row: written 22 times, read 21.
    counted = ledger(flash1(Attention(n_q=N, d=128), Schedule(block_q=128, block_k=192)))
    matrix = N * 128 * 2
    assert counted.paper_hbm_bytes == 67 * matrix == 70_254_592
    assert counted.hbm_read_bytes + counted.hbm_write_bytes == 67 * matrix + (22 + 21) * 2 * 4 * N
    assert (counted.extra_bytes, counted.allocated_bytes) == (2 * 4 * N, matrix + 2 * 4 * N)
    assert counted.executed_flops == 4 * (22 * 192) * N * 128  # whole tiles


def test_softmax_alone_at_4096() -> None:
    matrix = N * N * 2  # 33,554,432 bytes
    for name, accesses in (("softmax-naive", 3), ("softmax-safe", 4), ("softmax-online", 3)):
        flow = load_dataflow(name)
        for cols, expected in ((1024, accesses), (4096, 2)):
            counted = ledger(flow(Attention(n_q=N, d=128), replace(TILES, softmax_cols=cols)))
            assert counted.hbm_read_bytes + counted.hbm_write_bytes == counted.paper_hbm_bytes == expected * matrix


def test_split_kv_of_one_query_block() -> None:
    # 16 queries, 4096 keys, 8 splits of 4 tiles of 128 keys.  Each split reads the 16 queries; K and V are read once.
    counted = ledger(
        load_dataflow("split-kv")(Attention(n_q=16, n_k=N, d=128), Schedule(block_q=16, block_k=128, splits=8))
    )
    rows = 16 * 128
    assert counted.by_tensor == {
        "Q": {"read": 8 * rows * 2},
        "K": {"read": N * 128 * 2},
        "V": {"read": N * 128 * 2},
        "O parts": {"write": 8 * rows * 4, "read": 8 * rows * 4},
        "L parts": {"write": 8 * 16 * 4, "read": 8 * 16 * 4},
        "O": {"write": rows * 2},
    }
    assert counted.extra_bytes == 8 * 16 * 129 * 4


def test_backward_at_4096() -> None:
    a, matrix, scores = Attention(n_q=N, d=128), N * 128 * 2, N * N * 2
    counted = ledger(load_dataflow("flash-backward")(a, TILES))
    # 32 key tiles, each of which reads all of Q and dO, and adds 2 matrices (fp32) to dQ; K, V, O once, dO once more
    # for D; dQ in fp32 zeroed and read, that is 2 matrices each; dQ, dK and dV written once.
    assert counted.paper_hbm_bytes == (32 * (1 + 1 + 2) + 3 + 1 + 4 + 3) * matrix
    assert counted.hbm_add_bytes == 32 * 2 * matrix
    assert counted.extra_bytes == 2 * matrix + 4 * N  # dQ in fp32 and D
    # Five products on whole tiles, twice and a half the forward pass.
    assert counted.executed_flops == a.backward_flops == 10 * N * N * 128

    counted = ledger(load_dataflow("standard-backward")(a, TILES))
    # P read by dV and dS; dP written and read; dS written, read by dQ and dK.  dO twice; Q, K, V and 3 gradients once.
    assert counted.paper_hbm_bytes == (2 + 2 + 3) * scores + (2 + 3 + 3) * matrix
    assert counted.executed_flops == 8 * N * N * 128  # it has P already: four products
    assert counted.extra_bytes == 2 * scores


def test_a_window_bounds_the_keys_that_are_loaded() -> None:
    # Query tile i of 32 sees keys 128 i - 255 .. 128 i + 127: key tiles i - 2 .. i, of which tile 0 has 1 and tile 1
    # has 2: 1 + 2 + 30 * 3 = 93 tiles.
    counted = ledger(flash2(Attention(n_q=N, d=128, causal=True, window=256), TILES))
    assert counted.by_tensor["K"] == {"read": 93 * 128 * 128 * 2}


def test_causal_flash2_loads_the_lower_triangle_of_tiles() -> None:
    counted = ledger(flash2(Attention(n_q=N, d=128, causal=True), TILES))
    # Query tile i of 32 loads i + 1 key tiles of 128 * 128 * 2 bytes: 32 * 33 / 2 = 528 tiles.
    assert counted.by_tensor["K"] == {"read": 528 * 128 * 128 * 2}


def test_gqa_stores_keys_once_and_streams_them_for_each_query_head() -> None:
    counted = ledger(flash2(Attention(n_q=N, d=128, heads=8, kv_heads=2), TILES))
    keys = [f for f in counted.flows if f.tensor == "K"]
    assert [f.hbm_bytes for f in keys] == [8 * 32 * N * 128 * 2]
    assert [f.unique_bytes for f in keys] == [2 * N * 128 * 2]


def test_the_log_sum_exp_is_a_statistic_that_the_papers_leave_out() -> None:
    plain = ledger(flash2(Attention(n_q=N, d=128), TILES))
    with_lse = ledger(flash2(Attention(n_q=N, d=128, lse=True), TILES))
    assert with_lse.hbm_write_bytes == plain.hbm_write_bytes + 4 * N
    assert with_lse.io_bytes == plain.io_bytes + 4 * N
    assert with_lse.paper_hbm_bytes == plain.paper_hbm_bytes
    assert [f.tensor for f in with_lse.flows if f.statistic] == ["L"]


def test_scratch_lives_from_its_first_store_to_its_last_use() -> None:
    p = Builder("chain")  # X -> A -> B -> Y, 64 bytes each: A and B meet, then B and Y; A is gone by then
    X, Y = p.tensor("X", (4, 4), "fp32", "in"), p.tensor("Y", (4, 4), "fp32", "out")
    A, B = (p.tensor(name, (4, 4), "fp32", "scratch") for name in "AB")
    for n, (source, target) in enumerate(((X, A), (A, B), (B, Y))):
        with p.kernel(f"step {n}"):
            p.store(target[Span(0, 4)], p.load("t", source[Span(0, 4)]))
    counted = ledger(p.done())
    assert counted.extra_bytes == 128
    assert counted.allocated_bytes == 128
    assert counted.peak_bytes == 128 + 64


@pytest.mark.parametrize(
    ("guard", "lo", "hi", "loads"),
    [
        ("j", 1, 9, 16),  # iterations 1 to 4 of 4 blocks
        ("j", 7, 9, 0),  # no iteration
        ("i", 2, 4, 10),  # 5 iterations of blocks 2 and 3
        ("i", -3, 1, 5),
    ],
)
def test_a_guard_may_name_the_loop_or_the_grid(guard: str, lo: int, hi: int, loads: int) -> None:
    p = Builder("guarded")
    X, Y = p.tensor("X", (40, 1), "fp16", "in"), p.tensor("Y", (4, 1), "fp32", "out")
    with p.kernel("k", i=4) as (i,):
        with p.loop("j", 0, 5) as j, p.when(Index(guard), lo, hi):
            p.load("x", X[rows(i * 5 + j, 2)])  # every tile another 4 bytes
        p.store(Y[rows(i, 1)], p.fill("one", shape=(1, 1), value=1))
    read = [f for f in ledger(p.done()).flows if f.direction == "read"]
    assert [(f.hbm_bytes, f.unique_bytes) for f in read] == [(4 * loads, 4 * loads)]


def test_reductions_are_neither_reads_nor_writes() -> None:
    p = Builder("reduce")
    X, Y = p.tensor("X", (12, 2), "fp16", "in"), p.tensor("Y", (4, 2), "fp32", "out")
    with p.kernel("zero"):
        p.store(Y[Span(0, 4)], p.fill("z", shape=(4, 2), value=0))
    with p.kernel("sum", i=3) as (i,):
        p.store(Y[Span(0, 4)], p.load("x", X[rows(i, 4)]), add=True)
    counted = ledger(p.done())
    assert counted.by_tensor == {"X": {"read": 48}, "Y": {"write": 32, "add": 96}}
    assert (counted.hbm_read_bytes, counted.hbm_write_bytes, counted.hbm_add_bytes) == (48, 32, 96)


def test_overlapping_tiles_are_counted_as_often_as_they_are_loaded() -> None:
    p = Builder("blur")  # rows i .. i + 2 of 6: 3 + 3 + 3 + 3 + 2 + 1 = 15 rows asked for, 6 touched
    X, Y = p.tensor("X", (6, 1), "fp16", "in"), p.tensor("Y", (6, 1), "fp16", "out")
    with p.kernel("blur", i=6) as (i,):
        p.load("x", X[Span(i, 3)])
        p.store(Y[rows(i, 1)], p.fill("one", shape=(1, 1), value=1))
    flow = ledger(p.done()).flows[0]
    assert (flow.hbm_bytes, flow.unique_bytes) == (30, 12)


def test_the_union_of_flows_counts_what_they_share_once() -> None:
    p = Builder("cross")  # rows 0-3 of columns 0-3, rows 2-5 of columns 2-5, and the first again: 16 + 16 - 4
    X, Y = p.tensor("X", (6, 6), "fp16", "in"), p.tensor("Y", (4, 4), "fp16", "out")
    with p.kernel("cross"):
        for n, start in enumerate((0, 2, 0)):
            p.load(f"x{n}", X[Span(start, 4), Span(start, 4)])
        p.store(Y[Span(0, 4)], p.fill("one", shape=(4, 4), value=1))
    flows = ledger(p.done()).flows[:3]
    assert union_bytes(flows) == 28 * 2
    assert union_bytes([]) == 0


def test_the_cost_does_not_depend_on_the_length() -> None:
    def seconds(n: int) -> float:
        program = flash2(Attention(n_q=n, d=128, causal=True), Schedule(block_q=128, block_k=96))
        start = perf_counter()
        ledger(program)
        return perf_counter() - start

    assert min(seconds(2**24) for _ in range(5)) < 3 * min(seconds(2**12) for _ in range(5))
