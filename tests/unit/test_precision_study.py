"""The study of errors by format: the paper's figures, what must be larger than what, and the sampling of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from iosim import InputError
from iosim.problem import Attention
from iosim.report.precision import document, render, rows_as_csv
from iosim.study.precision import Precision, draw, flat, precision, published


@pytest.fixture(scope="module")
def small() -> Precision:
    return precision(n=512, d=64, queries=256, seed=1)


def rmse(result: Precision, dataflow: str, dtype: str, accumulator: str = "fp32", inputs: str = "normal") -> float:
    row = next(r for r in result.rows if (r.dataflow, r.dtype, r.accumulator) == (dataflow, dtype, accumulator))
    return row.errors[inputs].rmse


@pytest.mark.slow
def test_table_3_of_flash_attention_3_within_a_factor_of_one_and_a_half() -> None:
    rows = precision(dataflows=("standard", "flash2", "flash3"), dtypes=("fp16", "fp8"), accumulators=("fp32",)).rows
    ratios = {(r.dataflow, r.dtype, r.scales, r.incoherent): r.ratio for r in rows if r.ratio is not None}
    assert len(ratios) == len(published()) == 7
    for case, ratio in ratios.items():
        assert 1 / 1.5 < ratio < 1.5, (case, ratio)


def test_errors_grow_with_the_roundoff(small: Precision) -> None:
    """bf16's is 8 times fp16's, fp8's 128 times; O is a sum, in which only some of it stays."""
    for name in ("standard", "flash2", "flash3"):
        assert rmse(small, name, "bf16") == pytest.approx(8 * rmse(small, name, "fp16"), rel=0.1)
        assert 40 < rmse(small, name, "fp8_e4m3") / rmse(small, name, "fp16") < 160
        assert rmse(small, name, "fp16", "fp16") > 1.5 * rmse(small, name, "fp16")


def test_what_is_stored_in_the_data_dtype_costs_precision(small: Precision) -> None:
    """S by standard, O by flash1 after each key tile."""
    least = rmse(small, "flash2", "fp16")
    assert rmse(small, "standard", "fp16") > 1.2 * least
    assert rmse(small, "flash1", "fp16") > 1.1 * least
    assert rmse(small, "split-kv", "fp16") == pytest.approx(least, rel=0.05)


def test_the_rounding_of_scores_is_what_makes_standard_worse() -> None:
    """By hand in numpy: P and O rounded to fp16 as flash2 does, then S once as standard does, then S twice.

    Twice costs more where the scale is no power of two, as it is for d = 64.
    """
    a = Attention(n_q=256, n_k=2048, d=128)
    squares = np.zeros(3)
    for seed in range(3):
        x, weights = draw(a, "outliers", seed)
        Q, K, V = (x[name].astype(np.float64) for name in "QKV")
        s = Q @ K.T * a.scale

        def attend(s, V, to=np.float64):
            p = np.exp(s - s.max(1, keepdims=True))
            return ((p / p.sum(1, keepdims=True)).astype(to).astype(np.float64) @ V).astype(to).astype(np.float64)

        q, k, v = (x[name].astype(np.float16).astype(np.float64) for name in "QKV")
        once = (q @ k.T * a.scale).astype(np.float16).astype(np.float64)
        twice = ((q @ k.T).astype(np.float16).astype(np.float64) * a.scale).astype(np.float16).astype(np.float64)
        wanted = attend(s, V)
        for n, scores in enumerate((q @ k.T * a.scale, once, twice)):
            squares[n] += np.sum(weights * (attend(scores, v, np.float16) - wanted) ** 2)
    none, once, twice = np.sqrt(squares)
    assert 1.1 * none < once
    assert 1.1 * once < twice


def test_flash3_computes_what_flash2_does(small: Precision) -> None:
    errors = [[r.errors for r in small.rows if r.dataflow == name] for name in ("flash2", "flash3")]
    assert errors[0] == errors[1]


