"""Which key tiles a block of queries needs, and which of them need a mask: shared by the forward dataflows."""

from __future__ import annotations

from iosim.index import Ex, Expr, cdiv, least, most
from iosim.problem import Attention
from iosim.program import Builder, Tile


def key_tiles(a: Attention, i: Expr, block_q: int, block_k: int) -> tuple[Ex, Ex]:
    """(masked, end) for query tile i: key tiles 0..end-1 hold a key that some query of the tile sees; those from
    `masked` on also hold one that some query does not see, or reach beyond n_k."""
    if not a.causal:
        return a.n_k // block_k, cdiv(a.n_k, block_k)
    last = least((i + 1) * block_q, a.n_q) + a.diagonal  # keys that the last query sees
    first = i * block_q + 1 + a.diagonal  # keys that the first query sees
    end = cdiv(most(0, least(last, a.n_k)), block_k)
    return least(end, most(0, least(first, a.n_k)) // block_k), end


def mask_keys(p: Builder, a: Attention, x: Tile, i: Ex, j: Ex, block_q: int, block_k: int) -> None:
    """Mask the scores `x` of query tile i and key tile j."""
    p.mask(x, row=i * block_q, col=j * block_k, keys=a.n_k, diagonal=a.diagonal if a.causal else None)
