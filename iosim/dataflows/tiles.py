"""Which tiles of a pair of loops hold something to compute, and which of them need a mask: shared by the dataflows.

Query i sees the keys from i + diagonal + 1 - window (a sliding window) to i + diagonal (a causal mask), those inside
0 .. n_k - 1.  Seen from a key, the queries that see it are as many consecutive ones.
"""

from __future__ import annotations

from typing import TypeAlias

from iosim.index import Ex, Index, cdiv, least, most
from iosim.problem import Attention
from iosim.program import Builder, Tensor, Tile

# Weights are at most 1, and an fp8 number below 2^-9 is 0: kernels multiply them by 2^8, and their sum with them.
GAIN = 2**8
Edges: TypeAlias = tuple[Ex, Ex, Ex, Ex]


def key_tiles(a: Attention, i: Ex, block_q: int, block_k: int) -> Edges:
    """(lo, left, right, hi) for query tile i: the key tiles lo .. hi - 1 hold a key that some query of the tile sees.

    All its queries see all keys of the tiles left .. right - 1; the others need a mask.
    """
    first, end = i * block_q, least((i + 1) * block_q, a.n_q)  # of the queries
    lo: Ex = 0
    left: Ex = 0
    right: Ex = a.n_k // block_k
    hi = cdiv(a.n_k, block_k)
    if a.causal:
        hi = cdiv(most(0, least(end + a.diagonal, a.n_k)), block_k)
        right = least(hi, most(0, least(first + a.diagonal + 1, a.n_k)) // block_k)
    if a.window is not None:
        low = a.diagonal + 1 - a.window
        lo = _tile_of(first + low, (a.n_q - 1) // block_q * block_q + low, a.n_k, block_k)
        left = least(hi, cdiv(most(0, end - 1 + low), block_k))
        right = _from(left, right, hi)
    return lo, left, right, hi


def query_tiles(a: Attention, j: Ex, block_q: int, block_k: int) -> Edges:
    """(lo, left, right, hi) for key tile j: the query tiles lo .. hi - 1 hold a query that sees some key of the tile.

    All keys of the tile are seen by all queries of the tiles left .. right - 1; the others need a mask, and so do all
    of a key tile that reaches beyond n_k.
    """
    first, end = j * block_k, least((j + 1) * block_k, a.n_k)  # of the keys
    greatest, tiles = (a.n_k - 1) // block_k * block_k, cdiv(a.n_q, block_q)
    lo: Ex = 0
    left: Ex = 0
    right = hi = tiles
    if a.window is not None:
        low = a.window - a.diagonal
        hi = cdiv(most(0, least(end - 1 + low, a.n_q)), block_q)
        right = least(hi, _tile_of(first + low, greatest + low, a.n_q, block_q))
    if a.causal:
        lo = _tile_of(first - a.diagonal, greatest - a.diagonal, a.n_q, block_q)
        left = least(hi, cdiv(most(0, end - 1 - a.diagonal), block_q))
    if a.n_k % block_k:  # j - n_k // block_k + 1 is 1 for the last key tile, less for the others
        left = most(left, least(hi, (j - a.n_k // block_k + 1) * tiles))
    return lo, left, right if a.window is None else _from(left, right, hi), hi


def _from(left: Ex, right: Ex, hi: Ex) -> Ex:
    """max(left, right), where neither is above hi."""
    return hi if right == hi else most(left, right)


def _tile_of(x: Ex, greatest: int, n: int, size: int) -> Ex:
    """The tile of index x of n, the first one for an x below 0, the number of tiles for an x of n or more.

    `greatest` is the greatest value of x.
    """
    if greatest < n:
        tile: Ex = most(0, x) // size
    else:
        beyond = most(0, least(1, x - n + 1))  # 1 from n on
        tile = most(0, least(x, n - 1)) // size + beyond
    return tile


def operand(p: Builder, x: Tile, dtype: str) -> Tile:
    """A loaded tile as the matrix unit takes it: cast, in a phase of its own, where it is stored in another dtype."""
    if x.dtype == dtype:
        return x
    with p.phase(f"cast {x.name}"):
        return p.cast(f"{x.name} {dtype}", x, dtype)


def operands(p: Builder, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V."""
    return (
        p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in"),
        p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in"),
        p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in"),
    )


def mask_keys(p: Builder, a: Attention, x: Tile, i: Ex, j: Ex, block_q: int, block_k: int) -> None:
    """Mask the scores `x` of query tile i and key tile j."""
    high = a.diagonal if a.causal else None
    low = None if a.window is None else a.diagonal + 1 - a.window
    p.mask(x, row=i * block_q, col=j * block_k, keys=a.n_k, diagonal=high, low=low)


def mask_edges(
    p: Builder, a: Attention, x: Tile, i: Ex, j: Ex, block_q: int, block_k: int, along: Index, edges: Edges
) -> None:
    """Mask the scores `x` of query tile i and key tile j in the tiles at the two `edges` of the loop `along` i or j."""
    lo, left, right, hi = edges
    for first, end in ((lo, left), (right, hi)):
        with p.when(along, first, end):
            mask_keys(p, a, x, i, j, block_q, block_k)
