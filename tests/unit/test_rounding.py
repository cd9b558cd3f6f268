"""Rounding in float32 arithmetic is a cast there and back, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from iosim.dtypes import DTYPES
from iosim.rounding import round_into, round_to

CASTS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}


def cast(x, name):
    if name == "fp8_e4m3":  # GPUs saturate, ml_dtypes gives NaN
        x = np.clip(x, -448, 448)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(CASTS[name]).astype(np.float32)


def rounded(x, name):
    out = x.copy()
    round_to(out, DTYPES[name])
    return out


def assert_same_bits(got, want):
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


@pytest.mark.parametrize("name", CASTS)
def test_every_number_every_tie_and_their_neighbours(name):
    numbers = np.arange(2**16, dtype=np.uint16).view(CASTS[name]).astype(np.float32)
    finite = np.sort(numbers[np.isfinite(numbers)]).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    above, below = (np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf))
    for x in (numbers, ties, above, below):
        assert_same_bits(rounded(x, name), cast(x, name))


@pytest.mark.parametrize("name", CASTS)
def test_random_bit_patterns(name):
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, np.uint64)
    x = bits.astype(np.uint32).view(np.float32)
    assert_same_bits(rounded(x, name), cast(x, name))


@pytest.mark.parametrize("name", CASTS)
def test_ordinary_and_subnormal_sizes(name):
    x = np.random.default_rng(1).standard_normal(10**5).astype(np.float32)
    for scale in (1, 2**-14, 2**-24, 2**-126, 2**-140, 65504, 2**124):
        y = x * np.float32(scale)
        assert_same_bits(rounded(y, name), cast(y, name))


def test_fp8_overflow_saturates():
    x = np.array([448, 464, 465, -480, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert_same_bits(rounded(x, "fp8_e4m3"), np.array([448, 448, 448, -448, 448, 448, -448, np.nan], np.float32))


def test_overflow_goes_to_infinity_from_the_tie_on():
    x = np.array([65504, 65519.996, 65520, -65520, np.inf, -np.inf, 1e30, -0.0], np.float32)
    assert_same_bits(rounded(x, "fp16"), np.array([65504, 65504, *[np.inf, -np.inf] * 2, np.inf, -0.0], np.float32))


def test_float32_stays_as_it_is():
    x = np.random.default_rng(2).standard_normal(100).astype(np.float32)
    assert_same_bits(rounded(x, "fp32"), x)


@pytest.mark.parametrize("name", CASTS)
def test_any_layout(name):
    whole = np.random.default_rng(3).standard_normal((6, 5, 8)).astype(np.float32)
    for pick in (lambda x: x.T, lambda x: x[:, 1:3], lambda x: x[::2, :, ::3], lambda x: x[:, :1], lambda x: x[:0]):
        changed = whole.copy()
        round_to(pick(changed), DTYPES[name])
        assert_same_bits(np.ascontiguousarray(pick(changed)), np.ascontiguousarray(pick(cast(whole, name))))


@pytest.mark.parametrize("name", [*CASTS, "fp32"])
def test_into_another_array_with_broadcasting(name):
    x = np.random.default_rng(4).standard_normal((3, 1, 4)).astype(np.float32)
    out = np.zeros((3, 2, 4), np.float32)
    round_into(out.transpose(0, 1, 2), x, DTYPES[name])
    want = np.broadcast_to(rounded(x, name), out.shape)
    assert_same_bits(out, np.ascontiguousarray(want))
