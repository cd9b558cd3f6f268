"""What changes scores and weights: each is nothing at its neutral value, moves the bytes of its closed form, is refused
in one line where a dataflow is not written for it, and its numbers are checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iosim
from iosim.blockmask import BlockMask, load_block_mask
from iosim.check import check
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.index import Index, at, lookup
from iosim.interpreters.ledger import Ledger, ledger
from iosim.interpreters.region import Box
from iosim.interpreters.replay import replay
from iosim.philox import kept, philox
from iosim.problem import Attention
from iosim.program import Program, Tensor
from iosim.schedule import Schedule
from iosim.study.choose import choose
from iosim.sums import sum_over
from tests.conftest import Iosim
from tests.dataflow_checks import philox as philox_on_integers
from tests.dataflow_checks import visible

SMALL = Attention(n_q=48, n_k=56, d=16, heads=2, lse=True)
TILE = Schedule(block_q=16, block_k=8, softmax_cols=64, block_d=16)
BOTH = ("flash2", "standard")


def program(a: Attention, name: str = "flash2", schedule: Schedule = TILE) -> Program:
    return load_dataflow(name)(a, schedule)


def counted(a: Attention, name: str = "flash2", schedule: Schedule = TILE) -> Ledger:
    return ledger(program(a, name, schedule))


def results(a: Attention, name: str, **fixed: float) -> dict[str, np.ndarray]:
    """O and L for random Q, K and V; other inputs have the value in `fixed`."""

    def source(tensor: Tensor, box: Box) -> np.ndarray:
        if tensor.name in fixed:
            return np.full([hi - lo for lo, hi in box], fixed[tensor.name], np.float32)
        whole = np.random.default_rng(ord(tensor.name)).standard_normal(tensor.shape)
        return whole.astype(np.float16).astype(np.float32)[tuple(slice(*span) for span in box)]

    return dict(replay(program(a, name), source).outputs)


# ---------------------------------------------------------------- nothing at a neutral value


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("change", "inputs"),
    [
        ({"softcap": 2.0**20}, {}),
        ({"bias": "full"}, {"bias": 0.0}),
        ({"bias": "shared"}, {"bias": 0.0}),
        ({"sinks": True}, {"sinks": -200.0}),
        ({"block_mask": BlockMask.of(np.ones((1, 1)))}, {}),
        ({"block_mask": BlockMask.of(np.ones((1, 7)))}, {}),
    ],
)
def test_what_changes_nothing_changes_nothing(name: str, change: dict[str, Any], inputs: dict[str, float]) -> None:
    plain, changed = results(SMALL, name), results(replace(SMALL, **change), name, **inputs)
    for output in plain:  # a cap multiplies and divides, which rounds once or twice in float32
        np.testing.assert_allclose(changed[output], plain[output], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", BOTH)
def test_no_dropout_and_no_global_tokens_are_the_same_program(name: str) -> None:
    window = replace(SMALL, causal=True, window=9)
    assert program(replace(window, dropout=0, global_tokens=0), name) == program(window, name)


@pytest.mark.parametrize("name", BOTH)
def test_global_tokens_that_are_all_keys_leave_no_window(name: str) -> None:
    causal = replace(SMALL, causal=True)
    every = replace(causal, window=3, global_tokens=56)
    assert every.pairs == causal.pairs
    np.testing.assert_allclose(results(every, name)["O"], results(causal, name)["O"], atol=1e-3)


@pytest.mark.parametrize("name", BOTH)
def test_a_block_mask_can_be_a_causal_mask_of_blocks(name: str) -> None:
    a = Attention(n_q=64, d=16)
    blocks = replace(a, block_mask=BlockMask.of(np.tri(4)), causal=True)  # the diagonal blocks need the mask still
    np.testing.assert_array_equal(results(blocks, name)["O"], results(replace(a, causal=True), name)["O"])
    assert blocks.pairs == replace(a, causal=True).pairs


def test_a_row_that_sees_no_block_is_nothing() -> None:
    got = results(Attention(n_q=32, d=16, lse=True, block_mask=BlockMask.of([[0, 0], [0, 1]])), "flash2")
    assert (got["O"][..., :16, :] == 0).all()
    assert np.isneginf(got["L"][..., :16]).all()


@pytest.mark.parametrize("name", BOTH)
def test_a_large_sink_takes_all_the_weight(name: str) -> None:
    got = results(replace(SMALL, sinks=True), name, sinks=1000.0)
    assert (got["O"] == 0).all()
    np.testing.assert_allclose(got["L"], 1000, rtol=1e-6)


# ---------------------------------------------------------------- bytes and work


def test_a_bias_is_loaded_where_tiles_are_visited() -> None:
    """Every element of a full matrix once for each batch and head, whatever it is shared by; of a causal one 3 of 4
    tiles: query tile i of two sees key tiles 0 .. i of 32."""
    a = Attention(n_q=64, d=16, heads=2, batch=3)
    tile = Schedule(block_q=32, block_k=32)
    for kind in ("shared", "heads", "full"):
        dense, causal = (counted(replace(a, bias=kind, causal=c), schedule=tile).by_tensor for c in (False, True))
        assert dense["bias"]["read"] == 6 * 64 * 64 * 2
        assert causal["bias"]["read"] == 6 * 3 * 32 * 32 * 2


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"alibi": True}, {"dropout": 0.5}])
def test_some_take_work_and_no_bytes(change: dict[str, Any]) -> None:
    plain, changed = counted(SMALL), counted(replace(SMALL, **change))
    assert changed.by_tensor == plain.by_tensor
    tiles = 2 * 3 * 7 * 16 * 8  # elements of the tiles: 3 of queries, 7 of keys, a head each
    more = {unit: n - plain.work["attention"][unit] for unit, n in changed.work["attention"].items()}
    expected = {
        "softcap": {"exp": tiles, "vector": 2 * tiles},
        "alibi": {"vector": 2 * tiles},
        "dropout": {"alu": 3 * tiles + tiles * 42 // 16, "vector": 2 * 3 * 16 * 16},  # and O is scaled
    }
    assert {unit: n for unit, n in more.items() if n} == expected[next(iter(change))]


def test_standard_writes_weights_again_after_dropout_and_what_is_kept() -> None:
    plain, changed = (counted(replace(SMALL, dropout=p), "standard") for p in (0, 0.5))
    scores = 2 * 48 * 56
    assert changed.hbm_write_bytes - plain.hbm_write_bytes == 2 * scores + scores
    assert changed.hbm_read_bytes - plain.hbm_read_bytes == 2 * scores


MASKS = st.integers(1, 5).flatmap(
    lambda columns: st.lists(st.lists(st.integers(0, 1), min_size=columns, max_size=columns), min_size=1, max_size=5)
)


@settings(max_examples=25)
@given(table=MASKS, causal=st.booleans())
def test_bytes_and_pairs_of_a_block_mask(table: list[list[int]], causal: bool) -> None:
    """FlashAttention's Proposition 4: what goes with N^2 is multiplied by the share of blocks that are left."""
    mask = BlockMask.of(table)
    a = Attention(n_q=32 * len(table), n_k=16 * len(table[0]), d=16, block_mask=mask, causal=causal)
    assert a.pairs == visible(a).sum()
    if causal:
        return
    found, dense = counted(a), counted(replace(a, block_mask=None))
    blocks = len(table) * len(table[0])
    for name in "KV":
        assert found.by_tensor.get(name, {"read": 0})["read"] * blocks == mask.left * dense.by_tensor[name]["read"]
    assert found.by_tensor["Q"] == dense.by_tensor["Q"]
    assert found.executed_flops * blocks == mask.left * dense.executed_flops


