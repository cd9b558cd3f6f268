"""Errors, ranks and regret against cases worked by hand; families, goals and what is set apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from iosim.hardware import Hardware, load_hardware
from iosim.problem import Attention
from iosim.study.validate import Validation, metrics, predict
from iosim.study.validate.baseline import baselines
from iosim.study.validate.goals import judge
from iosim.study.validate.predict import Model, NotModelled
from iosim.study.validate.readers import read
from iosim.study.validate.rows import Kernel, Row, Tile
from iosim.study.validate.score import score, stage_steps

DATA = Path(__file__).parent.parent / "data"
H200 = load_hardware("h200-sxm")
BASE = Row(file="f.csv", line=2, kind="calls", device="", machine="h200-sxm", implementation="flash2",
           direction="forward", problem=Attention(n_q=4096, d=128, heads=16), measured={"time": 1e-3})  # fmt: skip


def test_errors_by_hand() -> None:
    """Predicted 90, 120, 100 of 100: -10, +20 and 0 percent."""
    errors = [metrics.error_pct(p, 100) for p in (90, 120, 100)]
    assert errors == pytest.approx([-10, 20, 0])
    assert metrics.mape(errors) == pytest.approx(10)
    assert metrics.median_ape(errors) == pytest.approx(10)
    assert metrics.worst_ape(errors) == pytest.approx(20)
    assert metrics.bias(errors) == pytest.approx(10 / 3)


def test_an_error_of_nothing_is_right_or_wrong() -> None:
    assert metrics.error_pct(0, 0) == 0
    assert metrics.error_pct(3, 0) == 100


def test_rank_correlation_by_hand() -> None:
    """Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6."""
    assert metrics.spearman([1, 2, 3, 4], [20, 10, 40, 30]) == pytest.approx(0.6)
    assert metrics.spearman([1, 2, 3], [9, 99, 999]) == pytest.approx(1)
    assert metrics.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def test_equal_values_share_their_mean_rank() -> None:
    """Ranks 1.5 1.5 3 and 1 2 3, about their mean 2: (0.5 * 1 + 0 + 1 * 1) / sqrt(1.5 * 2) = 0.866."""
    assert metrics.spearman([5, 5, 7], [1, 2, 3]) == pytest.approx(1.5 / 3**0.5)


def test_a_constant_prediction_ranks_nothing_and_pays_for_the_worst_choice() -> None:
    assert metrics.spearman([1, 1, 1], [1, 2, 3]) is None
    assert metrics.regret_pct([1, 1, 1], [2, 3, 4]) == pytest.approx(100)


def test_regret_is_of_the_tile_that_was_predicted_to_be_best() -> None:
    assert metrics.regret_pct([5, 3, 4], [10, 11, 12]) == pytest.approx(10)


def times(monkeypatch: pytest.MonkeyPatch, predicted: Mapping[str, float]) -> None:
    """Let `predicted` (by note) be what is predicted for time."""

    def model(row: Row, _: Hardware) -> Mapping[str, float] | NotModelled:
        return {"time": predicted[row.note]} if row.note in predicted else NotModelled("not in the table")

    monkeypatch.setattr(predict, "MODELS", (Model(("time",), model),))


def test_host_bound_calls_are_predicted_and_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2's floor is 0.05 ms; counted kernels have none."""
    times(monkeypatch, {"": 30e-6})
    short = replace(BASE, measured={"time": 49e-6})
    kernel = replace(short, kind="kernels", kernel=Kernel(name="flash_fwd", role="attention", call=0, position=0))
    rows = [short, replace(BASE, measured={"time": 51e-6}), kernel]
    found = Validation(tuple(s for r in rows for s in score(r, H200)))
    assert [s.status for s in found.scores] == ["host-bound", "scored", "scored"]
    assert found.scores[0].predicted == 30e-6
    assert [(f.kind, len(f.scores)) for f in found.families] == [("calls", 1), ("kernels", 1)]


def test_what_no_model_gives_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {})
    found = score(replace(BASE, measured={"time": 1e-3, "peak_extra_bytes": 1}), H200)
    assert [(s.quantity.name, s.status, s.reason) for s in found] == [
        ("time", "not modelled", "not in the table"),
        ("peak_extra_bytes", "not modelled", "no model"),
    ]


def test_a_machine_that_nobody_knows_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"": 1.0})
    (found,) = score(replace(BASE, device="TPU v5", machine=""), None)
    assert (found.status, found.reason) == ("not modelled", "no profile of TPU v5")


def test_small_counters_are_set_apart() -> None:
    """Reads below 0.1 MB and writes below 20 MB."""
    row = replace(BASE, kind="kernels", measured={"time": 1e-3, "dram_read_bytes": 99_999, "dram_write_bytes": 2e7})
    status = {s.quantity.name: s.status for s in score(row, H200)}
    assert status["dram_read_bytes"] == "below floor"
    assert status["dram_write_bytes"] == "not modelled"


def sweep_row(note: str, measured: float, spills: int = 0) -> Row:
    tile = Tile(block_q=64, block_k=64, stages=2, warps=4, registers=168, spills=spills)
    return replace(BASE, kind="tiles", implementation="triton", note=note, tile=tile,
                   measured={"time": measured, "smem_bytes": 49152, "launches": 1})  # fmt: skip


