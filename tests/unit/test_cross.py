"""Cross-validation of fitted constants, and the law of registers that it judges."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.memory.onchip import resident_blocks
from iosim.memory.triton import LAW, registers, sram_bytes
from iosim.problem import Attention
from iosim.report.crossed import document, render
from iosim.study.validate import metrics, shipped_rows
from iosim.study.validate.cross import CONSTANTS, Constant, Crossed, _crossed, _line, compiled, cross_validate
from iosim.study.validate.rows import Row

H200 = load_hardware("h200-sxm")
LAWS = tuple(c for c in CONSTANTS if c.source == "law")
SILENT = lambda _: None  # noqa: E731


def constant(**more: object) -> Constant:
    return Constant("x", "law", "", "always", lambda _: True, **{"by": ("d",), **more})  # type: ignore[arg-type]


def test_a_fold_is_judged_with_the_value_that_fits_the_other_rows() -> None:
    """Rows of d = 64 are exact at 1.0, those of d = 128 at 1.2: each part is left out with the other's value."""
    exact = {64: 1.0, 128: 1.2}
    keys = [{"d": d} for d in (64, 64, 64, 128, 128, 128, 128)]
    curves = [partial(lambda value, at: 100 * (value / at - 1), at=exact[key["d"]]) for key in keys]
    found = _crossed(constant(), 1.0, curves, keys)
    small, large = found.folds
    assert (small.left_out, small.rows, small.value) == ("d = 64", 3, pytest.approx(1.2))
    assert (small.standing_pct, small.left_out_pct) == (0, pytest.approx(20))
    assert (large.value, large.left_out_pct) == (1.0, pytest.approx(100 / 6))
    assert found.best == pytest.approx(1.2)  # four rows outvote three
    assert found.spread == (1.0, pytest.approx(1.2))


def test_a_constant_moves_within_its_bounds_and_small_folds_are_left() -> None:
    keys = [{"d": 64}] * 3 + [{"d": 128}] * 2
    found = _crossed(constant(most=1.1), 1.0, [lambda value: 100 * (value / 9 - 1)] * 5, keys)
    assert found.best == pytest.approx(1.1)
    assert found.folds == ()
    assert found.spread is None


def test_times_between_the_simulated_values_are_linear() -> None:
    error = _line((1.0, 2.0, 4.0), (10.0, 20.0, 20.0), 10.0)
    assert [error(v) for v in (1.0, 1.5, 2.0, 3.0, 4.0)] == pytest.approx([0, 50, 100, 100, 100])


def test_rows_that_tell_no_constant_are_refused() -> None:
    with pytest.raises(InputError, match="no row of these files"):
        cross_validate(rows=[], note=SILENT)


def tiles() -> list[Row]:
    return [r for r in shipped_rows() if r.tile is not None and r.tile.registers is not None]


def test_estimated_registers_give_the_blocks_that_fit_and_tell_which_tiles_spill() -> None:
    """Against 130 measured tiles; blocks are those that the measured registers and SRAM leave room for."""
    fits = spills = 0
    for r in tiles():
        t, a = r.tile, r.problem
        assert t is not None
        assert a is not None
        shape = t.block_q, t.block_k, t.stages, t.warps
        held, spilled = registers(a, *shape)

        def resident(each: int, warps: int = t.warps, sram: int = sram_bytes(a, *shape[:3])) -> int:
            return resident_blocks(H200, sram, 0, -(-each // 8) * 256 * warps, 32 * warps)[0]

        fits += resident(held) == resident(t.registers or 0)
        spills += (spilled > 8) == ((t.spills or 0) > 8)
    assert len(tiles()) == 130
    assert fits >= 124
    assert spills >= 127


def test_the_law_holds_for_compiled_tiles_of_other_head_dimensions() -> None:
    """Registers and spilled words together, within 7 % in the mean at d = 32, 64 and 14 % at 256."""
    off: dict[int, list[float]] = {}
    for (d, *shape), need in compiled():
        off.setdefault(d, []).append(metrics.error_pct(sum(registers(Attention(n_q=512, d=d), *shape)), need))  # type: ignore[arg-type]
    assert off.keys() == {32, 64, 256}
    assert max(metrics.mape(off[32]), metrics.mape(off[64])) < 9
    assert metrics.mape(off[256]) < 14


@pytest.fixture(scope="module")
def crossed() -> tuple[Crossed, ...]:
    return cross_validate(LAWS, note=SILENT)


@pytest.mark.slow
def test_unseen_parts_of_the_law_of_registers_are_predicted(crossed: tuple[Crossed, ...]) -> None:
    """No fold's error goes up by more than 4.2 points when its rows are left out of the fit."""
    for c in crossed:
        assert c.rows == 181
        assert c.best_pct <= c.standing_pct
        assert max(f.left_out_pct - f.standing_pct for f in c.folds) < 4.2


def test_the_table_of_constants_states_these_spreads(crossed: tuple[Crossed, ...]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "constants.md").read_text(encoding="utf-8")
    for c in crossed:
        assert c.spread is not None
        line = f"| {c.constant.name} | {c.standing:.4g} | {c.best:.4g} | {c.spread[0]:.4g} to {c.spread[1]:.4g} |"
        assert line in text


def test_text_and_document_say_the_same(crossed: tuple[Crossed, ...]) -> None:
    assert all(len(line) <= 80 for line in render(crossed).splitlines())
    answer = document(crossed)
    assert answer["schema"] == "iosim.validate-cross/1"
    assert [c["value"] for c in answer["constants"]] == [getattr(LAW, c.constant.field) for c in crossed]


@pytest.mark.long
def test_a_constant_of_a_kernel_is_fitted_by_simulated_times() -> None:
    """Products of the scores: the share of DRAM bandwidth, fitted to three quarters of the rows, holds for the rest."""
    (found,) = cross_validate([c for c in CONSTANTS if c.name == "standard: scores.dram_share"], note=SILENT)
    assert found.spread is not None
    assert found.spread[0] <= found.best <= found.spread[1]
    assert found.best_pct <= found.standing_pct < 12
