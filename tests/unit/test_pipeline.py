"""Phases, dependencies and orders of a loop body."""

from __future__ import annotations

import pytest

from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.errors import InputError
from iosim.pipeline import edges, nests, phases, segments
from iosim.problem import Attention
from iosim.program import Builder, Kernel, rows
from iosim.schedule import Order, Role, Schedule, Step

A = Attention(n_q=256, d=64)
S = Schedule(block_q=64, block_k=64, groups=2)
FLASH = flash2(A, S).kernels[0]


def order(*names: str, **slots: int) -> Order:
    return Order((Role("groups", 2, tuple(Step("run", name) for name in names)),), slots)


def with_order(order: Order) -> Schedule:
    return Schedule(block_q=64, block_k=64, orders={"j": order})


def body(*steps: str) -> Kernel:
    """A kernel whose loop has one phase for each of `steps`, like "a=b" (a is made from b) or "a" (a is loaded)."""
    p = Builder("body")
    X = p.tensor("X", (64, 64), "fp16", "in")
    Y = p.tensor("Y", (64, 64), "fp32", "out")
    with p.kernel("k", i=1):
        made = {"o": p.fill("o", shape=(64, 64), value=0)}
        with p.loop("j", 0, 4):
            for n, step in enumerate(steps):
                out, _, source = step.partition("=")
                if not source:
                    made[out] = p.load(out, X[rows(0, 64), rows(0, 64)])
                else:
                    with p.phase(f"{n}:{step}"):
                        made[out] = p.max(made.get(out, out), made[source], made[source])
        p.store(Y[rows(0, 64), rows(0, 64)], made["o"])
    return p.done().kernels[0]


def edges_of(*steps: str, **slots: int) -> set[tuple[str, str, int, str]]:
    cut = segments(body(*steps), S)[1].phases
    return {(e.before, e.after, e.distance, e.kind) for e in edges(cut, slots)}


# ---------------------------------------------------------------- phases and segments


def test_a_kernel_is_straight_code_and_loops_in_turn() -> None:
    parts = segments(FLASH, S)
    assert [p.loop.index if p.loop else None for p in parts] == [None, "j", None]
    assert [[p.name for p in part.phases] for part in parts] == [
        ["q", "compute"],
        ["k", "v", "qk", "softmax", "rescale", "pv"],
        ["compute"],
    ]
    assert [p.name for p in parts[1].copies] == ["k", "v"]


def test_consecutive_loops_are_segments_of_their_own() -> None:
    softmax = standard(A, Schedule(block_q=64, block_k=64, softmax_cols=64)).kernels[1]
    assert [p.loop.index if p.loop else None for p in segments(softmax, S)] == [None, "j1", "j2", "j3"]


def test_a_name_that_comes_again_gets_a_number() -> None:
    p = Builder("twice")
    X, Y = p.tensor("X", (64, 8), "fp32", "in"), p.tensor("Y", (64, 8), "fp32", "out")
    with p.kernel("k", i=1):
        o = p.fill("o", shape=(64, 8), value=0)
        x = p.load("x", X[rows(0, 64)])
        p.store(Y[rows(0, 64)], p.add("sum", o, x))
    assert [phase.name for phase in phases(p.done().kernels[0].body)] == ["compute", "x", "compute 2"]  # type: ignore[arg-type]


def nested() -> Kernel:
    """A loop over a, with code before and after its two inner loops, of which the first has one inside."""
    p = Builder("nest")
    X, Y = p.tensor("X", (64, 8), "fp32", "in"), p.tensor("Y", (64, 8), "fp32", "out")
    with p.kernel("k", i=1):
        o = p.fill("o", shape=(64, 8), value=0)
        with p.loop("a", 0, 2):
            x = p.load("x", X[rows(0, 64)])
            with p.loop("b", 0, 2), p.loop("c", 0, 2):
                p.add(o, o, x)
            with p.loop("d", 0, 2):
                p.add(o, o, p.load("y", X[rows(0, 64)]))
            p.mul(o, o, o)
        p.store(Y[rows(0, 64)], o)
    return p.done().kernels[0]


def test_loops_nest() -> None:
    parts = segments(nested(), S)
    assert ["".join(loop.index for loop in part.loops) for part in parts] == ["", "a", "abc", "ad", "a", ""]
    assert [part.loop.index if part.loop else None for part in parts] == [None, None, "c", "d", None, None]
    assert parts[3].order.slots == {"y": 2}
    assert [part.number for part in parts] == list(range(6))
    inside = [(loop.index if loop else None, [part.number for part in own]) for loop, own in nests(parts)]
    assert inside == [(None, [0]), ("a", [1, 2, 3, 4]), (None, [5])]
    assert [loop.index if loop else None for loop, _ in nests(parts[1:5], 1)] == [None, "b", None, None]


def test_a_loop_that_has_loops_inside_has_no_order() -> None:
    with pytest.raises(InputError, match="kernel k, loop b: only a loop without loops inside has an order"):
        segments(nested(), Schedule(block_q=64, block_k=64, orders={"b": order("compute")}))


