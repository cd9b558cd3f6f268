"""The checklist: thresholds, remedies that hold when they are tried, and the guide's own tile."""

from __future__ import annotations

import re
from typing import Any

import pytest

from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.kernels import load_kernel
from iosim.problem import Attention
from iosim.report.checklist import render
from iosim.study.checklist import Checklist, Line, checklist
from iosim.study.run import run
from iosim.words import duration

SMALL = Attention(n_q=256, d=64)
GUIDE = Attention(n_q=512, d=128)


def check(problem: Attention = SMALL, machine: str = "mp31", dataflow: str = "flash2", **given: Any) -> Checklist:
    margin = given.pop("margin", 0.1)
    return checklist(problem, load_dataflow(dataflow), load_hardware(machine), given, margin=margin)


def line(found: Checklist, name: str) -> Line:
    return next(line for line in found.lines if line.name == name)


@pytest.fixture(scope="module")
def default() -> Checklist:
    return check()


@pytest.fixture(scope="module")
def guide() -> Checklist:
    return check(GUIDE, block_q=256, block_k=128)


def test_every_line_has_a_status_and_a_remedy_where_it_is_not_met(default: Checklist, guide: Checklist) -> None:
    for found in (default, guide):
        assert len(found.lines) == 10
        for own in found.lines:
            assert bool(own.remedy) == (own.status in ("warn", "fail")), own
        assert sum(found.count(status) for status in ("pass", "warn", "fail", "skip")) == 10


def test_the_time_is_that_of_iosim_run(default: Checklist) -> None:
    assert default.seconds == run(SMALL, check=False).seconds


def test_the_guide_s_typical_tile_fails_its_own_rule(guide: Checklist) -> None:
    """Q 256 x 128 x 2 B = 64 KiB, K and V 32 each, P 256 x 128 x 2 B = 64: 192 of 192 KiB; the rule wants 172.8."""
    sram = line(guide, "SRAM")
    assert (sram.status, sram.value, sram.threshold) == ("fail", 100, 90)
    assert "q 64 KiB + k 32 KiB + v 32 KiB + p 64 KiB" in sram.detail
    notes = " ".join(guide.notes)
    assert "K and V double buffered without P, 64 KiB + 2 x 32 KiB + 2 x 32 KiB = 192 KiB" in notes
    assert "K and V once with P staged, 128 KiB + 64 KiB = 192 KiB" in notes
    assert "with two buffers of K and V as well it is 256 KiB, which does not fit in 192 KiB" in notes
    assert "breaks the guide's own rule of less than 90 %" in notes
    assert guide.failed(strict=False) == ["SRAM"]
    assert {"SRAM", "tail of the grid"} <= set(guide.failed(strict=True))


def test_no_note_on_a_tile_that_is_not_the_guide_s(default: Checklist) -> None:
    assert default.notes == ()
    assert check(Attention(n_q=512, d=128), block_q=128, block_k=128, stages=(1,)).notes == ()


def test_the_shipped_tile_passes_where_the_guide_s_fails() -> None:
    """Moore Threads' library at d = 128: 64 + 2 x 16 + 2 x 16 + 32 (P) = 160 of 192 KiB, 83 %."""
    sram = line(check(GUIDE, block_q=256, block_k=64, stages=(2,)), "SRAM")
    assert (sram.status, sram.found) == ("pass", "160 of 192 KiB, 83 %")


@pytest.mark.long
def test_the_margin_moves_the_threshold() -> None:
    tile = {"block_q": 256, "block_k": 128, "stages": (1,)}
    assert line(check(GUIDE, **tile, margin=0.0), "SRAM").status == "pass"
    assert line(check(GUIDE, block_q=256, block_k=64, stages=(2,), margin=0.2), "SRAM").status == "fail"
    with pytest.raises(InputError, match="margin: 1 is not a share of SRAM"):
        check(margin=1)


def test_a_tile_that_does_not_fit_fails_and_is_no_error() -> None:
    """256 KiB with two stages; its remedy is the vendor's tile, which leaves the margin."""
    found = check(GUIDE, block_q=256, block_k=128, stages=(2,))
    assert found.seconds is None
    assert line(found, "SRAM").found == "256 of 192 KiB, 133 %"
    assert line(found, "SRAM").remedy.startswith("block_k 64 would take 160 KiB (83 %)")
    assert line(found, "occupancy").status == "fail"
    assert [own.name for own in found.lines if own.status == "skip"] == ["tile for d", "tail of the grid", "intensity"]
    assert "2 fails" in render(found)


@pytest.mark.long
def test_a_far_too_large_tile_is_led_to_one_that_fits() -> None:
    found = check(Attention(n_q=512, d=256), block_q=512, block_k=512, stages=(2,))
    assert line(found, "registers").status == "fail"
    change = dict(re.findall(r"(block_[qk]) (\d+)", line(found, "SRAM").remedy))
    fitting = check(Attention(n_q=512, d=256), stages=(2,), **{name: int(size) for name, size in change.items()})
    assert line(fitting, "SRAM").status == "pass"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tile for d", SMALL),
        ("intensity", Attention(n_q=1024, d=128, heads=2)),
        ("occupancy", Attention(n_q=1024, d=128, heads=2)),
    ],
)
def test_a_remedy_is_what_a_run_of_it_shows(name: str, problem: Attention) -> None:
    """What the line says that a change would take, in SRAM and time, is what running it gives."""
    remedy = line(check(problem), name).remedy
    change = {field: int(size) for field, size in re.findall(r"(block_[qk]) (\d+)", remedy)}
    base = run(problem, check=False).schedule
    tile = {"block_q": base.block_q, "block_k": base.block_k, "stages": base.stages} | change
    again = run(problem, schedule=tile, check=False)
    assert f"would take {again.footprint.sram_bytes / 1024:.4g} KiB" in remedy
    assert f"and {duration(again.seconds or 0)}, now " in remedy


