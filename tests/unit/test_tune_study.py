"""`tune`: its rules against sizes worked by hand, its answer against timing everything, its times against `run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iosim
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware
from iosim.interpreters.timeline import least_ps
from iosim.kernels import load_kernel
from iosim.memory.onchip import CapacityError
from iosim.memory.triton import registers, serial_cycles
from iosim.report.tune import fields_of
from iosim.study import tune as study
from iosim.study.choose import choose
from iosim.study.tune import RULES, Search, Tuned, tune
from iosim.study.validate import shipped_rows
from iosim.study.validate.times import conditions

MP31 = load_hardware("mp31")
SMALL = MP31.with_value("processor.count", 4)
PROBLEM = iosim.Attention(n_q=256, d=64, heads=2)
LONG = iosim.Attention(n_q=4096, d=128, heads=32)


def search(**limits: Any) -> Tuned:
    """A small search on a small machine."""
    given = {"block_q": [64, 128], "block_k": [32, 64], "stages": [1, 2], "groups": [1, 2], **limits}
    return tune(PROBLEM, hardware=SMALL, limits=given)


# ---------------------------------------------------------------- the answer


@settings(max_examples=3)
@given(
    n=st.integers(64, 200),
    causal=st.booleans(),
    heads=st.integers(1, 3),
    dataflow=st.sampled_from(["flash2", "flash3", "split-kv"]),
    name=st.sampled_from(["mp31", "h200-sxm"]),
    l2=st.sampled_from([1, 8]),
)
def test_the_answer_is_that_of_timing_everything(
    n: int, causal: bool, heads: int, dataflow: str, name: str, l2: int
) -> None:
    """A slow L2 makes bounds bite; a batch of two makes them be looked at often.  An H200 has a power limit too."""
    machine = load_hardware(name).with_value("processor.count", 4).with_value("l2.bandwidth_gb_per_s", 280 / l2)
    problem = iosim.Attention(n_q=n, d=32, heads=heads, causal=causal)
    limits: dict[str, list[Any]] = {"block_q": [64, 128], "block_k": [32], "stages": [1, (2, 1)], "groups": [1, 2]}
    limits["place"] = [{}]
    if dataflow == "flash3":
        limits |= {"producer": [True], "overlap": [False]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "BATCH", 2)
        found = tune(problem, dataflow=dataflow, hardware=machine, limits=limits, top=2)
    s = Search(problem, machine, dataflow, False)
    left, _ = study._apply_rules(s, found.space, found.margin, lambda _: None)
    everything = sorted((s.run(given) for given, *_ in left), key=lambda c: c.order)
    assert list(found.candidates) == everything[:2]
    assert list(found.by_stages) == [next(c for c in everything if c.stages == n) for n in (1, 2)]
    assert found.timed + found.bounded == len(left)
    for c in everything:
        assert least_ps(*s.program(c.schedule), c.schedule, machine) <= c.makespan_ps


def test_bounds_spare_times() -> None:
    """Behind an L2 this slow a taller tile, which reads K and V less often, wins before the others are timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "BATCH", 2)
        machine = SMALL.with_value("l2.bandwidth_gb_per_s", 20)
        limits = {"block_q": [16, 128], "block_k": [64], "stages": [2], "groups": [1, 2]}
        found = tune(PROBLEM, hardware=machine, limits=limits, top=1)
    assert found.candidates[0].schedule.block_q == 128
    assert found.bounded > 0


def test_a_time_is_that_of_run() -> None:
    found = search()
    for c in (*found.candidates[:2], found.candidates[-1]):
        fields = json.loads(json.dumps(fields_of(c)))
        again = iosim.run(PROBLEM, hardware=SMALL, schedule=fields, check=False)
        assert again.timeline is not None
        assert (again.timeline.makespan_ps, dict(again.timeline.units)) == (c.makespan_ps, dict(c.units))
        assert again.schedule == c.schedule


def test_the_default_is_that_of_run() -> None:
    found = search()
    again = iosim.run(PROBLEM, hardware=SMALL, check=False)
    assert found.default is not None
    assert again.timeline is not None
    assert (found.default.makespan_ps, found.default.schedule) == (again.timeline.makespan_ps, again.schedule)


