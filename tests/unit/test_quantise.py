"""Codes and scales stand for the values they were made of, up to the roundings of fp8."""

from __future__ import annotations

import numpy as np
import pytest

from iosim.check import Normal
from iosim.check.quantise import Quantised, orthogonal
from iosim.problem import Attention

A = Attention(n_q=300, n_k=500, d=32, heads=2, dtype="fp8")
SOURCE = Normal(attention=A, q=3.0, outliers=0.01)
BOXES = {"Q": ((0, 1), (1, 2), (0, 300), (0, 32)), "K": ((0, 1), (1, 2), (0, 500), (0, 32))}


def coded(**options):
    return Quantised(SOURCE, A, {"Q": 64, "K": 128, "V": 128}, **options)


def decode(q, name):
    lo, hi = BOXES[name][2]
    return q.decoded(name, BOXES[name], q.rows(name, 0, 1, (lo, hi))[None, None])[0, 0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_code_times_its_scale_is_the_value_up_to_half_a_unit(whole):
    q = coded(whole=whole)
    value, got = SOURCE.rows("K", 0, 1, (0, 500)), decode(q, "K")
    scale = np.repeat(q.scales("K", ((0, 1), (1, 2), (0, 4)))[0, 0], 128)[:500, None]
    assert (np.abs(got - value) <= np.maximum(2.0**-4 * np.abs(value), 2.0**-10 * scale) * (1 + 1e-6)).all()
    assert len(np.unique(scale)) == (1 if whole else 4)


def test_each_block_uses_the_whole_range():
    codes = np.abs(coded().rows("K", 0, 1, (0, 500)))
    assert [codes[n : n + 128].max() for n in range(0, 500, 128)] == [448] * 4


def test_rows_do_not_depend_on_which_others_are_asked_for():
    whole = coded().rows("Q", 0, 1, (0, 300))
    assert np.array_equal(coded().rows("Q", 0, 1, (50, 150)), whole[50:150])


def test_zeros_stay_zeros():
    q = Quantised(Normal(attention=A, v=0.0), A, {"V": 128})
    assert not q.rows("V", 0, 0, (0, 500)).any()
    assert np.isfinite(q.scales("V", ((0, 1), (0, 1), (0, 4)))).all()


@pytest.mark.parametrize("d", [1, 2, 48, 64, 128])
def test_the_transform_is_orthogonal(d):
    m = orthogonal(d, 3)
    assert np.allclose(m @ m.T, np.eye(d), atol=1e-12)
    if d & (d - 1) == 0:
        assert np.allclose(np.abs(m), d**-0.5)
    assert not np.array_equal(m, orthogonal(d, 4)) or d == 1


def test_turning_q_and_k_leaves_their_products_and_spreads_the_error_of_outliers():
    """Roundings are relative, so that the mean error stays; the largest, where outliers meet, is what goes."""
    exact = SOURCE.rows("Q", 0, 1, (0, 300)) @ SOURCE.rows("K", 0, 1, (0, 500)).T

    plain, turned = (
        np.abs(decode(q, "Q") @ decode(q, "K").T - exact) for q in (coded(), coded(transform=orthogonal(32, 0)))
    )
    assert turned.max() < 0.5 * plain.max()
    assert turned.mean() < 2.0**-4 * exact.std()