@pytest.mark.long
def test_one_buffer_warns_where_blocks_wait_for_data() -> None:
    found = line(check(Attention(n_q=4096, d=64), stages=(1,), block_q=64, block_k=64), "double buffered")
    assert (found.status, found.value, found.threshold) == ("warn", 1, 2)
    assert found.remedy.startswith("stages 2 would take ")
    assert line(check(), "double buffered").status == "pass"


def test_copies_through_registers_warn() -> None:
    copies = line(check(machine="mp22"), "async copies")
    assert (copies.status, copies.remedy) == ("warn", "mp22 has no asynchronous copy")


def test_a_machine_without_time_skips_what_needs_it() -> None:
    found = check(machine="mp22")
    assert {own.name for own in found.lines if own.status == "skip"} >= {"tile for d", "tail of the grid"}
    assert line(found, "SRAM").status == "pass"
    assert "the profile does not know processor.count" in found.notes[0]


def test_registers_over_the_limit_fail() -> None:
    """O of 128 rows x 512 in fp32 over one group of 128 threads: 512 registers each."""
    found = line(check(Attention(n_q=128, d=512), block_q=128, block_k=16, stages=(1,), groups=1), "registers")
    assert found.status == "fail"
    assert "would spill" in found.found
    assert (found.value or 0) > 512 > (found.threshold or 0)


def test_the_tail_counts_waves() -> None:
    """57 blocks on 56 MPs, one each: the second wave has one block, so about half of the places stand idle."""
    found = line(check(Attention(n_q=57 * 64, d=128), block_q=64, block_k=128, stages=(2,)), "tail of the grid")
    assert found.found.startswith("57 blocks on 56 places, 1.02 waves; ")
    assert found.status == "warn"
    assert 40 < (found.value or 0) < 50


def test_padding_by_hand() -> None:
    """40 rows of one group in instructions of 16: 48 rows, so 1/6 of the work is padding; keys and d fill theirs."""
    found = line(check(Attention(n_q=40, n_k=64, d=64), block_q=40, block_k=64), "alignment")
    assert found.status == "warn"
    assert found.value == pytest.approx(100 / 6)
    assert found.remedy.startswith("block_q 48 would take ")


def test_intensity_by_hand() -> None:
    """4 N^2 d FLOPs; DRAM: Q, K, V and O once; the L2 is asked for Q and O once, K and V for each of N/64 tiles."""
    n, d = 512, 64
    found = check(Attention(n_q=n, d=d), block_q=64)
    tiles = n // 64
    flops, row = 4 * n * n * d, 2 * n * d
    of_l2 = flops / (2 * row + 2 * row * tiles)
    own = line(found, "intensity")
    assert own.found == f"DRAM {flops / (4 * row):.0f}, L2 {of_l2:.1f} FLOP/B"
    assert (own.status, own.value) == ("warn", pytest.approx(of_l2))
    assert own.threshold == pytest.approx(460e12 / 4000e9, rel=1e-6)


def test_decoding_is_bound_by_memory_whatever_the_tile() -> None:
    found = check(Attention(n_q=1, n_k=8192, d=64))
    assert "no tile reaches DRAM's" in line(found, "intensity").remedy
    assert line(found, "tail of the grid").remedy.startswith("split-kv with ")


def test_sums_in_fp16_warn() -> None:
    found = line(check(Attention(n_q=256, d=64, accumulator="fp16")), "fp32 sums")
    assert (found.status, found.value, found.threshold) == ("warn", 11, 24)


@pytest.mark.parametrize(
    ("dataflow", "skipped"),
    [
        ("standard", set()),
        ("flash-backward", set()),
        ("softmax-safe", {"tile for d", "double buffered", "intensity", "alignment"}),
    ],
)
def test_other_dataflows(dataflow: str, skipped: set[str]) -> None:
    found = check(Attention(n_q=256, d=64), dataflow=dataflow)
    assert {own.name for own in found.lines if own.status == "skip"} == skipped
    assert max(map(len, render(found).splitlines())) <= 80


def test_a_kernel_is_checked_with_its_own_order() -> None:
    """FlashAttention-2 has one buffer each of K and V, threads issue its copies, and it fixes its registers."""
    flow = load_kernel("flash2").dataflow()
    found = checklist(Attention(n_q=256, d=64), flow, load_hardware("h200-sxm"), {})
    assert line(found, "double buffered").found.startswith("1 buffer of k, v")
    assert line(found, "async copies").found.startswith("cp.async, which threads issue")
    assert line(found, "registers").value == 255


@pytest.mark.long
def test_one_buffer_passes_where_no_block_waits() -> None:
    """Moore Threads' kernel at d = 256: one K and one V stage, whose loads its order hides; 184 of 192 KiB."""
    flow = load_kernel("mp31").dataflow()
    found = checklist(Attention(n_q=2048, d=256), flow, load_hardware("mp31"), {})
    buffers = line(found, "double buffered")
    assert (buffers.status, buffers.value) == ("pass", 1)
    assert line(found, "SRAM").found == "184 of 192 KiB, 96 %"
    assert found.failed(strict=False) == ["SRAM"]
