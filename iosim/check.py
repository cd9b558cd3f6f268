"""The numeric check: replay a program, and compare every element with float64 under a bound that has a derivation.

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
 5. O = sum p v: how far errors of p move it, see oracle._softmax; the partial sums of 3. are bounded in the same way.
 6. Rounding O to its dtype adds r |O| and half the smallest number; products that underflow add n_k 2^-149.
 7. A kernel that stores S rounds it, to one of two neighbours when a tie is near, and with scores of 10^4 in fp16 these
    are 8 apart.  So S is compared by itself, by 1. and its own rounding, and O then with the float64 softmax of the S
    that was stored.

L = m scale + log l: the error of a score, that of l, and 4u of the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from iosim.dtypes import DTYPES
from iosim.errors import InputError
from iosim.interpreters.region import Box, Range, region
from iosim.interpreters.replay import Mapper, Replay, Replayer
from iosim.oracle import Heads, Rows, Slack, attend
from iosim.parallel import workers
from iosim.program import Program, Span, Store, Tensor, walk
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

BUDGET = 2**25  # (query, key) pairs checked: two heads of n = 4096
_BAND_PAIRS = 2**22  # pairs of a band: the scores of standard attention then take 16 MiB twice
_ORACLE_PAIRS = 2**20  # of a step of the float64 computation
_ORACLE_ROWS, _ORACLE_MOST = 32, 2**24  # but so many rows, up to so many pairs: each step reads all keys
_FEW_BANDS, _MOST_BANDS = 8, 64  # of a sample, as far as the budget and whole blocks allow
_MOST_HEADS = 4096
_CHUNK = 8192  # rows of an input that one stream of random numbers makes
_U, _LEAST = 2.0**-24, 2.0**-149  # of float32: roundoff, smallest number


class Source(Protocol):
    """Where a check takes Q, K and V from.

    `values_std` is V's standard deviation where V is normal, of mean 0 and independent of Q and K; None otherwise.
    """

    @property
    def values_std(self) -> float | None: ...

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """Rows lo..hi-1 of one head of Q, K or V, as float32 rounded to the problem's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Normal random numbers: a stream for each seed, tensor, batch and head, so that sampled heads need no others.

    `q`, `k` and `v` are standard deviations.  Of Q and K one element in `1 / outliers` is 30 times larger.
    """

    attention: Attention
    seed: int = 0
    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    outliers: float = 0.0

    @property
    def values_std(self) -> float | None:
        return self.v

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """See Source."""
        d = self.attention.d_v if name == "V" else self.attention.d
        n = self.attention.n_q if name == "Q" else self.attention.n_k
        out = np.empty((rows[1] - rows[0], d), np.float32)
        for first in range(rows[0] // _CHUNK * _CHUNK, rows[1], _CHUNK):
            random = np.random.Generator(np.random.SFC64([self.seed, "QKV".index(name), batch, head, first]))
            chunk = random.standard_normal((min(_CHUNK, n - first), d), np.float32)
            chunk *= np.float32({"Q": self.q, "K": self.k, "V": self.v}[name])
            if self.outliers and name != "V":
                chunk[random.random(chunk.shape, np.float32) < self.outliers] *= 30
            lo, hi = max(first, rows[0]), min(first + len(chunk), rows[1])
            out[lo - rows[0] : hi - rows[0]] = chunk[lo - first : hi - first]
        round_to(out, DTYPES[self.attention.dtype])
        return out


def large_logits(attention: Attention, seed: int = 0) -> Normal:
    """Inputs whose scaled scores reach about 10^4 on either side."""
    return Normal(attention=attention, seed=seed, q=50.0, k=50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of a check.

    `max_abs_error` is the largest |O - float64|, `rel_error` that over the largest |O|, `tolerance` the largest bound
    that was applied, and `worst_ratio` the largest error (of O, L and S) over its own bound: at most 1 when the check
    passes.  Of a program that stores S these compare with the float64 softmax of the S that it stored, which is checked
    too; `plain_error` compares with float64 alone.
    `counted` has replay's bytes by (tensor, direction) when every block of the program ran exactly once.
    """

    status: str
    max_abs_error: float
    rel_error: float
    tolerance: float
    worst_ratio: float
    plain_error: float
    rows_checked: int
    rows_total: int
    detail: str
    counted: Mapping[tuple[str, str], int] | None = None


