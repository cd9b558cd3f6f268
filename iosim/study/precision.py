"""How far each dataflow's O is from float64, by number format: roundings of its operands included.

Q, K and V are drawn in float32, and float64 attention of these is the truth.  Each program gets them in its own format
and is replayed.  Two distributions: N(0, 1), and that of FlashAttention-3's Table 3 (arXiv 2407.08608), which adds to
one entry in a thousand another number from N(0, 100), 100 being its variance.

The paper gives no shape and no mask.  We take one head with all keys seen; d = 128 and n = 8192 by default, where the
paper's figures stand beside ours, and some queries, as rows do not depend on each other.  "head" scales are the paper's
per-tensor ones: there is one head.

What makes unfused attention in fp16 worse (3.2e-4 there against 1.9e-4) is S in fp16.  Over seeds 0 to 15, RMSE of
outliers: no rounding of S 1.92e-4; S rounded after its scaling, as `standard` does, 2.54e-4; before and after, as code
that scales in a kernel of its own does, 3.09e-4; exponentials in fp16 on top, 3.10e-4; Q scaled in fp16 and S rounded,
2.78e-4.  P and O are rounded by all.

Sums of fp8 products are in fp32 here.  Hopper's instructions are said to keep about 14 bits of such a sum
(DeepSeek-V3's report, arXiv 2412.19437); that is not modelled.

Most of the squared error comes from few rows, whose query has an outlier that meets that of a key.  So every second
query has an outlier, and both kinds of rows weigh in the mean as much as they do in the distribution.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from iosim.check.quantise import Quantised, orthogonal, scaled_rows
from iosim.dataflows import Dataflow, dataflow_names, load_dataflow
from iosim.dtypes import DTYPES
from iosim.errors import InputError, nearest
from iosim.interpreters.replay import replay
from iosim.oracle import softmax
from iosim.problem import ACCUMULATORS, FP8, MAX_D, Attention, require_int
from iosim.program import Program, Tensor
from iosim.rounding import round_to
from iosim.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from iosim.interpreters.region import Box, Range

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

N, D = 8192, 128  # the shape that is taken for the paper's
MOST = 2**17  # keys
SEEDS = 100
BLOCK = 128  # rows of a tile, and so of a scale
FORMATS = ("fp16", "bf16", FP8)
INPUTS = ("normal", "outliers")
_OUTLIERS, _OUTLIER_STD = 0.001, 10.0
_ROWS = 128  # of a step in float64


@dataclass(frozen=True, slots=True)
class Error:
    """The root of the mean square of O - float64, and its largest magnitude."""

    rmse: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One dataflow in one format.

    `scales`: "block", "head", or "" where there are none.  `errors` is by the name of the inputs' distribution.
    `paper_rmse` is the figure that FlashAttention-3's Table 3 prints for its distribution, None where it has none and
    for a shape that is not the one taken for the paper's.
    """

    dataflow: str
    dtype: str
    accumulator: str
    scales: str
    incoherent: bool
    errors: Mapping[str, Error]
    paper_rmse: float | None

    @property
    def ratio(self) -> float | None:
        """Our RMSE over the paper's."""
        return None if self.paper_rmse is None else self.errors["outliers"].rmse / self.paper_rmse


@dataclass(frozen=True, slots=True)
class Precision:
    """Errors of dataflows for `queries` queries and `n` keys of one head, over seeds `seed`, `seed` + 1, ...

    `left_out` are reasons why a dataflow has no row for a format.
    """

    n: int
    d: int
    queries: int
    seed: int
    seeds: int
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from iosim.report.notebook import printed
        from iosim.report.precision import render

        return printed(render(self))

    def to_frame(self) -> pd.DataFrame:
        """One row a dataflow and format."""
        import pandas as pd

        return pd.DataFrame([flat(row) for row in self.rows])


def flat(row: Row) -> dict[str, Any]:
    """A row with its errors as plain columns."""
    out: dict[str, Any] = {"dataflow": row.dataflow, "dtype": row.dtype, "accumulator": row.accumulator}
    out |= {"scales": row.scales or None, "incoherent": row.incoherent}
    for name, error in row.errors.items():
        out |= {f"{name}_rmse": error.rmse, f"{name}_max_abs": error.max_abs}
    return out | {"paper_rmse": row.paper_rmse, "paper_ratio": row.ratio}


@dataclass(frozen=True, slots=True)
class _Case:
    """A program and how its operands are made."""

    dataflow: str
    problem: Attention
    program: Program
    scales: str
    incoherent: bool


