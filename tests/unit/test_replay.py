"""Replay: small programs, each with one rule of the language, against arrays worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.errors import InputError
from iosim.index import Index
from iosim.interpreters.region import bounds, region
from iosim.interpreters.replay import Replayer, replay
from iosim.problem import Attention
from iosim.program import Builder, Span, rows
from iosim.schedule import Schedule

SCHEDULE = Schedule(block_q=16, block_k=16, block_d=16, softmax_rows=4, softmax_cols=64)


def arrays(**given):
    """A source of these arrays."""
    return lambda tensor, box: np.float32(given[tensor.name])[tuple(slice(*span) for span in box)]


def count(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def builder(*tensors):
    p = Builder("test")
    return p, *(p.tensor(*t) for t in tensors)


def test_a_ragged_copy_drops_what_lies_outside_and_counts_what_lies_inside():
    p, X, Y = builder(("X", (10, 3), "fp16", "in"), ("Y", (10, 3), "fp16", "out"))
    with p.kernel("copy", i=3) as (i,):
        p.store(Y[rows(i, 4)], p.load("x", X[rows(i, 4)]))
    done = replay(p.done(), arrays(X=count((10, 3))))
    np.testing.assert_array_equal(done.outputs["Y"], count((10, 3)))
    assert done.moved == {("X", "read"): 60, ("Y", "write"): 60}
    assert done.blocks == (3,)


def test_what_lies_outside_is_loaded_as_zero_also_after_a_store():
    p, X, Y, Z = builder(("X", (3, 2), "fp32", "in"), ("Y", (3, 2), "fp32", "scratch"), ("Z", (1, 1), "fp32", "out"))
    with p.kernel("fill", i=1):
        p.store(Y[rows(0, 4)], p.fill("one", shape=(4, 2), value=1))
    with p.kernel("sum", i=1):
        t = p.matmul("t", p.load("y", Y[rows(0, 4)]).T, p.load("x", X[rows(0, 4)]))
        p.store(Z[rows(0, 1)], p.rowsum("s", p.matmul("u", p.fill("e", shape=(1, 2), value=1), t)))
    assert replay(p.done(), arrays(X=count((3, 2)))).outputs["Z"] == 2 * 15


def test_blocks_that_the_view_lacks_are_summed_by_an_add():
    p, X, Y = builder(("X", (3, 4, 2), "fp32", "in"), ("Y", (4, 2), "fp32", "out"))
    with p.kernel("base", i=1):
        p.store(Y[rows(0, 4)], p.fill("zero", shape=(4, 2), value=0))
    with p.kernel("sum", h=3, g=2, i=2) as (h, _, i):
        x = p.load("x", X[h, rows(i, 2)])
        p.store(Y[rows(i, 2)], x, add=True)  # differs by h, the same for both g
    done = replay(p.done(), arrays(X=count((3, 4, 2))))
    np.testing.assert_array_equal(done.outputs["Y"], 2 * count((3, 4, 2)).sum(0))
    assert done.moved["Y", "add"] == 3 * 2 * 4 * 2 * 4
    assert done.moved["X", "read"] == 3 * 2 * 4 * 2 * 4


def test_overlapping_views_are_added_one_block_at_a_time():
    p, X, Y = builder(("X", (6, 1), "fp32", "in"), ("Y", (6, 1), "fp32", "out"))
    with p.kernel("base", i=1):
        p.store(Y[rows(0, 6)], p.fill("zero", shape=(6, 1), value=0))
    with p.kernel("window", i=5) as (i,):
        p.store(Y[Span(i, 2)], p.load("x", X[Span(i, 2)]), add=True)
    y = replay(p.done(), arrays(X=count((6, 1)))).outputs["Y"]
    np.testing.assert_array_equal(y[:, 0], [0, 2, 4, 6, 8, 5])


def test_a_nest_of_loops_with_a_store_inside_and_consecutive_loops():
    p, X, Y, Z = builder(("X", (8, 4), "fp32", "in"), ("Y", (8, 4), "fp32", "out"), ("Z", (2, 4), "fp32", "out"))
    with p.kernel("nest", i=2) as (i,):
        total = p.fill("total", shape=(1, 4), value=0)
        with p.loop("a", 0, 2) as a:
            with p.loop("b", 0, a + i + 1) as b:
                x = p.load("x", X[Span(i * 4 + b, 1)])
                p.add(total, total, x)
            p.store(Y[Span(i * 4 + a, 1)], total)
        with p.loop("c", 0, 2) as c:
            p.store(Y[Span(i * 4 + c + 2, 1)], p.scale("twice", p.load("z", X[Span(i * 4 + c, 1)]), by=2))
        p.store(Z[Span(i, 1)], total)
    x = count((8, 4))
    done = replay(p.done(), arrays(X=x))
    first = [x[0], x[0] + x[0] + x[1]]
    second = [x[4] + x[5], 2 * (x[4] + x[5]) + x[6]]
    want = [*first, 2 * x[0], 2 * x[1], *second, 2 * x[4], 2 * x[5]]
    np.testing.assert_array_equal(done.outputs["Y"], want)
    np.testing.assert_array_equal(done.outputs["Z"], [first[1], second[1]])
    assert done.moved["X", "read"] == (1 + 2 + 2 + 3 + 2 + 2) * 16


def test_a_guarded_load_keeps_the_tile_where_it_does_not_run():
    p, X, Y = builder(("X", (6, 2), "fp32", "in"), ("Y", (6, 2), "fp32", "out"))
    with p.kernel("guard", i=3) as (i,):
        x = p.fill("x", shape=(2, 2), value=-1)
        with p.when(i, 1, 2):
            p.load("x", X[rows(i, 2)])
        p.store(Y[rows(i, 2)], x)
    done = replay(p.done(), arrays(X=count((6, 2))))
    np.testing.assert_array_equal(done.outputs["Y"], [[-1, -1]] * 2 + [[4, 5], [6, 7]] + [[-1, -1]] * 2)
    assert done.moved["X", "read"] == 16


def test_a_guard_on_a_loop_index_with_bounds_that_differ_by_block():
    p, Y = builder(("Y", (4, 1), "fp32", "out"))
    with p.kernel("guard", i=4) as (i,):
        n = p.fill("n", shape=(1, 1), value=0)
        one = p.fill("one", shape=(1, 1), value=1)
        with p.loop("j", i, 5) as j, p.when(j, 2, i + 3):
            p.add(n, n, one)
        p.store(Y[Span(i, 1)], n)
    y = replay(p.done(), arrays()).outputs["Y"][:, 0]
    assert y.tolist() == [sum(i <= j < 5 and 2 <= j < i + 3 for j in range(5)) for i in range(4)]


def test_a_tile_that_some_blocks_load_again_keeps_its_first_content_in_the_others():
    p, X, Y = builder(("X", (4, 1), "fp32", "in"), ("Y", (3, 1), "fp32", "out"))
    with p.kernel("again", i=3) as (i,):
        x = p.load("x", X[Span(i, 1)])
        with p.loop("j", 0, i):
            p.load("x", X[Span(3, 1)])
        p.store(Y[Span(i, 1)], x)
    assert replay(p.done(), arrays(X=count((4, 1)))).outputs["Y"][:, 0].tolist() == [0, 3, 3]


def test_a_block_that_never_stores_leaves_nan():
    p, Y = builder(("Y", (4, 1), "fp16", "out"))
    with p.kernel("half", i=2) as (i,), p.when(i, 0, 1):
        p.store(Y[rows(i, 2)], p.fill("one", shape=(2, 1), value=1))
    np.testing.assert_array_equal(replay(p.done(), arrays()).outputs["Y"][:, 0], [1, 1, np.nan, np.nan])


def test_tiles_and_stores_are_rounded_to_their_dtype():
    p, X, Y, Z = builder(("X", (1, 1), "fp32", "in"), ("Y", (1, 1), "fp16", "out"), ("Z", (1, 1), "fp32", "out"))
    with p.kernel("round", i=1):
        x = p.load("x", X[rows(0, 1)])
        p.store(Y[rows(0, 1)], x)
        p.store(Z[rows(0, 1)], p.cast("c", x, "bf16"))
    done = replay(p.done(), arrays(X=[[1 / 3]]))
    assert done.outputs["Y"] == np.float32(np.float16(1 / 3))
    assert done.outputs["Z"] == np.float32(0.333984375)


def test_one_store_for_several_blocks_is_the_last_one():
    p, X, Y = builder(("X", (3, 1), "fp32", "in"), ("Y", (1, 1), "fp32", "out"))
    with p.kernel("race", i=3) as (i,):
        p.store(Y[rows(0, 1)], p.load("x", X[Span(i, 1)]))
    done = replay(p.done(), arrays(X=count((3, 1))))
    assert done.outputs["Y"] == 2
    assert done.moved["Y", "write"] == 12


def test_a_kernel_may_load_what_it_stored_itself():
    p, X, Y = builder(("X", (8, 2), "fp32", "in"), ("Y", (8, 2), "fp32", "out"))
    with p.kernel("base", i=4) as (i,):
        p.store(Y[rows(i, 2)], p.load("x", X[rows(i, 2)]))
    with p.kernel("twice", i=4) as (i,), p.loop("j", 0, 3):
        y = p.load("y", Y[rows(i, 2)])
        p.store(Y[rows(i, 2)], p.add("sum", y, y))
    program = p.done()
    np.testing.assert_array_equal(replay(program, arrays(X=count((8, 2)))).outputs["Y"], 8 * count((8, 2)))
    part = replay(program, arrays(X=count((8, 2))), {"Y": ((2, 4), (0, 2))})
    np.testing.assert_array_equal(part.outputs["Y"], 8 * count((8, 2))[2:4])
    assert part.blocks == (1, 1)


# ---------------------------------------------------------------- regions


def test_one_query_head_runs_alone_under_grouped_queries():
    a = Attention(n_q=64, d=16, heads=6, kv_heads=2, batch=2)
    needed = region(flash2(a, SCHEDULE), {"O": ((1, 2), (4, 5), (16, 32), (0, 16))})
    assert needed.cells == (((1, 2), (1, 2), (1, 2), (1, 2)),)
    assert needed.touched["K"] == ((1, 2), (1, 2), (0, 64), (0, 16))


def test_heads_of_several_groups_run_with_their_whole_groups():
    a = Attention(n_q=64, d=16, heads=6, kv_heads=2)
    (cells,) = region(flash2(a, SCHEDULE), {"O": ((0, 1), (2, 4), (0, 64), (0, 16))}).cells
    assert cells == ((0, 1), (0, 2), (0, 3), (0, 4))


def test_a_band_of_a_long_problem_touches_a_band_of_scores():
    a = Attention(n_q=131072, d=128)
    s = Schedule(block_q=128, block_k=128)
    needed = region(standard(a, s), {"O": ((0, 1), (0, 1), (1000, 1256), (0, 128))})
    for name in "SP":
        assert needed.touched[name] == ((0, 1), (0, 1), (896, 1280), (0, 131072))
    assert needed.touched["Q"][2] == (896, 1280)


@pytest.mark.parametrize("flow", [flash2, standard])
@pytest.mark.parametrize("causal", [False, True])
def test_a_band_of_whole_blocks_is_bit_for_bit_that_of_the_whole(flow, causal):
    a = Attention(n_q=512, d=128, heads=2, kv_heads=1, causal=causal, lse=True)
    random = np.random.default_rng(0)
    operands = {name: random.standard_normal((1, n, 512, 128)) for name, n in (("Q", 2), ("K", 1), ("V", 1))}
    replayer = Replayer(flow(a, Schedule(block_q=128, block_k=128, softmax_rows=4)))
    whole = replayer.run(arrays(**operands)).outputs
    band = (0, 1), (1, 2), (128, 384)
    part = replayer.run(arrays(**operands), {"O": (*band, (0, 128)), "L": band}).outputs
    np.testing.assert_array_equal(part["O"], whole["O"][:, 1:, 128:384])
    np.testing.assert_array_equal(part["L"], whole["L"][:, 1:, 128:384])


def test_a_causal_block_needs_no_later_keys():
    a = Attention(n_q=64, d=16, causal=True)
    needed = region(flash2(a, SCHEDULE), {"O": ((0, 1), (0, 1), (16, 32), (0, 16))})
    assert needed.touched["K"][2] == (0, 32)


def test_a_kernel_that_is_not_needed_does_not_run():
    a = Attention(n_q=64, d=16)
    program = standard(a, SCHEDULE)
    source = arrays(Q=count((1, 1, 64, 16)), K=count((1, 1, 64, 16)), V=count((1, 1, 64, 16)))
    done = Replayer(program).run(source, {"S": ((0, 1), (0, 1), (0, 16), (16, 32))})
    assert done.blocks == (1, 0, 0)
    assert done.outputs["S"].shape == (1, 1, 16, 16)


@pytest.mark.parametrize(
    "demand", [{"Q": ((0, 1),) * 4}, {"X": ()}, {"O": ((0, 1), (0, 1), (0, 65), (0, 16))}, {"O": ((0, 1), (0, 1))}]
)
def test_a_demand_that_is_no_box_of_an_output_is_refused(demand):
    with pytest.raises(InputError, match="demand"):
        replay(flash2(Attention(n_q=64, d=16), SCHEDULE), arrays(), demand)


def test_bounds_of_an_expression():
    i, j = Index("i"), Index("j")
    ranges = {"i": (0, 4), "j": (2, 5)}
    assert bounds((i * 3 - j * 2 + 7) // 2, ranges) == (-1, 6)


def test_threads_change_nothing():
    a = Attention(n_q=300, d=64, heads=4, kv_heads=2, causal=True)
    random = np.random.default_rng(1)
    operands = {name: random.standard_normal((1, n, 300, 64)) for name, n in (("Q", 4), ("K", 2), ("V", 2))}
    for flow in (flash2, standard):
        replayer = Replayer(flow(a, SCHEDULE))
        alone, together = replayer.run(arrays(**operands), mapper=map), replayer.run(arrays(**operands))
        np.testing.assert_array_equal(alone.outputs["O"], together.outputs["O"])
        assert alone.moved == together.moved
