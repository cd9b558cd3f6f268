"""The tile language: which programs it refuses, and how it prints what the dataflows need of it."""

from __future__ import annotations

import numpy as np
import pytest

from iosim.index import Expr
from iosim.interpreters.replay import replay
from iosim.ops import OPS
from iosim.program import Builder, Program, ProgramError, Tensor, rows, show


def prefix_sums(own: str = "i", stores: bool = True) -> Program:
    """Y[r] = X[0] + ... + X[r], X in rows of 4 columns: each of two blocks reads its own last store."""
    p = Builder("prefix sums")
    X = p.tensor("X", (6, 8), "fp32", "in")
    Y = p.tensor("Y", (6, 8), "fp32", "scratch")
    Z = p.tensor("Z", (1, 8), "fp32", "out")
    with p.kernel("sums", i=2) as (i,):
        with p.loop("r", 0, 6) as r:
            x = p.load("x", X[rows(r, 1), rows(i, 4)])
            with p.when(r, 1, 6):
                mine: Expr | int = {"i": i, "next": i + 1, "first": 0}[own]
                y = p.load("y", Y[rows(r - 1, 1), rows(mine, 4)])
                p.add(x, x, y)
            if stores:
                p.store(Y[rows(r, 1), rows(i, 4)], x)
        p.store(Z[rows(0, 1), rows(i, 4)], p.load("last", Y[rows(5, 1), rows(i, 4)]))
    return p.done()


def test_a_block_may_load_what_it_stored_itself() -> None:
    x = np.arange(48, dtype=np.float32).reshape(6, 8)

    def source(_: Tensor, box: tuple[tuple[int, int], ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return x[tuple(slice(lo, hi) for lo, hi in box)]

    program = prefix_sums()
    done = replay(program, source)
    assert (done.outputs["Z"] == x.sum(0)).all()
    assert replay(program, source, {"Z": ((0, 1), (4, 8))}).blocks == (1,)  # the other block is not needed


@pytest.mark.parametrize("own", ["next", "first"])
def test_a_block_may_not_load_what_another_one_stores(own: str) -> None:
    with pytest.raises(ProgramError, match=r"Y\[.*\] is loaded, but another block may store Y\["):
        prefix_sums(own)


def test_what_nothing_stored_is_not_loaded() -> None:
    with pytest.raises(ProgramError, match=r"Y\[.*\] is loaded, but no earlier kernel stored Y"):
        prefix_sums(stores=False)


def test_what_all_blocks_of_a_kernel_store_is_not_loaded_by_it() -> None:
    p = Builder("race")
    Y = p.tensor("Y", (4, 1), "fp32", "out")
    with p.kernel("race", i=2):
        p.store(Y[rows(0, 4)], p.fill("one", shape=(4, 1), value=1))
        p.load("y", Y[rows(0, 4)])
    with pytest.raises(ProgramError, match="but blocks along i all store Y"):
        p.done()


def test_a_mask_hides_keys_outside_a_band() -> None:
    x = np.zeros((3, 5), np.float32)
    OPS["mask"].run(x, row=10, col=9, keys=13, diagonal=0, low=-1, out=x)
    # Query 10 + r sees keys 9 + r and 10 + r, key 13 is beyond the end: columns r and r + 1 up to column 3.
    assert np.isfinite(x).tolist() == [
        [True, True, False, False, False],
        [False, True, True, False, False],
        [False, False, True, True, False],
    ]


def test_show_prints_a_window_and_a_difference() -> None:
    p = Builder("band")
    Y = p.tensor("Y", (4, 4), "fp32", "out")
    with p.kernel("band"):
        x = p.fill("x", shape=(4, 4), value=0)
        p.mask(x, row=0, col=0, keys=4, diagonal=0, low=-2)
        p.store(Y[rows(0, 4)], p.sub("y", x, x))
    assert "x = mask(x: key < 4, key <= query, key >= query - 2)\n  y = x - x\n" in show(p.done())
