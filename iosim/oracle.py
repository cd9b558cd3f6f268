"""Attention in float64, and how far a kernel that computes weights less exactly may be from it.

This module is what replay is held against, so it shares nothing with it: no tile, no online softmax, no rounding.
It works on bands of query rows and never forms more than a band of scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.philox import kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

CONFIDENCE = 8.0  # standard deviations: a normal variable exceeds them with a probability of 1e-15
_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True, slots=True)
class Slack:
    """How exactly a kernel computes; check.py derives the numbers.

    With R = scale * |q| * max |k|, which no score exceeds: a score may be wrong by `score` * R, and by `stored` times
    itself plus `least` when it is stored; a weight relative to itself by `range` * R + `weight`, which the denominator
    shares; the denominator or the sum of w v by `sums`; a weight once more, unshared, by `rounding`, and by `floor`
    relative to the largest weight of its row.  `sum_least` is what sums of w v lose to numbers that are too small.
    """

    score: float
    stored: float
    least: float
    range: float
    weight: float
    sums: float
    rounding: float
    floor: float
    sum_least: float = 0.0


@dataclass(frozen=True, slots=True)
class Heads:
    """Some heads' keys and values, with what every band of rows needs of them.

    `values_std` is the standard deviation of V where V is normal, of mean 0 and independent of Q and K.
    """

    attention: Attention
    k: Double  # (heads, n_k, d)
    v: Double  # (heads, n_k, d_v)
    square_v: Single  # v^2
    values_std: float | None
    largest_k: Double  # (heads, 1, 1), the largest |k| of a key
    all_v: Double  # (heads, 1, d_v), bounds the sum of any weights up to 1 times v
    places: Sequence[tuple[int, int]] = ()  # (batch, query head) of each, where something depends on it
    sinks: Double | None = field(default=None)  # (heads, 1, 1), the logits of attention sinks

    @classmethod
    def of(
        cls,
        attention: Attention,
        k: Single,
        v: Single,
        values_std: float | None,
        places: Sequence[tuple[int, int]] = (),
        sinks: Double | None = None,
    ) -> Heads:
        """Heads with keys `k` of shape (heads, n_k, d) and values `v`."""
        exact = k.astype(np.float64)
        largest_k = np.sqrt(np.einsum("hjd,hjd->hj", exact, exact).max(-1))[:, None, None]
        all_v = np.abs(v).sum(-2, dtype=np.float64, keepdims=True)
        if values_std is not None:
            all_v = np.minimum(all_v, CONFIDENCE * values_std * np.sqrt(attention.n_k))
        logits = None if sinks is None else sinks[:, None, None]
        return cls(attention, exact, v.astype(np.float64), v * v, values_std, largest_k, all_v, places, logits)


@dataclass(frozen=True, slots=True)
class Rows:
    """The exact result for a band of rows of each head, and how far a kernel's errors may move it.

    For stored scores also how far these are from the exact ones, as a share of what is allowed.
    """

    o: Double  # (heads, rows, d_v)
    lse: Double  # (heads, rows)
    o_slack: Double
    lse_slack: Double
    score_ratio: Double  # (heads, rows)
    partial: Double  # like o: bounds the sum of p v over any part of the keys


def attend(
    heads: Heads, q: Single, first: int, slack: Slack, stored: Sequence[Single] = (), bias: Single | None = None
) -> list[Rows]:
    """Rows `first`, first + 1, ... of attention, for queries `q` of shape (heads, rows, d).

    `bias` (heads or 1, rows, n_k) is added to the scores.

    Then, for each array of (heads, rows, n_k) scaled scores in `stored`, as a kernel rounded and stored them: how good
    they are, and the exact softmax and output of these scores.
    """
    a = heads.attention
    keys, hidden = visible(a, first, q.shape[1])
    exact_q = q.astype(np.float64)
    reach = a.scale * np.sqrt((exact_q**2).sum(-1, keepdims=True)) * heads.largest_k
    scores = (exact_q * a.scale) @ heads.k[:, keys].swapaxes(-1, -2)
    scores, added = changed(a, heads.places, scores, first, keys, bias)
    reach = reach + (added if heads.sinks is None else np.maximum(added, np.abs(heads.sinks)))
    left = kept_weights(a, heads.places, first, q.shape[1], keys) if a.dropout else None
    ratios = [_score_ratio(s[..., keys], scores, reach, hidden, slack) for s in stored]
    wrong = slack.range * reach + slack.weight
    out = [_output(heads, scores, keys, hidden, slack.score * reach + wrong, slack, np.zeros(q.shape[:2]), left)]
    for s, ratio in zip(stored, ratios, strict=True):
        with np.errstate(invalid="ignore"):  # scores that overflowed
            out.append(_output(heads, s[..., keys].astype(np.float64), keys, hidden, wrong, slack, ratio, left))
    return out


def changed(
    a: Attention, places: Sequence[tuple[int, int]], scores: Double, first: int, keys: slice, bias: Single | None
) -> tuple[Double, Double | float]:
    """Scores (heads, rows, keys) with a soft-cap, ALiBi and a bias; and by row the most that is added.

    `places` are the batch and the query head of each of the heads.
    """
    added = None
    if a.softcap is not None:
        scores = a.softcap * np.tanh(scores / a.softcap)
    if a.alibi:
        query, key = np.arange(scores.shape[1])[:, None] + first + a.diagonal, np.arange(keys.start, keys.stop)
        slopes = np.array([_slope(head, a.heads) for _, head in places])
        added = -slopes[:, None, None] * np.abs(query - key)
    if bias is not None:
        added = bias[..., keys].astype(np.float64) + (0 if added is None else added)
    most: Double | float = 0.0
    if added is not None:
        scores = scores + added
        most = np.abs(added).max(-1, keepdims=True)
    return scores, most


def kept_weights(
    a: Attention, places: Sequence[tuple[int, int]], first: int, rows: int, keys: slice
) -> NDArray[np.bool_]:
    """Which weights dropout leaves; the random numbers are part of the problem, so that they are made as kernels do."""
    batch, head = (np.array(column) for column in zip(*places, strict=True))
    query = np.broadcast_to(np.arange(first, first + rows), (len(head), rows))
    return kept(batch, head, query, keys.start, keys.stop - keys.start, a.dropout)


def _slope(head: int, heads: int) -> float:
    """ALiBi's, from the authors' words: a geometric sequence that ends with 2^-8; see problem.alibi_slope."""
    power = 2 ** (heads.bit_length() - 1)
    eighths = (head + 1) / power if head < power else (2 * (head - power) + 1) / (2 * power)
    return float(np.exp2(-8 * eighths))


def visible(a: Attention, first: int, rows: int) -> tuple[slice, NDArray[np.bool_] | None]:
    """The keys that some of the queries first .. first + rows - 1 may see, and which of them each must not.

    At least one key, so that no array is empty; None where every query sees all of them.
    """
    end = a.n_k if not a.causal else max(1, min(a.n_k, first + rows + a.diagonal))
    start = 0 if a.window is None or a.global_tokens else min(end - 1, max(0, first + a.diagonal + 1 - a.window))
    if not a.causal and a.window is None and a.block_mask is None:
        return slice(start, end), None
    key, query = np.arange(start, end), np.arange(first, first + rows)[:, None] + a.diagonal
    hidden = np.zeros((rows, end - start), bool)
    if a.causal:
        hidden |= key > query
    if a.window is not None:
        hidden |= (key <= query - a.window) & (key >= a.global_tokens)
    if a.block_mask is not None:
        height, width = -(-a.n_q // len(a.block_mask.rows)), -(-a.n_k // len(a.block_mask.rows[0]))
        table = np.array([list(row) for row in a.block_mask.rows], bool)
        hidden |= ~table[np.arange(first, first + rows)[:, None] // height, key // width]
    return slice(start, end), hidden


def softmax(
    scores: Double, hidden: NDArray[np.bool_] | None, sinks: Double | None = None
) -> tuple[Double, Double, Double]:
    """Scores made weights exp(score - maximum) in place; then 1 / their sum and the log-sum-exp, one number a row.

    `sinks` are logits, one a head, that count in the sum.  Without them, a row without a visible key has weights of 0,
    0 and a log-sum-exp of -inf.
    """
    if hidden is not None:
        scores[:, hidden] = -np.inf
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    top[np.isneginf(top)] = 0
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    over = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    with np.errstate(divide="ignore"):
        return scores, over, top + np.log(total)


def _score_ratio(
    stored: Single, scores: Double, reach: Double, hidden: NDArray[np.bool_] | None, slack: Slack
) -> Double:
    """The largest error of each row's stored scores over what is allowed; infinite where one is no number."""
    exact = scores.astype(np.float32)
    error = stored - exact
    np.abs(error, out=error)
    np.abs(exact, out=exact)
    exact *= np.float32(slack.stored + _ROUNDOFF)
    exact += ((slack.score + _ROUNDOFF) * reach + slack.least).astype(np.float32)
    error /= exact
    if hidden is not None:
        error[:, hidden] = 0
    worst: Double = error.max(-1).astype(np.float64)
    worst[np.isnan(worst)] = np.inf
    return worst


