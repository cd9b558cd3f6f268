"""The check of backward passes: right programs pass, wrong ones fail, samples say what they left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iosim.check import Normal, check, check_all, large_logits
from iosim.check.rows import SAMPLED
from iosim.dataflows import load_dataflow
from iosim.problem import Attention
from iosim.program import Store, When
from iosim.schedule import Schedule
from tests.unit.test_check import Constant, edited, loading, parameter, scaled_after, storing, without

FLOWS = ["flash-backward", "standard-backward"]
SCHEDULE = Schedule(block_q=32, block_k=32, block_d=16, softmax_rows=4, softmax_cols=128)
LONG = Attention(n_q=512, d=32)
SHARED = Attention(n_q=201, n_k=150, d=20, d_v=12, heads=4, kv_heads=2, batch=2, causal=True)


def program(flow, a):
    return load_dataflow(flow)(a, SCHEDULE)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "a",
    [
        LONG,
        SHARED,
        replace(LONG, dtype="bf16", causal=True),
        replace(LONG, dtype="fp32", n_k=200),
        replace(LONG, window=70, causal=True),
        Attention(n_q=150, n_k=100, d=16, window=20),
        Attention(n_q=1, d=8),
        Attention(n_q=3, n_k=900, d=16, heads=4, kv_heads=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", ["normal", "large", "outliers", "tiny", "subnormal", "constant"])
def test_right_programs_pass(flow, a, inputs):
    source = {
        "normal": None,
        "large": large_logits(a),
        "outliers": Normal(attention=a, outliers=0.01),
        "tiny": Normal(attention=a, q=1e-6, k=1e-6, v=1e-6),
        "subnormal": Normal(attention=a, q=1e-40, k=1e-40, v=1e-40, do=1e-3),
        "constant": Constant(a),
    }[inputs]
    result = check(a, program(flow, a), inputs=source)
    assert result.status == "passed", result.detail
    assert result.rows_checked == result.rows_total == a.batch * (a.heads * a.n_q + 2 * a.kv_heads * a.n_k)
    assert result.worst_ratio <= 1
    if inputs == "normal" and a.n_q > 100 and a.dtype != "fp32":
        assert result.worst_ratio > 0.1
    assert result.counted is not None


def adding(tensor, **change):
    """Changes the stores that add to a tensor."""
    edit = storing(tensor, **change)
    return lambda node: edit(node) if isinstance(node, Store) and node.add else (node,)


WRONG = {
    "dQ without scale": ("flash-backward", parameter("scale", by=1)),
    "scale 1% off": ("flash-backward", parameter("exp", scale=1.01 * LONG.scale)),
    "no mask": ("flash-backward", without("mask")),
    "diagonal one off": ("flash-backward", parameter("mask", diagonal=1)),
    "dQ 2% off": ("flash-backward", scaled_after("matmul", "dq", 1.02)),
    "dK 2% off": ("flash-backward", scaled_after("scale", "dk", 1.02)),
    "D left out": ("flash-backward", without("sub")),
    "D 5% off": ("flash-backward", scaled_after("rowsum", "di", 1.05)),
    "D not stored": ("flash-backward", storing("D", when=When("i", 0, 15))),
    "dQ not added for a tile": ("flash-backward", adding("dQ sum", when=When("j", 1, 99))),
    "dV not stored": ("flash-backward", storing("dV", when=When("j", 0, 15))),
    "keys one off": ("flash-backward", loading("K", 1)),
    "gradient one off": ("flash-backward", loading("dO", 1)),
    "standard dQ without scale": ("standard-backward", parameter("scale", by=1)),
    "dS 2% off": ("standard-backward", scaled_after("mul", "shifted", 1.02)),
    "row sum 10% off": ("standard-backward", scaled_after("rowsum", "sum", 0.9)),
    "dP not stored": ("standard-backward", storing("dP", when=When("j", 1, 99))),
    "dS not stored": ("standard-backward", storing("dS", when=When("i", 0, 100))),
    "values one off": ("standard-backward", loading("V", 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_fail(name):
    flow, edit = WRONG[name]
    a = replace(LONG, causal=True)
    wrong = edited(program(flow, a), edit)
    assert wrong != program(flow, a)
    result = check(a, wrong)
    assert result.status == "failed"
    assert result.worst_ratio > 1
    assert " at batch 0, head 0, row " in result.detail


def test_a_query_head_left_out_of_a_group_is_noticed_and_named():
    wrong = edited(program("flash-backward", SHARED), adding("dV sum", when=When("g", 0, 1)))
    result = check(SHARED, wrong)
    assert result.status == "failed"
    assert result.detail.startswith("dV at batch 0, head 0, row 0, column ")


@pytest.mark.parametrize("flow", FLOWS)
def test_several_programs_share_the_exact_gradient(flow):
    together = check_all(SHARED, [program(f, SHARED) for f in FLOWS])
    alone = check(SHARED, program(flow, SHARED))
    assert together[FLOWS.index(flow)] == alone


def test_above_the_budget_whole_key_value_heads_are_checked():
    a = replace(SHARED, batch=3, heads=8, kv_heads=4)
    result = check(a, program("flash-backward", a), budget=2 * SAMPLED * a.group * a.n_q * a.n_k)
    assert result.status == "passed"
    assert result.rows_checked == 2 * (2 * a.n_q + 2 * a.n_k)
    assert result.rows_total == 3 * (8 * a.n_q + 2 * 4 * a.n_k)
    assert result.counted is None


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("flow", FLOWS)
def test_of_a_head_that_is_too_long_pieces_are_checked(flow, window):
    a = Attention(n_q=1000, d=16, heads=4, kv_heads=2, causal=True, window=window)
    right = program(flow, a)
    result = check(a, right, budget=2**19)
    assert result.status == "passed", result.detail
    assert 0 < result.rows_checked < result.rows_total == 4000 + 2 * 2000
    assert result.detail.endswith("; dO is 0 outside of sampled rows")
    wrong = [parameter("scale", by=1), storing("dQ", when=When("j" if flow == "flash-backward" else "i", 0, 0))]
    wrong += [scaled_after(op, out, 1.1) for op, out in (("sub", "dp"), ("sub", "shifted"), ("matmul", "dv"))]
    for edit in wrong:
        if (changed := edited(right, edit)) != right:
            assert check(a, changed, budget=2**19).status == "failed"


def test_what_would_take_whole_matrices_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr("iosim.check.backward._MOST_SCORES", 2**19)
    a = Attention(n_q=1000, d=16)
    result = check(a, program("standard-backward", a), budget=2**19)
    assert result.status == "passed"
    assert "; not dK, for which the program needs whole n_q x n_k matrices" in result.detail
    assert "; not" not in check(a, program("flash-backward", a), budget=2**19).detail
