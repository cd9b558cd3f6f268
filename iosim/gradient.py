"""The gradient of attention in float64, and how far that of a kernel that computes less exactly may be from it.

Like oracle.py this shares nothing with replay.  It works on steps of query rows and never forms more than a step of
scores.  With P the probabilities of a row, dP = dO V^T and D = rowsum(dO * O):

    dS = P (dP - D)    dQ = scale dS K    dK = scale dS^T Q    dV = P^T dO

check/backward.py derives the numbers of `Errors`; what becomes of them is derived here.  A kernel has p (1 + w) for p,
dP + f for dP and D + g for D, so that to first order its dS is off by

    p ( w (dP - D) + f - g ) + (rounding of dS)

which for |w| + (relative rounding of dS and dP) <= E, |f| <= F |dO_i| |v_j| beyond that and |g| <= G is at most

    E p |dP|  +  F p |dO_i| |v_j|  +  p (E |D| + G)

and dQ, dK and dV are off by at most the sums over j or i of that, times |k_j| or |q_i|, and of p (w + ...) |dO_i|.  So
much in the worst case.  Where dO and V are normal, of mean 0 and independent of Q and K and of each other, far less:
p and w follow from Q and K, and the other roundings are odd in what they round, so that over i every term, and over j
every term but those with D or g, has a sign that is as likely either way whatever the other terms are.  Such a sum
exceeds CONFIDENCE times the root of the sum of the squares with a probability of 3e-14 (Hoeffding).  D and g are the
same for all j: their sum over j stays a worst case.

What changes the scores.  With dropout v stands for v / (1 - its probability) where a weight is left, and for 0 where it
is dropped.  ALiBi and a bias add to R what they add at most.  The gradient of a bias is dS, summed over the batches and
heads that share it, each off by what is said above of one element.  A soft-cap c multiplies dS by 1 - (t / c)^2, t the
capped score: at most 1, and off by 2 / c times the error of t, which is at most that of the score, and by `cap`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.oracle import CONFIDENCE, changed, kept_weights, softmax, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from iosim.interpreters.region import Range
    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How exactly a kernel computes.

    With R = scale * |q| * max |k|: P may be wrong relative to itself by exp(`score` R + `lse` |L| + `weight`) - 1, and
    by `least`; P as an operand of dV and the sums of dV by `values`; dS and dP relative to themselves, and the sums of
    dQ and dK, by `scores`; dP by `product` |dO| |v|; dS by `floor`.  D is taken from the sum of dO O, wrong by `row`
    relative to each product and by `row_floor` |dO|, or, where `from_p`, from that of P dP, wrong by `row` of each.
    The slope of a soft-cap is wrong by `cap` beyond what a score, wrong by `capped` R, makes it wrong; a sum over all
    rows of a head, of which a sink has its gradient, by `sums`.
    """

    score: float
    lse: float
    weight: float
    least: float
    values: float
    scores: float
    product: float
    floor: float
    row: float
    row_floor: float
    from_p: bool
    cap: float = 0.0
    capped: float = 0.0
    sums: float = 0.0


@dataclass(frozen=True, slots=True)
class Operands:
    """One key/value head, with keys and values `k` (n_k, d) and `v` (n_k, d_v), and what every step needs of them.

    `columns` are the keys whose dK and dV are wanted.  `symmetric`: dO and V are normal and independent, see above.
    """

    attention: Attention
    k: Double
    v: Double
    columns: Range
    symmetric: bool
    largest_k: float  # the largest |k|, and the largest |v|
    largest_v: float
    size_k: Single  # (n_k, d)
    terms: Single  # (n_k, 2 d): |k| and |v| |k|, as terms
    floors: Double  # (d,): the sum of the terms of |k|

    @classmethod
    def of(cls, a: Attention, k: Single, v: Single, columns: Range, symmetric: bool) -> Operands:
        """Operands from K and V of one head."""
        exact_k, exact_v, size_k = k.astype(np.float64), v.astype(np.float64), np.abs(k)
        size_v = np.sqrt((exact_v**2).sum(-1, keepdims=True))
        terms = _term(np.concatenate([size_k, size_k * size_v], 1), symmetric)
        largest_k, largest_v = float(np.sqrt((exact_k**2).sum(-1).max())), float(size_v.max())
        floors = terms[:, : a.d].sum(0, dtype=np.float64)
        return cls(a, exact_k, exact_v, columns, symmetric, largest_k, largest_v, size_k, terms, floors)


