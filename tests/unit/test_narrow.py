"""A program cut down to some rows of its outputs computes these rows alike, and runs less."""

from __future__ import annotations

import numpy as np
import pytest

from iosim.dataflows import dataflow_names, load_dataflow
from iosim.interpreters.narrow import narrowed
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.program import walk
from iosim.schedule import Schedule
from tests.dataflow_checks import suited

SCHEDULE = Schedule(block_q=16, block_k=16, block_d=8, softmax_rows=4, softmax_cols=32, splits=2)
PROBLEMS = [
    Attention(n_q=100, d=8, heads=2, kv_heads=1, causal=True),
    Attention(n_q=70, n_k=90, d=8, window=30, lse=True),
]


def source(tensor, box):
    """Numbers that depend on the place alone; P and L of a size that softmax gives."""
    whole = np.random.default_rng(len(tensor.name)).random(tensor.shape, np.float32)
    if tensor.name == "L":
        whole += 5
    return whole[tuple(slice(lo, hi) for lo, hi in box)]


@pytest.mark.parametrize("a", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", dataflow_names())
def test_some_rows_of_an_output_are_the_same(name, a):
    program = load_dataflow(name)(suited(name, a), SCHEDULE)
    whole = replay(program, source)
    for tensor in [t for t in program.tensors if t.role == "out"]:
        demand = {tensor.name: ((0, 1), (0, 1), (32, 55), *((0, n) for n in tensor.shape[3:]))}
        done = replay(narrowed(program, demand), source, demand)
        cut = tuple(slice(lo, hi) for lo, hi in demand[tensor.name])
        np.testing.assert_array_equal(done.outputs[tensor.name], whole.outputs[tensor.name][cut])
        assert sum(done.moved.values()) < sum(whole.moved.values())


def test_what_nobody_asked_for_is_not_computed():
    a = PROBLEMS[0]
    program = load_dataflow("flash-backward")(a, SCHEDULE)
    box = {"dQ": ((0, 1), (0, 1), (16, 32), (0, a.d))}
    kernels = {k.name: k for k in narrowed(program, box).kernels}
    made = {n.out.name for n, _ in walk(kernels["gradients"].body) if hasattr(n, "out")}
    assert "dq" in made
    assert not {"dk", "dv", "p"} & made
    done = replay(narrowed(program, box), source, box)
    loads = (a.n_k // 16 + 1) * 16 * a.d * 2  # the tile of Q once for each key tile that is run, at most
    assert done.moved["Q", "read"] <= loads


def test_a_loop_that_hands_something_on_is_kept():
    a = PROBLEMS[1]
    program = load_dataflow("flash2")(a, SCHEDULE)
    box = {"O": ((0, 1), (0, 1), (16, 32), (0, a.d))}
    (kernel,) = narrowed(program, box).kernels
    loops = {loop for _, around in walk(kernel.body) for loop in around}
    assert {(loop.lo, loop.hi) for loop in loops} == {
        (loop.lo, loop.hi) for _, around in walk(program.kernels[0].body) for loop in around
    }
