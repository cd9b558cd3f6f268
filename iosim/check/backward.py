"""The check of programs that compute dQ, dK and dV.

From Q, K, V, O, dO and L, or from Q, K, V, dO and P: O and L or P are the float64 ones, rounded to the tensor's dtype.
gradient.py derives how far the results may be from float64 when P, dP, D and dS are wrong by so much.  How much that
is, with the names of forward.py:

 1. P = exp(S - L).  A score is wrong by u (chain(d) + 2) R, as in the forward pass, R the largest score possible; L was
    rounded, and it and 1 / scale are multiplied: 3u |L|; the difference and its scaling are wrong by 3u of themselves,
    at most R + |L|: u (chain(d) + 5) R + 6u |L| together, and exp adds 8u.  Flush to zero takes 2^-125.  A P that is
    given was rounded: r, and half the smallest number.
 2. P as the matrix unit takes it, for dV: r once more where it was not given.
 3. dP is a sum of d_v products: u chain(d_v) |dO_i| |v_j|.  A kernel that stores it rounds it to the tensor's dtype.
 4. D.  From O, which was rounded: r and half the smallest number for each product of dO and O, and u chain(d_v).  From
    P and dP: r for each that is rounded, and u chain(n_k).
 5. dS is rounded: r, and half the smallest number; two operations before add 2u.
 6. The sums over n_k keys, or n_q queries of every head of a group, in float32: u chain(n).  Scaling adds 2u, and
    rounding to the dtype of the output r and half the smallest number.

What changes scores: as 12. and 13. of forward.py has it.  A soft-cap's slope is made of a score wrong by
u (chain(d) + 16) R, by operations that take 4u.  Weights after dropout, where they are given, were rounded as P was.  A
program that stores dP again after dropout, or dS after the soft-cap, rounds once more.

The gradient of a bias that batches or heads share, and that of a sink, are checked where all that adds to them is
checked at once.  The latter sums exp(sink - L) D over queries and batches.

Above the budget whole key/value heads are sampled, and where one of them is too much, bands of rows of dQ and tiles of
keys of dK and dV.  dO is then 0 outside of the band, so that what other rows add is exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.check.forward import chain
from iosim.check.inputs import Source, gather
from iosim.check.outcome import FLUSH, LEAST, Check, Index, Result, Total, U, difference, judge
from iosim.check.rows import BAND_PAIRS, FEW_BANDS, MOST_BANDS, MOST_HEADS, SAMPLED, block_rows, cut, oracle_rows
from iosim.dtypes import DTYPES
from iosim.gradient import Errors, Operands, Step, Sums, differentiate
from iosim.interpreters.narrow import narrowed
from iosim.interpreters.region import Box, Range, region
from iosim.interpreters.replay import Mapper, Replayer
from iosim.oracle import kept_weights, visible
from iosim.parallel import workers
from iosim.program import Program, Span, Store, Tensor, walk
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

_MOST_SCORES = 2**27  # elements of the n_q x n_k matrices that a sample may make a program hold
_NO_WEIGHT = 1e6  # L of a row without a gradient in a sample: above any score, so that its P is 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is checked at a time: rows of dQ of some query heads, keys of dK and dV of the heads that these share."""

    batch: Range
    kv: Range
    heads: Range
    rows: Range
    keys: Range

    def whole(self, a: Attention) -> bool:
        """Whether it has all there is of its heads."""
        return self.rows == (0, a.n_q) and self.keys == (0, a.n_k)

    def box(self, name: str, columns: int) -> Box:
        """The piece's part of an output."""
        heads, rows = (self.heads, self.rows) if name == "dQ" else (self.kv, self.keys)
        return self.batch, heads, rows, (0, columns)

    def sink_box(self, a: Attention) -> Box | None:
        """The piece's part of dsinks; None where it does not have all that adds to it."""
        return (self.heads,) if a.sinks and self.whole(a) and self.batch == (0, a.batch) else None

    def bias_box(self, a: Attention) -> Box | None:
        """The piece's part of dbias; None where it does not have all batches and heads that share a bias."""
        if a.bias is None or not self.whole(a):
            return None
        batch, heads = a.bias_shape[:2]
        if (batch == 1 and self.batch != (0, a.batch)) or (heads == 1 and self.heads != (0, a.heads)):
            return None
        return self.batch if batch > 1 else (0, 1), self.heads if heads > 1 else (0, 1), self.rows, (0, a.n_k)