def _term(x: Double | Single, symmetric: bool) -> Single:
    """A term of a sum whose size is to be bounded: absolute, or squared where signs are symmetric."""
    y = np.abs(x).astype(np.float32)
    return y * y if symmetric else y


def _total(x: Double | Single, symmetric: bool) -> Double:
    """The bound of a sum, from the sum of its terms (in float32, whence one part in a thousand)."""
    exact = x.astype(np.float64)
    return 1.001 * (CONFIDENCE * np.sqrt(exact) if symmetric else exact)


_VANISHES = {True: 2.0**-74, False: 2.0**-149}  # by `symmetric`: less is 0 as a term


@dataclass(frozen=True, slots=True)
class Part:
    """What some rows add to dK and dV of some of the wanted keys, `at`; and to their bounds, terms by `Errors`."""

    at: slice
    dk: Double
    dv: Double
    terms: list[tuple[Single, Single, Single]]  # (keys, d): E p dP q, and p (E D + G + ..) q; (keys, d_v): p w dO
    floors: list[tuple[Double, Double]]  # (d,) and (d_v,), the same for all keys


@dataclass(frozen=True, slots=True)
class Step:
    """The results for some rows of one head, and the slack of dQ, dbias and dsink, for each of several `Errors`.

    `p` has P, 0 where a key is not seen, if it was asked for; `dbias` and `dsink` are what the rows add to the
    gradients of a bias and of the head's sink.
    """

    o: Double
    lse: Double
    dq: Double
    dq_slack: list[Double]
    part: Part
    p: Single | None
    dbias: Double | None = None
    dbias_slack: list[Double] = field(default_factory=list)
    dsink: float = 0.0
    dsink_slack: list[float] = field(default_factory=list)


def differentiate(
    of: Operands,
    q: Single,
    do: Single,
    first: int,
    errors: Sequence[Errors],
    keep_p: bool,
    place: tuple[int, int] = (0, 0),
    bias: Single | None = None,
    sink: float | None = None,
) -> Step:
    """The gradients for queries `first`, first + 1, ... of one head, `q` (rows, d) and `do` (rows, d_v).

    `place` is its batch and query head, `bias` (rows, n_k) what is added to its scores, `sink` the logit of its sink.
    """
    a = of.attention
    seen, hidden = visible(a, first, len(q))
    exact_q, exact_do = q.astype(np.float64), do.astype(np.float64)
    scores = (exact_q * a.scale) @ of.k[seen].T
    slope = None if a.softcap is None else 1 - np.tanh(scores / a.softcap) ** 2
    shown, added = changed(a, [place], scores[None], first, seen, None if bias is None else bias[None])
    sinks = None if sink is None else np.full((1, 1, 1), sink)
    p, over, lse = (x[0] for x in softmax(shown, hidden, sinks))
    p *= over
    left = 1.0 if not a.dropout else kept_weights(a, [place], first, len(q), seen)[0] / (1 - a.dropout)
    o, dp = (p * left) @ of.v[seen], (exact_do @ of.v[seen].T) * left
    d = (exact_do * o).sum(-1, keepdims=True)
    through = p * (dp - d)  # to the bias
    ds = through if slope is None else through * slope
    most = np.broadcast_to(np.asarray(added), (1, len(q), 1))[0]
    rows = _Rows(of, seen, exact_q, exact_do, p, p * left, dp, d, o, lse, most)
    bounds = [rows.bounds(e) for e in errors]
    start = min(max(seen.start, of.columns[0]), of.columns[1])
    end = max(start, min(seen.stop, of.columns[1]))
    inner = slice(start - seen.start, end - seen.start) if end > start else slice(0, 0)
    part = Part(
        slice(start - of.columns[0], end - of.columns[0]),
        a.scale * (ds[:, inner].T @ exact_q),
        rows.weights[:, inner].T @ exact_do,
        rows.terms(bounds, inner),
        [(b.dk_floors, b.dv_floors) for b in bounds],
    )
    whole = None
    if keep_p:
        whole = np.zeros((len(q), a.n_k), np.float32)
        whole[:, seen] = p
    step = Step(o, lse[:, 0], a.scale * (ds @ of.k[seen]), [b.dq for b in bounds], part, whole)
    if bias is not None:
        each = [_all_keys(rows.each(e), seen, a.n_k) for e in errors]
        step = replace(step, dbias=_all_keys(through, seen, a.n_k), dbias_slack=each)
    if sink is not None:
        weights = np.exp(sink - lse)
        slack = [rows.sink_error(e, sink, weights) for e in errors]
        step = replace(step, dsink=-float((weights * d).sum()), dsink_slack=slack)
    return step


