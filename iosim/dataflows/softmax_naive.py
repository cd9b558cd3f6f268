"""Softmax by rows, unguarded: the sum of exp(x) in one pass over the matrix, the output in a second.

Milakov & Gimelshein 2018 (arXiv 1805.02867), Algorithm 1: 3 accesses of device memory an element, 2 where a row fits
on chip.  Scores above 88 overflow float32, so that the row becomes NaN.
"""

from __future__ import annotations

from iosim.dataflows.row_softmax import softmax_alone
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule

USES = ("softmax_rows", "softmax_cols")
COMPUTES = "softmax"
TAKES = ("global tokens", "block mask")


def softmax_naive(a: Attention, s: Schedule) -> Program:
    """P = softmax(S) for S (batch, heads, n_q, n_k) with the masks of `a`, by the row tiles of schedule `s`."""
    return softmax_alone("softmax-naive", "naive", a, s)
