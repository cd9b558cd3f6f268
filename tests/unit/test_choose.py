"""The default schedule and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from iosim.blockmask import BlockMask
from iosim.dataflows import load_dataflow
from iosim.hardware import load_hardware, profile_names
from iosim.memory.onchip import CapacityError, footprints
from iosim.problem import Attention
from iosim.schedule import Schedule
from iosim.study.choose import choose
from iosim.study.run import compare

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


@pytest.mark.parametrize(
    ("n", "blocks", "tile"),
    [
        (256, 3, (86, 86)),  # blocks of 86 = 2 x 43
        (1024, 4, (256, 128)),  # a size of the rule divides blocks of 256
        (96, 4, (24, 24)),
        (24, 3, (8, 8)),  # blocks smaller than any tile of the rule
        (3000, 3, (250, 125)),  # blocks of 1000
    ],
)
def test_tiles_divide_the_blocks_of_a_mask(n: int, blocks: int, tile: tuple[int, int]) -> None:
    s, _ = chosen(n_q=n, d=64, heads=64, block_mask=BlockMask.of([[1] * blocks] * blocks))
    assert (s.block_q, s.block_k) == tile


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


def test_fewer_rows_are_taken_before_one_stage() -> None:
    """d = 256 at two stages: 128 x 64 needs Q 64 + K 64 + V 64 + P 16 = 208 KiB, 64 x 64 needs 32 + 64 + 64 + 8."""
    s, _ = chosen(n_q=4096, heads=16, d=256)
    assert (s.block_q, s.block_k, s.stages) == (64, 64, (2,))


def test_one_stage_with_a_wide_tile_is_taken_before_two_with_a_narrow_one() -> None:
    """d = 320: 64 x 64 at two stages needs 40 + 80 + 80 + 8 = 208 of 192 KiB, at one 40 + 40 + 40 + 8 = 128."""
    s, why = chosen(n_q=4096, heads=16, d=320)
    assert (s.block_q, s.block_k, s.stages) == (64, 64, (1,))
    assert why.endswith("at 1 stage, two do not fit")


def test_a_machine_of_unknown_size_gets_the_largest_tile_that_fits() -> None:
    hardware = MP31.with_value("processor.count", None)
    s, why = choose(FLASH2, Attention(n_q=4096, d=128), hardware, {})
    assert s.block_q == 256
    assert "how many MPs there are is unknown" in why


def test_a_softmax_row_stays_on_chip_where_it_fits() -> None:
    rows = {n: choose(STANDARD, Attention(n_q=n, d=64), MP31, {})[0] for n in (1024, 16384, 2**20)}
    assert {n: s.softmax_cols for n, s in rows.items()} == {1024: 1024, 16384: 16384, 2**20: 4096}
    assert rows[1024].softmax_rows > rows[16384].softmax_rows >= 1


# ---------------------------------------------------------------- rules of dataflows


def chosen_by(flow: str, hardware: str, given: dict[str, Any] | None = None, **problem: Any) -> tuple[Schedule, str]:
    return choose(load_dataflow(flow), Attention(**{"d": 64, **problem}), load_hardware(hardware), given or {})


def test_flash1_takes_the_tiles_of_its_paper() -> None:
    """A block of an A100 has 163 KiB, 83,456 fp16 numbers, of which m and l of 64 rows take 256: M = 83,200, and
    M / 4d = 325, in steps of 16 so 320."""
    s, why = chosen_by("flash1", "a100-sxm-80gb", n_q=4096)
    assert (s.block_q, s.block_k, s.stages) == (64, 320, (1,))
    assert why == (
        "block_k 320 is ceil(M / 4d) in steps of 16 (M = 83,200 elements of SRAM); block_q 64 is min(block_k, d); "
        "the one stage of the algorithm"
    )


def test_flash1_leaves_room_for_what_is_staged() -> None:
    """MP31 reads P from SRAM: 64 x block_k numbers beside the statistics, of 98,304."""
    s, _ = chosen_by("flash1", "mp31", n_q=4096)
    left = 98304 - 64 * s.block_k - 2 * 2 * 64
    assert s.block_k <= -(-left // 256) < s.block_k + 32


def test_flash1_is_reduced_until_it_fits() -> None:
    """64 rows of K, V, Q and O fill the 64 KiB of MP22: none are left for m and l."""
    s, why = chosen_by("flash1", "mp22", n_q=4096, d=128)
    assert (s.block_q, s.block_k) == (48, 48)
    assert "in steps of 16, reduced until it fits (" in why
    assert "no more than there are keys" in chosen_by("flash1", "mp31", n_q=100)[1]


@pytest.mark.parametrize("block_k", [64, 128, 256, 512])
def test_flash1_accepts_the_blocks_of_figure_2(block_k: int) -> None:
    """Up to 512 keys at d = 64 on an A100: enough warp groups hold the scores in registers."""
    problem = {"n_q": 1024, "batch": 64, "heads": 12}
    s, why = chosen_by("flash1", "a100-sxm-80gb", {"block_k": block_k}, **problem)
    assert (s.block_q, s.block_k) == (64, block_k)
    assert why.startswith(f"block_k {block_k} as given;")
    whole = {"block_q": 64, "block_k": block_k, "stages": (1,)}
    assert chosen_by("flash1", "a100-sxm-80gb", whole, **problem) == (s, "tile and stages as given")


@pytest.mark.parametrize(
    ("problem", "splits", "reason"),
    [
        # MP31, d 128: a K and V tile is 128 (128 + 128) 2 B = 64 KiB, a result 16 (128 + 1) 4 B = 8.06 KiB.  64 key
        # tiles: 22 splits of 3 take 3 * 64 + 22 * 8.06 = 369 KiB, 16 of 4 take 385, 32 of 2 take 386, 13 of 5 take 425.
        ({"n_q": 1, "n_k": 8192}, 22, "fewest bytes loaded in a row"),
        ({"n_q": 1, "n_k": 8192, "heads": 8}, 7, "fewest bytes"),  # 56 MPs have room for 7: ten tiles each
        ({"n_q": 1, "n_k": 1024, "heads": 11}, 4, "fewest bytes"),  # there is room for 6, but 5 and 6 empty a split
        ({"n_q": 1, "n_k": 8192, "heads": 56}, 1, "the grid gives each of 56 MPs a block"),
        ({"n_q": 1, "n_k": 100}, 1, "the keys are one tile"),
        # 64 rows: a result is 64 (512 + 1) 4 B = 128 KiB, two key tiles 2 * 64 (64 + 512) 2 B = 144 KiB.
        ({"n_q": 64, "n_k": 128, "d": 64, "d_v": 512}, 1, "combining the results would load more than it saves"),
    ],
)
def test_split_kv_loads_the_fewest_bytes_in_a_row(problem: dict[str, int], splits: int, reason: str) -> None:
    s, why = chosen_by("split-kv", "mp31", **{"d": 128, **problem})
    assert s.splits == splits
    assert reason in why


def test_default_splits_are_near_the_best_of_the_time_model() -> None:
    a = Attention(n_q=1, n_k=8192, d=128)
    times = {
        n: compare(a, dataflows="split-kv", schedule={"splits": n} if n else None, check=False).runs[0].seconds
        for n in (0, 1, 7, 14, 64)
    }
    assert times[0] < 1.1 * min(times.values())


def test_given_splits_are_kept() -> None:
    assert chosen_by("split-kv", "mp31", {"splits": 3}, n_q=1, n_k=8192)[0].splits == 3
    assert chosen_by("split-kv", "mp22", n_q=1, n_k=8192)[1].endswith("as the number of MPs is unknown")


# ---------------------------------------------------------------- what is given


def test_what_is_given_is_kept() -> None:
    s, why = chosen(n_q=4096, heads=32, given={"block_q": 128, "stages": (1,)})
    assert (s.block_q, s.block_k, s.stages) == (128, 128, (1,))
    assert why.startswith("block_q 128 as given;")
    s, why = chosen(n_q=4096, given={"block_q": 64, "block_k": 48, "stages": (2, 1), "groups": 2})
    assert (s.block_k, s.stages, s.groups, why) == (48, (2, 1), 2, "tile and stages as given")
    s, why = chosen(n_q=4096, given={"block_k": 32})
    assert s.block_k == 32
    assert why.endswith("a block; block_k 32 as given; 2 stages")


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
