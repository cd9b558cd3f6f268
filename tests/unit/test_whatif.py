"""What-if rows against runs alone, against what they are made of, and against measured stages."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib.resources import files

import pytest

import iosim
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.report import whatif as report
from iosim.study import outcome as study
from iosim.study.outcome import Outcome, attempt, outcome, spread
from iosim.study.vary import Axis, Case, Source
from iosim.study.whatif import WhatIf, whatif

MP31, H200 = load_hardware("mp31"), load_hardware("h200-sxm")
SMALL = Case(Attention(n_q=1024, d=64), Source(), MP31)
STAGES = Axis("stages", ((1,), (2,), (3,)))


@pytest.fixture(scope="module")
def found() -> WhatIf:
    return whatif(SMALL, [STAGES])


def outcomes(w: WhatIf) -> list[Outcome]:
    return [row.outcome for row in w.rows if row.outcome is not None]


def test_a_row_is_the_run_alone(found: WhatIf) -> None:
    for stages, of in zip((1, 2, 3), outcomes(found), strict=True):
        alone = iosim.run(SMALL.problem, schedule={"stages": stages, **found.kept}, check=False)
        assert of.seconds == alone.seconds
        assert of.hbm_bytes == alone.ledger.hbm_read_bytes + alone.ledger.hbm_write_bytes
        assert of.dram_bytes == alone.device.dram_read_bytes + alone.device.dram_write_bytes
        assert of.footprint == alone.footprint


def test_work_and_stalls_make_up_the_time(found: WhatIf) -> None:
    for of in outcomes(found):
        assert of.busy["matrix"] + sum(of.stalls.values()) == pytest.approx(1)


def test_the_first_row_that_runs_is_the_base(found: WhatIf) -> None:
    assert found.base is found.rows[0]
    assert found.ratio(found.rows[0]) == 1
    late = whatif(SMALL, [Axis("stages", ((16,), (2,)))])
    assert late.rows[0].outcome is None
    assert "needs" in late.rows[0].refused
    assert late.base is late.rows[1]
    assert report.change(late, late.rows[0]) == late.rows[0].refused


def test_where_no_row_runs_the_reason_of_the_first_is_raised() -> None:
    with pytest.raises(InputError, match=r"vary: stages: 17 is out of range; 1 to 16 is allowed"):
        whatif(SMALL, [Axis("stages", ((17,), (18,)))])


def test_what_is_set_is_so_in_all_rows() -> None:
    slow = whatif(SMALL, [STAGES], [Axis("hw.hbm.bandwidth_gb_per_s", (16,))])
    plain = whatif(replace(SMALL, machine=MP31.with_value("hbm.bandwidth_gb_per_s", 16)), [STAGES])
    assert [o.makespan_ps for o in outcomes(slow)] == [o.makespan_ps for o in outcomes(plain)]
    with pytest.raises(InputError, match="set: stages: is given twice"):
        whatif(SMALL, [STAGES], [Axis("stages", ((1,),))])


def test_without_a_second_buffer_one_block_alone_hides_little_and_with_it_nearly_all() -> None:
    """One block a processor, so that no other hides its loads, long enough that what is loaded first counts little.

    With one buffer V's load runs while S and P are computed and K's latency beside V's copy, so some is hidden.
    """
    alone = replace(SMALL, problem=Attention(n_q=8192, d=128), machine=MP31.with_value("processor.max_blocks", 1))
    one, two = outcomes(whatif(replace(alone, given={"block_q": 128, "block_k": 64}), [Axis("stages", ((1,), (2,)))]))
    assert one.load_ps == two.load_ps
    assert one.hidden is not None
    assert two.hidden is not None
    assert one.hidden < 0.7
    assert two.hidden > 0.95
    assert one.hidden == pytest.approx(1 - one.stalls["data"] * (one.makespan_ps or 0) / one.load_ps)


def test_loads_take_their_latency_and_their_slowest_unit() -> None:
    """One block of one query tile with one key tile: Q, K and V are each loaded once, from DRAM, by one processor."""
    case = replace(SMALL, problem=Attention(n_q=64, d=64), given={"block_q": 64, "block_k": 64, "stages": (1,)})
    of = outcome(case)
    each = 64 * 64 * 2
    machine = MP31
    assert machine.l2 is not None
    assert machine.l2.bandwidth is not None
    assert machine.copy.bandwidth is not None
    assert machine.sram.bandwidth is not None
    rates = machine.hbm.bandwidth * machine.hbm.read_efficiency, machine.copy.bandwidth, machine.sram.bandwidth
    slowest = max(each / rate for rate in rates) * 1e12
    latency = machine.hbm.latency_ps or 0
    assert of.load_ps == pytest.approx(3 * (slowest + latency), rel=0.02)


@pytest.mark.slow
def test_the_direction_and_size_of_measured_stages() -> None:
    """Triton's 256 x 64 tile with 8 warps at d = 64; all tiles are held in the goals of iosim validate."""
    rows = csv.DictReader((files("iosim") / "data" / "h200_triton_tiles.csv").read_text().splitlines())
    ms = {int(r["stages"]): float(r["ms"]) for r in rows
          if (r["d"], r["block_m"], r["block_n"], r["warps"]) == ("64", "256", "64", "8")}  # fmt: skip
    assert sorted(ms) == [1, 2, 3, 4]
    case = Case(Attention(n_q=4096, d=64, heads=32, batch=4), Source(kernel="triton"), H200)
    given = {"block_q": 256, "block_k": 64, "groups": 2}
    found = whatif(replace(case, given=given), [Axis("stages", ((1,), (2,), (3,), (4,)))])
    ratios = [found.ratio(row) or 0 for row in found.rows]
    for n in (1, 2, 3):
        measured, predicted = ms[n + 1] / ms[n] - 1, ratios[n] / ratios[n - 1] - 1
        assert abs(predicted - measured) < 0.15
        if abs(measured) > 0.05:
            assert predicted * measured > 0
    assert [o.footprint.sram_bytes // 1024 for o in outcomes(found)] == [40, 64, 80, 96]  # as Triton allots


def test_words_say_what_became_of_the_bottleneck() -> None:
    found = whatif(SMALL, [Axis("hw.hbm.bandwidth_gb_per_s", (1600, 16))])
    words = report.change(found, found.rows[1])
    assert "the busiest unit is DRAM (" in words
    assert "no longer the launch of kernels (" in words
    assert "the matrix units' largest change: no block left to run, " in words
    assert "as long" in words


def test_jobs_are_shared_out_where_they_are_long_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert spread(abs, [-1, -2, -3], said.append, "job", each=0.0) == [1, 2, 3]
    assert said[-1] == "job 3 of 3"
    monkeypatch.setattr(study, "cores", lambda: 2)
    assert spread(abs, [-4, -5, -6], said.append, "job", each=60.0) == [4, 5, 6]
    assert isinstance(attempt((replace(SMALL, given={"block_k": 512, "stages": (16,)}), None)), str)
