"""sums: closed forms against brute force."""

from __future__ import annotations

from itertools import product
from math import prod
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim import sums
from iosim.index import Ex, Index, at, cdiv, least, most
from iosim.sums import bounds, inside, sum_over, sum_product

I, J, K = Index("i"), Index("j"), Index("k")


def expressions(*leaves: Index) -> st.SearchStrategy[Ex]:
    constants = st.integers(-40, 40)
    return st.recursive(
        st.sampled_from(leaves) | constants,
        lambda e: st.one_of(
            st.builds(lambda a, b: a + b, e, e),
            st.builds(lambda a, b: a - b, e, e),
            st.builds(lambda a, c: a * c, e, st.integers(-7, 7)),
            st.builds(lambda a, c: a // c, e, st.integers(1, 12)),
            st.builds(least, e, e),
            st.builds(most, e, e),
        ),
        max_leaves=7,
    )


def brute(factors: list[Ex], extents: dict[str, int]) -> int:
    boxes = product(*(range(n) for n in extents.values()))
    return sum(prod(at(f, dict(zip(extents, point, strict=True))) for f in factors) for point in boxes)


@given(st.lists(expressions(I), min_size=1, max_size=3), st.integers(0, 400))
def test_a_sum_over_one_index_equals_brute_force(factors: list[Ex], extent: int) -> None:
    assert sum_over(factors, "i", extent) == brute(factors, {"i": extent})


@given(st.lists(expressions(I, J, K), max_size=3), *3 * [st.integers(0, 9)])
def test_a_sum_over_three_indices_equals_brute_force(factors: list[Ex], i: int, j: int, k: int) -> None:
    extents = {"i": i, "j": j, "k": k}
    assert sum_product(factors, extents) == brute(factors, extents)


@given(expressions(I, J), st.integers(-5, 5), st.integers(0, 9), st.integers(-5, 5), st.integers(0, 9))
def test_bounds_hold(e: Ex, i0: int, di: int, j0: int, dj: int) -> None:
    low, high = bounds(e, {"i": (i0, i0 + di), "j": (j0, j0 + dj)})
    box = product(range(i0, i0 + di + 1), range(j0, j0 + dj + 1))
    assert all(low <= at(e, {"i": i, "j": j}) <= high for i, j in box)


def test_bounds_of_a_causal_end_are_exact() -> None:
    # 8 query tiles of 16 see 16, 32, ..., 128 of 100 keys: 1 to ceil(100 / 24) = 5 key tiles of 24.
    assert bounds(cdiv(least((I + 1) * 16, 100), 24), {"i": (0, 7)}) == (1, 5)


def test_inside_is_one_in_the_range_and_zero_elsewhere() -> None:
    assert [at(inside(I, 2, J), {"i": i, "j": 4}) for i in range(6)] == [0, 0, 1, 1, 0, 0]


def test_long_sums_are_exact_beyond_64_bits() -> None:
    # The sum of i**3 for i < n is (n (n - 1) / 2)**2: about 5e30 for n = 2**26, far above 2**64.
    n = 2**26
    assert sum_over([I, I, I], "i", n) == (n * (n - 1) // 2) ** 2


def test_indices_that_no_factor_names_multiply() -> None:
    # 3 * (0 + 1 + 2 + 3) over i, times 2**40 values of j.
    assert sum_product([3, I], {"i": 4, "j": 2**40}) == 18 * 2**40


def test_a_hundred_million_terms_cost_no_more_than_a_few_thousand() -> None:
    # ceil(min(127 (i + 1), 96 n) / 96) has period 96: the sum takes 96 residues whatever the extent is.
    def seconds(extent: int) -> float:
        start = perf_counter()
        sum_over([cdiv(least((I + 1) * 127, 96 * extent), 96), I], "i", extent)
        return perf_counter() - start

    assert min(seconds(2**26) for _ in range(3)) < 5 * min(seconds(2**12) for _ in range(3))


def test_a_period_beyond_the_extent_is_summed_term_by_term() -> None:
    assert sum_over([I // 8191], "i", 8200) == 9  # 8191 zeros, then 9 ones


def test_tied_indices_that_are_both_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "MOST_TERMS", 10)
    # min(i, j) over j is 0 + ... + (i - 1), then i for each of the other n - i.
    n = 2**26
    assert sum_product([least(I, J)], {"i": 10, "j": n}) == sum(i * (i - 1) // 2 + i * (n - i) for i in range(10))
    with pytest.raises(NotImplementedError, match=r"the sum over i < 11, j < 12 of \(min\(i, j\)\)"):
        sum_product([least(I, J)], {"i": 11, "j": 12})


def test_what_is_no_index_expression_is_refused() -> None:
    with pytest.raises(TypeError, match=r"1\.5 is not an index expression"):
        bounds(1.5, {})  # type: ignore[arg-type]
