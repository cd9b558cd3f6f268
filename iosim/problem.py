"""The problem: which attention is to be computed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import sqrt
from operator import index
from typing import SupportsIndex, cast

from iosim.dtypes import dtype
from iosim.errors import InputError, nearest

MAX_N = 2**24  # 16.8 million tokens
MAX_D = 1024
MAX_HEADS = 2**16
SAME = cast(int, None)  # a default that stands for another field's value
ALIGNMENTS = ("bottom-right", "top-left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention call: O = softmax(scale * Q K^T + mask) V, for every batch and query head.

    Shapes: Q (batch, heads, n_q, d), K (batch, kv_heads, n_k, d), V (batch, kv_heads, n_k, d_v),
    O (batch, heads, n_q, d_v), all in `dtype`; the log-sum-exp (batch, heads, n_q) in fp32, an output when
    `lse` is set.  Query head h reads key/value head h // (heads / kv_heads).  `n_k`, `kv_heads` and `d_v`
    default to `n_q`, `heads` and `d`.  Scores are accumulated in fp32.

    `causal_align` says which diagonal a causal mask follows when n_q != n_k: "bottom-right" lets the last query
    see every key (FlashAttention from 2.1 on), "top-left" lets query i see keys 0..i (PyTorch's is_causal).

    Raises InputError for a value out of range, with the value and what is allowed.
    """

    n_q: int
    n_k: int = SAME
    d: int
    d_v: int = SAME
    batch: int = 1
    heads: int = 1
    kv_heads: int = SAME
    causal: bool = False
    causal_align: str = "bottom-right"
    dtype: str = "fp16"
    lse: bool = False
    accumulator: str = field(default="fp32", init=False)

    def __post_init__(self) -> None:
        for name, of in (("n_k", self.n_q), ("d_v", self.d), ("kv_heads", self.heads)):
            if getattr(self, name) is SAME:
                object.__setattr__(self, name, of)
        limits = {"n_q": MAX_N, "n_k": MAX_N, "d": MAX_D, "d_v": MAX_D,
                  "batch": MAX_HEADS, "heads": MAX_HEADS, "kv_heads": MAX_HEADS}  # fmt: skip
        for name, most in limits.items():
            object.__setattr__(self, name, require_int(name, getattr(self, name), 1, most))
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            close = min(divisors, key=lambda k: abs(k - self.kv_heads))
            raise InputError(
                f"heads: {self.heads} is not a multiple of kv_heads ({self.kv_heads}); "
                f"the nearest kv_heads that divides it is {close}"
            )
        for name in ("causal", "lse"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: {getattr(self, name)!r} is not true or false")
        if self.causal_align not in ALIGNMENTS:
            hint = nearest(str(self.causal_align), ALIGNMENTS)
            raise InputError(f"causal_align: {self.causal_align!r} is not one of {', '.join(ALIGNMENTS)}{hint}")
        object.__setattr__(self, "dtype", dtype(self.dtype).name)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """1 / sqrt(d), applied to the scores before the softmax."""
        return 1 / sqrt(self.d)

    @property
    def diagonal(self) -> int:
        """A causal mask lets query i see keys j <= i + diagonal."""
        return self.n_k - self.n_q if self.causal_align == "bottom-right" else 0

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs over all batches and query heads, counted exactly."""
        one_head = self.n_q * self.n_k
        if self.causal:
            # Query i sees min(n_k, max(0, i + 1 + diagonal)) keys: a ramp from `first` on, cut at n_k.
            first = max(0, -self.diagonal)  # queries before it see nothing
            full = min(self.n_q, max(0, self.n_k - 1 - self.diagonal))  # queries from here on see all keys
            ramp = range(min(first, full), full)
            one_head = (self.n_q - full) * self.n_k
            if ramp:
                one_head += len(ramp) * (ramp[0] + ramp[-1] + 2 + 2 * self.diagonal) // 2
        return one_head * self.batch * self.heads

    @property
    def flops(self) -> int:
        """Forward FLOPs by the papers' convention: 2 * pairs * (d + d_v); softmax is not counted."""
        return 2 * self.pairs * (self.d + self.d_v)

    def as_dict(self) -> dict[str, int | str | bool]:
        """The fields under the names of the JSON output."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def require_int(name: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int in [low, high]; raises InputError that names the field and the range otherwise."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InputError(f"{name}: {value!r} is not a whole number")
    number = index(value)  # an int also from numpy's integers
    if not low <= number <= high:
        raise InputError(f"{name}: {number} is out of range; {low} to {high} is allowed")
    return number