def test_a_search_around_the_default_finds_nothing_worse() -> None:
    chosen, _ = choose(load_dataflow("flash2"), PROBLEM, SMALL, {})
    names = ("block_q", "block_k", "groups")
    found = tune(PROBLEM, hardware=SMALL, limits={n: [getattr(chosen, n)] for n in names} | {"stages": [1, 2]}, top=1)
    assert found.default is not None
    assert found.candidates[0].makespan_ps <= found.default.makespan_ps


@pytest.mark.long
def test_processes_give_the_same_answer() -> None:
    limits = {"block_q": [32, 64, 128], "block_k": [32, 64], "groups": [1, 2]}
    one, two = (tune(PROBLEM, hardware=SMALL, limits=limits, workers=n) for n in (1, 2))
    assert one.candidates == two.candidates
    assert (one.by_stages, one.removed, one.timed) == (two.by_stages, two.removed, two.timed)


# ---------------------------------------------------------------- rules


def test_every_candidate_is_removed_or_left() -> None:
    found = search(groups=[1, 2, 8])
    assert found.considered == prod(map(len, found.space.values()))
    assert found.considered == sum(r.count for r in found.removed) + found.bounded + found.timed
    assert {r.rule for r in found.removed} <= RULES.keys()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        # q 256 x 128 x 2 B = 64 KiB, k and v 32 each, p 64: all 192 KiB of an MP.
        ({"block_q": 256, "block_k": 128, "stages": 1, "groups": 4}, "margin"),
        ({"block_q": 256, "block_k": 128, "stages": 2, "groups": 4}, "SRAM"),  # 64 more
        ({"block_q": 192, "block_k": 64, "stages": 1, "groups": 8}, "instruction"),  # 24 rows a group, in steps of 16
        ({"block_q": 64, "block_k": 24, "stages": 1, "groups": 1}, "instruction"),
        ({"block_q": 8192, "block_k": 64, "stages": 1, "groups": 8}, "size"),  # of 4096 rows
        # o and x: 256 x (128 + 64) x 4 B over 128 threads are 384 registers each.
        ({"block_q": 256, "block_k": 64, "stages": 1, "groups": 1}, "registers"),
        ({"block_q": 64, "block_k": 64, "stages": 2, "groups": 1, "place": {"p": "registers"}}, "staging"),
    ],
)
def test_a_rule_removes_what_breaks_it(fields: Mapping[str, Any], rule: str) -> None:
    limits = {name: [value] for name, value in fields.items()}
    with pytest.raises(CapacityError, match=rf"rules remove all \d candidates \({rule} 1[,)]"):
        tune(LONG, hardware=MP31, limits={"place": [{}], **limits})


def test_more_threads_than_a_block_has_are_a_rule() -> None:
    limits = {"block_q": [128], "block_k": [64], "groups": [8], "producer": [True]}  # 9 squads of 128
    with pytest.raises(CapacityError, match="threads"):
        tune(LONG, dataflow="flash3", hardware=MP31, limits=limits)


def test_without_a_margin_all_of_the_sram_may_be_used() -> None:
    limits = {"block_q": [256], "block_k": [128], "stages": [1], "groups": [4]}
    found = tune(LONG, hardware=MP31, limits=limits, margin=0)
    assert found.candidates[0].footprint.sram_bytes == 192 * 1024


def test_moore_threads_own_tile_is_a_candidate() -> None:
    """256 x 64, two K and two V stages: 64 + 2 x 16 + 2 x 16 + 32 (P) = 160 KiB, 83 %; their kernel takes it too."""
    limits = {"block_q": [256], "block_k": [64], "stages": [2], "groups": [4]}
    found = tune(LONG, kernel="mp31", hardware=MP31, limits=limits)
    assert found.candidates[0].footprint.sram_bytes == 160 * 1024
    assert found.default is not None
    assert found.candidates[0].makespan_ps == found.default.makespan_ps


