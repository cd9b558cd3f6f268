"""Fields and values of a varied subject, what goes with them, and the cases that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import load_hardware, settable
from iosim.problem import Attention
from iosim.study.vary import Axis, Case, Source, axis, kinds, machine_with, problem_with, variants

FLASH2 = Source().load()
MP31, H200 = load_hardware("mp31"), load_hardware("h200-sxm")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("stages=1,2,3", ((1,), (2,), (3,))),
        ("stages=2/1", ((2, 1),)),
        ("stages=1..3", ((1,), (2,), (3,))),
        ("block_k=32..256:x2", (32, 64, 128, 256)),
        ("block-k = 32..100:+32", (32, 64, 96)),
        ("n=1e3, 2000", (1000, 2000)),
        ("causal=yes,off", (True, False)),
        ("hw.copy.asynchronous=false", (False,)),
        ("hw.hbm.read_efficiency=0.5..0.7:+0.1", (0.5, 0.6, 0.7)),
        ("hw.matrix.operand_a=sram,either", ("sram", "either")),
        ("hw.launch.kernel_us=1..4:x2", (1, 2, 4)),
    ],
)
def test_values_of_a_text(text: str, values: tuple[object, ...]) -> None:
    assert axis(text, FLASH2).values == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages", "vary: 'stages' is not NAME=VALUES, like stages=1,2,3"),
        ("stage=1", "(did you mean 'stages'?)"),
        ("sram.capacity_kib=1", "(did you mean 'hw.sram.capacity_kib'?)"),
        ("hw.copy_engine.async=off", "(did you mean 'hw.copy.asynchronous'?)"),
        ("splits=1,2", "vary: splits: changes nothing in flash2"),
        ("stages=1,x", "vary: stages: 'x' is not a whole number"),
        ("block_q=1.5", "vary: block_q: '1.5' is not a whole number"),
        ("block_q=64..32", "'64..32' goes nowhere"),
        ("block_q=32..64:x1", "goes nowhere"),
        ("hw.exp.ops_per_clock=1..2", "'1..2' needs a step, as in 1..2:x2"),
        ("n=1..1000000:1", "'1..1000000:1' needs a step, as in 1..1000000:x2 or 1..1000000:+32"),
        ("n=1..9:x", "'1..9:x' needs a step, as in 1..9:x2"),
        ("hw.exp.ops_per_clock=nan", "'nan' is not a number"),
        ("causal=maybe", "'maybe' is not true or false"),
        ("hw.matrix.operand_a=sran", "(did you mean 'sram'?)"),
        ("block_q=64,64", "vary: block_q: 64 is given twice"),
    ],
)
def test_what_is_no_field_or_value_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        axis(text, FLASH2)
    assert said in str(error.value)


@settings(max_examples=25)
@given(low=st.integers(1, 500), span=st.integers(0, 2000), step=st.integers(1, 300))
def test_a_range_in_steps_is_pythons(low: int, span: int, step: int) -> None:
    wanted = tuple(range(low, low + span + 1, step))
    assert axis(f"block_q={low}..{low + span}:+{step}", FLASH2).values == wanted


def test_set_takes_one_value() -> None:
    with pytest.raises(InputError, match=r"set: stages: takes one value, not 2; --vary takes several"):
        axis("stages=1,2", FLASH2, "set")


@pytest.mark.parametrize("machine", [MP31, H200], ids=lambda m: m.name)
def test_every_number_of_a_profile_can_be_set_and_to_its_own_value_changes_nothing(machine: object) -> None:
    assert machine in (MP31, H200)
    own = MP31 if machine is MP31 else H200
    facts = {f.name: f.value for f in own.fields() if f.value is not None}
    assert facts.keys() <= settable().keys()
    again = own.with_values(facts)
    assert replace(again, profile_hash="", sources=()) == replace(own, profile_hash="", sources=())


def test_more_sram_is_there_for_a_block_too() -> None:
    """Of MP31's 192 KiB a block may have all, of an H200's 228 all but 1."""
    assert machine_with(MP31, {"sram.capacity_kib": 256}).sram.block_capacity_bytes == 256 * 1024
    assert machine_with(H200, {"sram.capacity_kib": 256}).sram.block_capacity_bytes == 255 * 1024
    own = machine_with(H200, {"sram.capacity_kib": 256, "sram.block_capacity_kib": 100})
    assert own.sram.block_capacity_bytes == 100 * 1024


def test_processors_and_clock_bring_their_matrix_units_along() -> None:
    """Twice the processors: the same rate each.  Twice the clock: twice the rate each."""
    rate = H200.matrix_rate("fp16")
    assert rate is not None
    assert machine_with(H200, {"processor.count": 264}).matrix_rate("fp16") == rate
    fast = machine_with(H200, {"processor.clock_mhz": 3660})
    assert fast.matrix_rate("fp16") == pytest.approx(2 * rate, rel=1e-9)
    assert fast.matrix_hz == 3_600_000_000


def test_keys_stay_as_many_as_queries() -> None:
    a = Attention(n_q=512, d=64, heads=8, kv_heads=2)
    assert problem_with(a, {"n": 1024}) == Attention(n_q=1024, d=64, heads=8, kv_heads=2)
    assert problem_with(a, {"n_k": 1024}) == Attention(n_q=512, n_k=1024, d=64, heads=8, kv_heads=2)
    assert problem_with(a, {"d": 128, "heads": 4}) == Attention(n_q=512, d=128, heads=4, kv_heads=2)


CASE = Case(Attention(n_q=1024, d=64), Source(), MP31)


def test_rows_are_all_combinations_the_last_field_fastest() -> None:
    found = variants(CASE, [Axis("block_k", (32, 64)), Axis("stages", ((1,), (2,)))])
    assert [tuple(v.values.values()) for v in found] == [(32, (1,)), (32, (2,)), (64, (1,)), (64, (2,))]
    assert [v.case.given["block_q"] for v in found if v.case] == [64] * 4  # of the plain run


def test_the_tile_is_kept_unless_the_problem_is_varied() -> None:
    def tiles(*axes: Axis, keep: bool = True) -> list[bool]:
        return ["block_q" in v.case.given for v in variants(CASE, axes, keep=keep) if v.case]

    assert tiles(Axis("hw.sram.capacity_kib", (128, 192))) == [True, True]
    assert tiles(Axis("n", (512, 1024))) == [False, False]
    assert tiles(Axis("stages", ((1,),)), keep=False) == [False]


def test_a_value_that_cannot_be_is_a_row_that_says_why() -> None:
    good, bad = variants(CASE, [Axis("hw.exp.ops_per_clock", (32, -1))])
    assert good.case is not None
    assert bad.case is None
    assert "exp.ops_per_clock: value = -1 must be a number from 0.001" in bad.refused


def test_too_many_rows_and_a_field_given_twice_are_refused() -> None:
    many = Axis("block_q", tuple(range(1, 200)))
    with pytest.raises(InputError, match=r"vary: makes 398 rows; 256 are allowed"):
        variants(CASE, [many, Axis("stages", ((1,), (2,)))])
    with pytest.raises(InputError, match="vary: stages: is given twice"):
        variants(replace(CASE, given={"stages": (2,)}), [Axis("stages", ((1,),))])


def test_names_are_those_that_the_dataflow_reads() -> None:
    assert {"stages", "block_q", "n", "causal", "hw.exp.ops_per_clock"} <= kinds(FLASH2).keys()
    assert "softmax" not in kinds(FLASH2)
    assert "softmax" in kinds(Source("standard").load())


def test_a_range_is_as_long_as_it_says() -> None:
    """A sweep takes ranges of more values than whatif has rows."""
    flow = load_dataflow("flash2")
    assert len(axis("n=1..600", flow).values) == 600
    assert axis("n=1..1000:x10", flow).values == (1, 10, 100, 1000)
    with pytest.raises(InputError, match="more than 100,000 values"):
        axis("n=1..1000000", flow)
    with pytest.raises(InputError, match="steps too small"):
        axis("n=64..70:x1.0001", flow)