# ---------------------------------------------------------------- the default order


def test_by_default_an_iteration_first_issues_the_copies_of_stages_minus_one_later() -> None:
    part = segments(FLASH, Schedule(block_q=64, block_k=64, stages=(3, 2), groups=2))[1]
    (role,) = part.order.roles
    assert role.count == 2
    assert role.steps[:3] == (Step("issue", "k", 2), Step("issue", "v", 1), Step("run", "qk"))
    assert part.order.slots == {"k": 3, "v": 2}


def test_the_code_around_a_loop_is_run_by_the_groups_of_its_order() -> None:
    parts = segments(FLASH, with_order(order("k", "v", "qk", "softmax", "rescale", "pv")))
    assert [part.order.roles[-1].count for part in parts] == [2, 2, 2]


# ---------------------------------------------------------------- dependencies


def test_the_dependencies_of_flash2() -> None:
    found = edges(segments(FLASH, S)[1].phases, {"k": 2, "v": 3})
    assert {(e.before, e.after, e.distance) for e in found if e.kind == "raw"} == {
        ("k", "qk", 0),
        ("qk", "softmax", 0),
        ("softmax", "rescale", 0),
        ("softmax", "pv", 0),
        ("v", "pv", 0),
        ("rescale", "pv", 0),
        ("pv", "rescale", 1),  # the output is carried
    }
    assert {(e.before, e.after, e.distance) for e in found if e.kind == "war"} == {
        ("qk", "k", 2),  # a buffer is free when its last reader has ended
        ("pv", "v", 3),
        ("softmax", "qk", 1),  # the scores have one buffer
        ("rescale", "softmax", 1),
        ("pv", "softmax", 1),
    }


def test_more_buffers_move_a_dependency_further_back() -> None:
    assert ("1:b=a", "a", 1, "war") in edges_of("a", "b=a")
    assert ("1:b=a", "a", 4, "war") in edges_of("a", "b=a", a=4)


def test_a_carried_tile_is_read_before_it_is_written_again() -> None:
    assert edges_of("a", "b=o", "o=a") == {
        ("a", "2:o=a", 0, "raw"),
        ("2:o=a", "1:b=o", 1, "raw"),
        ("1:b=o", "2:o=a", 0, "war"),
        ("2:o=a", "a", 1, "war"),
    }


def test_two_writers_of_a_tile_keep_their_order() -> None:
    found = edges_of("a", "b=a", "c=b", "b=a", "o=b")
    assert {("1:b=a", "3:b=a", 0, "war"), ("2:c=b", "3:b=a", 0, "war")} <= found
    assert {("3:b=a", "1:b=a", 1, "war"), ("4:o=b", "1:b=a", 1, "war")} <= found
    assert ("3:b=a", "4:o=b", 0, "raw") in found
    assert ("1:b=a", "4:o=b", 0, "raw") not in found


def test_where_a_guard_may_leave_a_writer_out_the_one_before_counts_too() -> None:
    """flash1 loads O or, in the first pass, fills it."""
    inner = segments(flash1(A, S).kernels[0], S)[1]
    assert {e.before for e in edges(inner.phases, {}) if (e.after, e.kind) == ("update", "raw")} == {
        "o",
        "clear",
        "softmax",
        "pv",
    }


# ---------------------------------------------------------------- orders that do not fit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (order("k", "v", "qk", "softmax", "scale", "pv"),
         r"kernel attention, loop j: the order names phase 'scale', which the loop does not have "
         r"\(it has k, v, qk, softmax, rescale, pv\) \(did you mean 'rescale'\?\)"),
        (order("k", "v", "qk", "softmax", "rescale"), "the order starts phase pv 0 times instead of once"),
        (order("k", "v", "qk", "softmax", "rescale", "pv", "pv"), "the order starts phase pv 2 times instead of once"),
        (order("k", "v", "qk", "softmax", "rescale", "pv", k=0), "tile k has 0 buffers; it needs 1 or more"),
        (Order(()), "kernel attention, loop j: the order has no role"),
        (Order((Role("a", 0, ()),)), "need distinct names and one warp group or more"),
        (Order((Role("a", 1, (Step("run", "qk"),)), Role("b", 1, ()))),
         "role a cannot run phase qk: only the last role, b, holds tiles"),
        (Order((Role("a", 1, (Step("fetch", "k"),)),)), "'fetch' is not one of issue, wait, run, take, give"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_order_that_does_not_fit_its_loop_is_refused_with_the_phase_named(given: Order, message: str) -> None:
    with pytest.raises(InputError, match=message):
        segments(FLASH, with_order(given))


def test_loops_of_a_kernel_share_one_number_of_groups() -> None:
    softmax = standard(A, Schedule(block_q=64, block_k=64, softmax_cols=64)).kernels[1]
    orders = {f"j{n}": Order((Role("groups", n, ()),)) for n in (1, 2)}
    with pytest.raises(InputError, match="different numbers of groups: 1 in loop j1, 2 in loop j2"):
        segments(softmax, Schedule(block_q=64, block_k=64, orders=orders))
