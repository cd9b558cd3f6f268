"""What Triton's plain FlashAttention-2 forward kernel takes on chip, by its tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RegisterLaw:
    """Registers of a thread by what is live in it, and the words that it spills.

    Fitted to 130 tiles measured on an H200 (d = 64, 128) and 51 that Triton compiled of a kernel like it for d = 32,
    64 and 256 (iosim/data/triton_compiled.csv); `iosim validate --cross` fits it again.
    """

    always: float = 10  # addresses, statistics, loop state
    depth: float = 0.375  # for each of d: Q's operand, offsets
    live: float = 1.2  # for each element of scores and output, copies of what is rescaled and converted included
    passing: float = 0.83  # for each register through which a tile passes on its way to SRAM (one stage)
    room: float = 478  # words below which nothing is spilled
    spilled_scores: float = 1.56  # words for each element
    spilled_outputs: float = 2.31  # the same; outputs live through the whole loop
    spilled_passing: float = 1.74
    spilled_one_stage: float = 120


LAW = RegisterLaw()


def registers(
    a: Attention, block_q: int, block_k: int, stages: int, warps: int, law: RegisterLaw = LAW
) -> tuple[int, int]:
    """An estimate of a thread's registers and of the words that it spills, for a tile that nobody has compiled.

    What is live decides: E scores and A outputs a thread (warps beyond a tile's rows share the outputs but repeat the
    scores), and with one stage the V tile, which passes through registers while the scores are in the making.  The
    compiler takes more registers than it must where it has them, so that what it takes and what it spills follow two
    laws.  Registers are 5 off in the mean (28 at most) where they are below the cap, and give the blocks that fit in
    125 of 130 tiles; 129 of these spill, or do not, as the law says.
    """
    group, rows = 16 * warps, max(1, block_q // (16 * warps))
    scores, outputs = rows * block_k / 2, rows * a.d_v / 2 / max(1, group // block_q)
    passing = block_k * a.d_v / (16 * warps) / 4 if stages == 1 else 0.0
    need = law.always + law.depth * a.d + law.live * (scores + outputs) + law.passing * passing
    spilled = law.spilled_scores * scores + law.spilled_outputs * outputs + law.spilled_passing * passing
    spilled += law.spilled_one_stage * (stages == 1) - law.room
    return min(255, ceil(need)), max(0, round(spilled))


def compiled(a: Attention, settled: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton's compiler adds to the `settled` fields of a schedule: registers, spills, waits, and with one stage
    that tiles come by way of registers.
    """
    block_q, block_k, stages, groups = (settled[name] for name in ("block_q", "block_k", "stages", "groups"))
    warps = WARPS * groups
    held, spilled = registers(a, block_q, block_k, stages[0], warps)
    added: dict[str, Any] = {"registers": held, "spills": spilled}
    if stages[0] == 1:
        added["through_registers"] = ("k", "v")
    if serial := serial_cycles(a, block_q, block_k, warps):
        added["cycles"] = {**settled.get("cycles", {}), **serial}
    return added
