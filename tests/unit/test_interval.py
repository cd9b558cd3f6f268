"""The range of predicted time: ends by hand, its order, and what it says nothing of."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from iosim.dataflows import load_dataflow
from iosim.hardware import Hardware, load_hardware
from iosim.problem import Attention
from iosim.report.interval import interval_columns, interval_fields, interval_lines
from iosim.study.interval import Interval, interval, ranged, with_intervals
from iosim.study.run import Plan, Run, compare, evaluate, plan_of, run

PROBLEM = Attention(n_q=512, d=64, heads=4)


@pytest.fixture(scope="module")
def flash2() -> Run:
    return run(PROBLEM, check=False)


@pytest.fixture(scope="module")
def found(flash2: Run) -> Interval:
    made = interval(flash2)
    assert made is not None
    return made


def seconds(machine: Hardware, base: Run) -> float:
    """The whole evaluation of the same schedule on another machine, nothing taken from the run."""
    plan = Plan(base.problem, machine, base.dataflow, base.schedule, "", base.program)
    again = evaluate(plan).seconds
    assert again is not None
    return again


def test_the_expected_time_is_the_run_s_and_lies_inside(flash2: Run, found: Interval) -> None:
    assert found.expected == flash2.seconds
    assert found.low < found.expected < found.high
    alone = [s for e in found.effects for s in (e.seconds_at_low, e.seconds_at_high) if s is not None]
    assert found.low <= min(alone)
    assert max(alone) <= found.high


@pytest.mark.long
def test_each_end_is_what_a_whole_evaluation_gives(flash2: Run, found: Interval) -> None:
    """Also for what changes the traffic: the partitions of the L2, and how many blocks are resident."""
    ends = {fact.name: (low, high) for fact, low, high in ranged(flash2.hardware)}
    assert len(found.effects) + len(found.unmoved) == len(ends)
    times = {e.fact.name: (e.seconds_at_low, e.seconds_at_high) for e in found.effects}
    for name, pair in ends.items():
        expected = tuple(seconds(flash2.hardware.with_value(name, end), flash2) for end in pair)
        assert times.get(name, (found.expected, found.expected)) == expected, name


def test_the_ends_have_all_numbers_at_their_slower_or_faster_ends(flash2: Run, found: Interval) -> None:
    """By hand: rates and shares of rates low, latencies and the launch high; counts move nothing here.

    Or as whole evaluations show each alone: with a faster L2 this run takes longer, as others then come in between.
    """
    corners = []
    for by_nature in (True, False):
        slow = fast = flash2.hardware
        for fact, low, high in ranged(flash2.hardware):
            if fact.name.startswith(("processor.max", "l2.part", "registers.")):
                assert fact.name in found.unmoved
                continue
            later = high if fact.name.endswith(("_cycles", "_us")) else low
            alone = [e for e in found.effects if e.fact == fact]
            if not by_nature and alone and alone[0].seconds_at_low != alone[0].seconds_at_high:
                later = high if alone[0].seconds_at_high > alone[0].seconds_at_low else low
            slow = slow.with_value(fact.name, later)
            fast = fast.with_value(fact.name, low if later == high else high)
        corners += [seconds(fast, flash2), seconds(slow, flash2)]
    assert (found.low, found.high) == (min(corners), max(corners))


@pytest.mark.long
def test_random_mixes_lie_inside(flash2: Run, found: Interval) -> None:
    """Within 1 %: which request comes first changes with every number, and moves the time a little either way."""
    draw = Random(0)  # noqa: S311 - the same mixes every time
    for _ in range(8):
        machine = flash2.hardware
        for fact, low, high in ranged(machine):
            machine = machine.with_value(fact.name, draw.choice((low, high)))
        assert 0.99 * found.low <= seconds(machine, flash2) <= 1.01 * found.high


def test_the_launch_moves_time_by_itself(found: Interval) -> None:
    """One kernel: 2.5 us is 1.5 us less than 4, 6 us 2 more."""
    launch = next(e for e in found.effects if e.fact.name == "launch.kernel_us")
    assert launch.seconds_at_low == pytest.approx(found.expected - 1.5e-6, abs=1e-12)
    assert launch.seconds_at_high == pytest.approx(found.expected + 2e-6, abs=1e-12)
    assert launch.swing(found.expected) == pytest.approx(3.5e-6)


def test_the_two_that_dominate_swing_most(found: Interval) -> None:
    swings = [e.swing(found.expected) for e in found.effects]
    assert swings == sorted(swings, reverse=True)
    assert [e.fact.name for e in found.dominant] == [e.fact.name for e in found.effects[:2]]
    assert interval_fields(found)["dominant"] == interval_columns(found)["interval_dominant"].split(" ")


def test_rates_of_other_dtypes_and_energy_move_nothing(found: Interval) -> None:
    assert {"matrix.tflops.bf16", "matrix.tflops.fp8_e4m3"} <= set(found.unmoved)
    named = {*found.unmoved, *(e.fact.name for e in found.effects)}
    assert not any(name.startswith("energy.") for name in named)


def test_a_machine_without_ranges_has_a_point(flash2: Run) -> None:
    machine = flash2.hardware
    for fact, _, _ in list(ranged(machine)):
        machine = machine.with_value(fact.name, fact.value)
    exact = run(PROBLEM, hardware=machine, check=False)
    point = interval(exact)
    assert point is not None
    assert (point.low, point.high, point.effects) == (exact.seconds, exact.seconds, ())
    assert "none, as no number with a range" in interval_lines([replace(exact, interval=point)])[0]


@pytest.mark.long
def test_an_end_at_which_the_tile_does_not_fit_has_no_time() -> None:
    """d=256, 64 rows, 128 threads: O takes 128 registers a thread, scores 64 or more, so over 168 with the others."""
    machine = load_hardware("mp31")
    given = {"block_q": 64, "block_k": 64}
    wide = evaluate(plan_of(Attention(n_q=512, d=256), machine, load_dataflow("flash2"), given))
    assert 168 < wide.footprint.registers <= 255
    made = interval(wide)
    assert made is not None
    (unfit,) = made.unfit
    assert (unfit.fact.name, unfit.seconds_at_low) == ("registers.max_registers_per_thread", None)
    assert unfit not in made.dominant
    text = " ".join(interval_lines([replace(wide, interval=made)]))
    assert "a block may not fit: registers.max_registers_per_thread (168: does not fit, 512: " in text


@pytest.mark.long
def test_a_training_step_adds_its_passes() -> None:
    step = compare(Attention(n_q=64, d=64), dataflows="flash2", computes="training", check=False).runs[0]
    made = interval(step)
    assert made is not None
    launches = len(step.program.kernels)
    launch = next(e for e in made.effects if e.fact.name == "launch.kernel_us")
    assert launch.seconds_at_high == pytest.approx(made.expected + launches * 2e-6, abs=1e-12)


def test_no_time_has_no_range() -> None:
    there = with_intervals(compare(PROBLEM, dataflows="flash2", hardware="mp22", check=False))
    assert there.runs[0].interval is None
    assert interval_lines(there.runs) == []
