"""The problem: which attention is to be computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import isfinite, log2, sqrt
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from iosim.dtypes import DATA, dtype
from iosim.errors import InputError, nearest
from iosim.strides import parse

if TYPE_CHECKING:
    from iosim.blockmask import BlockMask

MAX_N = 2**24  # 16.8 million tokens
MAX_D = 1024
MAX_HEADS = 2**16
SAME = cast(int, None)  # a default that stands for another field's value
ALIGNMENTS = ("bottom-right", "top-left")
FP8 = "fp8_e4m3"
ACCUMULATORS = ("fp32", "fp16")
BIASES = ("shared", "heads", "full")  # one matrix, one for each query head, one for each batch and head
LEAST_CAP, MOST_CAP = 2.0**-10, 2.0**20
MOST_DROPPED = 0.99
LAYOUT = "bhsd"
FEATURES = {  # what a dataflow must be written for to take a problem: the field that asks for it, and in words
    "fp8": ("dtype", "fp8"),
    "fp16 accumulator": ("accumulator", "an fp16 accumulator"),
    "soft-cap": ("softcap", "a soft-cap"),
    "ALiBi": ("alibi", "ALiBi"),
    "bias": ("bias", "an additive bias"),
    "sinks": ("sinks", "attention sinks"),
    "global tokens": ("global_tokens", "global tokens"),
    "dropout": ("dropout", "dropout"),
    "block mask": ("block_mask", "a block mask"),
}


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
    It does not imply `causal`; the two together leave each query `window` keys at most.  The first `global_tokens` keys
    stay visible beside a window (a causal mask still hides later ones).
    `block_mask` keeps only the pairs of its blocks that are 1 (see iosim.blockmask); beside it there is no window.

    What changes a score s = scale * q k, in this order: a `softcap` c makes it c * tanh(s / c); `alibi` adds
    -slope * |query + diagonal - key| with the slopes of `alibi_slope`; a `bias` tensor in `out_dtype` is added,
    "shared" (n_q, n_k), one for each of the "heads", or "full" with one for each batch and head.
    With `sinks` each query head has a learned logit that counts in the denominator of its softmax, and has no value.
    `dropout` is the probability with which a weight is set to 0 after the softmax; the others grow by 1 / (1 - it).
    Which, is said by iosim.philox: a function of the element's place alone.

    `layout` says where the elements of Q, K, V and O lie in device memory (see iosim.strides): "bhsd", "bshd" or
    "packed", with padding like "bhsd+8".  It changes no value, but which bytes are fetched beside those asked for.

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
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    sinks: bool = False
    global_tokens: int = 0
    dropout: float = 0.0
    block_mask: BlockMask | None = None
    layout: str = LAYOUT

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
        for name in ("causal", "lse", "alibi", "sinks"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: {getattr(self, name)!r} is not true or false")
        if self.causal_align not in ALIGNMENTS:
            hint = nearest(str(self.causal_align), ALIGNMENTS)
            raise InputError(f"causal_align: {self.causal_align!r} is not one of {', '.join(ALIGNMENTS)}{hint}")
        object.__setattr__(self, "dtype", dtype(self.dtype).name)
        if self.dtype not in DATA:
            raise InputError(f"dtype: {self.dtype} is a format of a K/V cache alone, not one of {', '.join(DATA)}")
        if self.accumulator not in ACCUMULATORS:
            hint = nearest(str(self.accumulator), ACCUMULATORS)
            raise InputError(f"accumulator: {self.accumulator!r} is not one of {', '.join(ACCUMULATORS)}{hint}")
        if self.accumulator == "fp16" and self.dtype != "fp16":
            why = "sums of scaled fp8 values overflow it" if self.is_fp8 else "matrix units have fp32 only for it"
            raise InputError(f"accumulator: fp16 goes with fp16 data, not with {self.dtype}: {why}")
        parse(self.layout)
        self._require_operations()

    def _require_operations(self) -> None:
        """The checks of what changes scores and weights."""
        if self.softcap is not None:
            cap = require_number("softcap", self.softcap, LEAST_CAP, MOST_CAP)
            object.__setattr__(self, "softcap", cap)
        object.__setattr__(self, "dropout", require_number("dropout", self.dropout, 0, MOST_DROPPED))
        if self.bias is not None and self.bias not in BIASES:
            hint = nearest(str(self.bias), BIASES)
            raise InputError(f"bias: {self.bias!r} is not one of {', '.join(BIASES)}{hint}")
        object.__setattr__(self, "global_tokens", require_int("global_tokens", self.global_tokens, 0, MAX_N))
        if self.global_tokens and self.window is None:
            raise InputError("global_tokens: changes nothing without a window, which hides other keys")
        if self.block_mask is not None:
            if self.window is not None:
                raise InputError("block_mask and window: give one of them; a block mask can say what a window does")
            self.block_mask.require(self.n_q, self.n_k)

    @property
    def features(self) -> tuple[str, ...]:
        """Those of FEATURES that it asks for."""
        asked = {
            "fp8": self.is_fp8,
            "fp16 accumulator": self.accumulator == "fp16",
            "soft-cap": self.softcap is not None,
            "ALiBi": self.alibi,
            "bias": self.bias is not None,
            "sinks": self.sinks,
            "global tokens": self.global_tokens > 0,
            "dropout": self.dropout > 0,
            "block mask": self.block_mask is not None,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """Of the bias tensor: (1 or batch, 1 or heads, n_q, n_k)."""
        batch = self.batch if self.bias == "full" else 1
        return batch, 1 if self.bias == "shared" else self.heads, self.n_q, self.n_k

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
        # Query i sees keys first(i) .. end(i) - 1, and those below first(i) that are global.  Both ends climb by 1 a
        # query, and a window of 1 or more keeps first(i) <= end(i), so the sum over the differences of the ends, cut to
        # the keys of a block, is the difference of the sums.
        return self.batch * self.heads * _pairs(self)

    def visible(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """Unmasked pairs of one head among these queries and keys, a block mask left aside."""
        lo, hi = keys
        seen = (queries[1] - queries[0]) * (hi - lo)
        if self.causal:
            seen = _ramp(self.diagonal + 1, queries, (lo, hi))
        if self.window is not None:
            hidden = self.diagonal + 1 - self.window
            seen -= _ramp(hidden, queries, (lo, hi))
            if lo < self.global_tokens:
                seen += _ramp(hidden, queries, (lo, min(hi, self.global_tokens)))
        return seen

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

    def as_dict(self) -> dict[str, Any]:
        """The fields under the names of the JSON output."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"block_mask": None if self.block_mask is None else self.block_mask.as_dict()}