def test_turning_helps_against_outliers_and_does_nothing_to_normal_inputs(small: Precision) -> None:
    for name, scales in (("flash3", "block"), ("flash3", "head"), ("standard", "head")):
        plain, turned = (
            next(r for r in small.rows if (r.dataflow, r.scales, r.incoherent) == (name, scales, on)).errors
            for on in (False, True)
        )
        assert turned["outliers"].rmse < 0.85 * plain["outliers"].rmse
        assert turned["normal"].rmse == pytest.approx(plain["normal"].rmse, rel=0.1)


def test_weights_undo_the_choice_of_queries() -> None:
    """The mean of anything over the rows is that of the distribution: here the square and the fourth power of Q."""
    a = Attention(n_q=40_000, n_k=16, d=8)
    x, weights = draw(a, "outliers", 0)
    assert weights.sum() == pytest.approx(1)
    q = x["Q"].astype(np.float64)
    assert np.sum(weights * q**2) / 8 == pytest.approx(1 + 0.001 * 100, rel=0.02)
    # E x^4 = 3 sigma^4: 3 of the others, and 3 (1 + 100)^2 of one in a thousand
    assert np.sum(weights * q**4) / 8 == pytest.approx(3 * 0.999 + 3 * 101**2 * 0.001, rel=0.05)


def test_seeds_are_averaged_as_squares() -> None:
    def run(**seeds: int) -> Precision:
        return precision(n=64, d=16, dataflows=("flash2",), dtypes=("fp16",), accumulators=("fp32",), **seeds)

    one, two, both = run(seed=3), run(seed=4), run(seed=3, seeds=2)
    for inputs in ("normal", "outliers"):
        squares = [rmse(r, "flash2", "fp16", inputs=inputs) ** 2 for r in (one, two)]
        assert rmse(both, "flash2", "fp16", inputs=inputs) ** 2 == pytest.approx(np.mean(squares))
    assert run(seed=3) == one


def test_the_table_fits_a_terminal_and_names_what_is_left_out(small: Precision) -> None:
    text = render(small)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "flash2/3" in text
    assert "flash1 is not written for fp8" in " ".join(text.split())


def test_json_and_csv_have_a_row_a_dataflow_and_format(small: Precision) -> None:
    out = document(small, {"n": 512})
    assert out["schema"] == "iosim.precision/1"
    assert out["rows"] == [flat(r) for r in small.rows]
    lines = rows_as_csv(small).splitlines()
    assert len(lines) == 1 + len(small.rows)
    assert list(small.to_frame().columns) == lines[0].split(",")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n: 0 is out of range; 1 to 131072 is allowed"),
        ({"queries": 0}, "queries: 0 is out of range"),
        ({"seeds": 0}, "seeds: 0 is out of range; 1 to 100"),
        ({"dtypes": ("fp17",)}, "dtype: 'fp17' is not one of"),
        ({"accumulators": ("f16",)}, "accumulator: 'f16' is not one of fp32, fp16 (did you mean 'fp16'?)"),
        ({"dataflows": ("flash-backward",)}, "flash-backward is backward; only the O of forward dataflows is compared"),
        ({"dataflows": ("flash1",), "dtypes": ("fp8",)}, "nothing is left to compare: "),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        precision(**fields)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_dataflow_without_o_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from iosim.program import Builder, rows\n"
        "USES = ()\n"
        "def mine(a, s):\n"
        "    p = Builder('mine')\n"
        "    Q = p.tensor('Q', (a.n_q, a.d), a.dtype, 'in')\n"
        "    R = p.tensor('R', (a.n_q, a.d), a.dtype, 'out')\n"
        "    with p.kernel('copy', i=1) as (i,):\n"
        "        p.store(R[rows(i, a.n_q)], p.load('q', Q[rows(i, a.n_q)]))\n"
        "    return p.done()\n"
    )
    with pytest.raises(InputError, match=r"dataflow: mine has no output O of shape \(1, 1, 512, 128\)"):
        precision(dataflows=(str(mine),))
