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


SERIAL = 192  # registers of accumulators (S and O) from which on ptxas lets one wgmma at a time be under way
SERIAL_CYCLES = 31  # that each then waits for the one before


def serial_cycles(a: Attention, block_q: int, block_k: int, warps: int) -> dict[str, int]:
    """Cycles by product that a warp group waits where the compiler serialises its wgmma instructions.

    Where the scores and the output of a thread take `SERIAL` registers or more and belong to several accumulators, each
    wgmma has a wait of its own (read in the SASS of such tiles on an H200; the 31 cycles are fitted to them).
    """
    each = -(-block_q // (64 * max(1, warps // 4)))  # accumulators of 64 rows in a group
    if each < 2 or each * (block_k + a.d_v) // 2 < SERIAL:
        return {}
    return {"qk": each * -(-a.d // 16) * SERIAL_CYCLES, "pv": each * -(-block_k // 16) * SERIAL_CYCLES}
