"""Backward passes of what changes scores and weights: numbers, bytes by hand, and faults that a check has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.blockmask import BlockMask
from iosim.check import Normal, check, large_logits
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.gradient import Errors, Operands, Sums, differentiate
from iosim.interpreters.ledger import Ledger, ledger
from iosim.problem import Attention
from iosim.program import Compute, Program, Store, When
from iosim.schedule import Schedule
from tests.conftest import Iosim
from tests.dataflow_checks import kept, slope, visible
from tests.unit.test_check import edited, parameter, scaled_after, storing, without

FLOWS = ("flash-backward", "standard-backward")
TILE = Schedule(block_q=16, block_k=16, block_d=16, softmax_rows=4, softmax_cols=64)
SMALL = Attention(n_q=50, n_k=70, d=16, d_v=8, heads=4, kv_heads=2, batch=2)
CHANGES: tuple[dict[str, Any], ...] = (
    {"softcap": 2.0},
    {"alibi": True},
    {"bias": "full", "causal": True},
    {"bias": "heads"},
    {"bias": "shared", "window": 20},
    {"dropout": 0.3},
    {"sinks": True},
    {"window": 20, "global_tokens": 5, "causal": True},
    {"window": 9, "global_tokens": 32},
    {"softcap": 3.0, "alibi": True, "bias": "shared", "dropout": 0.2, "causal": True},
)


def program(a: Attention, flow: str = "flash-backward", schedule: Schedule = TILE) -> Program:
    return load_dataflow(flow)(a, schedule)


def counted(a: Attention, flow: str = "flash-backward", schedule: Schedule = TILE) -> Ledger:
    return ledger(program(a, flow, schedule))


# ---------------------------------------------------------------- float64, against finite differences


def total(a: Attention, x: dict[str, np.ndarray]) -> float:
    """The sum of dO * O of one head from the definitions; head 1 of 2, batch 0."""
    s = x["q"] @ x["k"].T / np.sqrt(a.d)
    if a.softcap is not None:
        s = a.softcap * np.tanh(s / a.softcap)
    if a.alibi:
        s = s - slope(1, a.heads) * np.abs(np.arange(a.n_q)[:, None] + a.n_k - a.n_q - np.arange(a.n_k))
    s = np.where(visible(a), s + x["bias"], -np.inf)
    weights = np.exp(s)
    p = weights / (weights.sum(-1, keepdims=True) + (np.exp(x["sink"]) if a.sinks else 0))
    if a.dropout:
        p = p * kept(a)[0, 1]
    return float((x["do"] * (p @ x["v"])).sum())


@pytest.mark.parametrize("change", [*CHANGES, {"block_mask": BlockMask.of([[1, 0], [1, 1]])}], ids=str)
def test_the_gradient_is_what_finite_differences_give(change: dict[str, Any]) -> None:
    a = Attention(n_q=6, n_k=8, d=3, d_v=2, heads=2, **change)
    random = np.random.default_rng(1)
    shapes = {"q": (6, 3), "k": (8, 3), "v": (8, 2), "do": (6, 2), "bias": (6, 8), "sink": ()}
    x = {name: np.asarray(random.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    if a.bias is None:
        x["bias"] = np.zeros((6, 8), np.float32)
    exact = Errors(score=0, lse=0, weight=0, least=0, values=0, scores=0, product=0, floor=0, row=0, row_floor=0,
                   from_p=False)  # fmt: skip
    of = Operands.of(a, x["k"], x["v"], (0, 8), symmetric=False)
    sums, steps = Sums(of, 1), []
    for first in (0, 2, 4):
        rows = slice(first, first + 2)
        own = x["bias"][rows] if a.bias else None
        sink = float(x["sink"]) if a.sinks else None
        steps.append(differentiate(of, x["q"][rows], x["do"][rows], first, [exact], False, (0, 1), own, sink))
        sums.add(steps[-1].part)
    found: dict[str, np.ndarray] = {"q": np.concatenate([s.dq for s in steps]), "k": sums.dk, "v": sums.dv}
    if a.bias:
        found["bias"] = np.concatenate([s.dbias for s in steps if s.dbias is not None])
    if a.sinks:
        found["sink"] = np.asarray(sum(s.dsink for s in steps))
    double = {name: value.astype(np.float64) for name, value in x.items()}
    for name, gradient in found.items():
        for at in np.ndindex(gradient.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = {**double, name: double[name].copy()}
                moved[name][at] += h
                ends.append(total(a, moved))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8), name


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_right_programs_pass(flow: str, change: dict[str, Any]) -> None:
    if flow == "standard-backward" and "sinks" in change:
        return
    kinds = (("fp16", Normal), ("fp32", Normal), ("bf16", large_logits))
    for dtype, source in kinds if "softcap" in change else kinds[:1]:
        a = replace(SMALL, dtype=dtype, **change)
        result = check(a, program(a, flow), inputs=source(attention=a))
        assert result.status == "passed", result.detail
        assert result.rows_checked == result.rows_total
        assert result.detail.startswith("all rows checked; ")
        assert result.worst_ratio > 0.1 or source is large_logits or dtype == "fp32"


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_block_masks_pass(flow: str, causal: bool) -> None:
    for table in ([[1, 0, 1], [0, 1, 1]], [[0, 0, 0], [0, 1, 0]]):
        a = Attention(n_q=64, n_k=96, d=16, heads=2, block_mask=BlockMask.of(table), causal=causal, bias="full")
        assert check(a, program(a, flow)).status == "passed"


ALL = replace(SMALL, dtype="fp32", softcap=2.0, alibi=True, bias="heads", dropout=0.2, causal=True)
Edit = Callable[[Any], tuple[Any, ...]]


def adding(tensor: str, **change: Any) -> Edit:
    """Changes the stores that add to a tensor."""
    edit = storing(tensor, **change)
    return lambda node: edit(node) if isinstance(node, Store) and node.add else (node,)


def without_slope(node: Any) -> tuple[Any, ...]:
    """The slope of the soft-cap left out where it multiplies dS."""
    if not isinstance(node, Compute) or node.op != "mul" or node.out.name != "x":
        return (node,)
    return () if [str(operand) for operand in node.args] == ["x", "slope"] else (node,)


WRONG: dict[str, tuple[str, Edit, str]] = {
    "no slope": ("flash-backward", without_slope, "d"),
    "slope of another cap": ("flash-backward", parameter("fma", by=-0.26), "d"),
    "another cap": ("flash-backward", parameter("softcap", cap=2.02), "d"),
    "another head's slope": ("flash-backward", parameter("alibi", head=0), "d"),
    "another dropout": ("flash-backward", parameter("dropout", probability=0.21), "d"),
    "another batch's numbers": ("flash-backward", parameter("dropout", batch=0), "d"),
    "dV of all weights": ("flash-backward", without("dropout"), "d"),
    "dbias of a tile left out": ("flash-backward", adding("dbias sum", when=When("i", 1, 99)), "dbias"),
    "dbias not stored": ("flash-backward", storing("dbias", when=When("c", 1, 99)), "dbias"),
    "cap anew, of another cap": ("standard-backward", parameter("softcap", cap=2.02), "d"),
    "dP divided by too much": ("standard-backward", scaled_after("mul", "dp", 1.01), "d"),
    "dbias not stored by a library": ("standard-backward", storing("dbias", when=When("i", 1, 99)), "dbias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_fail(name: str) -> None:
    flow, edit, where = WRONG[name]
    right = program(ALL, flow)
    wrong = edited(right, edit)
    assert wrong != right
    result = check(ALL, wrong)
    assert result.status == "failed"
    assert result.detail.startswith(where)


def test_a_wrong_sink_is_noticed_and_named() -> None:
    a = replace(SMALL, sinks=True, dtype="fp32")
    right = program(a)
    unstored = storing("dsinks", when=When("h", 1, 9))
    for edit in (parameter("exp", scale=1.001), scaled_after("sub", "total", 1.001), unstored):
        result = check(a, edited(right, edit))
        assert result.status == "failed"
    assert result.detail.startswith("dsinks at head 0 is ")


def test_what_is_shared_by_more_than_is_checked_is_left_out_and_said() -> None:
    a = replace(SMALL, bias="shared", sinks=True, batch=4)
    result = check(a, program(a), budget=a.n_q * a.n_k * 8)
    assert result.status == "passed"
    words = "; not {}, to which batches or heads add that are not all checked"
    assert result.detail.endswith(words.format("dbias") + words.format("dsinks"))


# ---------------------------------------------------------------- bytes and work


def test_a_bias_is_read_and_its_gradient_stored_or_added_up() -> None:
    """A head's matrix is 48 x 64, all of it visited: 6,144 B in fp16, twice that in fp32."""
    a = Attention(n_q=48, n_k=64, d=16, heads=2, batch=3)
    each, heads = 48 * 64 * 2, 6
    full, by_head, shared = (counted(replace(a, bias=kind)).by_tensor for kind in ("full", "heads", "shared"))
    assert full["bias"] == by_head["bias"] == shared["bias"] == {"read": heads * each}
    assert full["dbias"] == {"write": heads * each}
    assert "dbias sum" not in full
    for moved, matrices in ((by_head, 2), (shared, 1)):
        twice = matrices * 2 * each
        assert moved["dbias sum"] == {"write": twice, "add": heads * 2 * each, "read": twice}
        assert moved["dbias"] == {"write": matrices * each}
    causal = counted(replace(a, bias="full", causal=True, n_k=48)).by_tensor  # 3 x 3 tiles, 6 of which are visited
    assert causal["dbias"] == {"write": heads * (48 * 48 * 2 + 6 * 16 * 16 * 2)}  # zeros first
    unfused = counted(replace(a, bias="shared"), "standard-backward").by_tensor
    assert unfused["dbias"] == {"write": each}
    plain = counted(a, "standard-backward").by_tensor
    assert unfused["dS"]["read"] == plain["dS"]["read"] + heads * each


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"alibi": True}, {"dropout": 0.5}])
def test_the_fused_backward_recomputes_and_moves_nothing_more(change: dict[str, Any]) -> None:
    """Philox runs once for a weight, in the backward pass as in the forward pass."""
    plain, changed = counted(SMALL), counted(replace(SMALL, **change))
    assert changed.by_tensor == plain.by_tensor
    tiles = 8 * 4 * 5 * 16 * 16  # elements: 8 heads, 4 tiles of queries, 5 of keys
    more = {unit: n - plain.work["gradients"][unit] for unit, n in changed.work["gradients"].items()}
    philox = 8 * 4 * 5 * (3 * 256 + 42 * 256 // 16)
    unscaled = -8 * 4 * 5 * 16  # L is not divided by the scale where the cap or ALiBi has it in it
    expected = {
        "softcap": {"exp": tiles, "vector": (2 + 1 + 1 + 1) * tiles + 8 * 4 * 5 + unscaled},
        "alibi": {"vector": 2 * tiles + unscaled},
        "dropout": {"alu": philox, "vector": 4 * tiles + 8 * 5 * 16 * 8},
    }
    assert {unit: n for unit, n in more.items() if n} == expected[next(iter(change))]


def test_the_unfused_backward_reads_what_the_forward_pass_kept() -> None:
    scores = 8 * 50 * 70
    changes: tuple[dict[str, Any], ...] = ({}, {"dropout": 0.5}, {"softcap": 9.0})
    plain, dropped, capped = (counted(replace(SMALL, **change), "standard-backward") for change in changes)
    assert dropped.by_tensor["kept"] == {"read": scores}
    assert dropped.by_tensor["P dropped"]["read"] + dropped.by_tensor["P"]["read"] == plain.by_tensor["P"]["read"]
    assert dropped.hbm_write_bytes - plain.hbm_write_bytes == 2 * scores  # dP again
    assert dropped.hbm_read_bytes - plain.hbm_read_bytes == (2 + 1) * scores
    assert capped.hbm_write_bytes - plain.hbm_write_bytes == 2 * scores  # dS again
    assert capped.executed_flops - plain.executed_flops == 8 * 64 * 80 * 16 * 2  # a product of whole tiles more


@settings(max_examples=12)
@given(
    table=st.integers(1, 4).flatmap(
        lambda columns: st.lists(
            st.lists(st.integers(0, 1), min_size=columns, max_size=columns), min_size=1, max_size=4
        )
    )
)
def test_bytes_of_a_backward_pass_go_with_the_blocks_that_are_left(table: list[list[int]]) -> None:
    """Proposition 4 of FlashAttention, backward: what goes with N^2 is multiplied by the share of blocks left."""
    mask = BlockMask.of(table)
    blocks = len(table) * len(table[0])
    a = Attention(n_q=32 * len(table), n_k=16 * len(table[0]), d=16, block_mask=mask)
    found, dense = counted(a), counted(replace(a, block_mask=None))
    for name, way in (("Q", "read"), ("L", "read"), ("dQ sum", "add")):
        moved = found.by_tensor.get(name, {}).get(way, 0)
        assert moved * blocks == mask.left * dense.by_tensor[name][way]
    for name in ("K", "V", "dK", "dV"):
        assert found.by_tensor[name] == dense.by_tensor[name]
    assert found.executed_flops * blocks == mask.left * dense.executed_flops


def test_columns_of_a_mask_have_their_runs_too() -> None:
    stripes = BlockMask.of(np.tile([[1], [0]], (65, 1)))
    with pytest.raises(InputError, match="column 0 has 65 runs of blocks; 64 is the most"):
        program(Attention(n_q=130 * 16, n_k=16, d=16, block_mask=stripes))


# ---------------------------------------------------------------- the command line


def test_training_takes_them(iosim: Iosim) -> None:
    common = ("run", "-n", "128", "-d", "32", "-H", "2", "--pass", "training")
    answer = iosim(*common, "--softcap", "30", "--alibi", "--bias", "shared", "--dropout", "0.1", "--causal")
    assert answer.code == 0, answer.err
    text = " ".join(answer.out.split())
    assert text.count("backward: all rows checked") == 2
    refused = iosim(*common, "--sinks")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "standard-backward is not written for attention sinks; flash-backward is" in refused.err
