"""Latent attention: the bytes of K and V with absorbed matrices and without, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import iosim
from iosim.check import check
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.interpreters.ledger import ledger
from iosim.problem import Attention
from iosim.schedule import Schedule

DECODE = Attention(n_q=1, n_k=4096, d=576, d_v=512, heads=128, kv_heads=1, batch=2)


def keys_read(a: Attention, name: str, schedule: Schedule) -> int:
    """Bytes of K and V that all blocks load."""
    read = ledger(load_dataflow(name)(a, schedule)).by_tensor
    return sum(read[tensor]["read"] for tensor in "KV" if tensor in read)


def test_bytes_of_the_cache_in_a_decoding_step() -> None:
    """A token of the latent is 576 numbers, once for 64 heads; expanded it is 128 heads of 192 and 128."""
    tile = Schedule(block_q=64, block_k=64)
    tokens = 2 * 4096 * 2  # batch, keys, bytes
    assert keys_read(DECODE, "mla", tile) == keys_read(DECODE, "mla", replace(tile, splits=8)) == tokens * 2 * 576
    plain = replace(DECODE, d=192, d_v=128, kv_heads=128)
    assert keys_read(plain, "split-kv", replace(tile, block_q=16)) == tokens * 128 * (192 + 128)
    # Without a dataflow of its own each of the 128 heads reads the latent, twice: as K and, in part, as V.
    assert keys_read(DECODE, "split-kv", replace(tile, block_q=16)) == tokens * 128 * (576 + 512)


def test_the_plan_takes_the_tallest_tile_and_fills_the_machine() -> None:
    run = iosim.run(DECODE, dataflow="mla", hardware="h200-sxm", check=False)
    assert (run.schedule.block_q, run.schedule.groups) == (64, 2)
    assert run.schedule.splits == 16  # 4 tiles of 73,728 bytes and then 16 results of 16,416; 13 and 22 take more
    few, many = (
        iosim.run(DECODE, dataflow="mla", hardware="h200-sxm", check=False, schedule={"splits": n}) for n in (4, 32)
    )
    assert run.seconds < min(few.seconds, many.seconds)
    assert not run.key_loads["K"].per_head
    assert run.key_loads["K"].hbm == 2


def test_a_wrong_column_is_noticed() -> None:
    a = Attention(n_q=1, n_k=100, d=24, d_v=16, heads=20, kv_heads=1, lse=True)
    program = load_dataflow("mla")(a, Schedule(block_q=16, block_k=32, splits=2))
    assert check(a, program).status == "passed"
    other = load_dataflow("mla")(replace(a, n_k=99), Schedule(block_q=16, block_k=32))
    assert check(a, other).status == "skipped"  # K has another shape
    assert check(replace(a, n_q=1), load_dataflow("split-kv")(a, Schedule(block_q=16, block_k=32))).status == "passed"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 128}, "kv_heads: mla is not written for kv_heads 128: all heads share one key/value head"),
        ({"d_v": 576}, "d_v: mla is not written for d_v 576: "),
        ({"window": 9}, "n_q: mla is not written for a mask that hides keys from the one query"),
        ({"softcap": 5.0}, "softcap: mla is not written for a soft-cap; "),
    ],
)
def test_what_is_no_latent_attention_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        load_dataflow("mla")(replace(DECODE, **change), Schedule(block_q=64, block_k=64))
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
