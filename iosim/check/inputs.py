"""Where a check takes a program's inputs from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from iosim.dtypes import DTYPES
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.interpreters.region import Box, Range
    from iosim.problem import Attention

    Single: TypeAlias = NDArray[np.float32]

_CHUNK = 8192  # rows of an input that one stream of random numbers makes
_CHUNK_OF_S = 2**22  # elements of S, whose rows are as long as there are keys
_STREAMS = ("Q", "K", "V", "S", "dO", "bias", "sinks")


class Source(Protocol):
    """Where a check takes Q, K and V from, the scores S for a softmax alone, and the gradient dO for a backward pass.

    Also what is added to scores, "bias", and the "sinks", a number for each head.

    `values_std` is V's standard deviation where V and dO are normal, of mean 0 and independent of Q and K and of each
    other; None otherwise.
    """

    @property
    def values_std(self) -> float | None: ...

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """Rows lo..hi-1 of one head of an input, as float32 rounded to the problem's dtype.

        Not rounded for fp8, whose codes and scales are made of them (see quantise.py).  Sinks are in float32.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Normal random numbers: a stream for each seed, tensor, batch and head, so that sampled heads need no others.

    `q`, `k`, `v`, `s` and `do` are standard deviations.  Of Q and K one element in `1 / outliers` is 30 times larger.
    """

    attention: Attention
    seed: int = 0
    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    s: float = 1.0
    do: float = 1.0
    outliers: float = 0.0

    @property
    def values_std(self) -> float | None:
        return self.v

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """See Source."""
        a = self.attention
        d = {"V": a.d_v, "dO": a.d_v, "S": a.n_k, "bias": a.n_k, "sinks": 1}.get(name, a.d)
        n = 1 if name == "sinks" else a.n_k if name in "KV" else a.n_q
        size = max(1, min(_CHUNK, _CHUNK_OF_S // d)) if name in ("S", "bias") else _CHUNK
        out = np.empty((rows[1] - rows[0], d), np.float32)
        for first in range(rows[0] // size * size, rows[1], size):
            random = np.random.Generator(np.random.SFC64([self.seed, _STREAMS.index(name), batch, head, first]))
            chunk = random.standard_normal((min(size, n - first), d), np.float32)
            chunk *= np.float32(getattr(self, name.lower(), 1.0))
            if self.outliers and name in "QK":
                chunk[random.random(chunk.shape, np.float32) < self.outliers] *= 30
            lo, hi = max(first, rows[0]), min(first + len(chunk), rows[1])
            out[lo - rows[0] : hi - rows[0]] = chunk[lo - first : hi - first]
        if name == "bias":
            round_to(out, DTYPES[a.out_dtype])
        elif not a.is_fp8 and name != "sinks":
            round_to(out, DTYPES[a.dtype])
        return out


@dataclass(frozen=True, slots=True)
class Latent:
    """A Source whose V is the first `columns` of K."""

    source: Source
    columns: int

    @property
    def values_std(self) -> float | None:
        return None

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """See Source."""
        if name == "V":
            return np.ascontiguousarray(self.source.rows("K", batch, head, rows)[:, : self.columns])
        return self.source.rows(name, batch, head, rows)


def large_logits(attention: Attention, seed: int = 0) -> Normal:
    """Inputs whose scaled scores reach about 10^4 on either side."""
    return Normal(attention=attention, seed=seed, q=50.0, k=50.0, s=2500.0)


def gather(source: Source, name: str, box: Box) -> Single:
    """The rows of a (batch, heads, rows, columns) box of an input, with all their columns."""
    heads = [[source.rows(name, b, h, box[2]) for h in range(*box[1])] for b in range(*box[0])]
    if len(heads) == len(heads[0]) == 1:
        return heads[0][0][None, None]
    return np.array(heads)
