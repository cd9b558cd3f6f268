"""The check of softmax alone: right programs pass, wrong ones fail, and the naive one on large logits says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iosim.check import Normal, check, check_all, large_logits
from iosim.dataflows import load_dataflow
from iosim.problem import Attention
from iosim.program import Compute, When
from iosim.schedule import Schedule
from tests.unit.test_check import Constant, edited, parameter, scaled_after, storing, without

KINDS = ["naive", "safe", "online"]
SHORT = Schedule(block_q=16, block_k=16, softmax_rows=4, softmax_cols=32)
WHOLE = replace(SHORT, softmax_cols=1024)
A = Attention(n_q=200, n_k=300, d=8, heads=2, causal=True, lse=True)


def program(kind, a, schedule=SHORT):
    return load_dataflow(f"softmax-{kind}")(a, schedule)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [SHORT, WHOLE], ids=["tiles", "rows"])
@pytest.mark.parametrize(
    "a",
    [
        A,
        replace(A, causal=False, window=40, dtype="bf16"),
        replace(A, dtype="fp32", n_q=330),
        Attention(n_q=1, d=1, lse=True),
    ],
    ids=str,
)
def test_right_programs_pass(kind, schedule, a):
    for source in (None, Normal(attention=a, s=15.0), Normal(attention=a, s=1e-40), Constant(a)):
        result = check(a, program(kind, a, schedule), inputs=source)
        assert result.status == "passed", result.detail
        assert result.rows_checked == result.rows_total == a.batch * a.heads * a.n_q
        assert result.worst_ratio <= 1
        assert result.counted is not None


@pytest.mark.parametrize("schedule", [SHORT, WHOLE], ids=["tiles", "rows"])
def test_the_naive_one_overflows_on_large_logits_and_the_others_do_not(schedule):
    naive, safe, online = check_all(A, [program(k, A, schedule) for k in KINDS], inputs=large_logits(A))
    assert (naive.status, safe.status, online.status) == ("failed", "passed", "passed")
    assert " is nan; float64 gives " in naive.detail
    assert "exp overflowed: the exponentials of this row's scores add up to exp(" in naive.detail
    assert "softmax-naive does not subtract the row's maximum first" in naive.detail


def test_the_naive_one_underflows_on_scores_far_below_0():
    class Low(Constant):
        def rows(self, *args):
            return super().rows(*args) - 200

    result = check(A, program("naive", A), inputs=Low(A))
    assert result.status == "failed"
    assert "exp underflowed" in result.detail
    assert check(A, program("safe", A), inputs=Low(A)).status == "passed"


WRONG = {
    "no mask": without("mask"),
    "diagonal one off": parameter("mask", diagonal=A.diagonal + 1),
    "weights 0.5% off": scaled_after("exp", "e3", 1.005),
    "denominator 0.5% off": scaled_after("add", "l", 1.005),
    "no rescale": lambda n: () if isinstance(n, Compute) and n.op == "mul" else (n,),
    "a tile not stored": storing("P", when=When("j3", 1, 9)),
    "rows not stored": storing("P", when=When("i", 0, 49)),
    "L of some rows not stored": storing("L", when=When("i", 1, 99)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_fail(name):
    result = check(A, edited(program("online", A), WRONG[name]))
    assert result.status == "failed"
    assert " at batch 0, head 0, row " in result.detail


def test_above_the_budget_rows_are_sampled():
    a = replace(A, n_q=2000, n_k=2000, heads=4)
    result = check(a, program("online", a), budget=2**19)
    assert result.status == "passed"
    assert 0 < result.rows_checked < result.rows_total == 8000
