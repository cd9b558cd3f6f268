"""Query heads that share K and V as rows of one tile: numbers, bytes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.check import check
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.program import Compute, Kernel, Loop, Node, Program, Store
from iosim.schedule import Schedule
from iosim.study.ragged import Cache, Engine, Lengths

H200 = load_hardware("h200-sxm")


def packed(a: Attention, flow: str = "flash2", **fields: int) -> Program:
    """The program with packed tiles of 16 x 16."""
    return load_dataflow(flow)(a, Schedule(block_q=16, block_k=16, pack_gqa=True, **fields))


@settings(max_examples=25)
@given(
    n_q=st.integers(1, 40),
    more=st.integers(0, 60),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([2, 3, 7, 16, 24]),
    mask=st.sampled_from([{}, {"causal": True}, {"causal": True, "window": 13}, {"lse": True}, {"softcap": 5.0}]),
    flow=st.sampled_from(["flash2", "split-kv", "flash3"]),
    splits=st.sampled_from([1, 3]),
)
def test_numbers_and_bytes(
    n_q: int, more: int, kv_heads: int, group: int, mask: dict[str, object], flow: str, splits: int
) -> None:
    """Any group, also one that does not divide a tile: within the bound of float64, and moved as counted."""
    if flow != "split-kv" or "lse" in mask:
        splits = 1
    a = Attention(n_q=n_q, n_k=n_q + more, d=8, heads=kv_heads * group, kv_heads=kv_heads, **mask)  # type: ignore[arg-type]
    program = packed(a, flow, splits=splits)
    assert check(a, program).status == "passed"
    counted = ledger(program)
    done = replay(program, lambda _, box: _zeros(box))
    assert sum(done.moved.values()) == counted.hbm_read_bytes + counted.hbm_write_bytes


def _zeros(box: tuple[tuple[int, int], ...]) -> object:
    import numpy as np

    return np.zeros([hi - lo for lo, hi in box], np.float32)


def test_k_and_v_are_loaded_once_for_a_group() -> None:
    """5 tokens of 3 heads are a tile of 15 rows: 2 K/V heads times 70 keys of 8 fp16, where each head loads its own."""
    a = Attention(n_q=5, n_k=70, d=8, heads=6, kv_heads=2, causal=True)
    alone = load_dataflow("flash2")(a, Schedule(block_q=16, block_k=16))
    assert ledger(packed(a)).by_tensor["K"] == {"read": 2 * 70 * 8 * 2}
    assert ledger(alone).by_tensor["K"] == {"read": 6 * 70 * 8 * 2}
    assert ledger(packed(a)).by_tensor["O"] == ledger(alone).by_tensor["O"]
    assert 3 * ledger(packed(a)).executed_flops * 16 == ledger(alone).executed_flops * 15


def test_a_mask_that_takes_rows_for_queries_is_found() -> None:
    """Without `queries` the rows of the second head would see keys that come later."""
    a = Attention(n_q=5, n_k=20, d=8, heads=2, kv_heads=1, causal=True)
    program = packed(a)
    wrong = replace(program, kernels=tuple(replace(k, body=_unfolded(k.body)) for k in program.kernels))
    assert wrong != program
    assert check(a, wrong).status == "failed"


def _unfolded(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Masks whose rows are queries of their own."""
    out: list[Node] = []
    for node in body:
        if isinstance(node, Loop):
            node = replace(node, body=_unfolded(node.body))
        elif isinstance(node, Compute) and node.op == "mask":
            node = replace(node, params=tuple(p for p in node.params if p[0] != "queries"))
        out.append(node)
    return tuple(out)


def test_a_store_in_another_place_is_found() -> None:
    """The heads of a tile follow one another: stored one head on, O is wrong."""
    a = Attention(n_q=5, n_k=20, d=8, heads=4, kv_heads=2)
    program = packed(a)

    def moved(kernel: Kernel) -> Kernel:
        *body, store = kernel.body
        assert isinstance(store, Store)
        b, heads, queries, d = store.view.index
        first = replace(heads, start=heads.start * -1 + 2)  # type: ignore[union-attr,arg-type,operator]
        return replace(kernel, body=(*body, replace(store, view=replace(store.view, index=(b, first, queries, d)))))

    assert check(a, replace(program, kernels=tuple(map(moved, program.kernels)))).status == "failed"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "pack_gqa: changes nothing where no query heads share a K/V head"),
        ({"kv_heads": 1, "alibi": True}, "pack_gqa: is not written for ALiBi"),
        ({"kv_heads": 1, "sinks": True}, "pack_gqa: is not written for attention sinks"),
        ({"kv_heads": 1, "dtype": "fp8"}, "pack_gqa: is not written for fp8"),
    ],
)
def test_what_it_refuses(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        packed(Attention(n_q=4, d=16, heads=2, **fields))  # type: ignore[arg-type]
    assert str(caught.value) == words


def test_a_few_new_tokens_cost_no_more_than_one() -> None:
    """Speculation of 4 tokens, 4 query heads a K/V head: 16 rows; unpacked, K and V come from the L2 for each head."""
    shape = Attention(n_q=1, d=128, heads=32, kv_heads=8, causal=True)
    one, four, apart = (
        Engine(shape, H200, given=given, cache=Cache()).step([Lengths(new, 8192)] * 8)
        for new, given in ((1, {}), (4, {}), (4, {"pack_gqa": False}))
    )
    assert four.seconds == pytest.approx(one.seconds, rel=0.03)
    assert apart.seconds > 2 * four.seconds
    assert apart.hbm_read_bytes > 3.9 * four.hbm_read_bytes
    assert (four.flops, four.dram_bytes) == (apart.flops, pytest.approx(apart.dram_bytes, rel=0.02))