def _output(
    heads: Heads,
    scores: Double,
    keys: slice,
    hidden: NDArray[np.bool_] | None,
    wrong: Double,
    slack: Slack,
    ratio: Double,
    left: NDArray[np.bool_] | None = None,
) -> Rows:
    """Softmax of the scores of `keys`, which become weights, times V; `wrong` is the error of a kernel's weights.

    With p the exact weights and p (1 + e) the kernel's, both with sum 1, O moves by the sum of p e (v - O), at most
    max |e| times the sum of p |v - O|, which is at most the deviation of V under p.  Errors that the denominator does
    not share move it by the sum of p e v, at most max |e| times the root of the sum of p v^2.  Where V is normal and
    independent of the weights and so of their errors, both sums are normal too, with a deviation of at most
    max |e| |p|: mostly far less.

    Dropout makes v of a weight that is `left` v / (1 - p), and that of the others 0.
    """
    seen, drop = scores.shape[-1], heads.attention.dropout
    scores, over, lse = softmax(scores, hidden, heads.sinks)
    if left is not None:
        scores *= left
        scores /= 1 - drop
    o = (scores @ heads.v[:, keys]) * over
    weights = scores.astype(np.float32)
    square = (weights @ heads.square_v[:, keys]) * over / (1 - drop)
    blur = 32 * np.sqrt(seen) * _ROUNDOFF * square  # of a float32 sum
    deviation, size = np.sqrt(np.maximum(square - o * o, 0) + blur), np.sqrt(square + blur)
    if heads.values_std is not None:
        chance = CONFIDENCE * heads.values_std * np.sqrt(np.einsum("hij,hij->hi", weights, weights))[..., None] * over
        deviation, size = np.minimum(deviation, chance), np.minimum(size, chance)
    moved = np.expm1(2 * wrong) * deviation + (slack.sums + slack.rounding) * size
    moved += slack.floor * heads.all_v / (1 - drop) * (over > 0)
    return Rows(o, lse[..., 0], moved, wrong[..., 0] + slack.sums, ratio, size)
