"""Laws of replay and check over random problems, tile sizes and formats."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iosim.check import Normal, check
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.dtypes import DTYPES
from iosim.index import at
from iosim.interpreters.replay import Replayer
from iosim.problem import ALIGNMENTS, Attention
from iosim.program import Compute, Load, Loop, Span
from iosim.schedule import Schedule

LAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ALL_ROWS = 2**60
small = st.integers(1, 40)


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 3))
    return Attention(
        n_q=draw(st.integers(1, 70)), n_k=draw(st.integers(1, 70)), d=draw(small), d_v=draw(small),
        batch=draw(st.integers(1, 3)), heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads,
        causal=draw(st.booleans()), causal_align=draw(st.sampled_from(ALIGNMENTS)),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])), lse=draw(st.booleans()),
    )  # fmt: skip


schedules = st.builds(Schedule, block_q=small, block_k=small, block_d=small, softmax_rows=st.integers(1, 5),
                      softmax_cols=st.integers(1, 80))  # fmt: skip
flows = st.sampled_from((flash2, standard))


def source(a, seed=0):
    inputs = Normal(attention=a, seed=seed)
    whole = {
        name: np.array([[inputs.rows(name, b, h, (0, n)) for h in range(heads)] for b in range(a.batch)])
        for name, heads, n in (("Q", a.heads, a.n_q), ("K", a.kv_heads, a.n_k), ("V", a.kv_heads, a.n_k))
    }
    return lambda tensor, box: whole[tensor.name][tuple(slice(*span) for span in box)]


@LAW
@given(problems(), schedules, flows, st.integers(0, 9))
def test_every_program_is_attention(a, schedule, flow, seed):
    result = check(a, flow(a, schedule), seed=seed, budget=ALL_ROWS)
    assert result.status == "passed", result.detail
    assert result.rows_checked == result.rows_total


@LAW
@given(problems(), schedules, flows, st.data())
def test_a_demanded_box_is_that_part_of_the_whole(a, schedule, flow, data):
    box = []
    for size in (a.batch, a.heads, a.n_q):
        lo = data.draw(st.integers(0, size - 1))
        box.append((lo, data.draw(st.integers(lo + 1, size))))
    replayer, give = Replayer(flow(a, schedule)), source(a)
    whole = replayer.run(give, mapper=map)
    part = replayer.run(give, {name: (*box, *((0, n) for n in x.shape[3:])) for name, x in whole.outputs.items()}, map)
    for name, x in whole.outputs.items():
        np.testing.assert_array_equal(part.outputs[name], x[tuple(slice(*span) for span in box)])
    assert all(n <= m for n, m in zip(part.blocks, whole.blocks, strict=True))


@LAW
@given(problems(), schedules, flows)
def test_counted_bytes_are_those_of_a_walk_over_every_block(a, schedule, flow):
    program = flow(a, schedule)
    moved = Replayer(program).run(source(a), mapper=map).moved
    assert moved == {key: count for key, count in walked(program).items() if count}


def walked(program):
    """Bytes by tensor and direction: every block, every iteration, one node at a time."""
    out = {}

    def run(body, env):
        for node in body:
            if isinstance(node, Loop):
                for n in range(at(node.lo, env), at(node.hi, env)):
                    run(node.body, {**env, node.index: n})
            elif not isinstance(node, Compute):
                w = node.when
                if w is None or at(w.lo, env) <= env[w.index] < at(w.hi, env):
                    tensor = node.view.tensor
                    lengths = []
                    for ix, size in zip(node.view.index, tensor.shape, strict=True):
                        start = at(ix.start if isinstance(ix, Span) else ix, env)
                        lengths.append(len(range(size)[start : start + (ix.size if isinstance(ix, Span) else 1)]))
                    direction = "read" if isinstance(node, Load) else "add" if node.add else "write"
                    key = tensor.name, direction
                    out[key] = out.get(key, 0) + prod(lengths) * DTYPES[tensor.dtype].bytes

    for kernel in program.kernels:
        for cell in product(*(range(extent) for _, extent in kernel.grid)):
            run(kernel.body, {axis: n for (axis, _), n in zip(kernel.grid, cell, strict=True)})
    return out
