"""The memory report: closed forms of every accounting, the guide's table derived, what a machine holds, H200 calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.dataflows import load_dataflow
from iosim.dtypes import dtype
from iosim.hardware import load_hardware
from iosim.interpreters.ledger import ledger
from iosim.memory.step import pass_memory
from iosim.problem import Attention
from iosim.report.memory import section
from iosim.report.sections import Section, text
from iosim.schedule import Schedule
from iosim.study.cases import forward_dataflows
from iosim.study.memory import ACCOUNTINGS, guide, longest_held, measured_calls, memory, tensors
from tests.dataflow_checks import suited

BY_NAME = {c.name: c for c in ACCOUNTINGS}
GUIDED = {"d": 128, "heads": 1}


@settings(max_examples=25)
@given(
    n=st.integers(1, 5000),
    d=st.integers(1, 256),
    heads=st.integers(1, 4),
    name=st.sampled_from(("fp16", "bf16", "fp32")),
)
def test_closed_forms_of_every_accounting(n: int, d: int, heads: int, name: str) -> None:
    """In bytes a head, e of an element.  Forward: S and P beside Q, K and V, or P and O, which comes when S has gone.

    A training step is Table 21 of the first paper: 4 N x N and 10 N x d tensors; 13 N x d and two fp32 numbers a row,
    where the sum of dQ, in fp32, is as large as two tensors of 2 bytes.
    """
    a, e = Attention(n_q=n, d=d, heads=heads, dtype=name), dtype(name).bytes
    wanted = {
        ("forward", "standard"): max(2 * n * n * e + 3 * n * d * e, n * n * e + 4 * n * d * e),
        ("fp32", "standard"): max(2 * n * n * 4 + 3 * n * d * e, n * n * 4 + 4 * n * d * e),
        ("training", "standard"): 4 * n * n * 4 + 10 * n * d * e,
        ("forward", "flash"): 4 * n * d * e,
        ("training", "flash"): 11 * n * d * e + n * d * 4 + 2 * 4 * n,
    }
    for (accounting, algorithm), bytes_ in wanted.items():
        held = tensors(a, algorithm, BY_NAME[accounting])
        if accounting == "training" and n < 2 * d:
            continue  # another call may hold more where rows are short
        assert held.bytes == heads * bytes_, (accounting, algorithm)


def test_what_grows_with_n_squared_is_told_by_shape_not_by_size() -> None:
    """At N = d every tensor has as many elements."""
    held = tensors(Attention(n_q=64, d=64), "standard", BY_NAME["forward"])
    assert [name for name, _ in held.scores] == ["S", "P"]
    assert held.score_bytes == 2 * 64 * 64 * 2


def test_the_guides_table_by_hand() -> None:
    """16 N^2 bytes: 4,194,304; 67,108,864; 268,435,456; 4,294,967,296.  8 N 128 bytes: 0.5, 2, 4, 16 MiB.

    MB over MiB: 4.194 / 0.5 = 8.39, 67.11 / 2 = 33.55, 268.4 / 4 = 67.11, 4295 / 16 = 268.4, rounded as printed.
    In one unit N / 64.  68 is no rounding of 67.1 but 34 x 2.
    """
    lines = guide()
    assert [p.standard_bytes for p in lines] == [4_194_304, 67_108_864, 268_435_456, 4_294_967_296]
    assert [p.flash_bytes for p in lines] == [x * 2**20 for x in (0.5, 2, 4, 16)]
    assert [round(p.mixed_ratio) for p in lines] == [p.ratio for p in lines] == [8, 34, 67, 268]
    assert [p.one_unit_ratio for p in lines] == [8, 32, 64, 256]
    assert [p.rounded for p in lines] == [True, False, True, True]


def test_the_guides_standard_column_is_the_scores_of_a_training_step_in_fp32() -> None:
    for p in guide():
        held = tensors(Attention(n_q=p.n, d=128), "standard", BY_NAME["training"])
        assert held.score_bytes == p.standard_bytes
        assert tensors(Attention(n_q=p.n, d=128), "flash", BY_NAME["forward"]).bytes == p.flash_bytes


@pytest.mark.parametrize("name", forward_dataflows())
def test_a_pass_alone_holds_what_the_ledger_says(name: str) -> None:
    a = suited(name, Attention(n_q=512, d=64, heads=2))
    program = load_dataflow(name)(a, Schedule(block_q=64, block_k=64, splits=2))
    assert pass_memory(program).peak_bytes == ledger(program).peak_bytes


@pytest.mark.parametrize(("algorithm", "accounting"), [("standard", "forward"), ("flash", "training")])
def test_the_longest_n_fits_and_one_more_does_not(algorithm: str, accounting: str) -> None:
    capacity = 10**8
    longest = longest_held(GUIDED, algorithm, BY_NAME[accounting], capacity)
    assert longest is not None
    sizes = [tensors(Attention(n_q=n, d=128), algorithm, BY_NAME[accounting]).bytes for n in (longest, longest + 1)]
    assert sizes[0] <= capacity < sizes[1]
    assert longest_held(GUIDED, algorithm, BY_NAME[accounting], 100) is None


def test_measured_calls_of_standard_attention_are_four_bytes_a_score_and_a_scaled_q() -> None:
    """4 N^2 + 2 N d for each head of N queries, to the byte; the guide's 16 N^2 is no inference pass."""
    calls = [c for c in measured_calls() if c.implementation == "standard"]
    assert len(calls) >= 9
    for c in calls:
        a = c.problem
        assert c.measured_bytes == c.listed_bytes == a.batch * a.heads * (4 * a.n_q**2 + 2 * a.n_q * a.d)


@pytest.fixture(scope="module")
def report() -> Section:
    machines = [load_hardware(name) for name in ("mp31", "h200-sxm")]
    return section(memory((512, 2048, 4096, 16384), GUIDED, machines), {"n": [512]})


def test_the_report_leads_with_the_answer_and_fits_a_terminal(report: Section) -> None:
    """At N = 16,384: 2 x 2 x 2^28 + 3 x 2^22 = 1.086 GB against 4 x 2^22 = 16.8 MB, 64.75x."""
    shown = text(report)
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert "standard attention holds 1.09 GB of device memory, FlashAttention 16.8 MB (64.8x less)" in words
    assert "34 x 2" in words
    assert "h200-sxm holds a forward pass of standard attention up to N = " in words


GOLDEN = """\
n,standard_forward_bytes,standard_fp32_bytes,standard_training_bytes,flash_forward_bytes,flash_training_bytes
512,1441792,2490368,5505024,524288,1708032
2048,18350080,35127296,72351744,2097152,6832128
4096,70254592,137363456,278921216,4194304,13664256
16384,1086324736,2160066560,4336910336,16777216,54657024
"""


def test_golden_memory_table(report: Section) -> None:
    """By the closed forms above at d = 128 in fp16: 4 N^2 + 6 N d, 8 N^2 + 6 N d, 16 N^2 + 20 N d, 8 N d,
    26 N d + 8 N bytes."""
    table = next(t for t in report.tables if t.name == "memory")
    keys = GOLDEN.splitlines()[0].split(",")
    lines = [",".join(keys), *(",".join(str(row[key]) for key in keys) for row in table.rows)]
    assert lines == GOLDEN.splitlines()
    for n, *found in ([int(x) for x in line.split(",")] for line in lines[1:]):
        nd = n * 128
        assert found == [4 * n * n + 6 * nd, 8 * n * n + 6 * nd, 16 * n * n + 20 * nd, 8 * nd, 26 * nd + 8 * n]
