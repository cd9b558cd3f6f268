"""The check passes right programs of every kind and fails wrong ones, and says what it did."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

import numpy as np
import pytest

import iosim.check
from iosim.check import Normal, check, check_all, large_logits, memory_needed, skipped
from iosim.check.rows import bands, block_rows, rewrites
from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.split_kv import split_kv
from iosim.dataflows.standard import standard
from iosim.dtypes import DTYPES
from iosim.errors import InputError
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.program import Builder, Compute, Load, Loop, Store, When, rows
from iosim.rounding import round_to
from iosim.schedule import Schedule

FLOWS = {"flash2": flash2, "standard": standard, "flash1": flash1, "split-kv": split_kv}
SCHEDULE = Schedule(block_q=32, block_k=32, block_d=16, softmax_rows=4, softmax_cols=128, splits=3)
ALL_ROWS = 2**40
LONG = Attention(n_q=512, d=32, lse=True)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "a",
    [
        LONG,
        replace(LONG, dtype="bf16", causal=True),
        replace(LONG, dtype="fp32"),
        Attention(n_q=33, n_k=70, d=20, d_v=12, heads=6, kv_heads=2, batch=2, causal=True, lse=True),
        Attention(n_q=70, n_k=33, d=16, causal=True, lse=True),
        Attention(n_q=1, d=8, lse=True),
        Attention(n_q=150, n_k=100, d=16, window=20, lse=True),
        replace(LONG, window=70, causal=True),
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
        "subnormal": Normal(attention=a, q=1e-40, k=1e-40, v=1e-40),
        "constant": Constant(a),
    }[inputs]
    result = check(a, FLOWS[flow](a, SCHEDULE), inputs=source, budget=ALL_ROWS)
    assert result.status == "passed", result.detail
    assert result.rows_checked == result.rows_total == a.batch * a.heads * a.n_q
    assert 0 <= result.worst_ratio <= 1
    assert result.counted is not None
    assert all(isfinite(x) for x in (result.max_abs_error, result.rel_error, result.tolerance, result.plain_error))


class Constant:
    """All scores alike, all values alike: rounding errors that all have one sign."""

    values_std = None

    def __init__(self, a):
        self.a = a

    def rows(self, name, batch, head, rows):  # noqa: ARG002 - all batches alike
        columns = {"V": self.a.d_v, "dO": self.a.d_v, "S": self.a.n_k}.get(name, self.a.d)
        out = np.full((rows[1] - rows[0], columns), 0.1 + 0.01 * head, np.float32)
        round_to(out, DTYPES[self.a.dtype])
        return out


# ---------------------------------------------------------------- wrong programs


def edited(program, edit):
    """The program with every node replaced by the nodes that `edit` gives for it."""

    def body(nodes):
        for node in nodes:
            inner = replace(node, body=tuple(body(node.body))) if isinstance(node, Loop) else node
            yield from edit(inner)

    return replace(program, kernels=tuple(replace(k, body=tuple(body(k.body))) for k in program.kernels))


def without(op):
    return lambda node: () if isinstance(node, Compute) and node.op == op else (node,)


def scaled_after(op, out, by):
    """The result of an operation one part in a hundred or so off."""

    def edit(node):
        if isinstance(node, Compute) and (node.op, node.out.name) == (op, out):
            return node, Compute("scale", node.out, (node.out,), (("by", by),), node.phase)
        return (node,)

    return edit


def storing(tensor, **change):
    return lambda n: (replace(n, **change),) if isinstance(n, Store) and n.view.tensor.name == tensor else (n,)


def shorter(node):
    """The last iteration of each loop over keys left out."""
    return (replace(node, hi=node.hi - 1),) if isinstance(node, Loop) and node.index in "jt" else (node,)


def loading(name, by):
    """The view of an input moved by some keys."""

    def edit(node):
        if isinstance(node, Load) and node.view.tensor.name == name:
            span = replace(node.view.index[2], start=node.view.index[2].start + by)
            return (replace(node, view=replace(node.view, index=(*node.view.index[:2], span, *node.view.index[3:]))),)
        return (node,)

    return edit


def parameter(op, **change):
    def edit(node):
        if isinstance(node, Compute) and node.op == op:
            return (replace(node, params=tuple({**dict(node.params), **change}.items())),)
        return (node,)

    return edit


WRONG = {
    "rescale 1% off": ("flash2", scaled_after("mul", "o", 1.01)),
    "denominator 1% off": ("flash2", scaled_after("add", "l", 1.01)),
    "output 0.5% off": ("flash2", scaled_after("div", "out", 1.005)),
    "no mask": ("flash2", without("mask")),
    "no rescale": ("flash2", lambda n: () if isinstance(n, Compute) and n.phase == "rescale" else (n,)),
    "last key tile missing": ("flash2", shorter),
    "keys one off": ("flash2", loading("K", 1)),
    "diagonal one off": ("flash2", parameter("mask", diagonal=1)),
    "scale 1% off": ("flash2", parameter("exp", scale=1.01 * LONG.scale)),
    "a store dropped": ("flash2", storing("O", when=When("i", 0, 3))),
    "no L": ("flash2", storing("L", when=When("i", 1, 9))),
    "scores 1% off": ("standard", parameter("scale", by=1.01 * LONG.scale)),
    "standard without a mask": ("standard", without("mask")),
    "values one off": ("standard", loading("V", 1)),
    "last step of a product missing": ("standard", shorter),
    "S not stored": ("standard", storing("S", when=When("j", 1, 99))),
    "P not stored": ("standard", storing("P", when=When("i", 0, 50))),
    "O not kept up to date": ("flash1", scaled_after("mul", "old", 1.01)),
    "O of a pass not stored": ("flash1", storing("O", when=When("j", 0, 8))),
    "a statistic not stored": ("flash1", storing("l", when=When("j", 0, 1))),
    "a part 3% off": ("split-kv", scaled_after("mul", "part", 1.03)),
    "a part not stored": ("split-kv", storing("O parts", when=When("t", 0, 2))),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("inputs", ["normal", "large"])
def test_wrong_programs_fail(name, inputs):
    if (name, inputs) == ("scale 1% off", "large"):
        return  # one key has all the weight of a row, by any scale
    flow, edit = WRONG[name]
    a = replace(LONG, causal=True)
    source = large_logits(a) if inputs == "large" else None
    result = check(a, edited(FLOWS[flow](a, SCHEDULE), edit), inputs=source)
    assert result.status == "failed"
    assert result.worst_ratio > 1
    assert " at batch 0, head 0, row " in result.detail


def test_wrong_programs_fail_at_length():
    """The bound follows |p| down: at 4096 keys an output of about 0.02 is still checked to a few per cent."""
    a = Attention(n_q=128, n_k=4096, d=64)
    program = edited(flash2(a, replace(SCHEDULE, block_k=128)), shorter)
    assert check(a, program).status == "failed"


def test_the_first_difference_is_named_with_both_values():
    a = Attention(n_q=96, d=16, heads=2, batch=2)
    program = edited(flash2(a, SCHEDULE), storing("O", when=When("g", 0, 1)))
    program = edited(program, storing("O", when=When("kv", 0, 1)))
    result = check(a, program)
    got = replay(program, lambda _, box: np.zeros([hi - lo for lo, hi in box], np.float32)).outputs["O"]
    assert np.isnan(got[:, 1]).all()
    assert not np.isnan(got[:, 0]).any()
    assert result.detail.startswith("O at batch 0, head 1, row 0, column 0 is nan; float64 gives ")
    assert result.max_abs_error == inf


# ---------------------------------------------------------------- sampling, inputs, memory


def test_above_the_budget_whole_blocks_of_sampled_heads_are_checked():
    a = Attention(n_q=1000, d=16, heads=8, kv_heads=4)
    programs = [flow(a, SCHEDULE) for flow in FLOWS.values()]
    results = check_all(a, programs, budget=200_000)
    for result in results:
        assert result.status == "passed"
        assert result.counted is None
        assert result.rows_total == 8000
        assert 0 < result.rows_checked < 1000
        assert f"{result.rows_checked} of 8000 rows" in result.detail


def test_samples_hold_the_first_and_the_last_rows_and_different_kv_heads():
    a = Attention(n_q=2000, d=16, heads=8, kv_heads=4)
    found = list(bands(a, [flash2(a, SCHEDULE)], seed=1, budget=2**21))
    assert len(found) >= 4
    assert all(band.rows[0] % 32 == 0 for band in found)
    assert min(band.rows[0] for band in found) == 0
    assert max(band.rows[1] for band in found) == 2000
    assert {band.heads[0] // 2 for band in found} == {0, 1, 2, 3}


def test_where_keys_are_many_a_sample_is_a_part_of_a_tile():
    """A tile of 32 rows has 32 * 2000 pairs, a budget of 40,000 has room for 20,000: 8 rows, the last ones."""
    a = Attention(n_q=2000, d=16)
    right = flash2(a, SCHEDULE)
    result = check(a, right, budget=40_000)
    assert (result.status, result.rows_checked) == ("passed", 8)
    wrong = edited(right, scaled_after("matmul", "x", 1.1))
    assert check(a, wrong, budget=40_000).status == "failed"


def test_a_seed_gives_the_same_check_and_another_seed_another():
    a = Attention(n_q=300, d=16, heads=2)
    one, again, other = (check(a, flash2(a, SCHEDULE), seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.max_abs_error != other.max_abs_error


def test_a_head_of_the_inputs_does_not_depend_on_the_other_heads():
    a = Attention(n_q=20000, d=8, heads=4, kv_heads=2)
    source = Normal(attention=a, seed=3)
    head = source.rows("K", 0, 1, (0, 20000))
    assert np.array_equal(source.rows("K", 0, 1, (9000, 17000)), head[9000:17000])
    assert not np.array_equal(source.rows("K", 0, 0, (0, 20000)), head)
    assert abs(head.std() - 1) < 0.02
    assert np.array_equal(head, head.astype(np.float16).astype(np.float32))


def test_large_logits_reach_ten_thousand():
    a = Attention(n_q=256, d=64)
    source = large_logits(a)
    q, k = (source.rows(name, 0, 0, (0, 256)) for name in "QK")
    scores = q @ k.T * a.scale
    assert scores.max() > 9000
    assert scores.min() < -9000


def test_a_head_that_the_host_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr(iosim.check, "available_memory", lambda: 10**9)
    a = Attention(n_q=2**24, d=128)
    assert memory_needed(a) > 12 * 3 * 2**24 * 128
    with pytest.raises(InputError, match=r"needs 77\.\d GB of memory and this host has 1\.0 GB free; --no-check"):
        check(a, flash2(a, Schedule(block_q=128, block_k=128)))


def test_a_check_that_was_not_asked_for():
    result = skipped(LONG)
    assert (result.status, result.rows_checked, result.rows_total) == ("skipped", 0, 512)


def test_storing_scores_shows_the_plain_error_too():
    a = replace(LONG, lse=False)
    result = check(a, standard(a, SCHEDULE), inputs=large_logits(a))
    assert result.status == "passed"
    assert result.plain_error > 100 * result.max_abs_error


def test_a_window_one_key_too_wide_or_too_narrow_is_noticed():
    a = replace(LONG, window=60, causal=True)
    for name, program in ((name, flow(a, SCHEDULE)) for name, flow in FLOWS.items()):
        assert check(a, program).status == "passed", name
        for low in (a.diagonal + 2 - 60, a.diagonal - 60):
            assert check(a, edited(program, parameter("mask", low=low))).status == "failed", name


def test_more_stores_of_an_output_allow_more_roundings():
    a = replace(LONG, lse=False)
    often, once = (check(a, flow(a, SCHEDULE)) for flow in (flash1, flash2))
    assert once.tolerance < often.tolerance < 16 * once.tolerance
    assert rewrites(flash1(a, SCHEDULE), "O") == 512 // 32
    assert rewrites(flash2(a, SCHEDULE), "O") == rewrites(standard(a, SCHEDULE), "O") == 1


def test_rows_of_a_block_that_loops_over_rows():
    a = Attention(n_q=100, d=16)
    assert block_rows(a, [flash1(a, replace(SCHEDULE, splits=1))]) == 128
    assert block_rows(a, [flash1(a, SCHEDULE)], narrow=True) == block_rows(a, [flash2(a, SCHEDULE)]) == 32


def test_an_unfused_kernel_with_the_naive_softmax_overflows_on_large_logits():
    program = standard(LONG, replace(SCHEDULE, softmax="naive"))
    assert check(LONG, program).status == "passed"
    result = check(LONG, program, inputs=large_logits(LONG))
    assert result.status == "failed"
    assert "exp overflowed: the exponentials of this row's scores add up to exp(" in result.detail
    assert "standard does not subtract the row's maximum first" in result.detail


# ---------------------------------------------------------------- what is not known


def test_outputs_that_nobody_knows_are_not_checked():
    p = Builder("copy")
    Q, X = p.tensor("Q", (1, 1, 512, 32), "fp16", "in"), p.tensor("X", (1, 1, 512, 32), "fp16", "out")
    with p.kernel("copy", i=16) as (i,):
        p.store(X[0, 0, rows(i, 32)], p.load("x", Q[0, 0, rows(i, 32)]))
    unknown, known = check_all(LONG, [p.done(), flash2(LONG, SCHEDULE)])
    assert (unknown.status, known.status) == ("skipped", "passed")
    assert unknown.detail.startswith("not checked: it is not known what X from Q should be (known are O from Q K V; ")


def test_a_program_of_another_problem_is_not_checked():
    result = check(LONG, flash2(replace(LONG, d=16), SCHEDULE))
    assert result.status == "skipped"
    assert "Q has the shape (1, 1, 512, 16), that of the problem is (1, 1, 512, 32)" in result.detail