def precision(
    *,
    n: int = N,
    d: int = D,
    queries: int = 512,
    dataflows: Sequence[str] = (),
    dtypes: Sequence[str] = FORMATS,
    accumulators: Sequence[str] = ACCUMULATORS,
    seed: int = 0,
    seeds: int = 1,
    note: Callable[[str], None] = lambda _: None,
) -> Precision:
    """The error of each dataflow (all forward ones by default) in each format; `note` is told what happens next.

    Raises InputError for bad input.
    """
    n, d = require_int("n", n, 1, MOST), require_int("d", d, 1, MAX_D)
    queries = require_int("queries", queries, 1, MOST)
    seeds, seed = require_int("seeds", seeds, 1, SEEDS), require_int("seed", seed, 0, 2**32 - 1 - SEEDS)
    for name in accumulators:
        if name not in ACCUMULATORS:
            raise InputError(f"accumulator: {name!r} is not one of {', '.join(ACCUMULATORS)}"
                             f"{nearest(name, ACCUMULATORS)}")  # fmt: skip
    flows = [load_dataflow(name) for name in dict.fromkeys(dataflows)] or _forward()
    if other := next((f for f in flows if f.computes != "forward"), None):
        raise InputError(f"dataflow: {other.name} is {other.computes}; only the O of forward dataflows is compared")
    a = Attention(n_q=queries, n_k=n, d=d)
    problems, reasons = _problems(a, dtypes, accumulators)
    cases: list[_Case] = []
    for problem in problems:
        for flow in flows:
            if refusal := flow.refusal(problem):
                reasons.append(refusal.partition(": ")[2].partition(";")[0])
            else:
                cases += _cases(flow, problem)
    reasons = list(dict.fromkeys(reasons))
    if not cases:
        raise InputError(f"precision: nothing is left to compare: {'; '.join(reasons)}")
    sums = _errors(cases, seed, seeds, note)
    rows = [_row(case, {name: sums[name][i] for name in INPUTS}) for i, case in enumerate(cases)]
    return Precision(n, d, queries, seed, seeds, tuple(rows), tuple(reasons))


def _forward() -> list[Dataflow]:
    flows = [load_dataflow(name) for name in dataflow_names()]
    return sorted((f for f in flows if f.computes == "forward"), key=lambda f: f.name != "standard")


def _problems(a: Attention, dtypes: Sequence[str], accumulators: Sequence[str]) -> tuple[list[Attention], list[str]]:
    """The formats that go together, fp32 sums first, and why others do not."""
    out, reasons = [], []
    for accumulator in accumulators:
        for name in dtypes:
            narrow = replace(a, dtype=name)
            try:
                out.append(replace(narrow, accumulator=accumulator))
            except InputError as error:
                reasons.append(f"accumulator {str(error).partition(': ')[2]}")
    return out, reasons


def _cases(flow: Dataflow, a: Attention) -> list[_Case]:
    """A program in every way of making its operands: without scales there is one."""
    tile = Schedule(block_q=BLOCK, block_k=BLOCK, block_d=min(64, a.d), softmax_cols=a.n_k, splits=4)
    program = flow(a, tile)
    if not any(t.name == "O" and t.role == "out" and t.shape == (1, 1, a.n_q, a.d_v) for t in program.tensors):
        raise InputError(f"dataflow: {flow.name} has no output O of shape {(1, 1, a.n_q, a.d_v)}")
    if not (blocks := scaled_rows(program)):
        return [_Case(flow.name, a, program, "", False)]
    by_head = all(rows >= (a.n_q if name == "Q" else a.n_k) for name, rows in blocks.items())
    kinds = ("head",) if by_head else ("block", "head")
    return [_Case(flow.name, a, program, kind, turned) for kind in kinds for turned in (False, True)]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A Source of arrays that are there."""

    arrays: Mapping[str, Single]
    values_std: float | None = None

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:  # noqa: ARG002 - one head
        return self.arrays[name][slice(*rows)]


def draw(a: Attention, inputs: str, seed: int) -> tuple[dict[str, Single], Double]:
    """Q, K and V of one head in float32, and the weight of each query's row in a mean over rows, as a column."""
    random = np.random.default_rng([seed, INPUTS.index(inputs)])
    shapes = {"Q": (a.n_q, a.d), "K": (a.n_k, a.d), "V": (a.n_k, a.d_v)}
    out = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    weights = np.full((a.n_q, 1), 1 / a.n_q)
    if inputs == "outliers":
        hit = {name: random.random(shape) < _OUTLIERS for name, shape in shapes.items() if name != "Q"}
        hit["Q"] = np.zeros(shapes["Q"], bool)
        with_outliers = hit["Q"][1::2]
        with_outliers[...] = _touched(random, *with_outliers.shape)
        share = 1 - (1 - _OUTLIERS) ** a.d  # of the queries that have one
        if len(with_outliers):
            weights[1::2] = share / len(with_outliers)
            weights[::2] = (1 - share) / (a.n_q - len(with_outliers))
        for name, x in out.items():
            x += hit[name] * random.normal(0, _OUTLIER_STD, x.shape)
    return {name: x.astype(np.float32) for name, x in out.items()}, weights