def check_backward(a: Attention, programs: Sequence[Program], source: Source, seed: int, budget: int) -> list[Check]:
    """Compare dQ, dK and dV of several programs with one float64 computation."""
    totals = [Total(program) for program in programs]
    errors = [errors_of(a, program) for program in programs]
    kinds = list(dict.fromkeys(errors))
    done: list[set[tuple[str, Box]]] = [set() for _ in programs]
    with workers() as threads:
        for piece in _pieces(a, programs, seed, budget):
            exact = _Exact.of(a, source, piece, kinds, any(_has(p, "P") for p in programs), threads.map)
            for total, kind, boxes in zip(totals, errors, done, strict=True):
                for wanted in _demands(a, total.program, piece):
                    total.results.append(exact.compare(total, wanted, kinds.index(kind), threads.map))
                    boxes.update(wanted.items())
    rows = a.batch * (a.heads * a.n_q + 2 * a.kv_heads * a.n_k) + (prod(a.bias_shape[:3]) if a.bias else 0)
    rows += a.heads if a.sinks else 0
    return [
        total.check(sum(prod(hi - lo for lo, hi in box[:3]) for _, box in boxes), rows, _note(a, boxes))
        for total, boxes in zip(totals, done, strict=True)
    ]


def backward_memory(a: Attention, programs: Sequence[Program]) -> int:
    """Bytes that the check holds at least: one head's operands and gradients, and a step of the exact computation."""
    given = any(_has(program, "P") for program in programs)
    pairs = a.group * a.n_q * a.n_k
    matrices = 16 * pairs if given and pairs <= _MOST_SCORES // 4 else 0
    return 20 * (a.n_q * a.group + 2 * a.n_k) * (a.d + a.d_v) + 64 * oracle_rows(a.n_k) * a.n_k + matrices


def _has(program: Program, name: str) -> bool:
    return any((t.name, t.role) == (name, "in") for t in program.tensors)


def _note(a: Attention, boxes: set[tuple[str, Box]]) -> str:
    """What a check of pieces of heads left out."""
    have = {name for name, _ in boxes}
    missing = [name for name in ("dQ", "dK", "dV") if name not in have]
    note = f"; not {' and '.join(missing)}, for which the program needs whole n_q x n_k matrices" if missing else ""
    for name, there in (("dbias", a.bias is not None), ("dsinks", a.sinks)):
        if there and name not in have:
            note += f"; not {name}, to which batches or heads add that are not all checked"
    if any(name == "dQ" and box[2] != (0, a.n_q) for name, box in boxes):
        note += "; dO is 0 outside of sampled rows"
    return note


def errors_of(a: Attention, program: Program) -> Errors:
    """The numbers of the module's derivation."""
    data, tensors = DTYPES[a.dtype], {t.name: t for t in program.tensors}
    given = DTYPES[tensors["P"].dtype] if _has(program, "P") else None
    stored = DTYPES[tensors["dP"].dtype] if "dP" in tensors else None
    r, half = data.roundoff, max(data.smallest / 2, FLUSH)
    sums = U * chain(max(a.n_k, a.n_q * a.group, a.batch * a.heads if a.bias else 1))
    times = 1 + ("dP dropped" in tensors)
    dp, capped = times * stored.roundoff if stored else 0.0, "dS through cap" in tensors
    changed = not {"soft-cap", "ALiBi", "bias"}.isdisjoint(a.features)
    again = r if given is None or given.roundoff < r else 0.0
    return Errors(
        score=0.0 if given else U * (chain(a.d) + 5 + 16 * changed),
        lse=0.0 if given else 6 * U,
        weight=given.roundoff + U if given else 8 * U,
        least=max(given.smallest / 2, FLUSH) if given else FLUSH,
        values=again + sums + 4 * U,
        scores=r * (1 + capped) + dp + sums + 8 * U,
        product=U * chain(a.d_v),
        floor=half * (1 + capped) + (times * max(stored.smallest / 2, FLUSH) / (1 - a.dropout) if stored else 0),
        row=given.roundoff + dp + U * (chain(a.n_k) + 2) if given else r + U * (chain(a.d_v) + 2),
        row_floor=data.smallest / 2,
        from_p=given is not None,
        cap=4 * U,
        capped=U * (chain(a.d) + 16),
        sums=U * (chain(a.batch * a.n_q) + 8),
    )


