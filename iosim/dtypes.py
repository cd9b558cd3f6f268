"""Number formats: their names, sizes and precision.  One row a format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from iosim.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class DType:
    """A binary number format: floating point, or whole numbers, which are floating point below its least exponent.

    `bits` counts the significand with its hidden bit, so the unit roundoff is 2**-bits.
    `least_exponent` is the exponent of the smallest normal number, `largest` the largest finite one.  What rounds to
    more is infinite, or, where the format `saturates`, the largest.
    """

    name: str
    bytes: int
    bits: int
    least_exponent: int
    largest: float
    saturates: bool = False

    @property
    def roundoff(self) -> float:
        """Largest relative error of rounding to nearest: half a unit in the last place."""
        return 2.0**-self.bits

    @property
    def smallest(self) -> float:
        """The smallest positive (subnormal) number."""
        return 2.0 ** (self.least_exponent - self.bits + 1)


DTYPES = {
    row.name: row
    for row in (
        DType("fp16", 2, 11, -14, 65504.0),
        DType("bf16", 2, 8, -126, 2.0**127 * (2 - 2.0**-7)),
        DType("fp32", 4, 24, -126, 2.0**127 * (2 - 2.0**-23)),
        # OCP's E4M3: no infinities, NaN above 448.  GPUs convert to it with .satfinite: infinity becomes 448 too.
        DType("fp8_e4m3", 1, 4, -6, 448.0, saturates=True),
        DType("int8", 1, 8, 7, 127.0, saturates=True),  # symmetric, as caches have it: -127 to 127
    )
}

CACHED = ("fp8_e4m3", "int8")  # what a K/V cache can be kept in, beside the dtype of Q
DATA = tuple(name for name in DTYPES if name != "int8")  # of a problem: what matrix units take here

ALIASES = {
    "float16": "fp16", "half": "fp16", "f16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32", "float": "fp32", "f32": "fp32",
    "fp8": "fp8_e4m3", "e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3",
}  # fmt: skip


@lru_cache(maxsize=64)
def dtype(name: str) -> DType:
    """The format called `name` (its iosim name or a usual alias).

    Raises InputError, with the nearest name, for any other.
    """
    known = DTYPES.get(ALIASES.get(name.lower(), name.lower()))
    if known is None:
        hint = nearest(name, [*DATA, *ALIASES])
        raise InputError(f"dtype: {name!r} is not one of {', '.join(DATA)}{hint}")
    return known
