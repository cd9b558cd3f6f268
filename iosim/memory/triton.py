"""What Triton's plain FlashAttention-2 forward kernel takes on chip, by its tile."""

from __future__ import annotations

from iosim.dtypes import dtype
from iosim.problem import Attention


def sram_bytes(a: Attention, block_q: int, block_k: int, stages: int) -> int:
    """Bytes of SRAM that Triton asks for a block.

    Q's tile, and `stages` tiles each of K and V; with one stage, K and V take turns in one buffer.  It repeats
    all 152 measured sizes, those of tiles that were refused included (Triton 3.6 on an H200, d = 64 and 128).
    """
    keys = max(a.d, a.d_v) if stages == 1 else stages * (a.d + a.d_v)
    return dtype(a.dtype).bytes * (block_q * a.d + block_k * keys)
