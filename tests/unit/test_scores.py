"""Scores stored in fp32: what `standard` and its backward pass then move, and how exactly they compute."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from iosim.check import Normal, check, large_logits
from iosim.check.backward import errors_of
from iosim.check.forward import Kind, slack_of
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.interpreters.ledger import ledger
from iosim.problem import Attention
from iosim.program import Compute, Program
from iosim.schedule import Schedule
from tests.conftest import Iosim
from tests.unit.test_check import Constant, edited

SCHEDULE = Schedule(block_q=32, block_k=32, block_d=16, softmax_rows=4, softmax_cols=128, scores="fp32")
LONG = Attention(n_q=300, d=32)


def program(flow: str, a: Attention, scores: str = "fp32") -> Program:
    return load_dataflow(flow)(a, replace(SCHEDULE, scores=scores))


@pytest.mark.parametrize("flow", ["standard", "standard-backward"])
@pytest.mark.parametrize(
    "a",
    [
        LONG,
        replace(LONG, dtype="bf16", causal=True),
        Attention(n_q=71, n_k=150, d=20, d_v=12, heads=4, kv_heads=2, batch=2, causal=True, lse=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", ["normal", "large", "outliers", "tiny", "constant"])
def test_right_programs_pass(flow: str, a: Attention, inputs: str) -> None:
    source = {
        "normal": None,
        "large": large_logits(a),
        "outliers": Normal(attention=a, outliers=0.01),
        "tiny": Normal(attention=a, q=1e-6, k=1e-6, v=1e-6),
        "constant": Constant(a),
    }[inputs]
    result = check(a, program(flow, a), inputs=source)
    assert result.status == "passed", result.detail
    assert result.rows_checked == result.rows_total


def test_the_bound_is_that_of_the_dtype() -> None:
    """A score in fp32 that is a quarter of fp16's roundoff off is found; dP loses one of the roundings before dQ."""
    error, r = 2.0**-13, 2.0**-11

    def off(node):  # type: ignore[no-untyped-def]
        if isinstance(node, Compute) and node.out.name == "s":
            return node, Compute("scale", node.out, (node.out,), (("by", 1 + error),), node.phase)
        return (node,)

    wrong = check(LONG, edited(program("standard", LONG), off))
    assert "S at batch 0" in wrong.detail
    assert (wrong.status, slack_of(LONG, Kind(1, "fp32")).stored, slack_of(LONG, Kind(1, "fp16")).stored) == (
        "failed",
        2.0**-24,
        r,
    )
    wide, narrow = (errors_of(LONG, program("standard-backward", LONG, kept)) for kept in ("fp32", "data"))
    assert narrow.scores - wide.scores == pytest.approx(r, rel=1e-3)
    assert wide.values - narrow.values == r  # P is rounded for dV in any case, by the program or by its input


def test_large_scores_keep_their_meaning() -> None:
    """In fp16, scores of 10^4 are 8 apart, so that the softmax is of other numbers; in fp32 they are as good as any."""
    source = large_logits(LONG)
    found = {kept: check(LONG, program("standard", LONG, kept), inputs=source) for kept in ("data", "fp32")}
    assert {result.status for result in found.values()} == {"passed"}
    assert found["fp32"].plain_error < 0.01 < 0.1 < found["data"].plain_error


def test_bytes_of_the_matrices_double() -> None:
    for flow, names in (("standard", "S P"), ("standard-backward", "P dP dS")):
        narrow, wide = (ledger(program(flow, LONG, kept)) for kept in ("data", "fp32"))
        for name, row in narrow.by_tensor.items():
            factor = 2 if name in names.split() else 1
            assert wide.by_tensor[name] == {way: factor * count for way, count in row.items()}
    # Forward: S and P each written and read; backward: P, dP, dS seven times; N x d tensors as before.
    matrix, data = 300 * 300, 300 * 32
    assert ledger(program("standard", LONG)).paper_hbm_bytes == 4 * matrix * 4 + 4 * data * 2
    assert ledger(program("standard-backward", LONG)).paper_hbm_bytes == 7 * matrix * 4 + 8 * data * 2


def test_the_option(iosim: Iosim) -> None:
    n, d, args = 512, 64, ("run", "-n", "512", "-d", "64", "--pass", "training", "--scores")
    text = iosim(*args, "fp32").out
    assert "passed" in text
    mib = (4 * 4 * n * n + 10 * 2 * n * d) / 2**20  # P, dP, dS, P * dP in fp32 and ten N x d tensors in fp16
    assert ceil(100 * mib) / 100 == 4.63
    assert f"({mib:.2f} MiB)" in text
    assert "--scores: 'fp23' is not one of data, fp32 (did you mean 'fp32'?)" in iosim(*args, "fp23").err
    idle = iosim("run", "-n", "512", "-d", "64", "--dataflow", "flash2", "--scores", "fp32")
    assert "--scores: changes nothing in flash2" in idle.err
    with pytest.raises(InputError, match="scores: None is not one of data, fp32"):
        replace(SCHEDULE, scores=None)  # type: ignore[arg-type]
