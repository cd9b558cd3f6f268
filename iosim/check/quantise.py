"""Operands in fp8 or int8: codes and scales, made from values as a kernel's caller makes them.

A scale is the largest magnitude of its block over the largest number of the format, in fp32, and at least 2^-60; a
code is a value over its scale, rounded.  So one value far from the others costs those of its block their precision.

Incoherent processing (FlashAttention-3, section 3.3) spreads such values: the rows of Q and K are multiplied by one
random orthogonal matrix M before they are rounded.  (Q M)(K M)^T = Q K^T, so that only the roundings differ.  It is
done when Q and K are written: the paper fuses it with the rotary embedding, which reads and writes them anyway, so that
it costs no traffic.  It changes no node of a program, nor when or where one runs: it is neither Program nor Schedule,
but a way to make operands, like the choice of a scale, and stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.dtypes import DTYPES
from iosim.index import cdiv
from iosim.problem import FP8
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.check.inputs import Source
    from iosim.interpreters.region import Box, Range
    from iosim.problem import Attention
    from iosim.program import Program

    Single: TypeAlias = NDArray[np.float32]
    Double: TypeAlias = NDArray[np.float64]

_LEAST = 2.0**-60  # so that products and quotients of scales are normal numbers
_ROWS = 8192  # that are looked at together


def scaled_rows(program: Program) -> dict[str, int]:
    """The rows that share a scale, for each input of a program that has scales."""
    return {t.scales.tensor: t.scales.rows for t in program.tensors if t.scales is not None}


@dataclass(frozen=True, slots=True)
class Quantised:
    """A Source of codes in 8 bits, and of their scales, made from another source's values.

    `blocks` says how many rows of Q, K and V share a scale; what is not named has a scale of 1.  With `wide` K and V
    are a cache in `dtype` beside a Q in that format, to which blocks widen them: it is then what `decoded` gives.
    `whole`: all blocks of a head get the head's own scale, as a tensor quantised as a whole has.  `transform` (d, d)
    multiplies Q's and K's rows first.
    """

    source: Source
    attention: Attention
    blocks: Mapping[str, int]
    whole: bool = False
    transform: Double | None = None
    dtype: str = FP8
    wide: str = ""
    _known: dict[tuple[str, int, int], Single] = field(default_factory=dict, repr=False)

    @property
    def values_std(self) -> float | None:
        """See Source; a code times its scale may exceed the value by its rounding."""
        std = self.source.values_std
        return None if std is None else std * (1 + DTYPES[self.dtype].roundoff)

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """The codes, see Source."""
        if self.wide and name not in self.blocks:
            return self.source.rows(name, batch, head, rows)
        out = self._values(name, batch, head, rows) / self._by_row(name, batch, head, rows)
        round_to(out, DTYPES[self.dtype])
        return out

    def scales(self, name: str, box: Box) -> Single:
        """A (batch, heads, blocks) box of the scales of an input."""
        lead = [[self._scales(name, b, h)[slice(*box[2])] for h in range(*box[1])] for b in range(*box[0])]
        return np.array(lead, np.float32)

    def decoded(self, name: str, box: Box, codes: Single) -> Single:
        """What the codes of a (batch, heads, rows, columns) box stand for, in float32."""
        factors = [[self._by_row(name, b, h, box[2]) for h in range(*box[1])] for b in range(*box[0])]
        out: Single = codes * np.array(factors, np.float32)
        if self.wide:
            round_to(out, DTYPES[self.wide])
        return out

    def _values(self, name: str, batch: int, head: int, rows: Range) -> Single:
        values = self.source.rows(name, batch, head, rows)
        if self.transform is None or name == "V":
            return values
        return (values.astype(np.float64) @ self.transform).astype(np.float32)

    def _by_row(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """The scale of each row, as a column."""
        if name not in self.blocks:
            return np.ones((rows[1] - rows[0], 1), np.float32)
        return self._scales(name, batch, head)[np.arange(*rows) // self.blocks[name], None]

    def _scales(self, name: str, batch: int, head: int) -> Single:
        """The scales of one head."""
        if (found := self._known.get((name, batch, head))) is not None:
            return found
        n, block = self.attention.n_q if name == "Q" else self.attention.n_k, self.blocks[name]
        largest = np.zeros(cdiv(n, block), np.float32)
        step = max(block, _ROWS // block * block)
        for first in range(0, n, step):
            rows = first, min(first + step, n)
            most = np.abs(self._values(name, batch, head, rows)).max(-1)
            starts = np.arange(0, len(most), block)
            largest[first // block : first // block + len(starts)] = np.maximum.reduceat(most, starts)
        if self.whole:
            largest[:] = largest.max()
        scales = np.maximum(largest / np.float32(DTYPES[self.dtype].largest), np.float32(_LEAST))
        self._known[name, batch, head] = scales
        return scales


def orthogonal(d: int, seed: int) -> Double:
    """A random orthogonal d x d matrix: Hadamard's with random signs of its rows for a d that is a power of two.

    Otherwise that of a normal matrix's QR factorisation.
    """
    random = np.random.default_rng([seed, d])
    if d & (d - 1):
        q, r = np.linalg.qr(random.standard_normal((d, d)))
        out: Double = q * np.sign(np.diag(r))
        return out
    hadamard = np.ones((1, 1))
    while len(hadamard) < d:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signed: Double = random.choice([-1.0, 1.0], d)[:, None] * hadamard / np.sqrt(d)
    return signed
