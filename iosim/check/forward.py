"""The check of programs that compute O from Q, K and V, and L where it is asked for.

The bound.  Let u = 2^-24 (float32), r the roundoff of the data dtype, w_j the weight of key j before the division by
l = sum w, p_j = w_j / l, and let a kernel accumulate in float32.  To first order, with every term a worst case:

 1. Scores.  A sum of d products is wrong by at most u * chain(d) * sum |q_k k_k|, which is at most |q| |k|.  chain(n)
    is the longest chain of additions that a term goes through.  min(n, 8 sqrt n) is such a bound for sums in tiles of
    sqrt(n)/8 to 8 sqrt(n) terms (b + n/b additions), and for any order with roundings that are independent in the
    mean (Higham and Mary 2019: it fails with a probability below n 1e-13).  The scale factor and its product add 2u.
 2. Weights.  exp(x - m) with |x - m| <= 2 R, R the largest score possible: subtraction, scale and scaling are wrong
    by 3u relatively, so the exponent by 6uR; exp itself by 8u (numpy states 2.5 units in the last place).  A wrong
    maximum cancels.  What flush to zero takes is below 2^-125 of the largest weight.
 3. Rescaling, sum of weights, and sum of w v: n_k weights in tiles.  Two sums, each with chain(n_k) additions and as
    many products, and at most chain(n_k)/8 rescaling factors wrong by 8u each: 5 u chain(n_k) together.  The
    division adds 3u.
 4. P in the data dtype, as the matrix unit takes it: r relatively, half the smallest number absolutely.
 5. O = sum p v: how far errors of p move it, see oracle._output; the partial sums of 3. are bounded in the same way.
 6. Rounding O to its dtype adds r |O| and half the smallest number; products that underflow add n_k 2^-149.
 7. A kernel that stores S rounds it to the tensor's dtype, to one of two neighbours when a tie is near, and with scores
    of 10^4 in fp16 these are 8 apart.  So S is compared by itself, by 1. and its own rounding, and O then with the
    float64 softmax of the S that was stored.
 8. A kernel that stores O again and again, normalised, in its dtype: the rounding of an earlier O stays in the last one
    by the share of its weights, so that each adds r times a partial sum of p v, bounded as in 5., and the products that
    bring an O up to date 8u.  t roundings add up to chain(t).
 9. A kernel that splits the keys in s parts, each with its own O and L = m scale + log l, weighs them by exp(L_t - L).
    L_t is wrong by 4u (|L_t| + log n_k + 1) and the difference by 2u of itself, |L_t| at most R + log n_k: together
    6uR + 8u (log n_k + 1) of a weight, and 8u for exp; the sum over parts as in 3., and another division.

10. fp8: what is compared with is attention of the values that codes and scales stand for, so that it is the kernel that
    is judged, not its caller's rounding.  These values in float32, the product of two scales and its product with a
    score add 5u to 1.  Units of o that change with the scale of V add 3u to a rescaling factor, and another u for V: a
    further u chain(n_k).  Weights times 2^8 move the exponent: 8u of a weight and 2u R.  P has r = 2^-4, and half the
    smallest number over 2^8.  S is stored in fp16, O in bf16, and so rounded.
11. An fp16 accumulator (r' = 2^-11): a sum of n is rounded after each 16 products, and where a tile ends once more
    for the rescaling: t roundings, each of r' times a partial sum, add up to chain(t) r', and t times half the smallest
    number.  A partial sum of q k is at most |q| |k|, that of w v is bounded as in 5., l is not concerned.

12. What changes scores.  |c tanh(s / c)| is at most |s| and its slope at most 1, so that a soft-cap passes on an error
    of s at most; its own operations are wrong by 12u |s|, tanh by 8u of it.  ALiBi and a bias round twice each, to
    numbers below R + the most that they add, which takes the place of R from there on, as a sink's logit does: 16u of
    that.
13. Dropout multiplies v by 0 or 1 / (1 - p), see oracle._output; a kernel that stores P before and after it rounds
    twice.

L = m scale + log l: the error of a score, that of l, and 4u of the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.check.inputs import Source, gather
from iosim.check.outcome import FLUSH, LEAST, Check, Result, Total, U, difference, judge, unguarded
from iosim.check.quantise import Quantised, scaled_rows
from iosim.check.rows import Band, check_rows, oracle_rows, rewrites, rows_memory, run
from iosim.dtypes import DTYPES
from iosim.interpreters.region import Box
from iosim.interpreters.replay import Mapper, Replay
from iosim.oracle import Heads, Rows, Slack, attend
from iosim.program import Compute, Program, Tensor, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]


def check_forward(a: Attention, programs: Sequence[Program], source: Source, seed: int, budget: int) -> list[Check]:
    """Compare O, and L where it is an output, of several programs with one float64 computation for each bound."""
    out: dict[int, Check] = {}
    kinds = [Kind.of(a, program) for program in programs]
    for kind in dict.fromkeys(kinds):
        chosen = [n for n, have in enumerate(kinds) if have == kind]
        group = [programs[n] for n in chosen]
        slack, stores = slack_of(a, kind), [_stores_scores(a, program) for program in group]
        given = source
        if kind.scaled:
            given = Quantised(source, a, dict(kind.scaled), dtype=kind.keys, wide="" if a.is_fp8 else a.dtype)
        checks = check_rows(
            a,
            group,
            seed,
            budget,
            lambda bands: _Case.of(a, given, bands, slack, stores),  # noqa: B023 - used at once
        )
        out |= zip(chosen, checks, strict=True)
    return [out[n] for n in range(len(programs))]


def forward_memory(a: Attention, programs: Sequence[Program]) -> int:
    """Bytes that the check holds at least: one head of Q, K and V in float32 and float64, and one band of scores."""
    return 12 * (a.n_q * a.d + a.n_k * (a.d + a.d_v)) + rows_memory(a, programs)


def chain(n: int) -> float:
    """The longest chain of additions in a sum of n terms; see 1. above."""
    return min(n, 8 * sqrt(n))


@dataclass(frozen=True, slots=True)
class Kind:
    """What a program's operands and bound depend on.

    `parts` into which it splits the keys (it keeps row statistics of each, in scratch), the dtype of stored `scores`,
    (input, rows) that share a scale, the inner sizes of its products with an fp16 accumulator, whether weights are
    rounded `twice`: stored, and stored again after dropout, and the format of the `keys` and values.
    """

    parts: int
    scores: str
    scaled: tuple[tuple[str, int], ...] = ()
    narrow: tuple[int, ...] = ()
    twice: bool = False
    keys: str = ""

    @classmethod
    def of(cls, a: Attention, program: Program) -> Kind:
        shape, parts = (a.batch, a.heads, a.n_q), 1
        for t in program.tensors:
            if t.role == "scratch" and t.shape[1:] == shape:
                parts = max(parts, t.shape[0])
        computes = [n for kernel in program.kernels for n, _ in walk(kernel.body) if isinstance(n, Compute)]
        narrow = {n.args[0].shape[1] for n in computes if n.op == "matmul" and n.out.dtype == "fp16"}
        scores = next((t.dtype for t in program.tensors if t.name == "S"), a.score_dtype)
        twice = not a.is_fp8 and any(t.name == "P dropped" for t in program.tensors)
        keys = next(t.dtype for t in program.tensors if t.name == "K")
        return cls(parts, scores, tuple(scaled_rows(program).items()), tuple(sorted(narrow)), twice, keys)

    def roundings(self, n: int) -> int:
        """How often a sum of n products in an fp16 accumulator is rounded at most."""
        return max((-(-n // inner) * (-(-inner // _STEP) + 1) for inner in self.narrow), default=0)


_STEP = 16  # products of fp16 values in one instruction
_GAIN = 2.0**8  # of fp8 weights, see 10.


def slack_of(a: Attention, kind: Kind) -> Slack:
    """The numbers of the module's derivation for a problem and a kind of program."""
    data, scores, half = DTYPES[a.dtype], DTYPES[kind.scores], DTYPES["fp16"]
    split, scaled = kind.parts > 1, a.is_fp8
    changed = not {"soft-cap", "ALiBi", "bias"}.isdisjoint(a.features)
    of_qk, of_pv = kind.roundings(a.d), kind.roundings(a.n_k)
    least = of_qk * half.smallest / 2 * a.scale
    return Slack(
        score=(chain(a.d) + 2 + 5 * scaled + 16 * changed) * U + chain(of_qk) * half.roundoff,
        stored=scores.roundoff,
        least=max(scores.smallest / 2, 2.0**-126) + least,  # products of subnormals vanish
        range=(6 + 6 * split + 2 * scaled) * U,
        weight=(8 + 8 * split + split * 8 * (np.log(a.n_k) + 1) + 8 * scaled) * U + least,
        sums=(5 * chain(a.n_k) + 3 + split * (4 * chain(kind.parts) + 6) + scaled * (chain(a.n_k) + 32)) * U,
        rounding=data.roundoff * (1 + kind.twice) + chain(of_pv) * half.roundoff,
        floor=max(data.smallest / 2 / (_GAIN if scaled else 1), FLUSH),
        sum_least=of_pv * half.smallest / 2,
    )


