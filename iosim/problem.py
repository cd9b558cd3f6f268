"""The problem: which attention is to be computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
FP8 = "fp8_e4m3"
ACCUMULATORS = ("fp32", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention call: O = softmax(scale * Q K^T + mask) V, for every batch and query head.

    Shapes: Q (batch, heads, n_q, d), K (batch, kv_heads, n_k, d), V (batch, kv_heads, n_k, d_v),
    O (batch, heads, n_q, d_v), all in `dtype`; the log-sum-exp (batch, heads, n_q) in fp32, an output when
    `lse` is set.  Query head h reads key/value head h // (heads / kv_heads).  `n_k`, `kv_heads` and `d_v`
    default to `n_q`, `heads` and `d`.  Matrix products are accumulated in `accumulator`: fp32, or fp16, which matrix
    units have for fp16 data.

    In fp8 (E4M3) Q, K and V have fp32 scales beside them, one for each block of rows, and O is in bf16, as
    FlashAttention-3 has it: see `out_dtype`.

    `causal_align` says which diagonal a causal mask follows when n_q != n_k: "bottom-right" lets the last query
    see every key (FlashAttention from 2.1 on), "top-left" lets query i see keys 0..i (PyTorch's is_causal).
    A `window` hides all keys but the last `window` up to that diagonal: query i sees keys > i + diagonal - window.
    It does not imply `causal`; the two together leave each query `window` keys at most.

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
    window: int | None = None
    dtype: str = "fp16"
    lse: bool = False
    accumulator: str = "fp32"

    def __post_init__(self) -> None:
        for name, of in (("n_k", self.n_q), ("d_v", self.d), ("kv_heads", self.heads)):
            if getattr(self, name) is SAME:
                object.__setattr__(self, name, of)
        limits = {"n_q": MAX_N, "n_k": MAX_N, "d": MAX_D, "d_v": MAX_D,
                  "batch": MAX_HEADS, "heads": MAX_HEADS, "kv_heads": MAX_HEADS}  # fmt: skip
        for name, most in limits.items():
            object.__setattr__(self, name, require_int(name, getattr(self, name), 1, most))
        if self.window is not None:
            object.__setattr__(self, "window", require_int("window", self.window, 1, MAX_N))
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
        if self.accumulator not in ACCUMULATORS:
            hint = nearest(str(self.accumulator), ACCUMULATORS)
            raise InputError(f"accumulator: {self.accumulator!r} is not one of {', '.join(ACCUMULATORS)}{hint}")
        if self.accumulator == "fp16" and self.dtype != "fp16":
            why = "sums of scaled fp8 values overflow it" if self.is_fp8 else "matrix units have fp32 only for it"
            raise InputError(f"accumulator: fp16 goes with fp16 data, not with {self.dtype}: {why}")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def is_fp8(self) -> bool:
        """Whether Q, K and V are in fp8 and have scales."""
        return self.dtype == FP8

    @property
    def out_dtype(self) -> str:
        """The dtype of O: that of the data, but bf16 for fp8."""
        return "bf16" if self.is_fp8 else self.dtype

    @property
    def score_dtype(self) -> str:
        """The dtype of S where it is stored: that of the data, but fp16 for fp8."""
        return "fp16" if self.is_fp8 else self.dtype

    @property
    def scale(self) -> float:
        """1 / sqrt(d), applied to the scores before the softmax."""
        return 1 / sqrt(self.d)

    @property
    def diagonal(self) -> int:
        """A causal mask lets query i see keys j <= i + diagonal, a window keys j > i + diagonal - window."""
        return self.n_k - self.n_q if self.causal_align == "bottom-right" else 0

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs over all batches and query heads, counted exactly."""
        # Query i sees keys first(i) .. end(i) - 1.  Both ends climb by 1 a query and are cut to 0 .. n_k, and a window
        # of 1 or more keeps first(i) <= end(i), so the sum of the differences is the difference of the sums.
        one_head = self._ramp(self.diagonal + 1) if self.causal else self.n_q * self.n_k
        if self.window is not None:
            one_head -= self._ramp(self.diagonal + 1 - self.window)
        return one_head * self.batch * self.heads

    @property
    def flops(self) -> int:
        """Forward FLOPs by the papers' convention: 2 * pairs * (d + d_v); softmax is not counted."""
        return 2 * self.pairs * (self.d + self.d_v)

    @property
    def backward_flops(self) -> int:
        """Backward FLOPs by the papers' convention: 2 * pairs * (3 * d + 2 * d_v), 2.5 times the forward at d = d_v.

        Five products: S = Q K^T again, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q.
        """
        return 2 * self.pairs * (3 * self.d + 2 * self.d_v)

    def as_dict(self) -> dict[str, int | str | bool | None]:
        """The fields under the names of the JSON output."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _ramp(self, first: int) -> int:
        """The sum over all queries i of first + i cut to 0 .. n_k."""
        start = min(self.n_q, max(0, -first))  # queries before it add 0
        full = min(self.n_q, max(start, self.n_k - first))  # queries from here on add n_k
        return (full - start) * (2 * first + start + full - 1) // 2 + (self.n_q - full) * self.n_k


def require_int(name: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int in [low, high]; raises InputError that names the field and the range otherwise."""
    if type(value) is int and low <= value <= high:
        return value  # at once: what follows is slow
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InputError(f"{name}: {value!r} is not a whole number")
    number = index(value)  # an int also from numpy's integers
    if not low <= number <= high:
        raise InputError(f"{name}: {number} is out of range; {low} to {high} is allowed")
    return number
