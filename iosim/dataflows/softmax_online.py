"""Softmax by rows with maximum and sum in one pass, the sum rescaled where the maximum grows; the output in a second.

Milakov & Gimelshein 2018 (arXiv 1805.02867), Algorithm 3: 3 accesses of device memory an element, 2 where a row fits
on chip.  FlashAttention is this recurrence with the output carried along.
"""

from __future__ import annotations

from iosim.dataflows.row_softmax import softmax_alone
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule

USES = ("softmax_rows", "softmax_cols")
COMPUTES = "softmax"
TAKES = ("global tokens", "block mask")


def softmax_online(a: Attention, s: Schedule) -> Program:
    """P = softmax(S) for S (batch, heads, n_q, n_k) with the masks of `a`, by the row tiles of schedule `s`."""
    return softmax_alone("softmax-online", "online", a, s)
