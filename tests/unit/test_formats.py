"""fp8 data with scales, and an fp16 accumulator: what programs move and compute, and what the check catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from iosim import InputError, run
from iosim.check import Normal, check
from iosim.check.quantise import Quantised, scaled_rows
from iosim.dataflows import load_dataflow
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.interpreters.ledger import ledger
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.program import Builder, Compute, Kernel, Loop, Node, Program, ProgramError, Scales, rows, show
from iosim.schedule import Schedule

SCHEDULE = Schedule(block_q=32, block_k=48, block_d=16, softmax_rows=4, softmax_cols=128)
FLOWS = {"flash2": flash2, "standard": standard}
FP8 = Attention(n_q=200, n_k=300, d=32, d_v=16, heads=4, kv_heads=2, causal=True, lse=True, dtype="fp8")
NARROW = Attention(n_q=100, n_k=150, d=40, heads=2, lse=True, accumulator="fp16")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "a",
    [
        FP8,
        Attention(n_q=70, n_k=33, d=16, causal=True, lse=True, dtype="fp8"),
        Attention(n_q=150, n_k=100, d=16, window=20, lse=True, dtype="e4m3"),
        Attention(n_q=1, n_k=900, d=16, heads=4, kv_heads=1, dtype="fp8"),
        NARROW,
        replace(NARROW, causal=True, window=30),
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", [{}, {"outliers": 0.01}, {"q": 1e-6, "v": 1e-6}, {"q": 8.0, "k": 8.0}], ids=str)
def test_right_programs_pass(flow: str, a: Attention, inputs: dict[str, float]) -> None:
    result = check(a, FLOWS[flow](a, SCHEDULE), inputs=Normal(attention=a, **inputs))
    assert result.status == "passed", result.detail


def change(body: tuple[Node, ...], edit: Callable[[Compute], Node | None]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, Loop):
            out.append(replace(node, body=change(node.body, edit)))
        elif not isinstance(node, Compute):
            out.append(node)
        elif (new := edit(node)) is not None:
            out.append(new)
    return tuple(out)


def without(program: Program, drop: Callable[[Compute], bool]) -> Program:
    kernels: list[Kernel] = [replace(k, body=change(k.body, lambda n: None if drop(n) else n)) for k in program.kernels]
    assert kernels != list(program.kernels)
    return replace(program, kernels=tuple(kernels))


def is_(op: str, out: str, *args: str) -> Callable[[Compute], bool]:
    return lambda n: n.op == op and n.out.name == out and all(a in {str(x) for x in n.args} for a in args)


@pytest.mark.parametrize(
    ("flow", "drop"),
    [
        ("flash2", is_("mul", "x", "sqk")),  # scores without their scales
        ("flash2", is_("mul", "shrink", "unit")),  # sums left in the last tile's units
        ("flash2", is_("mul", "out", "unit")),
        ("flash2", is_("cast", "unit", "sv")),
        ("flash2", is_("sub", "m", "lift")),  # the log-sum-exp of 2^8 times the weights
        ("standard", is_("mul", "x", "sqk")),
        ("standard", is_("mul", "o", "sv / gain")),
    ],
)
def test_a_missing_scale_is_caught(flow: str, drop: Callable[[Compute], bool]) -> None:
    program = FLOWS[flow](FP8, SCHEDULE)
    assert check(FP8, without(program, drop)).status == "failed"


def test_bytes_of_codes_and_scales() -> None:
    """Codes of a byte, O of two; a scale of four bytes for each tile that a block loads."""
    a = Attention(n_q=200, n_k=300, d=32, d_v=16, heads=4, kv_heads=2, dtype="fp8")
    q_tiles, k_tiles = ceil(200 / 32), ceil(300 / 48)
    expected = {
        "Q": {"read": 4 * 200 * 32},
        "K": {"read": 4 * q_tiles * 300 * 32},
        "V": {"read": 4 * q_tiles * 300 * 16},
        "SQ": {"read": 4 * q_tiles * 4},
        "SK": {"read": 4 * q_tiles * k_tiles * 4},
        "SV": {"read": 4 * q_tiles * k_tiles * 4},
        "O": {"write": 4 * 200 * 16 * 2},
    }
    counted = ledger(flash2(a, SCHEDULE))
    assert counted.by_tensor == expected
    scales = 4 * (4 * q_tiles + 2 * 2 * k_tiles)
    assert counted.io_bytes == 4 * 200 * 32 + 2 * 300 * (32 + 16) + 4 * 200 * 16 * 2 + scales


def test_against_attention_of_the_decoded_values() -> None:
    """Written out in float64, without the check's own code; P's rounding of 2^-4 is what remains."""
    a = Attention(n_q=64, n_k=96, d=32, dtype="fp8")
    program = flash2(a, SCHEDULE)
    q = Quantised(Normal(attention=replace(a, dtype="fp32")), a, scaled_rows(program))

    def source(tensor, box):
        if tensor.scales is not None:
            return q.scales(tensor.scales.tensor, box)
        return q.rows(tensor.name, 0, 0, box[2])[None, None]

    got = replay(program, source).outputs["O"][0, 0]
    x = {}
    for name, n, block in (("Q", 64, 32), ("K", 96, 48), ("V", 96, 48)):
        scale = q.scales(name, ((0, 1), (0, 1), (0, 2)))[0, 0].astype(np.float64)
        x[name] = q.rows(name, 0, 0, (0, n)) * np.repeat(scale, block)[:, None]
    s = x["Q"] @ x["K"].T / np.sqrt(32)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    off = np.abs(got - p @ x["V"])
    assert (off <= 2.0**-4 * (p @ np.abs(x["V"])) + 2.0**-8 * np.abs(got) + 1e-5).all()
    assert off.max() > 2.0**-8  # so it was rounded


def product(n: int, dtype: str) -> Program:
    p = Builder("product")
    A = p.tensor("A", (16, n), "fp16", "in")
    B = p.tensor("B", (n, 8), "fp16", "in")
    C = p.tensor("C", (16, 8), "fp32", "out")
    with p.kernel("product", i=1):
        a, b = p.load("a", A[rows(0, 16)]), p.load("b", B[rows(0, n)])
        p.store(C[rows(0, 16)], p.matmul("c", a, b, dtype=dtype))
    return p.done()


def test_an_fp16_accumulator_rounds_after_each_step_of_16() -> None:
    random = np.random.default_rng(0)
    x = {"A": random.standard_normal((16, 100)), "B": random.standard_normal((100, 8))}
    x = {name: value.astype(np.float16).astype(np.float32) for name, value in x.items()}
    got = replay(product(100, "fp16"), lambda t, _: x[t.name]).outputs["C"]
    acc = np.zeros((16, 8), np.float16)
    for k in range(0, 100, 16):
        acc = (acc + x["A"][:, k : k + 16] @ x["B"][k : k + 16]).astype(np.float16)
    assert np.array_equal(got, acc.astype(np.float32))
    once = replay(product(100, "fp32"), lambda t, _: x[t.name]).outputs["C"].astype(np.float16)
    assert (got != once).any()


def test_an_fp16_accumulator_is_worse_but_within_its_bound() -> None:
    narrow, wide = (check(a, flash2(a, SCHEDULE)) for a in (NARROW, replace(NARROW, accumulator="fp32")))
    assert narrow.status == wide.status == "passed"
    assert narrow.max_abs_error > 3 * wide.max_abs_error


def test_the_text_of_a_program_says_what_scales_scale() -> None:
    assert "SK (1, 2, 7) fp32, scales of 48 rows of K each" in show(flash2(FP8, SCHEDULE))


def test_scales_must_fit_what_they_scale() -> None:
    program = flash2(FP8, SCHEDULE)
    from iosim.program import check as check_program

    for scales, message in (
        (Scales("K", 32), "one scale for each 32 rows of K takes (1, 2, 10)"),
        (Scales("W", 48), "SK scales W; both must be inputs"),
    ):
        tensors = tuple(replace(t, scales=scales) if t.name == "SK" else t for t in program.tensors)
        with pytest.raises(ProgramError, match="SK") as caught:
            check_program(replace(program, tensors=tensors))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accumulator": "fp61"}, "accumulator: 'fp61' is not one of fp32, fp16 (did you mean 'fp16'?)"),
        ({"accumulator": "fp16", "dtype": "bf16"}, "matrix units have fp32 only for it"),
        ({"accumulator": "fp16", "dtype": "fp8"}, "sums of scaled fp8 values overflow it"),
        ({"dtype": "fp9"}, "dtype: 'fp9' is not one of fp16, bf16, fp32, fp8_e4m3"),
    ],
)
def test_formats_that_do_not_go_together(fields: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Attention(n_q=64, d=64, **fields)
    assert message in str(caught.value)


def test_fp8_runs_where_the_machine_has_it() -> None:
    a = Attention(n_q=1024, d=128, heads=4, dtype="fp8")
    fast = run(a, dataflow="flash3", hardware="h200-sxm")
    assert fast.check is not None
    assert fast.check.status == "passed"
    half = run(replace(a, dtype="fp16"), dataflow="flash3", hardware="h200-sxm", check=False)
    assert (fast.seconds or 0) < (half.seconds or 0)
    with pytest.raises(InputError, match="a100-sxm-80gb has no matrix rate for fp8_e4m3; it takes fp16, bf16, fp32"):
        run(a, dataflow="flash3", hardware="a100-sxm-80gb")


def test_a_dataflow_that_is_not_written_for_a_format_says_which_are() -> None:
    with pytest.raises(InputError, match="flash1 is not written for fp8; flash2, flash3, standard are"):
        run(FP8, dataflow="flash1", hardware="h200-sxm")
    assert load_dataflow("flash3").takes[:2] == ("fp8", "fp16 accumulator")