def _touched(random: np.random.Generator, n: int, d: int) -> NDArray[np.bool_]:
    """n rows of d entries of which each is an outlier by chance, of the rows that have one or more."""
    rows = np.zeros((0, d), bool)
    while len(rows) < n:
        drawn = random.random((4096, d)) < _OUTLIERS
        rows = np.concatenate([rows, drawn[drawn.any(1)]])
    return rows[:n]


def _exact(a: Attention, x: Mapping[str, Single]) -> Double:
    """O in float64."""
    q, k, v = (x[name].astype(np.float64) for name in "QKV")
    parts = []
    for at in range(0, a.n_q, _ROWS):
        weights, over, _ = softmax((q[None, at : at + _ROWS] * a.scale) @ k.T, None)
        parts.append((weights[0] @ v) * over[0])
    return np.concatenate(parts)


def _errors(cases: Sequence[_Case], seed: int, seeds: int, note: Callable[[str], None]) -> dict[str, list[Error]]:
    """The errors of every case over all seeds, by distribution."""
    out = {}
    for inputs in INPUTS:
        squares, largest = np.zeros(len(cases)), np.zeros(len(cases))
        for s in range(seed, seed + seeds):
            x, weights = draw(cases[0].problem, inputs, s)
            wanted = _exact(cases[0].problem, x)
            done: dict[tuple[Any, ...], tuple[float, float]] = {}
            for n, case in enumerate(cases):
                key = (replace(case.program, name=""), case.scales, case.incoherent)  # flash3 computes what flash2 does
                if key not in done:
                    note(f"{case.dataflow} in {case.problem.dtype} on {inputs} inputs")
                    off = np.abs(_output(case, x, s) - wanted)
                    done[key] = float(np.sum(weights * off**2)) / off.shape[1], float(np.max(off))
                squares[n] += done[key][0]
                largest[n] = max(largest[n], done[key][1])
        out[inputs] = [Error(float(np.sqrt(q / seeds)), float(m)) for q, m in zip(squares, largest, strict=True)]
    return out


def _output(case: _Case, x: Mapping[str, Single], seed: int) -> Single:
    """O of a replayed program, from values `x` in its format."""
    a = case.problem
    data = DTYPES[a.dtype]
    if case.scales:
        turn = orthogonal(a.d, seed) if case.incoherent else None
        coded = Quantised(_Drawn(x), a, scaled_rows(case.program), case.scales == "head", turn)
    else:
        rounded = {name: value.copy() for name, value in x.items()}
        for value in rounded.values():
            round_to(value, data)
    codes: dict[str, Single] = {}

    def source(tensor: Tensor, box: Box) -> Single:
        if tensor.scales is not None:
            return coded.scales(tensor.scales.tensor, box)
        if not case.scales:
            return rounded[tensor.name][None, None, slice(*box[2]), slice(*box[3])]
        if tensor.name not in codes:
            codes[tensor.name] = coded.rows(tensor.name, 0, 0, (0, tensor.shape[2]))
        return codes[tensor.name][None, None, slice(*box[2]), slice(*box[3])]

    done: Single = replay(case.program, source).outputs["O"][0, 0]
    return done


@cache
def published() -> Mapping[tuple[str, str, str, str, bool], float]:
    """RMSE that FlashAttention-3's Table 3 prints, by (dataflow, dtype, accumulator, scales, incoherent)."""
    path = Path(__file__).parent.parent / "data" / "fa3_rmse.csv"

    def entries() -> Iterator[tuple[tuple[str, str, str, str, bool], float]]:
        with path.open(encoding="utf-8") as file:
            for r in csv.DictReader(file):
                key = (r["dataflow"], r["dtype"], r["accumulator"], r["scales"], r["incoherent"] == "yes")
                yield key, float(r["rmse"])

    return dict(entries())


def _row(case: _Case, errors: Mapping[str, Error]) -> Row:
    a = case.problem
    key = case.dataflow, a.dtype, a.accumulator, case.scales, case.incoherent
    return Row(
        dataflow=case.dataflow,
        dtype=a.dtype,
        accumulator=a.accumulator,
        scales=case.scales,
        incoherent=case.incoherent,
        errors=errors,
        paper_rmse=published().get(key) if (a.n_k, a.d) == (N, D) else None,
    )
