"""key_tiles and query_tiles against the masks themselves, tile by tile."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from iosim.dataflows.tiles import Edges, key_tiles, query_tiles
from iosim.index import Index, at
from iosim.problem import Attention

Seen = list[list[bool]]


def mask(a: Attention) -> Seen:
    """[query][key]: seen or not."""
    shift = a.n_k - a.n_q if a.causal_align == "bottom-right" else 0

    def sees(query: int, key: int) -> bool:
        early = a.window is not None and key <= query + shift - a.window
        return not early and not (a.causal and key > query + shift)

    return [[sees(query, key) for key in range(a.n_k)] for query in range(a.n_q)]


def assert_edges(edges: Edges, index: str, tiles: int, others: int, cell: Callable[[int, int], list[bool]]) -> None:
    """`cell(n, m)` has whether each pair of tiles n and m is unmasked; False beyond the last key."""
    for n in range(tiles):
        lo, left, right, hi = (at(e, {index: n}) for e in edges)
        assert left <= right
        for m in range(others):
            assert (lo <= m < hi) == any(cell(n, m)), "visited where something is seen"
            if lo <= m < hi and not all(cell(n, m)):
                assert m < left or m >= right, "masked where something is not"
            elif lo <= m < hi:
                assert left <= m < right, "not masked where all is seen"


@given(
    n_q=st.integers(1, 24),
    n_k=st.integers(1, 24),
    causal=st.booleans(),
    align=st.sampled_from(["bottom-right", "top-left"]),
    window=st.none() | st.integers(1, 26),
    block_q=st.integers(1, 9),
    block_k=st.integers(1, 9),
)
def test_tiles_are_visited_where_something_is_seen_and_masked_where_not_all_is(
    n_q: int, n_k: int, causal: bool, align: str, window: int | None, block_q: int, block_k: int
) -> None:
    a = Attention(n_q=n_q, n_k=n_k, d=8, causal=causal, causal_align=align, window=window)
    seen = mask(a)

    def cell(i: int, j: int) -> list[bool]:
        queries = range(i * block_q, min((i + 1) * block_q, n_q))
        return [k < n_k and seen[q][k] for q in queries for k in range(j * block_k, (j + 1) * block_k)]

    q_tiles, k_tiles = -(-n_q // block_q), -(-n_k // block_k)
    assert_edges(key_tiles(a, Index("i"), block_q, block_k), "i", q_tiles, k_tiles, cell)
    transposed = query_tiles(a, Index("j"), block_q, block_k)
    assert_edges(transposed, "j", k_tiles, q_tiles, lambda j, i: cell(i, j))
