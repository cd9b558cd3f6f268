"""The reports on traffic, time and rooflines: closed forms, laws, and what their sections say."""

from __future__ import annotations

from math import ceil

import pytest

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.report import io as io_report
from iosim.report import roofline as roofline_report
from iosim.report import trend as trend_report
from iosim.report.sections import picture, text
from iosim.study.cases import Case, Runs, cases, forward_dataflows
from iosim.study.io import Io, io, tensor_flows
from iosim.study.roofline import Roofline, roofline
from iosim.study.trend import CAUSES, PAYS, Point, Trend, measured, trend

MP31 = load_hardware("mp31")
SHAPE = {"d": 64, "heads": 2}
LENGTHS = (256, 512, 1024)
NAMES = ["standard", "flash2", "flash3"]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """What all reports here share, made in this process."""
    made = Runs()
    for case in cases(LENGTHS, SHAPE, [MP31], NAMES):
        made.get([case])
    return made


@pytest.fixture(scope="module")
def moved(runs: Runs) -> Io:
    return io(LENGTHS, SHAPE, [MP31], NAMES, runs)


@pytest.fixture(scope="module")
def times(runs: Runs) -> Trend:
    return trend(LENGTHS, SHAPE, [MP31], NAMES, runs)


@pytest.fixture(scope="module")
def roofs(runs: Runs) -> Roofline:
    return roofline(Attention(n_q=512, **SHAPE), [MP31], NAMES, runs)  # type: ignore[arg-type]


# ---------------------------------------------------------------- cases


def test_a_run_is_made_once_and_what_cannot_be_is_left_out_with_its_reason() -> None:
    made, mp22 = Runs(), load_hardware("mp22")  # without asynchronous copies, which flash3 is made of
    a = Attention(n_q=256, d=64)
    possible, impossible = Case(a, "flash2", MP31), Case(a, "flash3", mp22)
    assert made.get([possible])[possible] is made.get([possible, impossible])[possible]
    assert made.get([possible, impossible]).keys() == {possible}
    assert made.left_out == ["flash3: mp22 has no asynchronous copies, on which its order rests"]
    with pytest.raises(InputError, match="mp22 has no asynchronous copies"):
        made.get([impossible])
    narrow = Case(Attention(n_q=256, d=64, dtype="fp8"), "flash1", load_hardware("h200-sxm"))
    with pytest.raises(InputError):
        made.get([narrow])
    assert made.left_out[1:] == ["flash1 is not written for fp8"]


@pytest.mark.long
def test_processes_make_the_same_runs(runs: Runs) -> None:
    """Nine cases are enough for a pool."""
    wanted = cases(LENGTHS, SHAPE, [MP31], NAMES)
    apart, here = Runs().get(wanted), runs.get(wanted)
    assert list(apart) == list(here) == wanted
    for case in wanted:
        assert apart[case].seconds == here[case].seconds
        assert apart[case].ledger.by_tensor == here[case].ledger.by_tensor


def test_dataflows_are_in_the_order_that_people_know() -> None:
    assert forward_dataflows()[:5] == ["standard", "flash1", "flash2", "flash3", "split-kv"]


# ---------------------------------------------------------------- traffic


def test_flash2_asks_for_k_and_v_once_a_query_tile(moved: Io) -> None:
    """(2 + 2 ceil(N / block_q)) N d elements a head; DRAM sees each tensor once, as all fit in the L2."""
    for n in LENGTHS:
        m = moved.runs["mp31", "flash2", n]
        block_q = m.run.schedule.block_q
        assert m.asked_bytes == 2 * SHAPE["heads"] * n * SHAPE["d"] * (2 + 2 * ceil(n / block_q))
        assert m.dram_bytes == m.least_bytes == 4 * 2 * SHAPE["heads"] * n * SHAPE["d"]


