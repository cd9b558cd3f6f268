"""What Triton's plain FlashAttention-2 forward kernel takes on chip, by its tile."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from iosim.dtypes import dtype
from iosim.problem import Attention


def sram_bytes(a: Attention, block_q: int, block_k: int, stages: int) -> int:
    """Bytes of SRAM that Triton asks for a block.

    Q's tile, and `stages` tiles each of K and V; with one stage, K and V take turns in one buffer.  It repeats
    all 152 measured sizes, those of tiles that were refused included (Triton 3.6 on an H200, d = 64 and 128).
    """
    keys = max(a.d, a.d_v) if stages == 1 else stages * (a.d + a.d_v)
    return dtype(a.dtype).bytes * (block_q * a.d + block_k * keys)


WARPS = 4  # of a warp group
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


def registers(a: Attention, block_q: int, block_k: int, stages: int, warps: int) -> tuple[int, int]:
    """An estimate of a thread's registers and of the words that it spills, for a tile that nobody has compiled.

    With E scores and A outputs a thread, the need is 19.8 + 16.5 d' + E (0.70 + 0.45 d') + 1.21 A for d' = d / 64, and
    with one stage 0.91 of the registers through which a tile of K passes; what goes beyond 255, a little for which the
    compiler finds room, is spilled.  Fitted to 68 tiles at d = 64 and 128 (Triton 3.6, H200), on which it is 5 off in
    the mean and 28 at most; at other head dimensions it is a guess.
    """
    share, wide = max(1, 16 * warps // block_q), a.d / 64
    rows = max(1, block_q // (16 * warps))
    scores, outputs = rows * block_k / 2, rows * a.d_v / 2 / share
    passing = min(16, 2 * block_k * a.d * 2 / (16 * 32 * warps)) if stages == 1 else 0
    need = 19.8 + 16.5 * wide + scores * (0.70 + 0.45 * wide) + 1.21 * outputs + 0.91 * passing
    return min(255, ceil(need)), ceil(1.3 * (need - 255)) if need > 262 else 0


def compiled(a: Attention, settled: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton's compiler adds to the `settled` fields of a schedule: registers, spills, buffers, waits."""
    block_q, block_k, stages, groups = (settled[name] for name in ("block_q", "block_k", "stages", "groups"))
    warps = WARPS * groups
    held, spilled = registers(a, block_q, block_k, stages[0], warps)
    added: dict[str, Any] = {"registers": held, "spills": spilled}
    if serial := serial_cycles(a, block_q, block_k, warps):
        added["cycles"] = {**settled.get("cycles", {}), **serial}
    return added
