"""Rounding float32 values to a narrower format, kept in float32: bit-equal to a cast there and back.

numpy's own casts to float16 take five to fifty times longer, and replay rounds every stored element.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.dtypes import DType

    Array: TypeAlias = NDArray[np.float32]
    Bits: TypeAlias = NDArray[np.int32]

_CHUNK = 1 << 16  # elements rounded at a time: they and two temporaries stay in a core's own cache
_EXPONENT = 0x7F800000
_FP32_BITS, _FP32_LEAST, _FP32_BIAS = 24, -126, 127


def round_to(x: Array, dtype: DType) -> None:
    """Round `x` in place to `dtype`: to nearest, ties to even; NaN stays.

    Overflow goes to infinity, or to the largest number where the format saturates.
    """
    round_into(x, x, dtype)


def round_into(out: Array, x: Array, dtype: DType) -> None:
    """out = x rounded to `dtype`; `out` may be `x`, and `x` broadcasts to it."""
    if dtype.bits == _FP32_BITS:
        if out is not x:
            out[...] = x
        return
    target, source = flat(out), flat(x)
    if target is None or source is None or (out is not x and not _same_layout(out, x)):
        copy = np.empty(out.shape, np.float32)
        copy[...] = x
        round_into(copy, copy, dtype)
        out[...] = copy
        return
    one = _shortened if dtype.least_exponent == _FP32_LEAST else _shifted
    for chunk in _chunks(target.size):
        one(target[chunk], source[chunk], dtype)


def flat(x: Array) -> Array | None:
    """`x` as one line of memory, whatever the order of its axes; None where it has gaps."""
    axes = sorted((n for n in range(x.ndim) if x.shape[n] > 1), key=lambda n: -x.strides[n])
    size = x.itemsize
    for n in reversed(axes):
        if x.strides[n] != size:
            return None
        size *= x.shape[n]
    rest = [n for n in range(x.ndim) if x.shape[n] <= 1]
    return x.transpose(rest + axes).reshape(-1)


def _same_layout(a: Array, b: Array) -> bool:
    return a.shape == b.shape and all(n < 2 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, _CHUNK):
        yield slice(start, start + _CHUNK)


def _shortened(out: Array, x: Array, dtype: DType) -> None:
    """For a format with float32's exponents: add half a unit less the even bit, then cut the low bits off."""
    drop = _FP32_BITS - dtype.bits
    bits = x.view(np.int32)
    nan = np.isnan(x) if np.maximum.reduce(bits & _EXPONENT) == _EXPONENT else None
    rounded = bits >> drop
    rounded &= 1
    rounded += (1 << (drop - 1)) - 1
    rounded += bits
    rounded &= -1 << drop
    out[...] = rounded.view(np.float32)
    if nan is not None:
        out[nan] = np.nan


def _shifted(out: Array, x: Array, dtype: DType) -> None:
    """For a format with fewer exponents: x + c - c with c = 1.5 * 2^(e + 24 - bits), e the exponent of x.

    float32 keeps 24 bits, so the sum loses just the bits that the format lacks, rounded to nearest even.
    Below the least exponent the step no longer shrinks (subnormals): e is cut there.
    """
    bits = x.view(np.int32)
    c = bits & _EXPONENT
    top = frexp(dtype.largest)[1] - 1  # exponent of the largest finite number
    least = (dtype.least_exponent + _FP32_BIAS) << 23
    overflow = np.maximum.reduce(c) >= (top + _FP32_BIAS) << 23
    signed = np.minimum.reduce(bits) < 0
    np.clip(c, least, (top + 1 + _FP32_BIAS) << 23, out=c)
    c += ((_FP32_BITS - dtype.bits) << 23) + (1 << 22)
    shift = c.view(np.float32)
    sign = bits & np.int32(-(2**31)) if signed else None
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.add(x, shift, out=out)
    out -= shift
    if sign is not None:  # -0 and what rounds to it
        np.bitwise_or(out.view(np.int32), sign, out=out.view(np.int32))
    if overflow:
        beyond = np.float32(dtype.largest if dtype.saturates else np.inf)
        np.copyto(out, np.copysign(beyond, out), where=np.abs(out) > np.float32(dtype.largest))