def test_flash1_and_flash2_over_their_tiles(runs: Runs) -> None:
    """flash2: K and V once for each of N / block_q query tiles; flash1: Q, O and the statistics (4 B each of m and l)
    once for each of N / block_k key tiles, all but the first read too."""
    made = io((512,), SHAPE, [MP31], ["flash1", "flash2"], runs)
    n, d, heads = 512, SHAPE["d"], SHAPE["heads"]
    assert {t.dataflow for t in made.tiles} == {"flash1", "flash2"}
    for t in made.tiles:
        tiles = ceil(n / t.rows)
        if t.dataflow == "flash2":
            wanted = 2 * n * d * (2 + 2 * tiles)
        else:
            wanted = 2 * n * d * (2 + tiles + 2 * tiles - 1) + 8 * n * (2 * tiles - 1)
        assert t.asked_bytes == heads * wanted, t
        assert (t.dram_bytes is None) == bool(t.why)


def test_flows_by_tensor_add_up(moved: Io) -> None:
    for m in moved.runs.values():
        flows = tensor_flows(m.run)
        assert sum(f.asked_bytes for f in flows) == m.asked_bytes
        assert sum(f.dram_read_bytes + f.dram_write_bytes for f in flows) == m.dram_bytes


def test_the_bound_stands_only_where_it_is_more_than_inputs_and_outputs(moved: Io) -> None:
    """N^2 d^2 / M >= 4 N d from N = 4 M / d on: 4 x 98,304 / 64 = 6,144."""
    assert all(m.bound_bytes is None for m in moved.runs.values())
    large = io((8192,), {"d": 64}, [MP31], ["flash2"], Runs()).runs["mp31", "flash2", 8192]
    assert large.bound_bytes == 2 * (8192**2 * 64**2 // 98304)


# ---------------------------------------------------------------- time


def test_busy_and_waits_make_the_whole_run(times: Trend) -> None:
    for p in times.points.values():
        assert p.waits.keys() == CAUSES.keys()
        assert p.busy + sum(p.waits.values()) == pytest.approx(1)
        assert 0 < p.launch_ps < p.time_ps


def test_speed_up_and_where_it_pays() -> None:
    """By hand: 1 us of launches in 10, 20, 40 us; a dataflow that takes 10, 19, 20 us with 5 us of launches."""

    def point(time: int, launch: int) -> Point:
        return Point(None, time, launch, 0.5, {"idle": 0.3, "launch": 0.2})  # type: ignore[arg-type]

    def trend_of(*own: int) -> Trend:
        base = {("m", "standard", n): point(t, 1) for n, t in zip((1, 2, 4), (10, 20, 40), strict=True)}
        other = {("m", "x", n): point(t, 5) for n, t in zip((1, 2, 4), own, strict=True)}
        return Trend({"d": 64}, (1, 2, 4), (), base | other, {}, ())

    t = trend_of(10, 19, 20)
    assert [t.speed_up("m", "x", n) for n in (1, 2, 4)] == [1, 20 / 19, 2]
    assert t.speed_up("m", "x", 4, launches=False) == 39 / 15
    assert (t.pays_from("m", "x"), t.pays_from("m", "x", launches=False)) == (4, 1)
    assert trend_of(5, 19, 20).pays_from("m", "x") == 4  # what pays at first and then not, pays from where it stays so
    assert trend_of(5, 10, 39).pays_from("m", "x") is None
    assert t.speed_up("m", "no", 1) is None
    assert PAYS == 1.1
    assert t.points["m", "x", 1].largest == "idle"


def test_measured_speed_ups_on_an_h200() -> None:
    """By hand from the file: 16 heads of N = 16,384 and d = 128 take 12.88547 ms and, by flash2, 6.39504 ms: 2.01x."""
    rows = measured(128)
    long = next(m for m in rows if (m.problem.heads, m.problem.n_q) == (16, 16384))
    assert long.seconds["standard"] / long.seconds["flash2"] == pytest.approx(2.015, abs=1e-3)
    assert long.host_bound == ()
    short = next(m for m in rows if (m.problem.heads, m.problem.n_q) == (1, 512))
    assert set(short.host_bound) == {"standard", "flash2", "cudnn"}
    assert measured(80) == []


# ---------------------------------------------------------------- rooflines


def test_no_kernel_is_above_its_roof(roofs: Roofline) -> None:
    assert {(p.dataflow, p.kernel) for p in roofs.points} == {
        ("standard", "scores"), ("standard", "softmax"), ("standard", "output"), ("flash2", "attention"),
        ("flash3", "attention"),
    }  # fmt: skip
    for p in roofs.points:
        assert 0 < p.rate <= p.roof, p
        assert all(0 <= share <= 1 for share in p.busy.values())


def test_ceilings_of_mp31_by_hand(roofs: Roofline) -> None:
    """1,600 GB/s x 0.85; 4,000 GB/s; 56 MPs x 2 GHz x 128 B; 460 TFLOP/s; 56 x 2 GHz x 32 exponentials x 4 d FLOPs."""
    tops = {c.name: c.rate for c in roofs.ceilings["mp31"]}
    wanted = {"DRAM": 1.36e12, "L2": 4e12, "SRAM": 56 * 2e9 * 128, "matrix": 460e12, "exp": 56 * 2e9 * 32 * 256,
              "vector": 56 * 2e9 * 128}  # fmt: skip
    assert tops == pytest.approx(wanted, rel=1e-6)


def test_intensities_are_work_over_bytes(roofs: Roofline, moved: Io) -> None:
    p = next(p for p in roofs.points if p.dataflow == "flash2")
    m = moved.runs["mp31", "flash2", 512]
    assert p.work == 4 * SHAPE["heads"] * 512**2 * 64  # no mask and whole tiles: the convention's FLOPs
    assert p.asked_intensity == p.work / m.asked_bytes
    assert p.dram_intensity == p.work / m.dram_bytes


# ---------------------------------------------------------------- sections


def test_sections_fit_a_terminal_and_lead_with_the_answer(moved: Io, times: Trend, roofs: Roofline) -> None:
    made = [io_report.section(moved, {}), trend_report.section(times, {}), roofline_report.section(roofs, {})]
    for s, words in zip(made, ("asks device memory for", "as fast as standard", "matrix units"), strict=True):
        shown = text(s)
        assert max(map(len, shown.splitlines())) <= 80, s.name
        assert words in s.answer[0]
        assert "…" not in shown
        assert shown.index(s.answer[0][:30]) < shown.index(s.tables[0].title[:20])


def test_all_dataflows_have_room_on_a_terminal() -> None:
    s = trend_report.section(trend((64,), SHAPE, [MP31], forward_dataflows(), Runs()), {})
    assert [table.name for table in s.tables] == ["times", "speed-ups", "waits", "measured"]
    assert "…" not in text(s)
    assert max(map(len, text(s).splitlines())) <= 80


@pytest.mark.long
def test_plots_draw(moved: Io, times: Trend, roofs: Roofline) -> None:
    for s in (io_report.section(moved, {}), trend_report.section(times, {}), roofline_report.section(roofs, {})):
        svg = picture(s, "svg").decode()
        assert svg.count('class="mark"') > 10, s.name


def test_a_machine_without_times_says_so_and_has_its_traffic() -> None:
    mp31 = MP31.with_value("launch.kernel_us", 4).with_value("sram.bandwidth_bytes_per_clock", None)
    found = trend((256,), SHAPE, [mp31], ["standard", "flash2"], Runs())
    s = trend_report.section(found, {})
    assert s.answer == ("mp31: no time, as the profile does not know sram.bandwidth_bytes_per_clock.",)
    assert [table.name for table in s.tables] == ["measured"]
    assert s.plots == ()
    assert roofline_report.section(roofline(Attention(n_q=256, **SHAPE), [mp31], ["flash2"], Runs()), {}).tables  # type: ignore[arg-type]