@lru_cache(maxsize=64)
def _pairs(a: Attention) -> int:
    """Pairs of one head that the masks leave."""
    if a.block_mask is None:
        return a.visible((0, a.n_q), (0, a.n_k))
    return sum(a.visible(*box) for box in a.block_mask.boxes(a.n_q, a.n_k))


def alibi_slope(head: Any, heads: int) -> Any:
    """The slope of a query head of `heads`, also for an array of heads (Press, Smith and Lewis 2022, section 3).

    2^(-8 (head + 1) / heads) for a power of 2.  Otherwise those of the power below for the first heads, then every
    second one of the power above, as in the authors' code.
    """
    power = 1 << int(log2(heads))
    first = -8 * (head + 1) / power
    if power == heads:
        return 2.0**first
    between = -8 * (2 * (head - power) + 1) / (2 * power)
    early = head < power  # a truth value, or an array of them
    return 2.0 ** (early * first + (1 - early) * between)


def _ramp(first: int, queries: tuple[int, int], keys: tuple[int, int]) -> int:
    """The sum over the queries i of first + i cut to the range of keys, less where that begins."""
    begin, end = queries
    (low, high), width = keys, keys[1] - keys[0]
    start = min(end, max(begin, low - first))  # queries before it add 0
    full = min(end, max(start, high - first))  # queries from here on add all
    return (full - start) * (2 * (first - low) + start + full - 1) // 2 + (end - full) * width


def require_number(name: str, value: object, low: float, high: float) -> float:
    """`value` as a float if it is a number in [low, high]; raises InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InputError(f"{name}: {value!r} is not a number")
    if not low <= value <= high:
        raise InputError(f"{name}: {value} is out of range; {low:g} to {high:g} is allowed")
    return float(value)


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
