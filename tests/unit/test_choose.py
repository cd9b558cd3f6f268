"""The default schedule and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from iosim.dataflows import load_dataflow
from iosim.hardware import load_hardware, profile_names
from iosim.memory.onchip import CapacityError, footprints
from iosim.problem import Attention
from iosim.schedule import Schedule
from iosim.study.choose import choose

FLASH2, STANDARD = load_dataflow("flash2"), load_dataflow("standard")
MP31 = load_hardware("mp31")


def chosen(hardware: str = "mp31", given: dict[str, Any] | None = None, **problem: Any) -> tuple[Schedule, str]:
    return choose(FLASH2, Attention(**{"d": 128, **problem}), load_hardware(hardware), given or {})


# ---------------------------------------------------------------- the rule


def test_one_head_takes_the_largest_tile_that_gives_each_processor_a_block() -> None:
    """4096 / 64 = 64 blocks for 56 MPs; 128 rows would give 32 of them a block."""
    s, why = chosen(n_q=4096)
    assert (s.block_q, s.block_k, s.stages, s.groups) == (64, 128, (2,), 1)
    assert why == (
        "block_q 64 is the largest that fits and gives each of 56 MPs a block; "
        "block_k 128 is the largest that leaves 10% of SRAM free at 2 stages"
    )


def test_many_heads_take_the_largest_tile_that_fits() -> None:
    """256 x 128 with two stages would be 256 KiB, 256 x 64 is 160 of 192 KiB."""
    s, _ = chosen(n_q=4096, heads=32)
    assert (s.block_q, s.block_k, s.stages, s.groups) == (256, 64, (2,), 4)


def test_few_queries_leave_processors_idle_and_it_says_so() -> None:
    s, why = chosen(n_q=1024)
    assert s.block_q == 64
    assert why.startswith("block_q 64 gives 16 of 56 MPs a block, a larger one fewer;")


def test_a_tile_is_not_twice_as_large_as_the_problem() -> None:
    s, _ = chosen(n_q=1, n_k=20)
    assert (s.block_q, s.block_k) == (16, 32)


def test_one_stage_with_a_wide_tile_is_taken_before_two_with_a_narrow_one() -> None:
    """d = 256: Q 64 + K 32 + V 32 + P 16 KiB at 128 x 64; two stages do not fit beside 128 rows."""
    s, why = chosen(n_q=4096, heads=16, d=256)
    assert (s.block_q, s.block_k, s.stages) == (128, 64, (1,))
    assert why.endswith("at 1 stage")


def test_a_machine_of_unknown_size_gets_the_largest_tile_that_fits() -> None:
    hardware = MP31.with_value("processor.count", None)
    s, why = choose(FLASH2, Attention(n_q=4096, d=128), hardware, {})
    assert s.block_q == 256
    assert "how many MPs there are is unknown" in why


def test_a_softmax_row_stays_on_chip_where_it_fits() -> None:
    rows = {n: choose(STANDARD, Attention(n_q=n, d=64), MP31, {})[0] for n in (1024, 16384, 2**20)}
    assert {n: s.softmax_cols for n, s in rows.items()} == {1024: 1024, 16384: 16384, 2**20: 4096}
    assert rows[1024].softmax_rows > rows[16384].softmax_rows >= 1


# ---------------------------------------------------------------- what is given


def test_what_is_given_is_kept() -> None:
    s, why = chosen(n_q=4096, heads=32, given={"block_q": 128, "stages": (1,)})
    assert (s.block_q, s.block_k, s.stages) == (128, 128, (1,))
    assert why.startswith("block_q 128 as given;")
    s, why = chosen(n_q=4096, given={"block_q": 64, "block_k": 48, "stages": (2, 1), "groups": 2})
    assert (s.block_k, s.stages, s.groups, why) == (48, (2, 1), 2, "as given")
    s, why = chosen(n_q=4096, given={"block_k": 32})
    assert s.block_k == 32
    assert why.endswith("a block; 2 stages")


# ---------------------------------------------------------------- what is refused


def test_a_given_tile_that_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    with pytest.raises(CapacityError) as refused:
        chosen(n_q=4096, given={"block_q": 256, "block_k": 128, "stages": (2,)})
    assert str(refused.value) == (
        "flash2: kernel attention needs 262,144 B of SRAM (q 65,536 + k x2 65,536 + v x2 65,536 + p 65,536); "
        "mp31 gives a block 196,608 B; block_q 192, block_k 96 would fit"
    )
    s, _ = chosen(n_q=4096, given={"block_q": 192, "block_k": 96, "stages": (2,)})
    assert all(f.fits for f in footprints(FLASH2(Attention(n_q=4096, d=128), s), s, MP31).values())


def test_a_given_height_that_fits_with_no_key_tile_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"B of SRAM \(q 262,144 \+ .*\); mp31 gives .*; block_q \d+, block_k"):
        chosen(n_q=4096, given={"block_q": 1024})


def test_a_head_dimension_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"mp22 gives a block 65,536 B; no smaller tile fits at these stages"):
        chosen("mp22", n_q=4096, d=1024, dtype="fp32")


@pytest.mark.parametrize("hardware", profile_names())
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("d", [8, 64, 128, 256, 512])
def test_every_machine_gets_a_schedule_that_fits_or_a_reason(hardware: str, dtype: str, d: int) -> None:
    machine = load_hardware(hardware)
    for flow in (FLASH2, STANDARD):
        for n in (100, 4096):
            a = Attention(n_q=n, d=d, heads=32, dtype=dtype)
            try:
                s, why = choose(flow, a, machine, {})
            except CapacityError as refused:
                if d < 512 or f"{hardware} gives a block" not in str(refused):
                    raise
                continue
            assert why
            assert all(f.fits for f in footprints(flow(a, s), s, machine).values())
