"""The float64 oracle against a textbook loop, and its error bounds."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest

from iosim.oracle import Heads, Slack, attend
from iosim.problem import Attention

EXACT = Slack(score=0, stored=0, least=0, range=0, weight=0, sums=0, rounding=0, floor=0)


def textbook(a, q, k, v):
    """O and log-sum-exp of one head, a query and a key at a time."""
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -inf)
    for i in range(len(q)):
        keys = range(min(len(k), max(0, i + a.diagonal + 1))) if a.causal else range(len(k))
        scores = [a.scale * sum(float(q[i, n]) * float(k[j, n]) for n in range(a.d)) for j in keys]
        if scores:
            top = max(scores)
            total = sum(exp(s - top) for s in scores)
            lse[i] = top + log(total)
            for j, s in zip(keys, scores, strict=True):
                o[i] += exp(s - lse[i]) * v[j].astype(float)
    return o, lse


def operands(a, seed=0, heads=2):
    random = np.random.default_rng(seed)
    shapes = (heads, a.n_q, a.d), (heads, a.n_k, a.d), (heads, a.n_k, a.d_v)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


PROBLEMS = [
    Attention(n_q=7, n_k=9, d=4, d_v=3),
    Attention(n_q=7, n_k=9, d=4, causal=True),
    Attention(n_q=9, n_k=5, d=4, causal=True),
    Attention(n_q=5, n_k=9, d=4, causal=True, causal_align="top-left"),
    Attention(n_q=1, d=1),
]


@pytest.mark.parametrize("a", PROBLEMS, ids=str)
def test_it_is_the_textbook(a):
    q, k, v = operands(a)
    (rows,) = attend(Heads.of(a, k, v, None), q, 0, EXACT)
    for h in range(2):
        o, lse = textbook(a, q[h], k[h], v[h])
        np.testing.assert_allclose(rows.o[h], o, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(rows.lse[h], lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("a", PROBLEMS, ids=str)
def test_a_band_of_rows_is_part_of_the_whole(a):
    q, k, v = operands(a)
    heads = Heads.of(a, k, v, None)
    (whole,) = attend(heads, q, 0, EXACT)
    for first in range(a.n_q):
        (band,) = attend(heads, q[:, first : first + 2], first, EXACT)
        np.testing.assert_allclose(band.o, whole.o[:, first : first + 2], rtol=1e-12, atol=1e-14)


def test_fully_masked_rows_are_zero_with_a_log_sum_exp_of_minus_infinity():
    a = Attention(n_q=6, n_k=2, d=4, causal=True)
    (rows,) = attend(Heads.of(a, *operands(a)[1:], 1.0), operands(a)[0], 0, EXACT)
    assert (rows.o[:, :4] == 0).all()
    assert (rows.lse[:, :4] == -inf).all()
    assert (rows.o_slack[:, :4] == 0).all()


def test_stored_scores_are_judged_and_then_taken_as_they_are():
    a = Attention(n_q=6, n_k=8, d=4)
    q, k, v = operands(a)
    exact = (q.astype(float) @ k.swapaxes(-1, -2)) * a.scale
    stored = exact.astype(np.float16).astype(np.float32)
    slack = Slack(score=1e-6, stored=2**-11, least=2**-25, range=0, weight=0, sums=0, rounding=0, floor=0)
    heads = Heads.of(a, k, v, None)
    _, rows = attend(heads, q, 0, slack, [stored])
    assert rows.score_ratio.max() <= 1
    p = np.exp(stored.astype(float))
    np.testing.assert_allclose(rows.o, p / p.sum(-1, keepdims=True) @ v, rtol=1e-12)
    stored[1, 2, 3] += 0.01
    stored[0, 5, 0] = np.nan
    ratio = attend(heads, q, 0, slack, [stored])[1].score_ratio
    assert sorted(zip(*np.nonzero(ratio > 1), strict=True)) == [(0, 5), (1, 2)]
    assert ratio[0, 5] == inf


@pytest.mark.parametrize("values_std", [None, 1.0])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3])
def test_wrong_weights_move_the_output_less_than_the_bound(values_std, size):
    a = Attention(n_q=30, n_k=200, d=16)
    q, k, v = operands(a, seed=3)
    slack = Slack(score=0, stored=0, least=0, range=0, weight=size, sums=0, rounding=size, floor=0)
    (rows,) = attend(Heads.of(a, k, v, values_std), q, 0, slack)
    exact = (q.astype(float) @ k.swapaxes(-1, -2)) * a.scale
    random = np.random.default_rng(5)
    for errors in (random.uniform(-1, 1, exact.shape), random.choice([-1.0, 1.0], exact.shape), np.sign(exact)):
        p = np.exp(exact + size * errors)
        o = (p / p.sum(-1, keepdims=True) * (1 + size * errors[:, ::-1])) @ v
        assert (np.abs(o - rows.o) <= rows.o_slack).all()
