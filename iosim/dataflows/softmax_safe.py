"""Softmax by rows as libraries compute it: maximum, sum of exp(x - maximum), output, each in a pass of its own.

Milakov & Gimelshein 2018 (arXiv 1805.02867), Algorithm 2: 4 accesses of device memory an element, 2 where a row fits
on chip.
"""

from __future__ import annotations

from iosim.dataflows.row_softmax import softmax_alone
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule

USES = ("softmax_rows", "softmax_cols")
COMPUTES = "softmax"
TAKES = ("global tokens", "block mask")


def softmax_safe(a: Attention, s: Schedule) -> Program:
    """P = softmax(S) for S (batch, heads, n_q, n_k) with the masks of `a`, by the row tiles of schedule `s`."""
    return softmax_alone("softmax-safe", "safe", a, s)