def skipped(attention: Attention) -> Check:
    """The outcome of a check that was not asked for."""
    total = attention.batch * attention.heads * attention.n_q
    return Check(status="skipped", max_abs_error=0.0, rel_error=0.0, tolerance=0.0, worst_ratio=0.0, plain_error=0.0,
                 rows_checked=0, rows_total=total, detail="not checked")  # fmt: skip


def check(
    attention: Attention, program: Program, *, seed: int = 0, budget: int = BUDGET, inputs: Source | None = None
) -> Check:
    """Replay `program` and compare O, and L where it has one, with float64; see `check_all`."""
    return check_all(attention, (program,), seed=seed, budget=budget, inputs=inputs)[0]


def check_all(
    attention: Attention,
    programs: Sequence[Program],
    *,
    seed: int = 0,
    budget: int = BUDGET,
    inputs: Source | None = None,
) -> tuple[Check, ...]:
    """Check several programs of one problem against one float64 computation.

    All rows are checked while they have no more than `budget` (query, key) pairs; above that, whole blocks of rows of
    sampled heads: last, first, then random ones.  Raises InputError when the host's memory cannot hold one head.
    """
    need, have = memory_needed(attention, programs), _available_memory()
    if need > have:
        raise InputError(
            f"the numeric check of one head needs {need / 1e9:.1f} GB of memory and this host has {have / 1e9:.1f} GB "
            f"free; --no-check leaves it out"
        )
    source = Normal(attention=attention, seed=seed) if inputs is None else inputs
    bands = list(_bands(attention, programs, seed, budget))
    sums = [_Sum(program, _stores_scores(attention, program)) for program in programs]
    with workers() as threads:
        for group in _by_heads(bands):
            case = _Case.of(attention, source, group)
            outer: Mapper = threads.map if len(group) > 1 else map
            inner: Mapper = map if len(group) > 1 else threads.map
            for results in outer(lambda band: case.compare(sums, band, inner), group):  # noqa: B023 - used at once
                for total, result in zip(sums, results, strict=True):
                    total.add(result)
    rows = sum(band.rows_count for band in bands)
    return tuple(total.result(attention, rows) for total in sums)


def memory_needed(attention: Attention, programs: Sequence[Program] = ()) -> int:
    """Bytes that the check holds at least: one head of Q, K and V in float32 and float64, and one band of scores."""
    a = attention
    operands = a.n_q * a.d + a.n_k * (a.d + a.d_v)
    exact = 28 * _oracle_rows(a.n_k) * a.n_k
    band = 0
    for program in programs:
        rows = min(a.n_q, _block_rows(a, programs))
        boxes = region(program, _demand(program, _Band((0, 1), (0, 1), (0, rows)))).touched
        made = [t.name for t in program.tensors if t.role != "in" and t.name in boxes]
        band = max(band, sum(4 * prod(hi - lo for lo, hi in boxes[name]) for name in made))
    return 12 * operands + exact + band