def _all_keys(x: Double, seen: slice, n_k: int) -> Double:
    """Columns of the keys `seen` among those of all keys, 0 elsewhere."""
    out = np.zeros((len(x), n_k))
    out[:, seen] = x
    return out


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Of some rows under some `Errors`: the slack of dQ, factors of the terms of dK and dV, and their floors."""

    dq: Double
    factors: tuple[Single, Single, Single]
    dk_floors: Double
    dv_floors: Double


@dataclass(frozen=True, slots=True)
class _Rows:
    of: Operands
    seen: slice
    q: Double
    do: Double
    p: Double
    weights: Double  # P after dropout
    dp: Double
    d: Double
    o: Double
    lse: Double
    added: Double  # (rows, 1): the most that is added to a score

    def wrong(self, e: Errors) -> tuple[Double, Double, Double]:
        """(the error of P relative to itself, that of the slope of a soft-cap, |dO|), by row."""
        a = self.of.attention
        reach = a.scale * np.sqrt((self.q**2).sum(-1, keepdims=True)) * self.of.largest_k
        level = np.where(np.isneginf(self.lse), 0, np.abs(self.lse))
        slope = np.minimum(1, e.cap + 2 * e.capped * reach / a.softcap) if a.softcap is not None else 0 * reach
        weight: Double = np.expm1(e.score * (reach + self.added) + e.lse * level + e.weight)
        return weight, slope, np.sqrt((self.do**2).sum(-1, keepdims=True))

    def each(self, e: Errors) -> Double:
        """How far each element of dS may be off before it meets a soft-cap, in the worst case."""
        wrong, _, size_do = self.wrong(e)
        size_v = np.sqrt((self.of.v[self.seen] ** 2).sum(-1))
        p_dp = _term(self.p * self.dp, self.of.symmetric)
        ours, small = wrong + e.scores, (e.least + _VANISHES[False]) * (1 + wrong)
        out: Double = ours * (np.abs(self.p * self.dp) + self.p * np.abs(self.d))
        out += e.product * size_do * self.weights * size_v + self.p * self._row_error(e, size_do, p_dp)
        out += e.floor + small * (np.abs(self.dp) + np.abs(self.d) + size_do * size_v)
        return out

    def sink_error(self, e: Errors, sink: float, weights: Double) -> float:
        """How far the sum over rows of D times the sink's weight may be off, in the worst case."""
        sized = _term(self.p * self.dp, self.of.symmetric)
        wrong = np.expm1(e.lse * (np.abs(self.lse) + abs(sink)) + e.weight) + e.sums
        off = self._row_error(e, np.sqrt((self.do**2).sum(-1, keepdims=True)), sized)
        return float((weights * (wrong * np.abs(self.d) + (1 + wrong) * off)).sum())

    def bounds(self, e: Errors) -> _Bounds:
        """See the module's derivation."""
        of, a = self.of, self.of.attention
        wrong, slope, size_do = self.wrong(e)
        sym = of.symmetric
        ours, apart = wrong + e.scores + slope, e.product * size_do
        size_p, p_dp = np.abs(self.p).astype(np.float32), _term(self.p * self.dp, sym)
        shared = ours * np.abs(self.d) + self._row_error(e, size_do, p_dp)
        most_dp = np.abs(self.dp).max(-1, keepdims=True)
        small = (e.least + _VANISHES[sym]) * (1 + wrong)
        floor = e.floor + small * (most_dp + np.abs(self.d) + size_do * of.largest_v / (1 - a.dropout))
        dq = ours * _total(p_dp @ of.terms[self.seen, : a.d], sym)
        dq += apart * _total(_term(self.weights, sym) @ of.terms[self.seen, a.d :], sym)
        dq += shared * 1.001 * (size_p @ of.size_k[self.seen])
        square = (floor**2 * of.floors + a.n_k * _VANISHES[sym] ** 2) if sym else floor * of.floors
        dq += _total(square, sym)
        factors = (
            _term(ours * self.q, sym),
            _term((shared + apart * of.largest_v / (1 - a.dropout)) * self.q, sym),
            _term((wrong + e.values) * self.do, sym),
        )
        floors = self._floors(floor * self.q), self._floors((e.floor + small) * self.do / (1 - a.dropout))
        return _Bounds(a.scale * dq, factors, *floors)

    def _row_error(self, e: Errors, size_do: Double, p_dp: Single) -> Double:
        """How far D of a kernel may be off."""
        if not e.from_p:
            each: Double = np.abs(self.do) * (e.row * np.abs(self.o) + e.row_floor)
            total: Double = np.sum(each, -1, keepdims=True)
            return total
        sym, size_v = self.of.symmetric, np.sqrt((self.of.v[self.seen] ** 2).sum(-1, keepdims=True))
        off: Double = e.row * _total(p_dp.sum(-1, keepdims=True, dtype=np.float64), sym)
        off += e.least * _total(_term(self.dp, sym).sum(-1, keepdims=True, dtype=np.float64), sym)
        off += e.product * size_do * (self.weights @ size_v)
        return off

    def _floors(self, x: Double) -> Double:
        """The sum over rows of the terms of x, and of terms too small to be there."""
        least = _VANISHES[self.of.symmetric]
        terms: Double = x**2 + least**2 if self.of.symmetric else np.abs(x) + least
        total: Double = terms.sum(0)
        return total

    def terms(self, bounds: Sequence[_Bounds], columns: slice) -> list[tuple[Single, Single, Single]]:
        """See Part."""
        sym = self.of.symmetric
        p_dp = _term(self.p[:, columns] * self.dp[:, columns], sym).T
        p, weights = (_term(x[:, columns], sym).T for x in (self.p, self.weights))
        return [(p_dp @ b.factors[0], p @ b.factors[1], weights @ b.factors[2]) for b in bounds]


