"""Sensitivity against closed forms: what a launch costs, a run bound by DRAM, blocks in SRAM."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.study.outcome import outcome
from iosim.study.sensitivity import STEP, WORTH, Effect, sensitivity
from iosim.study.vary import Case, Source, machine_with

MP31, H200 = load_hardware("mp31"), load_hardware("h200-sxm")
CASE = Case(Attention(n_q=512, d=64), Source(), MP31)


def test_a_launch_adds_its_time_and_stops_mattering_where_that_is_little() -> None:
    """Time is R + L.  Halving L brings L/2 / (R + L/2) < 1 % from L = 2 R / 99 on."""
    case = replace(CASE, machine=MP31.with_value("launch.kernel_us", 1))
    (effect,) = sensitivity(case, ["launch.kernel_us"]).effects
    launch, whole = 1_000_000, outcome(case).makespan_ps or 0
    assert effect.more == pytest.approx((whole + launch * (STEP - 1)) / whole, abs=1e-6)
    assert effect.less == pytest.approx((whole - launch * (1 - 1 / STEP)) / whole, abs=1e-6)
    assert effect.better == pytest.approx((whole - launch / 2) / whole, abs=1e-6)
    assert effect.elasticity == pytest.approx(launch / whole, rel=0.01)
    exact = 2 * (whole - launch) / 99 / 1e6
    assert effect.enough is not None
    assert exact / 1.1 <= effect.enough <= exact * 1.001


def test_a_run_that_dram_bounds_takes_as_much_less_time_as_there_is_more_bandwidth() -> None:
    slow = replace(CASE, machine=MP31.with_value("hbm.bandwidth_gb_per_s", 1).with_value("launch.kernel_us", 0))
    found = sensitivity(slow, ["hbm.bandwidth_gb_per_s", "exp.ops_per_clock"])
    first, second = found.effects
    assert first.name == "hbm.bandwidth_gb_per_s"
    assert first.elasticity == pytest.approx(-1, abs=0.02)
    assert first.better == pytest.approx(0.5, abs=0.02)
    assert abs(second.elasticity) < 0.02
    assert found.mattering[0] is first


def test_enough_is_where_a_doubling_begins_to_bring_less() -> None:
    case = replace(CASE, machine=MP31.with_value("exp.ops_per_clock", 8))
    (effect,) = sensitivity(case, ["exp.ops"]).effects  # the unit can be left out
    assert effect.enough is not None
    schedule = outcome(case).schedule

    def gain(value: float) -> float:
        here, there = (outcome(replace(case, machine=machine_with(MP31, {"exp.ops_per_clock": v})), schedule)
                       for v in (value, 2 * value))  # fmt: skip
        return (here.makespan_ps or 0) / (there.makespan_ps or 1) - 1

    assert gain(effect.enough) < WORTH
    assert gain(effect.enough / 1.1) >= WORTH
    assert (
        effect.then
        == outcome(replace(case, machine=machine_with(MP31, {"exp.ops_per_clock": effect.enough})), schedule).bound
    )


def test_room_for_one_more_block() -> None:
    """An H200 keeps 1 KiB of each block: k + 1 blocks take k + 1 times what one takes and holds back."""
    case = Case(Attention(n_q=2048, d=64, heads=16), Source(), H200, {"block_q": 64, "block_k": 128, "stages": (4,)})
    (found,) = sensitivity(case, ["sram.capacity_kib"]).capacities
    block = outcome(case).footprint.sram_bytes + 1024
    now = 228 * 1024 // block
    assert found.resident == now
    assert found.needed == -(-(now + 1) * block // 1024)
    assert found.doubled_resident == 456 * 1024 // block


def test_what_is_not_used_changes_nothing() -> None:
    found = sensitivity(replace(CASE, machine=H200), ["matrix.tflops.fp8_e4m3", "matrix_warp.tflops.fp16"])
    assert found.unread == ("matrix.tflops.fp8_e4m3", "matrix_warp.tflops.fp16")
    assert not found.effects
    base = outcome(replace(CASE, machine=H200))
    for name in found.unread:
        other = replace(CASE, machine=machine_with(H200, {name: 1}))
        assert outcome(other, base.schedule).makespan_ps == base.makespan_ps


def test_elasticity_of_one_side_where_the_other_cannot_be() -> None:
    """hbm.read_efficiency of 1 has no tenth more: log(1 / less) over the one step."""
    case = replace(CASE, machine=MP31.with_value("hbm.read_efficiency", 1).with_value("hbm.bandwidth_gb_per_s", 10))
    (effect,) = sensitivity(case, ["hbm.read_efficiency"]).effects
    assert effect.more is None
    assert effect.better is None
    assert effect.less is not None
    assert effect.elasticity == pytest.approx(-log(effect.less) / log(STEP))
    assert Effect("x", "", 1.0, None, None).elasticity == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exp.op", "field: exp.op: is no number of this profile (did you mean 'exp.ops'?)"),
        ("matrix.instruction_m", "field: matrix.instruction_m: changes nothing here by degrees"),
    ],
)
def test_names_that_cannot_be_tried(name: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        sensitivity(CASE, [name])
    assert said in str(error.value)


def test_a_machine_without_what_time_needs_is_refused() -> None:
    with pytest.raises(InputError, match=r"hw: the profile does not know exp.ops_per_clock"):
        sensitivity(replace(CASE, machine=MP31.with_value("exp.ops_per_clock", None)))


def test_costs_are_times_and_loads_and_rates_are_not() -> None:
    """Blocks that start in a microsecond are a rate, though the name ends as a time's does."""
    costs = {f.name for f in H200.fields() if Effect(f.name, f.unit, 1.0, None, None).is_cost}
    assert {"launch.kernel_us", "launch.block_cycles", "power.idle_w_per_ghz3", "matrix.issue_share"} <= costs
    assert not {"launch.blocks_per_us", "exp.ops_per_clock", "power.limit_w", "matrix_warp.lone_share"} & costs
    assert next(f.unit for f in H200.fields() if f.name == "launch.blocks_per_us") == "/us"