def _oracle_rows(keys: int) -> int:
    """Rows of one step of the float64 computation, for `keys` keys over all heads of a band."""
    return max(1, _ORACLE_PAIRS // keys, min(_ORACLE_ROWS, _ORACLE_MOST // keys))


def _available_memory() -> int:
    """Bytes that can be allocated without swapping, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63  # unknown: let the allocation itself decide


@dataclass(frozen=True, slots=True)
class _Band:
    batch: Range
    heads: Range
    rows: Range

    @property
    def rows_count(self) -> int:
        return prod(hi - lo for lo, hi in (self.batch, self.heads, self.rows))


def _demand(program: Program, band: _Band, scores: bool = False) -> dict[str, Box]:
    """The band's part of every output, and of S where asked."""
    lead = (band.batch, band.heads, band.rows)
    wanted = [t for t in program.tensors if t.role == "out" or (scores and t.name == "S")]
    return {t.name: (*lead, *((0, n) for n in t.shape[3:])) for t in wanted}


def _block_rows(a: Attention, programs: Sequence[Program]) -> int:
    """Rows that a band must be a multiple of so that it holds whole blocks of every kernel of every program.

    Where that is very many, blocks of the programs' largest row tile: some kernels then run blocks twice.
    """
    sizes = {1}
    for program in programs:
        for kernel in program.kernels:
            for node, _ in walk(kernel.body):
                if isinstance(node, Store) and node.view.tensor.shape[:3] == (a.batch, a.heads, a.n_q):
                    span = node.view.index[2]
                    sizes.add(span.size if isinstance(span, Span) else 1)
    together = lcm(*sizes)
    return together if together <= max(1024, max(sizes)) else max(sizes)


def _padded(a: Attention, programs: Sequence[Program]) -> tuple[int, int]:
    """Rows and keys of one head as the programs' tiles cover them: replay computes whole tiles."""
    rows, keys = a.n_q, a.n_k
    for program in programs:
        tensors = {t.name: t for t in program.tensors}
        for name, box in region(program, _demand(program, _Band((0, 1), (0, 1), (0, a.n_q)))).touched.items():
            length = [hi - lo for lo, hi in box]
            if tensors[name].shape[:3] == (a.batch, a.heads, a.n_q):
                rows = max(rows, length[2])
            if tensors[name].shape[:3] == (a.batch, a.kv_heads, a.n_k):
                keys = max(keys, length[2])
            if tensors[name].shape == (a.batch, a.heads, a.n_q, a.n_k):
                keys = max(keys, length[3])
    return rows, keys


def _bands(a: Attention, programs: Sequence[Program], seed: int, budget: int) -> Iterator[_Band]:
    """The rows to check, ordered by head."""
    block, (rows_of_head, keys) = _block_rows(a, programs), _padded(a, programs)
    pairs = rows_of_head * keys
    size = max(block, _BAND_PAIRS // keys // block * block)
    if a.batch * a.heads <= _MOST_HEADS and a.batch * a.heads * pairs <= budget:
        together = max(1, _BAND_PAIRS // pairs)  # small heads in one band
        together = together // a.group * a.group or 1
        many = max(1, together // a.heads)
        for batches in _cut(a.batch, many):
            for heads in _cut(a.heads, together):
                for rows in _cut(a.n_q, size):
                    yield _Band(batches, heads, rows)
        return
    size = max(block, min(_BAND_PAIRS, budget // _FEW_BANDS) // keys // block * block)
    starts = range(0, a.n_q, size)
    count = min(_MOST_BANDS, max(1, budget // (min(size, rows_of_head) * keys)), a.batch * a.heads * len(starts))
    random = np.random.default_rng([seed, count])
    chosen: set[tuple[int, int, int]] = set()
    kv_heads = random.permutation(a.kv_heads)
    while len(chosen) < count:
        n = len(chosen)
        batch, member, place = (int(random.integers(k)) for k in (a.batch, a.group, len(starts)))
        place = {0: len(starts) - 1, 1: 0}.get(n, place)
        kv = int(kv_heads[n] if n < a.kv_heads else random.integers(a.kv_heads))
        chosen.add((batch, kv * a.group + member, place))
    for batch, head, place in sorted(chosen):
        yield _Band((batch, batch + 1), (head, head + 1), (starts[place], min(starts[place] + size, a.n_q)))


def _cut(count: int, size: int) -> list[Range]:
    return [(lo, min(lo + size, count)) for lo in range(0, count, size)]


def _by_heads(bands: Iterable[_Band]) -> Iterator[list[_Band]]:
    """Runs of bands of the same heads."""
    group: list[_Band] = []
    for band in bands:
        if group and (band.batch, band.heads) != (group[0].batch, group[0].heads):
            yield group
            group = []
        group.append(band)
    if group:
        yield group


def _slack(a: Attention) -> Slack:
    """The numbers of the module's derivation for a problem."""

    def chain(n: int) -> float:
        return min(n, 8 * sqrt(n))

    data = DTYPES[a.dtype]
    return Slack(
        score=(chain(a.d) + 2) * _U,
        stored=data.roundoff,
        least=max(data.smallest / 2, 2.0**-126),  # products of subnormals vanish
        range=6 * _U,
        weight=8 * _U,
        sums=(5 * chain(a.n_k) + 3) * _U,
        rounding=data.roundoff,
        floor=max(data.smallest / 2, 2.0**-125),
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

    @classmethod
    def of(cls, a: Attention, source: Source, group: Sequence[_Band]) -> _Case:
        band, g = group[0], a.group
        shared = band.heads[0] // g, (band.heads[1] - 1) // g + 1
        boxes: dict[str, Box] = {
            "K": (band.batch, shared, (0, a.n_k), (0, a.d)),
            "V": (band.batch, shared, (0, a.n_k), (0, a.d_v)),
        }
        rows = group[0].rows[0], group[-1].rows[1]
        if rows[1] - rows[0] == sum(hi - lo for lo, hi in (one.rows for one in group)):  # else each band makes its own
            boxes["Q"] = (band.batch, band.heads, rows, (0, a.d))
        held = {name: (box, _gather(source, name, box)) for name, box in boxes.items()}
        pick = [h // g - shared[0] for h in range(*band.heads)]
        k, v = (_stack(held[name][1], pick) for name in "KV")
        return cls(a, source, held, Heads.of(a, k, v, source.values_std))

    def give(self, tensor: Tensor, box: Box) -> Single:
        """An input of a program, see replay."""
        return self._part(tensor.name, box)

    def _part(self, name: str, box: Box) -> Single:
        if name in self.held:
            whole, data = self.held[name]
            if all(lo >= first and hi <= last for (lo, hi), (first, last) in zip(box, whole, strict=True)):
                cut = [slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, whole, strict=True)]
                return data[tuple(cut)]
        return _gather(self.source, name, box)[..., slice(*box[3])]

    def exact(self, band: _Band, scores: Sequence[Single], inner: Mapper) -> list[Rows]:
        """The float64 result of a band, then that of each array of stored scores."""
        a, (lo, hi) = self.attention, band.rows
        q = self._part("Q", (band.batch, band.heads, band.rows, (0, a.d))).reshape(-1, hi - lo, a.d)
        step, slack = _oracle_rows(a.n_k * len(q)), _slack(a)

        def block(at: int) -> list[Rows]:
            end = min(at + step, hi)
            stored = [s[:, at - lo : end - lo] for s in scores]
            return attend(self.heads, q[:, at - lo : end - lo], at, slack, stored)

        return [_join(parts) for parts in zip(*inner(block, range(lo, hi, step)), strict=True)]

    def compare(self, sums: Sequence[_Sum], band: _Band, inner: Mapper) -> list[_Result]:
        """Every program's result for a band."""
        done = []
        for s in sums:
            replayer = s.idle.pop() if s.idle else Replayer(s.program)
            done.append(replayer.run(self.give, _demand(s.program, band, s.stores), inner))
            s.idle.append(replayer)
        scores = [
            replay.outputs["S"].reshape(-1, *replay.outputs["S"].shape[2:])
            for replay, s in zip(done, sums, strict=True)
            if s.stores
        ]
        exact, *others = self.exact(band, scores, inner)
        own = iter(others)
        return [
            _Result.of(self.attention, band, replay, next(own) if s.stores else exact, exact)
            for replay, s in zip(done, sums, strict=True)
        ]


def _gather(source: Source, name: str, box: Box) -> Single:
    heads = [[source.rows(name, b, h, box[2]) for h in range(*box[1])] for b in range(*box[0])]
    if len(heads) == len(heads[0]) == 1:
        return heads[0][0][None, None]
    return np.array(heads)


def _stack(x: Single, pick: Sequence[int]) -> Single:
    """(batch, kv heads, n, d) as (batch * query heads, n, d)."""
    chosen = x if list(pick) == list(range(x.shape[1])) else x[:, pick]
    return chosen.reshape(-1, *x.shape[2:])


def _join(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    columns = ([getattr(p, name) for p in parts] for name in ("o", "lse", "o_slack", "lse_slack", "score_ratio"))
    return Rows(*(np.concatenate(column, 1) for column in columns))


@dataclass(frozen=True, slots=True)
class _Result:
    """What one band of one program came to."""

    error: float
    largest: float
    tolerance: float
    ratio: float
    plain: float
    failure: str
    moved: Mapping[tuple[str, str], int]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, a: Attention, band: _Band, done: Replay, wanted: Rows, exact: Rows) -> _Result:
        data, scores = DTYPES[a.dtype], float(np.max(wanted.score_ratio))
        if scores > 1:  # there is no use in their softmax
            wanted = replace(exact, score_ratio=wanted.score_ratio)
        got = done.outputs["O"].reshape(wanted.o.shape)
        least = data.smallest / 2 + a.n_k * _LEAST
        bound = wanted.o_slack + data.roundoff * (np.abs(wanted.o) + wanted.o_slack) + least
        error = _difference(got, wanted.o)
        ratio, failure = _judge(band, "O", got, wanted.o, error, bound)
        if scores > 1:
            ratio, failure = max(ratio, scores), _wrong_score(band, wanted.score_ratio)
        if "L" in done.outputs:
            lse = done.outputs["L"].reshape(wanted.lse.shape)
            size = np.where(np.isneginf(wanted.lse), 0, np.abs(wanted.lse)) + np.log(a.n_k)
            limit = np.where(np.isneginf(wanted.lse), 0, wanted.lse_slack + 4 * _U * (size + 1))
            worst, wrong = _judge(band, "L", lse, wanted.lse, _difference(lse, wanted.lse), limit)
            ratio, failure = max(ratio, worst), failure or wrong
        plain = float(np.max(_difference(got, exact.o)))
        largest = float(np.max(np.abs(wanted.o)))
        return cls(float(np.max(error)), largest, float(np.max(bound)), ratio, plain, failure, done.moved, done.blocks)


def _difference(got: Single, wanted: Double) -> Double:
    """|got - wanted|; 0 where both are the same infinity, infinity where only one is a number."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - wanted)
    if not np.isfinite(error).all():
        error[got == wanted] = 0
        error[np.isnan(error)] = np.inf
    return error


def _judge(band: _Band, name: str, got: Single, wanted: Double, error: Double, bound: Double) -> tuple[float, str]:
    """The largest error over its bound, and where the first element lies that exceeds it."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = float(np.max(np.where(error == 0, 0, error / bound)))
    if ratio <= 1:
        return ratio, ""
    at = tuple(int(n) for n in np.argwhere(~(error <= bound))[0])
    return ratio, (
        f"{name} at {_place(band, at)} is {got[at]:.9g}; float64 gives {wanted[at]:.9g}, "
        f"{error[at]:.3g} away where {bound[at]:.3g} is allowed"
    )


def _wrong_score(band: _Band, ratio: Double) -> str:
    at = tuple(int(n) for n in np.argwhere(~(ratio <= 1))[0])
    return f"S at {_place(band, at)} has a score that is {ratio[at]:.3g} times as far from float64's as is allowed"


def _place(band: _Band, at: Sequence[int]) -> str:
    batch, head = divmod(at[0], band.heads[1] - band.heads[0])
    place = [f"batch {band.batch[0] + batch}", f"head {band.heads[0] + head}", f"row {band.rows[0] + at[1]}"]
    return ", ".join(place + [f"column {column}" for column in at[2:]])


@dataclass(slots=True)
class _Sum:
    """A program's results so far."""

    program: Program
    stores: bool
    idle: list[Replayer] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)

    def add(self, result: _Result) -> None:
        self.results.append(result)

    def result(self, a: Attention, rows: int) -> Check:
        total, results = a.batch * a.heads * a.n_q, self.results
        error, largest = max(r.error for r in results), max(r.largest for r in results)
        ratio = max(r.ratio for r in results)
        failure = next((r.failure for r in results if r.failure), "")
        share = "all rows" if rows == total else f"{rows} of {total} rows"
        return Check(
            status="failed" if failure else "passed",
            max_abs_error=error,
            rel_error=error / largest if largest else error,
            tolerance=max(r.tolerance for r in results),
            worst_ratio=ratio,
            plain_error=max(r.plain for r in results),
            rows_checked=rows,
            rows_total=total,
            detail=failure or f"{share} checked; the largest error is {ratio:.0%} of its bound",
            counted=self._counted() if rows == total else None,
        )

    def _counted(self) -> dict[tuple[str, str], int] | None:
        blocks = tuple(map(sum, zip(*(r.blocks for r in self.results), strict=True)))
        if blocks != tuple(kernel.blocks for kernel in self.program.kernels):
            return None
        moved: dict[tuple[str, str], int] = {}
        for r in self.results:
            for key, count in r.moved.items():
                moved[key] = moved.get(key, 0) + count
        return moved