class Sums:
    """dK and dV of the wanted keys, and how far those of a kernel may be from them, summed over rows and heads."""

    def __init__(self, of: Operands, count: int) -> None:
        a, n = of.attention, of.columns[1] - of.columns[0]
        self._of = of
        self.dk, self.dv = np.zeros((n, a.d)), np.zeros((n, a.d_v))
        self._terms = [tuple(np.zeros((n, d), np.float32) for d in (a.d, a.d, a.d_v)) for _ in range(count)]
        self._floors = [(np.zeros(a.d), np.zeros(a.d_v)) for _ in range(count)]

    def add(self, part: Part) -> None:
        """Add what some rows contribute."""
        self.dk[part.at] += part.dk
        self.dv[part.at] += part.dv
        for mine, more in zip(self._terms, part.terms, strict=True):
            for x, y in zip(mine, more, strict=True):
                x[part.at] += y
        for (dk, dv), (more_dk, more_dv) in zip(self._floors, part.floors, strict=True):
            dk += more_dk
            dv += more_dv

    def slack(self, n: int) -> tuple[Double, Double]:
        """How far dK and dV of a kernel of the n-th `Errors` may be off, before it rounds them."""
        sym, (first, second, third), (dk, dv) = self._of.symmetric, self._terms[n], self._floors[n]
        of_dk = _total(first, sym) + _total(second, sym) + _total(dk, sym)
        return self._of.attention.scale * of_dk, _total(third, sym) + _total(dv, sym)
