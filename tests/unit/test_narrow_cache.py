"""A K/V cache in 8 bits beside a Q in fp16: numbers, bytes, rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from iosim.check import check
from iosim.dataflows import load_dataflow
from iosim.dataflows.narrow_cache import narrowed
from iosim.dtypes import DTYPES
from iosim.errors import InputError
from iosim.interpreters.ledger import ledger
from iosim.problem import Attention
from iosim.program import Compute, Loop, Program
from iosim.rounding import round_to
from iosim.schedule import Schedule
from iosim.study.ragged import Cache, token_bytes

SHAPE = Attention(n_q=5, n_k=70, d=16, heads=4, kv_heads=2, causal=True)


def program(flow: str, dtype: str, per: str, **fields: object) -> Program:
    """Tiles of 16 x 16."""
    return narrowed(load_dataflow(flow)(SHAPE, Schedule(block_q=16, block_k=16, **fields)), dtype, per)  # type: ignore[arg-type]


@pytest.mark.parametrize(("flow", "splits"), [("flash2", 1), ("split-kv", 3)])
def test_numbers_are_those_of_the_widened_cache(flow: str, splits: int) -> None:
    for dtype, per, pack in product(("fp8_e4m3", "int8"), ("token", "head"), (False, True)):
        done = check(SHAPE, program(flow, dtype, per, splits=splits, pack_gqa=pack))
        assert (done.status, done.rows_checked) == ("passed", 4 * 5), (dtype, per, pack)


@pytest.mark.parametrize("per", ["token", "head"])
def test_a_scale_that_is_left_out_is_found(per: str) -> None:
    made = program("flash2", "int8", per)
    (kernel,) = made.kernels

    def without(loop: Loop) -> Loop:
        return replace(loop, body=tuple(n for n in loop.body if not _scales(n)))

    body = tuple(without(n) if isinstance(n, Loop) else n for n in kernel.body)
    assert check(SHAPE, replace(made, kernels=(replace(kernel, body=body),))).status == "failed"


def _scales(node: object) -> bool:
    return isinstance(node, Compute) and node.op == "mul" and node.phase == "widen k"


def test_bytes_of_scales() -> None:
    """A byte an element; 4 for each token of a head, or once a block for K and once for V."""
    each = ledger(program("flash2", "int8", "token")).by_tensor
    whole = ledger(program("flash2", "int8", "head")).by_tensor
    assert each["K"] == whole["K"] == {"read": 4 * 70 * 16}  # of 4 query heads
    assert (each["SK"], whole["SK"]) == ({"read": 4 * 70 * 4}, {"read": 4 * 4})
    assert token_bytes(SHAPE, Cache(dtype="int8")) == 2 * (16 + 16 + 4 + 4)
    assert token_bytes(SHAPE, Cache(dtype="int8", scales="head")) == 2 * (16 + 16)


def test_int8_rounds_to_whole_numbers_and_saturates() -> None:
    x = np.concatenate([np.linspace(-200, 200, 4001, dtype=np.float32), np.float32([0.5, 1.5, -2.5, np.inf])])
    wanted = np.clip(np.rint(x), -127, 127)
    round_to(x, DTYPES["int8"])
    assert (x == wanted).all()


def test_int8_is_no_format_of_a_problem() -> None:
    with pytest.raises(InputError, match="dtype: int8 is a format of a K/V cache alone, not one of fp16, bf16, fp32"):
        replace(SHAPE, dtype="int8")
    with pytest.raises(InputError, match="cache_scales: changes nothing without a cache_dtype of 8 bits"):
        Cache(scales="head")
    with pytest.raises(InputError, match="cache_scales: 'tokn' is not one of token, head"):
        Cache(dtype="int8", scales="tokn")
