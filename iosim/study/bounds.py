"""How few HBM accesses any dataflow can do with: inputs and outputs once, and the lower bound for its SRAM.

Saha and Ye 2024 (arXiv 2402.07443, "The I/O Complexity of Attention, or How Optimal is FlashAttention?"): with M
elements of fast memory, computing attention of one N x d head takes Theta(min(N^2 d^2 / M, N^2 d / sqrt(M))) accesses;
the first term is the smaller from M = d^2 on.  A theta has no constant; it is taken as 1 here, so that the bound
compares dataflows and machines but is no floor for a single number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.problem import Attention


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on HBM accesses, in elements of the data dtype over all batches and heads.

    `compulsory` is inputs and outputs once, `theta` the term of Saha and Ye that `formula` names, for `m` elements in
    the SRAM of one processor.  Both bound what a dataflow asks of HBM, not what reaches DRAM behind a cache.
    """

    compulsory: int
    theta: int
    formula: str
    m: int


def bounds(a: Attention, hardware: Hardware, io_bytes: int) -> Bounds:
    """The bounds for one problem on one machine."""
    size = dtype(a.dtype).bytes
    m = hardware.sram.capacity_bytes // size
    pairs = a.pairs
    squared, rooted = pairs * a.d**2 // m, pairs * a.d // max(1, isqrt(m))
    formula = "N^2 d^2 / M" if m >= a.d**2 else "N^2 d / sqrt(M)"
    return Bounds(-(-io_bytes // size), min(squared, rooted), formula, m)