def test_time_goes_with_the_blocks_that_are_left() -> None:
    """A band of 1 and of 7 blocks a row of 16, and all of them: a fixed part, and one that goes with them."""
    seconds, left = [], []
    for width in (1, 4, 16):
        band = np.abs(np.subtract.outer(np.arange(16), np.arange(16))) < width
        a = Attention(n_q=2048, d=64, heads=28, block_mask=BlockMask.of(band))
        run = iosim.run(a, dataflow="flash2", check=False)
        seconds.append(run.seconds)
        left.append(band.mean())
    assert seconds == sorted(seconds)
    for time, share in zip(seconds, left, strict=True):
        assert 0.9 * share * seconds[-1] < time < share * seconds[-1] + seconds[0]


@settings(max_examples=30)
@given(n=st.integers(1, 40), values=st.lists(st.integers(0, 9), min_size=40, max_size=40), divisor=st.integers(1, 4))
def test_a_table_is_summed_like_a_table(n: int, values: list[int], divisor: int) -> None:
    i = Index("i")
    e = lookup("t", tuple(values), i // divisor)
    assert sum_over([e, i + 1], "i", n) == sum(values[x // divisor] * (x + 1) for x in range(n))
    np.testing.assert_array_equal(at(e, {"i": np.arange(n)}) + np.zeros(n), [values[x // divisor] for x in range(n)])


# ---------------------------------------------------------------- random numbers


def test_philox_has_the_numbers_of_its_authors() -> None:
    """Random123's kat_vectors: philox4x32 with 7 and with 10 rounds, a counter and a key of 0."""
    assert philox((0, 0, 0, 0)).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox((0, 0, 0, 0), rounds=10).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((1, 2, 3, 4)).tolist() == philox_on_integers((1, 2, 3, 4))


@settings(max_examples=25)
@given(first=st.integers(0, 50), keys=st.integers(1, 40), start=st.integers(0, 9))
def test_a_part_of_the_mask_is_that_part_of_the_whole(first: int, keys: int, start: int) -> None:
    whole = kept(1, 2, np.arange(20), 0, 100, 0.3)
    part = kept(1, 2, np.arange(start, start + 5), first, keys, 0.3)
    assert (part == whole[start : start + 5, first : first + keys]).all()
    both = kept(1, 2, np.arange(5), np.array([first, 0]), keys, 0.3)
    assert (both == np.stack([whole[:5, first : first + keys], whole[:5, :keys]])).all()


def test_so_many_are_kept_as_are_asked_for() -> None:
    n = 512 * 512
    share = kept(0, 0, np.arange(512), 0, 512, 0.25).mean()
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / n) ** 0.5


# ---------------------------------------------------------------- the check, and refusals


ALL = {"softcap": 3.0, "alibi": True, "bias": "heads", "sinks": True, "dropout": 0.2}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("wrong", [{"softcap": 3.1}, {"alibi": False}, {"dropout": 0.3}, {"block_mask": None}])
def test_the_check_passes_and_notices_what_is_wrong(name: str, wrong: dict[str, Any]) -> None:
    mask = BlockMask.of([[1, 0, 1], [0, 1, 1]])
    a = Attention(n_q=64, n_k=96, d=16, heads=2, dtype="fp32", lse=True, block_mask=mask, **ALL)
    assert check(a, program(a, name)).status == "passed"
    assert check(a, program(replace(a, **wrong), name)).status == "failed"


@pytest.mark.parametrize("name", ["split-kv", "flash3"])
@pytest.mark.parametrize(
    "change", [{**ALL, "causal": True}, {"window": 9, "global_tokens": 20, "causal": True}, {}], ids=str
)
def test_other_dataflows_take_them_too(name: str, change: dict[str, Any]) -> None:
    """In three splits a sink counts once, and each split has its part of every loop."""
    a = Attention(n_q=64, n_k=96, d=16, heads=2, lse=True, **{"causal": True, **change})
    if not change:
        a = replace(a, block_mask=BlockMask.of([[1, 0, 1], [0, 1, 1]]), sinks=True)
    made = program(a, name, replace(TILE, splits=3))
    assert check(a, made).status == "passed"
    plain = program(replace(a, sinks=False, window=None, global_tokens=0), name, replace(TILE, splits=3))
    assert check(a, plain).status != "passed"


def test_kernels_run_them_or_say_that_they_have_none(iosim: Iosim) -> None:
    """FlashAttention-2's kernel splits keys here, and its parts are programs of split-kv, not of flash2."""
    common = ("run", "-n", "512", "-d", "64", "--hw", "h200-sxm", "--kernel", "flash2")
    answer = iosim(*common, "--window", "64", "--global-tokens", "4", "--dropout", "0.1", "--sinks")
    assert answer.code == 0, answer.err
    assert "keys in 2 splits" in " ".join(answer.out.split())
    refused = iosim(*common, "--bias", "full")
    assert refused.err.startswith("iosim: --bias: flash2 kernel is not written for an additive bias; flash2, flash3, ")


def test_an_order_of_flash3_has_every_loop_and_copies_the_bias() -> None:
    a = Attention(n_q=256, d=64, heads=4, block_mask=BlockMask.of([[1, 0, 1, 1], [0, 1, 0, 1]]), bias="full")
    run = iosim.run(a, dataflow="flash3", hardware="h200-sxm", check=False)
    assert set(run.schedule.orders) == {"j", "j2"}
    producer = run.schedule.orders["j2"].roles[0]
    assert [step.phase for step in producer.steps] == ["k", "bias", "v"]
    assert run.seconds is not None


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("flash1", {"softcap": 1.0}, "softcap: flash1 is not written for a soft-cap; flash2, flash3, "),
        ("flash1", {"bias": "full"}, "bias: flash1 is not written for an additive bias; flash2, flash3, split-kv, "),
        ("standard-backward", {"sinks": True}, "sinks: standard-backward is not written for attention sinks; flash-b"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_who_else(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        program(Attention(n_q=64, d=16, **fields), name)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"softcap": 0}, "softcap: 0 is out of range; 0.000976562 to 1.04858e+06 is allowed"),
        ({"softcap": float("nan")}, "softcap: nan is not a number"),
        ({"bias": "head"}, "bias: 'head' is not one of shared, heads, full (did you mean 'heads'?)"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range; 0 to 0.99 is allowed"),
        ({"global_tokens": 4}, "global_tokens: changes nothing without a window"),
        ({"window": 4, "global_tokens": -1}, "global_tokens: -1 is out of range"),
        ({"alibi": 1}, "alibi: 1 is not true or false"),
        ({"window": 4, "block_mask": BlockMask.of([[1]])}, "block_mask and window: give one of them"),
        ({"block_mask": BlockMask.of([[1]] * 50)}, "block_mask: table: 50 blocks of 2 queries are more than the 64"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        Attention(n_q=64, d=16, **fields)
    assert str(error.value).startswith(words)


def test_tiles_must_divide_blocks_and_runs_are_bounded() -> None:
    a = Attention(n_q=96, d=16, block_mask=BlockMask.of(np.ones((4, 4))))
    with pytest.raises(InputError, match="block_q: 16 does not divide the 24 rows of a block of table"):
        program(a)
    uneven = Attention(n_q=771, d=16, block_mask=BlockMask.of(np.ones((3, 3))))  # blocks of 257, a prime
    with pytest.raises(InputError, match="the 257 rows of a block of table; give a tile that does, or rows in a multi"):
        choose(load_dataflow("flash2"), uneven, load_hardware("mp31"), {})
    stripes = BlockMask.of(np.tile([1, 0], (1, 65)))
    with pytest.raises(InputError, match="row 0 has 65 runs of blocks; 64 is the most"):
        program(Attention(n_q=16, n_k=130 * 8, d=16, block_mask=stripes))


# ---------------------------------------------------------------- files and the command line


def test_a_mask_is_read_from_text_and_arrays(tmp_path: Path) -> None:
    table = [[1, 0, 1], [0, 1, 1]]
    text, npy, npz = tmp_path / "m.txt", tmp_path / "m.npy", tmp_path / "m.npz"
    text.write_text("101\n0, 1, 1\n\n")
    np.save(npy, np.array(table, bool))
    np.savez(npz, mask=np.array(table, np.float32))
    masks = [load_block_mask(file) for file in (text, npy, npz)]
    assert {mask.rows for mask in masks} == {BlockMask.of(table).rows}
    assert (masks[0].left, masks[0].origin) == (4, "m.txt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 x 0 blocks; 1 to 1024"),
        (b"10\n1\n", "row 1 has 1 blocks, row 0 has 2"),
        (b"10\n1x\n", "line 2: 'x'; 0 and 1 are allowed"),
        (b"\xff\xfe", "a block mask is a table of 0 and 1"),
        (b"\x93NUMPY\x01", "cannot be read"),
        (b"PK\x03\x04 no archive", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "mask"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_block_mask(file)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_arrays_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.npy"
    bad = [(np.ones(4), "two axes"), (np.full((2, 2), 2), "2; 0 and 1"), (np.ones((2000, 1)), "two axes")]
    for array, words in (*bad, (np.array([[None]], object), "numbers or truth values")):
        np.save(file, array)
        with pytest.raises(InputError, match=words):
            load_block_mask(file)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_block_mask(tmp_path / "none")


@pytest.mark.parametrize("name", ["m.npz", "m.npy", "m"])
def test_a_broken_array_is_not_taken_for_text(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"PK\x05\x06 cut off")
    with pytest.raises(InputError, match=f"{name}: is not a mask file; a block mask is a table of 0 and 1"):
        load_block_mask(file)


def test_the_command_takes_them(iosim: Iosim, tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("10\n11\n")
    answer = iosim(
        "run", "-n", "256", "-d", "32", "--block-mask", str(tmp_path / "m.txt"), "--softcap", "30", "--sinks"
    )
    assert answer.code == 0, answer.err
    text = " ".join(answer.out.split())
    assert "fp16, soft-cap 30, sinks, 3 of 4 blocks (m.txt)" in text
    assert "Check of flash2: all rows checked" in text
    refused = iosim("run", "-n", "64", "-d", "32", "--alibi", "--dataflow", "flash1")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