@pytest.mark.long
def test_on_mp31_the_search_comes_to_moore_threads_own_tile() -> None:
    """256 x 64, two K and two V stages, 160 KiB, in FlashAttention-3's order: taller or wider tiles do not fit at two
    stages (256 x 96: 64 + 48 + 48 + 48 KiB, 208), and lower ones keep SRAM busier."""
    limits = {
        "block_q": [128, 192, 256],
        "block_k": [64, 96],
        "stages": [1, 2],
        "groups": [1, 2, 4],
        "overlap": [False],
    }
    found = tune(LONG, dataflow="flash3", hardware=MP31, limits=limits, top=1)
    (best,) = found.candidates
    assert (best.schedule.block_q, best.schedule.block_k, best.schedule.stages) == (256, 64, (2,))
    assert best.footprint.sram_bytes == 160 * 1024


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"limits": {"block_d": [1]}},
            "block_d: is not searched in flash2; block_q, block_k, stages, groups",
        ),
        ({"limits": {"block_q": []}}, "block_q: needs one value"),
        ({"limits": {"block_q": [0]}}, "block_q"),
        ({"margin": 1.0}, "margin: 1.0 is not"),
        ({"top": 0}, "top"),
        ({"dataflow": "softmax-online"}, "no block_q"),
        ({"dataflow": "flash4"}, "flash4"),
        ({"hardware": "mp22"}, "no time without"),
    ],
)
def test_bad_input_is_one_line(bad: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        tune(PROBLEM, **bad)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- Triton


def test_triton_takes_what_a_config_can_say() -> None:
    h200 = load_hardware("h200-sxm")
    space = study._space(Search(LONG, h200, "triton", True), {}, for_triton=True)
    assert space.keys() == {"block_q", "block_k", "stages", "groups"}
    assert space["block_q"] == (16, 32, 64, 128, 256, 512)
    assert space["stages"] == ((1,), (2,), (3,), (4,))


def test_what_tritons_compiler_settles_follows_from_the_tile() -> None:
    h200, a = load_hardware("h200-sxm"), iosim.Attention(n_q=4096, d=128)
    flow = load_kernel("triton").dataflow()
    s, _ = choose(flow, a, h200, {"block_q": 128, "block_k": 128, "stages": (1,), "groups": 1})
    assert (s.registers, s.spills) == registers(a, 128, 128, 1, 4)
    assert s.spills > 0
    assert dict(s.shares) == {"v": "k"}
    assert s.cycles.items() >= serial_cycles(a, 128, 128, 4).items()
    given, _ = choose(flow, a, h200, {"block_q": 128, "registers": 100, "spills": 0})
    assert (given.registers, given.spills) == (100, 0)


def measured(d: int) -> tuple[Hardware, iosim.Attention, dict[tuple[int, ...], float]]:
    """The machine under the power limit of the tile sweep, the problem, and measured seconds by tile."""
    rows = [r for r in shipped_rows() if r.tile is not None and r.problem is not None and r.problem.d == d]
    machine = load_hardware("h200-sxm")
    assert machine.power is not None
    limit = conditions()["tiles"]["limit_w"]
    times = {
        (r.tile.block_q, r.tile.block_k, r.tile.stages, r.tile.warps // 4): r.measured["time"]
        for r in rows
        if r.tile is not None and "time" in r.measured
    }
    assert rows[0].problem is not None
    return replace(machine, power=replace(machine.power, limit_w=limit)), rows[0].problem, times


@pytest.mark.long
@pytest.mark.parametrize("d", [64, 128])
def test_the_pick_of_tritons_tiles_costs_what_validate_says(d: int) -> None:
    """At most 3 % over the best tile that was measured, as the goal "Triton tiles, estimated spills" has it."""
    machine, problem, times = measured(d)
    names = ("block_q", "block_k", "stages", "groups")
    limits = {name: sorted({tile[n] for tile in times}) for n, name in enumerate(names)}
    found = tune(problem, kernel="triton", hardware=machine, margin=0, limits=limits)
    ranked = [(c.given["block_q"], c.given["block_k"], c.stages, c.given["groups"]) for c in found.candidates]
    pick = next(tile for tile in ranked if tile in times)
    assert times[pick] / min(times.values()) - 1 <= 0.03