# ---------------------------------------------------------------- which part


def _pieces(a: Attention, programs: Sequence[Program], seed: int, budget: int) -> Iterator[_Piece]:
    """All key/value heads with their query heads, or as many as the budget allows, or pieces of some."""
    pairs = a.group * a.n_q * a.n_k
    random = np.random.default_rng([seed, a.n_q])
    if a.batch * a.kv_heads <= MOST_HEADS and a.batch * a.kv_heads * pairs <= budget:
        together = max(1, BAND_PAIRS // pairs)
        batches, heads = max(1, together // a.kv_heads), together
        if a.bias is not None:  # what shares one goes together
            batches = batches if a.bias_shape[0] > 1 else a.batch
            heads = heads if a.bias_shape[1] > 1 else a.kv_heads
        for batch in cut(a.batch, batches):
            for kv in cut(a.kv_heads, heads):
                yield _whole(a, batch, kv)
    elif pairs <= budget:
        count = min(max(1, budget // SAMPLED // pairs), MOST_BANDS, a.batch * a.kv_heads)
        for n in sorted(random.choice(a.batch * a.kv_heads, count, replace=False)):
            first, head = divmod(int(n), a.kv_heads)
            yield _whole(a, (first, first + 1), (head, head + 1))
    else:
        yield from _samples(a, programs, random, budget // SAMPLED)


def _whole(a: Attention, batch: Range, kv: Range) -> _Piece:
    return _Piece(batch, kv, (kv[0] * a.group, kv[1] * a.group), (0, a.n_q), (0, a.n_k))


def _samples(a: Attention, programs: Sequence[Program], random: np.random.Generator, budget: int) -> Iterator[_Piece]:
    """Rows of a query head, the last and the first ones first, and keys that they see, their last ones first."""
    block_q, block_k = block_rows(a, programs, narrow=True), _block_keys(a, programs)
    share = min(BAND_PAIRS, budget // FEW_BANDS)
    rows, keys = max(block_q, share // a.n_k // block_q * block_q), max(block_k, share // a.n_q // block_k * block_k)
    starts = range(0, a.n_q, rows)
    cost = min(rows, a.n_q) * a.n_k + min(keys, a.n_k) * a.n_q * a.group
    count = min(MOST_BANDS, max(2, budget // cost), a.batch * a.heads * len(starts))
    chosen: dict[tuple[int, int, int], None] = {}
    while len(chosen) < count:
        batch, head, place = (int(random.integers(n)) for n in (a.batch, a.heads, len(starts)))
        chosen[batch, head, {0: len(starts) - 1, 1: 0}.get(len(chosen), place)] = None
    for n, (batch, head, place) in enumerate(chosen):
        band = starts[place], min(starts[place] + rows, a.n_q)
        seen = visible(a, band[0], band[1] - band[0])[0]
        first, last = seen.start // keys, (seen.stop - 1) // keys
        tile = last if n == 0 else int(random.integers(first, last + 1))
        kv = head // a.group
        columns = tile * keys, min((tile + 1) * keys, a.n_k)
        yield _Piece((batch, batch + 1), (kv, kv + 1), (head, head + 1), band, columns)


def _block_keys(a: Attention, programs: Sequence[Program]) -> int:
    """Keys of the largest tile of dK or dV that a program stores."""
    sizes = [1]
    for program in programs:
        for kernel in program.kernels:
            for node, _ in walk(kernel.body):
                if isinstance(node, Store) and node.view.tensor.shape[:3] == (a.batch, a.kv_heads, a.n_k):
                    span = node.view.index[2]
                    sizes.append(span.size if isinstance(span, Span) else 1)
    return max(sizes)


def _demands(a: Attention, program: Program, piece: _Piece) -> list[dict[str, Box]]:
    """The piece's parts of the outputs, in as few replays as compute little else; those that need too much left out."""
    columns = {"dQ": a.d, "dK": a.d, "dV": a.d_v}
    boxes = {name: piece.box(name, n) for name, n in columns.items()}
    if piece.whole(a):
        more = {"dbias": piece.bias_box(a), "dsinks": piece.sink_box(a)}
        return [boxes | {name: box for name, box in more.items() if box is not None}]
    out = [{"dQ": boxes["dQ"]}]
    both = {name: boxes[name] for name in ("dK", "dV")}
    for some in [both] if _affordable(a, program, both) else [{name: box} for name, box in both.items()]:
        if _affordable(a, program, some):
            out.append(some)
    return out


def _affordable(a: Attention, program: Program, wanted: Mapping[str, Box]) -> bool:
    """Whether a program computes this without holding too much of n_q x n_k matrices."""
    shapes = {t.name: t.shape for t in program.tensors}
    touched = region(narrowed(program, wanted), wanted).touched
    scores = [box for name, box in touched.items() if shapes[name] == (a.batch, a.heads, a.n_q, a.n_k)]
    return sum(prod(hi - lo for lo, hi in box) for box in scores) <= _MOST_SCORES


# ---------------------------------------------------------------- exact results, and those of a program


@dataclass(frozen=True, slots=True)
class _Exact:
    """The float64 results of a piece, by name: arrays (batch, heads, rows, ..); slack by kind of errors."""

    attention: Attention
    source: Source
    piece: _Piece
    given: Mapping[str, Single | Double]  # dO, O, L and, where asked for, P
    results: Mapping[str, Double]
    slack: Sequence[Mapping[str, Double]]

    @classmethod
    def of(
        cls, a: Attention, source: Source, piece: _Piece, kinds: Sequence[Errors], keep_p: bool, inner: Mapper
    ) -> _Exact:
        """Compute a piece head by head."""
        lead = [hi - lo for lo, hi in (piece.batch, piece.heads, piece.rows)]
        rows, keys = piece.rows, piece.keys[1] - piece.keys[0]
        given: dict[str, Single | Double] = {"O": np.empty((*lead, a.d_v)), "L": np.empty(lead)}
        given["dO"] = gather(source, "dO", (piece.batch, piece.heads, rows, (0, a.d_v)))
        if keep_p:
            names = ("P", "P dropped", "kept") if a.dropout else ("P",)
            given |= {name: np.empty((*lead, a.n_k), np.float32) for name in names}
        shared = lead[0], piece.kv[1] - piece.kv[0], keys

        summed = {"dbias": piece.bias_box(a), "dsinks": piece.sink_box(a)}

        def outputs() -> dict[str, Double]:
            out = {"dQ": np.empty((*lead, a.d)), "dK": np.empty((*shared, a.d)), "dV": np.empty((*shared, a.d_v))}
            more = {name: np.zeros([hi - lo for lo, hi in box]) for name, box in summed.items() if box is not None}
            return out | more

        exact = cls(a, source, piece, given, outputs(), [outputs() for _ in kinds])
        for b in range(lead[0]):
            for kv in range(shared[1]):
                exact._head(b, kv, kinds, inner)
        return exact

    def _head(self, b: int, kv: int, kinds: Sequence[Errors], inner: Mapper) -> None:
        """Fill in one key/value head, by index within the piece, and its query heads."""
        a, piece, source = self.attention, self.piece, self.source
        batch, head = piece.batch[0] + b, piece.kv[0] + kv
        k, v = (source.rows(name, batch, head, (0, a.n_k)) for name in "KV")
        of = Operands.of(a, k, v, piece.keys, source.values_std is not None)
        sums, step = Sums(of, len(kinds)), oracle_rows(a.n_k)
        for h in range(max(piece.heads[0], head * a.group), min(piece.heads[1], (head + 1) * a.group)):
            at, (lo, hi) = (b, h - piece.heads[0]), piece.rows
            q, do = source.rows("Q", batch, h, piece.rows), self.given["dO"][at].astype(np.float32)
            bias = None if a.bias is None else source.rows("bias", *self._of_bias(batch, h), piece.rows)
            sink = float(source.rows("sinks", 0, h, (0, 1))[0, 0]) if a.sinks else None

            def block(
                first: int,
                q: Single = q,
                do: Single = do,
                h: int = h,
                bias: Single | None = bias,
                sink: float | None = sink,
            ) -> Step:
                rows = slice(first - lo, min(first + step, hi) - lo)  # noqa: B023 - used at once
                own = None if bias is None else bias[rows]
                return differentiate(of, q[rows], do[rows], first, kinds, "P" in self.given, (batch, h), own, sink)

            for first, result in zip(range(lo, hi, step), inner(block, range(lo, hi, step)), strict=True):
                self._rows((*at, slice(first - lo, min(first + step, hi) - lo)), result)
                sums.add(result.part)
        self.results["dK"][b, kv], self.results["dV"][b, kv] = sums.dk, sums.dv
        for n, slack in enumerate(self.slack):
            slack["dK"][b, kv], slack["dV"][b, kv] = sums.slack(n)

    def _rows(self, at: tuple[int, int, slice], step: Step) -> None:
        self.given["O"][at], self.given["L"][at], self.results["dQ"][at] = step.o, step.lse, step.dq
        if step.p is not None:
            self.given["P"][at] = step.p
            if self.attention.dropout:
                self._dropped(at, step.p)
        for slack, dq in zip(self.slack, step.dq_slack, strict=True):
            slack["dQ"][at] = dq
        if "dsinks" in self.results:
            self.results["dsinks"][at[1]] += step.dsink
            for slack, off in zip(self.slack, step.dsink_slack, strict=True):
                slack["dsinks"][at[1]] += off
        if step.dbias is not None and "dbias" in self.results:
            batch, head = self._of_bias(*at[:2])
            self.results["dbias"][batch, head, at[2]] += step.dbias
            for slack, each in zip(self.slack, step.dbias_slack, strict=True):
                slack["dbias"][batch, head, at[2]] += each

    def _dropped(self, at: tuple[int, int, slice], p: Single) -> None:
        """What a forward pass keeps of dropout, for some rows of one head."""
        a, piece = self.attention, self.piece
        place, first = (piece.batch[0] + at[0], piece.heads[0] + at[1]), piece.rows[0] + at[2].start
        left = kept_weights(a, [place], first, len(p), slice(0, a.n_k))[0]
        self.given["kept"][at] = left
        self.given["P dropped"][at] = p * left / (1 - a.dropout)

    def _of_bias(self, batch: int, head: int) -> tuple[int, int]:
        """Which of the matrices of the bias, or of its gradient, is that of a batch and a query head."""
        batches, heads = self.attention.bias_shape[:2]
        return batch if batches > 1 else 0, head if heads > 1 else 0

    def give(self, tensor: Tensor, box: Box) -> Single:
        """An input of a program, see replay."""
        if tensor.name in self.given:
            whole = self.given[tensor.name]
            out = np.full([hi - lo for lo, hi in box], _NO_WEIGHT if tensor.name == "L" else 0, np.float32)
            have = (self.piece.batch, self.piece.heads, self.piece.rows, *((0, n) for n in whole.shape[3:]))
            common = [(max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(box, have, strict=True)]
            if all(lo < hi for lo, hi in common):
                inside, mine = (
                    tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(common, frame, strict=True))
                    for frame in (box, have)
                )
                out[inside] = whole[mine]
        elif tensor.name == "sinks":
            out = np.array([self.source.rows("sinks", 0, h, (0, 1))[0, 0] for h in range(*box[0])], np.float32)
        else:
            out = gather(self.source, tensor.name, box)[..., slice(*box[3])].copy()
        round_to(out, DTYPES[tensor.dtype])
        return out

    def compare(self, total: Total, wanted: Mapping[str, Box], kind: int, mapper: Mapper) -> Result:
        """What a program makes of some outputs."""
        a, whole = self.attention, self.piece.whole(self.attention)
        if whole and not total.idle:
            total.idle.append(Replayer(total.program))
        replayer = total.idle[0] if whole else Replayer(narrowed(total.program, wanted))
        done = replayer.run(self.give, wanted, mapper)
        error = largest = tolerance = worst = 0.0
        failure, data = "", DTYPES[a.dtype]
        for name, box in wanted.items():
            exact, slack, got = self.results[name], self.slack[kind][name], done.outputs[name]
            least = data.smallest / 2 + max(a.n_k, a.n_q * a.group) * LEAST
            bound = slack + data.roundoff * (np.abs(exact) + slack) + least
            off = difference(got, exact)
            ratio, wrong, _ = judge(name, got, exact, off, bound, lambda at: _place(box, at))  # noqa: B023 - at once
            error, largest = max(error, float(np.max(off))), max(largest, float(np.max(np.abs(exact))))
            tolerance, worst, failure = max(tolerance, float(np.max(bound))), max(worst, ratio), failure or wrong
        return Result(error, largest, tolerance, worst, error, failure, done.moved, done.blocks)


def _place(box: Box, at: Index) -> str:
    names = ("batch", "head", "row", "column") if len(box) > 1 else ("head",)
    return ", ".join(f"{name} {lo + n}" for name, (lo, _), n in zip(names, box, at, strict=True))
