"""Every dataflow under drawn problems and schedules: its numbers, its bytes, and replay's count of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from iosim.dataflows import dataflow_names, load_dataflow
from iosim.problem import Attention
from iosim.schedule import Schedule
from tests.dataflow_checks import CHECKS, backward, forward, forward_inputs, normal, suited

# ---------------------------------------------------------------- problems and schedules


@st.composite
def problems(draw: st.DrawFn, longest: int = 30) -> Attention:
    n_q = draw(st.integers(1, longest))
    kv_heads = draw(st.integers(1, 2))
    return Attention(
        n_q=n_q,
        n_k=draw(st.just(n_q) | st.integers(1, longest)),
        d=draw(st.sampled_from([1, 4, 8])),
        d_v=draw(st.sampled_from([1, 5, 8])),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        causal=draw(st.booleans()),
        causal_align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.none() | st.integers(1, longest)),
        dtype=draw(st.sampled_from(["fp16", "fp32"])),
        lse=draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn, largest: int = 13) -> Schedule:
    size = st.integers(1, largest)
    return Schedule(
        block_q=draw(size),
        block_k=draw(size),
        block_d=draw(size),
        splits=draw(st.integers(1, 5)),
        softmax=draw(st.sampled_from(["safe", "naive", "online"])),
        softmax_rows=draw(st.integers(1, 3)),
        softmax_cols=draw(st.integers(1, 40)),
        scores=draw(st.sampled_from(["data", "fp32"])),
    )


# ---------------------------------------------------------------- the laws


def test_every_dataflow_has_a_check() -> None:
    assert sorted(CHECKS) == dataflow_names()


@pytest.mark.parametrize("name", CHECKS)
@settings(deadline=None, max_examples=40)
@given(a=problems(), s=schedules())
def test_it_computes_and_moves_what_it_should(name: str, a: Attention, s: Schedule) -> None:
    flow = load_dataflow(name)
    a = suited(name, a)
    assume(not flow.refusal(a))
    CHECKS[name](a, s, flow(a, s))


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 2, "causal_align": "top-left"}])
def test_the_gradient_is_the_slope(mask: dict[str, object]) -> None:
    # Central differences of a smooth function are wrong by step^2 times a third derivative of order 1, and by the
    # roundoff of the sum over the step: 1e-10 and 1e-16 * 10 / 1e-5.
    a = Attention(n_q=4, n_k=3, d=2, d_v=3, heads=4, kv_heads=2, batch=2, **mask)  # type: ignore[arg-type]
    x = forward_inputs(a) | {"dO": normal(a, "dO", (a.batch, a.heads, a.n_q, a.d_v))}
    gradients, step = backward(a, x), 1e-5
    for name in "QKV":
        for place in np.ndindex(x[name].shape):
            ends = []
            for sign in (1, -1):
                moved = x[name].copy()
                moved[place] += sign * step
                ends.append((forward(a, x | {name: moved})["O"] * x["dO"]).sum())
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(slope - gradients[f"d{name}"][place]) < 1e-8
