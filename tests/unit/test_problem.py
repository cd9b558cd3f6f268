"""Attention: the counts of a problem against a count of its mask, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.errors import InputError
from iosim.problem import Attention


def seen_pairs(a: Attention) -> int:
    """By the definitions of the masks, one pair after another."""
    shift = a.n_k - a.n_q if a.causal_align == "bottom-right" else 0
    pairs = 0
    for query in range(a.n_q):
        for key in range(a.n_k):
            late = a.causal and key > query + shift
            early = a.window is not None and key <= query + shift - a.window
            pairs += not late and not early
    return a.batch * a.heads * pairs


@given(
    n_q=st.integers(1, 20),
    n_k=st.integers(1, 20),
    causal=st.booleans(),
    causal_align=st.sampled_from(["bottom-right", "top-left"]),
    window=st.none() | st.integers(1, 25),
    batch=st.integers(1, 2),
)
def test_pairs_are_the_unmasked_ones(**shape: Any) -> None:
    a = Attention(d=8, d_v=3, heads=2, **shape)
    assert a.pairs == seen_pairs(a)
    assert a.flops == 2 * a.pairs * (8 + 3)
    assert a.backward_flops == 2 * a.pairs * (3 * 8 + 2 * 3)


def test_backward_is_two_and_a_half_times_forward_where_d_v_is_d() -> None:
    a = Attention(n_q=4096, d=128, causal=True)
    assert 2 * a.backward_flops == 5 * a.flops


def test_a_window_leaves_each_query_that_many_keys() -> None:
    # 4096 queries, 256 keys each, but the first 255 see only 1, 2, ... 255: 4096 * 256 - (255 + 254 + ... + 1).
    a = Attention(n_q=4096, d=128, causal=True, window=256)
    assert a.pairs == 4096 * 256 - 255 * 256 // 2
    assert Attention(n_q=4096, d=128, causal=True, window=4096).pairs == 4096 * 4097 // 2


@pytest.mark.parametrize("window", [0, -1, 2**24 + 1, 1.5, True, "8"])
def test_a_bad_window_is_refused(window: Any) -> None:
    with pytest.raises(InputError, match="window: "):
        Attention(n_q=8, d=8, window=window)