def test_sweep_and_goals_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted 1.1, 2.2, 4.4 of 1, 2, 4 ms: 10 % each, in order, no regret; the one that spills is 50 % off."""
    times(monkeypatch, {"a": 1.1e-3, "b": 2.2e-3, "c": 4.4e-3, "d": 15e-3})
    rows = [sweep_row("a", 1e-3), sweep_row("b", 2e-3), sweep_row("c", 4e-3), sweep_row("d", 10e-3, spills=8)]
    found = Validation(tuple(s for r in rows for s in score(r, H200)))
    reached = {v.goal.name: v for v in found.verdicts if v.rows}
    assert reached["Triton tiles without spills"].reached == {"mean": pytest.approx(10)}
    assert reached["Triton tiles without spills"].met is False
    everything = reached["Triton tiles, all"]
    assert everything.reached == pytest.approx({"mean": 20, "spearman": 1, "regret": 0})
    assert everything.met is False
    assert [everything.meets(t) for t in ("mean", "spearman", "regret")] == [False, True, True]
    (family,) = found.families
    assert family.label == "triton forward d=128"
    assert family.sweep() == (pytest.approx(1), pytest.approx(0))


def test_two_sweeps_of_one_head_dimension_are_ranked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower correlation and the larger regret count: in the second the worse of two is taken, 3 ms for 2."""
    times(monkeypatch, {"a": 1.0, "b": 2.0, "c": 1.0, "d": 2.0})
    other = Attention(n_q=1024, d=128)
    rows = [sweep_row("a", 1e-3), sweep_row("b", 2e-3),
            *(replace(r, problem=other) for r in (sweep_row("c", 3e-3), sweep_row("d", 2e-3)))]  # fmt: skip
    (family,) = Validation(tuple(s for r in rows for s in score(r, H200))).families
    assert family.sweep() == (pytest.approx(-1), pytest.approx(50))


def test_resident_blocks_from_measured_registers_and_sram() -> None:
    """168 registers x 128 threads: 3 of 65536 registers; 49152 + 1024 bytes: 4 of 233472. 96 KiB more: 1."""
    row = sweep_row("a", 1e-3)
    occupancy = {s.quantity.name: s.measured for s in score(row, H200)}["occupancy"]
    assert occupancy == 3
    large = replace(row, measured={**row.measured, "smem_bytes": 147456})
    assert {s.quantity.name: s.measured for s in score(large, H200)}["occupancy"] == 1


def test_resident_blocks_are_those_that_nsight_compute_says() -> None:
    for row in read(DATA / "ncu_raw_sample.csv"):
        said = row.measured["occupancy"]
        unsaid = replace(row, measured={"time": row.measured["time"]})
        assert {s.quantity.name: s.measured for s in score(unsaid, H200)}["occupancy"] == said, row.where


def test_split_keys_and_decoding_are_judged_apart_from_long_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of 4096 queries is cut into splits on 132 processors, 16 heads are not; one query is decoding."""
    times(monkeypatch, {"": 1e-3})
    shapes = {"split": Attention(n_q=4096, d=128), "long": BASE.problem,
              "decode": Attention(n_q=1, n_k=2**17, d=128, heads=512)}  # fmt: skip
    judged = {}
    for name, problem in shapes.items():
        found = Validation(score(replace(BASE, problem=problem), H200))
        judged[name] = [v.goal.name for v in found.verdicts if v.rows]
    apart = ["kernels of 10-100 us, splits, decode"]
    assert judged == {"split": apart, "long": ["flash2 forward over 0.1 ms"], "decode": apart}


def test_roofline_by_hand() -> None:
    """16 heads of N=4096, d=128: 4 * 16 * 4096^2 * 128 FLOPs of 989.4e12; 4 tensors of 16.8 MB of 4.8 TB/s."""
    line = baselines(BASE, H200)["time"]
    assert line.roofline == pytest.approx(4 * 16 * 4096**2 * 128 / 989.4e12, rel=1e-6)
    assert line.bandwidth == pytest.approx(4 * 16 * 4096 * 128 * 2 / 4.8e12)
    kernel = Kernel(name="softmax", role="softmax", call=0, position=1)
    softmax = replace(BASE, implementation="standard", kind="kernels", kernel=kernel)
    assert baselines(softmax, H200)["dram_read_bytes"].roofline == 16 * 4096**2 * 2
    assert baselines(replace(softmax, kernel=replace(kernel, role="")), H200) == {}


def test_steps_of_stages_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured 100, 80, 82, 60: -20 %, +2.5 % (too little to count), -26.8 %; predicted 100, 90, 60, 66: -10 %, +10 %.

    One of two has the right direction; they are 10 and 36.8 points off.  Another tile has no next stage.
    """
    measured, predicted = (100, 80, 82, 60), (100, 90, 60, 66)
    times(monkeypatch, {str(n): p * 1e-6 for n, p in enumerate(predicted, 1)} | {"5": 1.0})
    tiles = [
        replace(BASE, kind="tiles", implementation="triton", note=str(n), measured={"time": m * 1e-6},
                tile=Tile(block_q=64, block_k=64, stages=n, warps=4))
        for n, m in enumerate(measured, 1)
    ]  # fmt: skip
    other = replace(tiles[0], note="5", tile=Tile(block_q=64, block_k=64, stages=2, warps=8))
    scores = [s for r in (*tiles, other) for s in score(r, H200) if s.quantity.name == "time"]
    assert [pytest.approx(step) for step in stage_steps(scores)] == [(-20, -10), (100 * (60 / 82 - 1), 10)]
    (verdict,) = [v for v in judge(scores) if v.goal.steps]
    assert verdict.rows == 2
    assert verdict.reached["right"] == 50
    assert verdict.reached["mean"] == pytest.approx((10 + 10 + 100 * (1 - 60 / 82)) / 2)
    assert verdict.met is False