def _stores_scores(a: Attention, program: Program) -> bool:
    """Whether a program stores its scaled scores: in a scratch tensor called S, a row of n_k for each query."""
    shape = (a.batch, a.heads, a.n_q, a.n_k)
    return any((t.name, t.role, t.shape) == ("S", "scratch", shape) for t in program.tensors)


@dataclass(frozen=True, slots=True)
class _Case:
    """The operands of some heads."""

    attention: Attention
    source: Source
    held: Mapping[str, tuple[Box, Single]]
    heads: Heads
    slack: Slack
    stores: Sequence[bool]  # by program: whether it stores S

    @classmethod
    def of(cls, a: Attention, source: Source, group: Sequence[Band], slack: Slack, stores: Sequence[bool]) -> _Case:
        band, g = group[0], a.group
        shared = band.heads[0] // g, (band.heads[1] - 1) // g + 1
        boxes: dict[str, Box] = {
            "K": (band.batch, shared, (0, a.n_k), (0, a.d)),
            "V": (band.batch, shared, (0, a.n_k), (0, a.d_v)),
        }
        rows = group[0].rows[0], group[-1].rows[1]
        if rows[1] - rows[0] == sum(hi - lo for lo, hi in (one.rows for one in group)):  # else each band makes its own
            boxes["Q"] = (band.batch, band.heads, rows, (0, a.d))
        held = {name: (box, gather(source, name, box)) for name, box in boxes.items()}
        places = [(b, h) for b in range(*band.batch) for h in range(*band.heads)]
        sinks = None
        if a.sinks:
            plain = source.source if isinstance(source, Quantised) else source
            sinks = np.array([plain.rows("sinks", 0, h, (0, 1))[0, 0] for _, h in places], np.float64)
        pick = [h // g - shared[0] for h in range(*band.heads)]
        k, v = (_stack(_decoded(source, name, *held[name]), pick) for name in "KV")
        return cls(a, source, held, Heads.of(a, k, v, source.values_std, places, sinks), slack, stores)

    @property
    def plain(self) -> Source:
        """Where what is not quantised is from."""
        return self.source.source if isinstance(self.source, Quantised) else self.source

    def give(self, tensor: Tensor, box: Box) -> Single:
        """An input of a program, see replay."""
        if tensor.name == "bias":
            return gather(self.plain, "bias", box)[..., slice(*box[3])]
        if tensor.name == "sinks":
            return np.array([self.plain.rows("sinks", 0, h, (0, 1))[0, 0] for h in range(*box[0])], np.float32)
        if tensor.scales is not None and isinstance(self.source, Quantised):
            return self.source.scales(tensor.scales.tensor, box)
        return self._part(tensor.name, box)

    def _part(self, name: str, box: Box) -> Single:
        if name in self.held:
            whole, data = self.held[name]
            if all(lo >= first and hi <= last for (lo, hi), (first, last) in zip(box, whole, strict=True)):
                cut = [slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, whole, strict=True)]
                return data[tuple(cut)]
        return gather(self.source, name, box)[..., slice(*box[3])]

    def exact(self, band: Band, scores: Sequence[Single], inner: Mapper) -> list[Rows]:
        """The float64 result of a band, then that of each array of stored scores."""
        a, (lo, hi) = self.attention, band.rows
        box = (band.batch, band.heads, band.rows, (0, a.d))
        q = _decoded(self.source, "Q", box, self._part("Q", box)).reshape(-1, hi - lo, a.d)
        step, bias = oracle_rows(a.n_k * len(q)), self._bias(band)

        def block(at: int) -> list[Rows]:
            end = min(at + step, hi)
            stored = [s[:, at - lo : end - lo] for s in scores]
            part = None if bias is None else bias[:, at - lo : end - lo]
            return attend(self.heads, q[:, at - lo : end - lo], at, self.slack, stored, part)

        return [_join(parts) for parts in zip(*inner(block, range(lo, hi, step)), strict=True)]

    def _bias(self, band: Band) -> Single | None:
        """What is added to the scores of a band: (batch * heads, rows, n_k)."""
        a = self.attention
        if a.bias is None:
            return None
        batch, heads = a.bias_shape[:2]
        box = band.batch if batch > 1 else (0, 1), band.heads if heads > 1 else (0, 1), band.rows, (0, a.n_k)
        lead = band.batch[1] - band.batch[0], band.heads[1] - band.heads[0]
        found = gather(self.plain, "bias", box)
        return np.broadcast_to(found, (*lead, *found.shape[2:])).reshape(-1, *found.shape[2:])

    def compare(self, totals: Sequence[Total], band: Band, inner: Mapper) -> list[Result]:
        """Every program's result for a band."""
        done = [run(total, band, self.give, inner, s) for total, s in zip(totals, self.stores, strict=True)]
        scores = [
            replay.outputs["S"].reshape(-1, *replay.outputs["S"].shape[2:])
            for replay, stores in zip(done, self.stores, strict=True)
            if stores
        ]
        exact, *others = self.exact(band, scores, inner)
        own = iter(others)
        return [
            _result(self, total.program, band, replay, next(own) if stores else exact, exact)
            for total, replay, stores in zip(totals, done, self.stores, strict=True)
        ]


