"""The guide's online softmax, run literally and corrected (docs/online-softmax-erratum.md), beside softmax-online."""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.dataflows import load_dataflow
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

rows = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


def listing(scores: list[float], *, corrected: bool) -> list[float]:
    """The probabilities of one row, updated score by score."""
    m, l, probabilities = -inf, 0.0, list[float]()
    for score in scores:
        m_new = max(m, score)
        l_new = exp(m - m_new) * l + exp(score - m_new)
        factor = exp(m - m_new) * (l / l_new if corrected else 1)
        probabilities = [p * factor for p in probabilities] + [exp(score - m_new) / l_new]
        m, l = m_new, l_new
    return probabilities


def softmax(scores: list[float]) -> list[float]:
    weights = [exp(score - max(scores)) for score in scores]
    return [w / sum(weights) for w in weights]


@given(rows)
def test_the_corrected_listing_is_softmax(scores: list[float]) -> None:
    assert listing(scores, corrected=True) == pytest.approx(softmax(scores), rel=1e-12)


def test_the_listing_as_written_does_not_sum_to_1() -> None:
    # The second of two equal scores leaves P_1 = 1 and adds P_2 = 1/2; the third adds 1/3.
    assert listing([3.0, 3.0], corrected=False) == [1, 0.5]
    assert listing([3.0, 3.0, 3.0], corrected=False) == pytest.approx([1, 1 / 2, 1 / 3])
    assert sum(listing([3.0, 3.0, 3.0], corrected=True)) == pytest.approx(1)


@given(rows)
def test_as_written_each_key_keeps_the_denominator_of_its_own_step(scores: list[float]) -> None:
    # P_i = e^(S_i - m) / l_i where it should be e^(S_i - m) / l_n: too large or too small by l_n / l_i.
    maxima = [max(scores[: n + 1]) for n in range(len(scores))]
    sums = [sum(exp(s - m) for s in scores[: n + 1]) for n, m in enumerate(maxima)]
    wanted = [p * sums[-1] / l for p, l in zip(softmax(scores), sums, strict=True)]
    assert listing(scores, corrected=False) == pytest.approx(wanted, rel=1e-12)


def test_as_written_a_row_may_sum_to_less_than_1_too() -> None:
    # l = 1, 2, then 1 + 2 e^-2 = 1.2707: e^-2 / 1 + e^-2 / 2 + 1 / 1.2707 = 0.1353 + 0.0677 + 0.7870.
    assert sum(listing([0.0, 0.0, 2.0], corrected=False)) == pytest.approx(0.98999, abs=1e-5)


def dataflow(name: str, scores: NDArray[np.float32], cols: int) -> NDArray[np.float32]:
    """P of the dataflow, for fp32 scores (n_q, n_k) in tiles of `cols` keys."""
    a = Attention(n_q=scores.shape[0], n_k=scores.shape[1], d=1, dtype="fp32")
    s = Schedule(block_q=1, block_k=1, softmax_rows=2, softmax_cols=cols)
    done = replay(load_dataflow(name)(a, s), lambda _, box: scores[None, None][tuple(slice(*r) for r in box)])
    probabilities: NDArray[np.float32] = done.outputs["P"][0, 0]
    return probabilities


@given(rows, st.integers(1, 5))
def test_softmax_online_agrees_with_the_corrected_listing(scores: list[float], cols: int) -> None:
    single = np.array([scores], np.float32)
    wanted = listing(single[0].tolist(), corrected=True)
    assert dataflow("softmax-online", single, cols)[0].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("cols", [3, 16])
def test_on_large_scores_the_naive_kind_overflows_and_the_others_do_not(cols: int) -> None:
    # e^89 is above the largest float32, 3.4e38 = e^88.7: sum and element are infinite, and their quotient is no number.
    scores = np.random.default_rng(0).normal(0, 5000, (4, 16)).astype(np.float32)
    exact = np.array([softmax([float(x) for x in row]) for row in scores])
    for name in ("softmax-safe", "softmax-online"):
        np.testing.assert_allclose(dataflow(name, scores, cols), exact, atol=1e-6)
    assert np.isnan(dataflow("softmax-naive", scores, cols)).any(-1).all()
