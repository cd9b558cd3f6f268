"""The check of programs that compute P = softmax(S) by rows, and L where it is asked for.

The bound, with the names of forward.py, for a maximum that is subtracted, at once or as it grows.  S is taken as it is.

 1. A weight exp(x - m): the differences on the way from x to the final m are wrong by u of each, together by u (m - x);
    exp by 8u; flush to zero takes 2^-125 of the largest weight, which is 1.
 2. The sum l >= 1 of n_k of them: the mean of their errors under p, and 3 u chain(n_k) for the additions and at most
    chain(n_k)/8 factors by which a maximum that grows rescales what is there.
 3. The division, by a product with 1 / l: 3u.  All of p together: p (exp(w) - 1), w the sum of 1. to 3., and 2^-125.
 4. P in its dtype: r |p| and half the smallest number.

L = m + log l: the error of l, and 4u of the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.check.forward import chain, judge_lse
from iosim.check.inputs import Source, gather
from iosim.check.outcome import FLUSH, Check, Result, Total, U, difference, judge, unguarded
from iosim.check.rows import Band, check_rows, oracle_rows, rows_memory, run
from iosim.dtypes import DTYPES
from iosim.interpreters.region import Box
from iosim.interpreters.replay import Mapper, Replay
from iosim.oracle import softmax, visible
from iosim.program import Program, Tensor
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]


def check_softmax(a: Attention, programs: Sequence[Program], source: Source, seed: int, budget: int) -> list[Check]:
    """Compare P, and L where it is an output, of several programs with one float64 computation."""
    return check_rows(a, programs, seed, budget, lambda _: _Case(a, source))


def softmax_memory(a: Attention, programs: Sequence[Program]) -> int:
    """Bytes that the check holds at least."""
    return rows_memory(a, programs)


@dataclass(frozen=True, slots=True)
class _Case:
    attention: Attention
    source: Source

    def compare(self, totals: Sequence[Total], band: Band, inner: Mapper) -> list[Result]:
        """Every program's result for a band."""
        a, (lo, hi) = self.attention, band.rows
        scores = gather(self.source, "S", (band.batch, band.heads, band.rows, (0, a.n_k)))

        def give(tensor: Tensor, box: Box) -> Single:
            if box[:3] == (band.batch, band.heads, band.rows):
                part = scores[..., slice(*box[3])]
            else:
                part = gather(self.source, tensor.name, box)[..., slice(*box[3])]
            if tensor.dtype != a.dtype:
                part = part.copy()
                round_to(part, DTYPES[tensor.dtype])
            return part

        done = [run(total, band, give, inner) for total in totals]
        flat = scores.reshape(-1, hi - lo, a.n_k)
        results: list[list[Result]] = [[] for _ in totals]
        step = oracle_rows(a.n_k * len(flat))
        for at in range(lo, hi, step):
            end = min(at + step, hi)
            exact = _Rows.of(a, flat[:, at - lo : end - lo], at)
            part = Band(band.batch, band.heads, (at, end))
            for total, replay, own in zip(totals, done, results, strict=True):
                own.append(exact.judge(total.program, replay, band, part))
        return [_join(own, replay) for own, replay in zip(results, done, strict=True)]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The exact result for some rows of each head, and how far a kernel's errors may move it."""

    attention: Attention
    p: Double  # (heads, rows, n_k)
    lse: Double  # (heads, rows)
    p_slack: Double
    lse_slack: Double

    @classmethod
    def of(cls, a: Attention, scores: Single, first: int) -> _Rows:
        """Of the rows `first`, first + 1, ..., for scores (heads, rows, n_k)."""
        keys, hidden = visible(a, first, scores.shape[1])
        p, moved = np.zeros(scores.shape), np.zeros(scores.shape)
        some = scores[..., keys].astype(np.float64)
        weights, over, lse = softmax(some.copy(), hidden)
        p[..., keys] = weights * over
        distance = some.max(-1, keepdims=True, initial=-np.inf, where=True if hidden is None else ~hidden) - some
        np.maximum(distance, 0, out=distance, where=np.isfinite(distance))
        distance[~np.isfinite(distance)] = 0
        wrong = U * (distance + 8)
        total = (p[..., keys] * wrong).sum(-1, keepdims=True) + 3 * U * chain(a.n_k)
        moved[..., keys] = p[..., keys] * np.expm1(wrong + total + 3 * U) + 2 * FLUSH * (weights > -1)
        if hidden is not None:
            moved[..., keys][:, hidden] = 0
        return cls(a, p, lse[..., 0], moved, total[..., 0])

    def judge(self, program: Program, done: Replay, whole: Band, band: Band) -> Result:
        """A program's result for these rows, `band`, of those that were computed, `whole`."""
        a, data = self.attention, DTYPES[self.attention.dtype]
        rows = slice(band.rows[0] - whole.rows[0], band.rows[1] - whole.rows[0])
        got = done.outputs["P"].reshape(len(self.p), -1, a.n_k)[:, rows]
        bound = self.p_slack + data.roundoff * (self.p + self.p_slack) + data.smallest / 2
        bound[(self.p == 0) & (self.p_slack == 0)] = 0  # hidden keys
        error = difference(got, self.p)
        ratio, failure, at = judge("P", got, self.p, error, bound, band.place)
        if at:
            failure += unguarded(program, got[at], self.lse[at[:2]])
        if "L" in done.outputs:
            lse = done.outputs["L"].reshape(len(self.p), -1)[:, rows]
            worst, wrong = judge_lse(a, band, lse, self.lse, self.lse_slack)
            ratio, failure = max(ratio, worst), failure or wrong
        most = float(np.max(error))
        return Result(most, float(np.max(self.p)), float(np.max(bound)), ratio, most, failure, {}, ())


def _join(parts: Sequence[Result], done: Replay) -> Result:
    """The result of all rows of a band."""
    error, largest, tolerance, ratio = (
        max(getattr(part, name) for part in parts) for name in ("error", "largest", "tolerance", "ratio")
    )
    failure = next((part.failure for part in parts if part.failure), "")
    return Result(error, largest, tolerance, ratio, error, failure, done.moved, done.blocks)
