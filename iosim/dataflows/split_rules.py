"""Into how many splits known libraries cut the keys, or the queries of a head, when a grid would be small.

A split needs scratch for partial results and a kernel that combines them, so the rule decides memory, launches and
time alike.  `processors` is the machine's number of SMs; a library may count on two blocks of each.
"""

from __future__ import annotations

from math import ceil

from iosim.index import cdiv
from iosim.problem import Attention

SLOTS = 2  # blocks a processor that both libraries count on
FLASH2_ROWS = 64  # query rows of FlashAttention-2's split kernel
FLASH2_KEYS = ((64, 256), (128, 128), (1024, 64))  # up to this head dimension: key rows of its tile
FLASH2_MOST = 128
FLASH1_MOST = 30


def flash2_splits(a: Attention, processors: int) -> int:
    """Splits of FlashAttention-2's forward (num_splits_heuristic in its flash_api.cpp, public since 2.2).

    None (1) where the query tiles fill 80 % of the slots.  Else the smallest number whose last wave is at least 85 %
    as full as the best one's; a number that leaves as many key tiles a split as the number before it is not tried.
    With one query, the query heads that share a K/V head are rows of one tile.
    """
    slots = SLOTS * processors
    decode = a.n_q == 1 and a.group > 1
    heads, n_q = (a.kv_heads, a.group) if decode else (a.heads, a.n_q)
    blocks = a.batch * heads * cdiv(n_q, FLASH2_ROWS)
    if 10 * blocks >= 8 * slots:
        return 1
    tiles = cdiv(a.n_k, next(rows for most, rows in FLASH2_KEYS if a.d <= most))
    tried = [s for s in range(1, min(FLASH2_MOST, slots, tiles) + 1) if s == 1 or cdiv(tiles, s) != cdiv(tiles, s - 1)]
    fullness = {s: (waves := blocks * s / slots) / ceil(waves) for s in tried}
    best = max(fullness.values())
    return next(s for s in tried if fullness[s] >= 0.85 * best)


def cudnn_splits(a: Attention, processors: int) -> int:
    """Splits of cuDNN's kernel for one query: the largest power of two that leaves every block a slot.

    Found from its memory on an H200 (four decode shapes); cuDNN does not publish a rule.  With more queries: 1.
    """
    blocks = a.batch * a.kv_heads
    room = SLOTS * processors // blocks
    return 2 ** (room.bit_length() - 1) if a.n_q == 1 and room else 1


def flash1_splits(a: Attention, processors: int) -> int:
    """Blocks that share the queries of a head in FlashAttention 1.0 (fmha_fwd_launch_template.h), two a processor.

    The smallest number whose last wave is over 95 % as full as the best one's.
    """
    blocks, slots = a.batch * a.heads, SLOTS * processors
    fullness = {s: (waves := blocks * s / slots) / ceil(waves) for s in range(1, FLASH1_MOST + 1)}
    best = max(fullness.values())
    return next(s for s in fullness if fullness[s] > 0.95 * best)