def _decoded(source: Source, name: str, box: Box, given: Single) -> Single:
    """The values that an input's elements stand for."""
    return source.decoded(name, box, given) if isinstance(source, Quantised) else given


def _stack(x: Single, pick: Sequence[int]) -> Single:
    """(batch, kv heads, n, d) as (batch * query heads, n, d)."""
    chosen = x if list(pick) == list(range(x.shape[1])) else x[:, pick]
    return chosen.reshape(-1, *x.shape[2:])


def _join(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    columns = ([getattr(p, name) for p in parts] for name in (f.name for f in fields(Rows)))
    return Rows(*(np.concatenate(column, 1) for column in columns))


def _result(case: _Case, program: Program, band: Band, done: Replay, wanted: Rows, exact: Rows) -> Result:
    a = case.attention
    data, scores = DTYPES[a.out_dtype], float(np.max(wanted.score_ratio))
    if scores > 1:  # there is no use in their softmax
        wanted = replace(exact, score_ratio=wanted.score_ratio)
    got = done.outputs["O"].reshape(wanted.o.shape)
    times, slack = rewrites(program, "O"), wanted.o_slack
    if times > 1:
        slack = slack + (chain(times - 1) * data.roundoff + 8 * times * U) * wanted.partial
    least = times * data.smallest / 2 + a.n_k * LEAST + case.slack.sum_least
    bound = slack + data.roundoff * (np.abs(wanted.o) + slack) + least
    error = difference(got, wanted.o)
    ratio, failure, at = judge("O", got, wanted.o, error, bound, band.place)
    if at:
        failure += unguarded(program, got[at], wanted.lse[at[:2]])
    if scores > 1:
        ratio, failure = max(ratio, scores), _wrong_score(band, wanted.score_ratio)
    if "L" in done.outputs:
        worst, wrong = judge_lse(a, band, done.outputs["L"], wanted.lse, wanted.lse_slack)
        ratio, failure = max(ratio, worst), failure or wrong
    plain = float(np.max(difference(got, exact.o)))
    largest = float(np.max(np.abs(wanted.o)))
    return Result(float(np.max(error)), largest, float(np.max(bound)), ratio, plain, failure, done.moved, done.blocks)


def judge_lse(a: Attention, band: Band, got: Single, wanted: Double, slack: Double) -> tuple[float, str]:
    """The largest error of L over its bound, and what is wrong."""
    got, hidden = got.reshape(wanted.shape), np.isneginf(wanted)
    size = np.where(hidden, 0, np.abs(wanted)) + np.log(a.n_k)
    limit = np.where(hidden, 0, slack + 4 * U * (size + 1))
    worst, wrong, _ = judge("L", got, wanted, difference(got, wanted), limit, band.place)
    return worst, wrong


def _wrong_score(band: Band, ratio: Double) -> str:
    at = tuple(int(n) for n in np.argwhere(~(ratio <= 1))[0])
    return f"S at {band.place(at)} has a score that is {ratio[at]:.3g} times as far from float64's as is allowed"
