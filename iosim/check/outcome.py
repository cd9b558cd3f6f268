"""What a check came to: errors, their bounds, and where the first element lies that is too far away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.interpreters.replay import Replayer
from iosim.program import Compute, Program, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

Index: TypeAlias = tuple[int, ...]
U, LEAST = 2.0**-24, 2.0**-149  # of float32: roundoff, smallest number
FLUSH = 2.0**-125  # what an exp flushed to zero takes from a weight whose largest is 1
_LARGEST_EXPONENT = 88.7  # exp of more is infinite in float32
_SMALLEST_EXPONENT = -87.3  # exp of less is flushed to zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of a check.

    `max_abs_error` is the largest |output - float64|, `rel_error` that over the largest |output|, `tolerance` the
    largest bound that was applied, and `worst_ratio` the largest error (of all outputs, and of S where a program
    stores it) over its own bound: at most 1 when the check passes.  The outputs are O, softmax's P, or dQ, dK and dV;
    L counts for `worst_ratio` alone.  A program that stores S is compared with the float64 softmax of the S that it
    stored, which is checked too; `plain_error` compares with float64 alone.
    `rows_checked` and `rows_total` count the rows of these outputs.  `status` is "passed", "failed" or "skipped".
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


def skipped(attention: Attention, why: str = "not checked") -> Check:
    """The outcome of a check that was not asked for, or that cannot be."""
    total = attention.batch * attention.heads * attention.n_q
    return Check(status="skipped", max_abs_error=0.0, rel_error=0.0, tolerance=0.0, worst_ratio=0.0, plain_error=0.0,
                 rows_checked=0, rows_total=total, detail=why)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What one part of one program came to."""

    error: float
    largest: float
    tolerance: float
    ratio: float
    plain: float
    failure: str
    moved: Mapping[tuple[str, str], int]
    blocks: Index


@dataclass(slots=True)
class Total:
    """A program's results so far."""

    program: Program
    idle: list[Replayer] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def check(self, rows: int, total: int, note: str = "") -> Check:
        """The outcome, for `rows` of `total` rows; `note` says what was left out."""
        results = self.results
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
            detail=failure or f"{share} checked; the largest error is {ratio:.2g} of its bound{note}",
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


def difference(got: Single, wanted: Double) -> Double:
    """|got - wanted|; 0 where both are the same infinity, infinity where only one is a number."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - wanted)
    if not np.isfinite(error).all():
        error[got == wanted] = 0
        error[np.isnan(error)] = np.inf
    return error


def judge(
    name: str, got: Single, wanted: Double, error: Double, bound: Double, place: Callable[[Index], str]
) -> tuple[float, str, Index]:
    """The largest error over its bound; of the first element that exceeds its bound, what is wrong and the index."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = float(np.max(np.where(error == 0, 0, error / bound)))
    if ratio <= 1:
        return ratio, "", ()
    at = tuple(int(n) for n in np.argwhere(~(error <= bound))[0])
    return (
        ratio,
        f"{name} at {place(at)} is {got[at]:.9g}; float64 gives {wanted[at]:.9g}, "
        f"{error[at]:.3g} away where {bound[at]:.3g} is allowed",
        at,
    )


def unguarded(program: Program, got: float, lse: float) -> str:
    """Why a row went wrong whose log-sum-exp is `lse`, if it is that exp is taken of scores as they are."""
    if any(isinstance(n, Compute) and n.op == "rowmax" for kernel in program.kernels for n, _ in walk(kernel.body)):
        return ""
    if lse > _LARGEST_EXPONENT and not np.isfinite(got):
        what, limit = "overflowed", f"float32 ends at exp({_LARGEST_EXPONENT}): above is infinity"
    elif -np.inf < lse < _SMALLEST_EXPONENT:
        what, limit = "underflowed", f"float32 ends at exp({_SMALLEST_EXPONENT}): below is 0"
    else:
        return ""
    return (
        f"; exp {what}: the exponentials of this row's scores add up to exp({lse:.5g}), {limit}, and {program.name} "
        f"does not subtract the row's maximum first"
    )
