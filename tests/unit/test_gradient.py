"""The float64 gradient against finite differences of a textbook forward pass, and its error bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from iosim.gradient import Errors, Operands, Sums, differentiate
from iosim.problem import Attention

EXACT = Errors(score=0, lse=0, weight=0, least=0, values=0, scores=0, product=0, floor=0, row=0, row_floor=0,
               from_p=False)  # fmt: skip
PROBLEMS = [
    Attention(n_q=5, n_k=7, d=3, d_v=2),
    Attention(n_q=5, n_k=7, d=3, causal=True),
    Attention(n_q=7, n_k=5, d=3, causal=True),
    Attention(n_q=5, n_k=7, d=3, causal=True, causal_align="top-left"),
    Attention(n_q=9, n_k=7, d=3, window=3),
    Attention(n_q=7, d=3, window=2, causal=True),
]


def operands(a, seed=0):
    random = np.random.default_rng(seed)
    shapes = (a.n_q, a.d), (a.n_k, a.d), (a.n_k, a.d_v), (a.n_q, a.d_v)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def output(a, q, k, v):
    """O of one head, from the definitions."""
    out = np.zeros((a.n_q, a.d_v))
    for i in range(a.n_q):
        at = i + (a.n_k - a.n_q if a.causal_align == "bottom-right" else 0)
        keys = [j for j in range(a.n_k) if not (a.causal and j > at) and not (a.window and j <= at - a.window)]
        if keys:
            w = np.exp([q[i] @ k[j] / np.sqrt(a.d) for j in keys])
            out[i] = w @ v[keys] / w.sum()
    return out


def gradients(a, q, k, v, do, errors=EXACT, columns=None, symmetric=False, step=3):
    of = Operands.of(a, k, v, columns or (0, a.n_k), symmetric)
    sums, steps = Sums(of, 1), []
    for first in range(0, a.n_q, step):
        rows = slice(first, first + step)
        steps.append(differentiate(of, q[rows], do[rows], first, [errors], True))
        sums.add(steps[-1].part)
    dq, slack = np.concatenate([s.dq for s in steps]), np.concatenate([s.dq_slack[0] for s in steps])
    return (dq, sums.dk, sums.dv), (slack, *sums.slack(0)), steps


@pytest.mark.parametrize("a", PROBLEMS, ids=str)
def test_it_is_what_finite_differences_give(a):
    *inputs, do = operands(a)
    exact = [x.astype(np.float64) for x in inputs]
    found, _, _ = gradients(a, *inputs, do)
    for n, gradient in enumerate(found):
        for at in np.ndindex(gradient.shape):
            moved = []
            for h in (1e-5, -1e-5):
                args = [x.copy() for x in exact]
                args[n][at] += h
                moved.append((output(a, *args) * do).sum())
            assert gradient[at] == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("a", PROBLEMS, ids=str)
def test_some_keys_are_part_of_the_whole(a):
    data = operands(a)
    (_, dk, dv), _, steps = gradients(a, *data)
    for first in range(a.n_k - 1):
        (_, some_k, some_v), _, _ = gradients(a, *data, columns=(first, first + 2), step=2)
        np.testing.assert_allclose(some_k, dk[first : first + 2], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(some_v, dv[first : first + 2], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([s.o for s in steps]), output(a, *data[:3]), rtol=1e-6, atol=1e-7)
    assert all(s.p is not None and s.p.shape[1] == a.n_k for s in steps)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1e-5, 1e-3])
@pytest.mark.parametrize("from_p", [False, True])
def test_wrong_p_dp_d_and_ds_move_the_gradients_less_than_the_bound(symmetric, size, from_p):
    a = Attention(n_q=60, n_k=90, d=8)
    q, k, v, do = (x.astype(np.float64) for x in operands(a, seed=3))
    errors = replace(EXACT, weight=size, scores=2 * size, product=size, row=2 * size, from_p=from_p, floor=size / 100)
    exact, slack, _ = gradients(a, *operands(a, seed=3), errors=errors, symmetric=symmetric)
    random = np.random.default_rng(7)
    p = np.exp(q @ k.T * a.scale)
    p /= p.sum(1, keepdims=True)
    o, dp = p @ v, do @ v.T

    def off(shape):
        return size * random.choice([-1.0, 1.0], shape)

    for _ in range(10):
        wrong_p, wrong_dp = p * (1 + off(p.shape)), dp * (1 + off(p.shape))
        d = ((wrong_p * wrong_dp) if from_p else do * o * (1 + off(o.shape))).sum(1, keepdims=True)
        ds = wrong_p * (wrong_dp - d) * (1 + off(p.shape)) + off(p.shape) / 100
        found = a.scale * ds @ k, a.scale * ds.T @ q, wrong_p.T @ do
        for x, y, allowed in zip(found, exact, slack, strict=True):
            assert (np.abs(x - y) <= allowed * (1 + 4 * size)).all()
            assert np.abs(x - y).max() > 0.005 * allowed.max()
