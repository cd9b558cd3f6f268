"""The L2, first model: what of a program's device traffic is left behind a cache that all processors share.

The cache is empty when a kernel begins.  Where everything a kernel touches fits, each operand crosses once.
Where it does not, the blocks that are resident at one time are taken to walk their loops together, so that a
tile which several of them read comes from DRAM once, as long as two tiles of every kind fit; no tile is kept
for a later pass or wave.  Stores meet in the cache and are written back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from iosim.interpreters.ledger import Direction, Flow, Ledger, union_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iosim.program import Kernel, Program


@dataclass(frozen=True, slots=True)
class DramFlow:
    """The bytes that one flow of the ledger reads from and writes to DRAM, over all blocks."""

    flow: Flow
    dram_read_bytes: int
    dram_write_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """Device traffic of a program in bytes: `flows` in the ledger's order, and their sums.

    `l2_*_bytes` are the requests that reach the L2, 0 where there is none.
    """

    flows: tuple[DramFlow, ...]
    l2_read_bytes: int
    l2_write_bytes: int
    l2_add_bytes: int

    @property
    def dram_read_bytes(self) -> int:
        """Bytes read from DRAM."""
        return sum(f.dram_read_bytes for f in self.flows)

    @property
    def dram_write_bytes(self) -> int:
        """Bytes written to DRAM."""
        return sum(f.dram_write_bytes for f in self.flows)


def dram_flows(program: Program, ledger: Ledger, cache_bytes: int | None, resident: Mapping[str, int]) -> DeviceTraffic:
    """What each flow of `ledger` moves to and from DRAM behind an L2 of `cache_bytes` (None: there is none).

    `resident` gives, by kernel, how many blocks the machine runs at one time; they start in launch order, the
    last grid axis fastest.  A reduction (`add`) reads and writes what it adds to.
    """
    flows: list[DramFlow] = []
    for kernel in program.kernels:
        own = [f for f in ledger.flows if f.kernel == kernel.name]
        if cache_bytes is None:
            reads = writes = [f.hbm_bytes for f in own]
        else:
            reads, writes = _behind_cache(kernel, own, cache_bytes, resident[kernel.name])
        flows += [
            DramFlow(f, 0 if f.direction == "write" else read, 0 if f.direction == "read" else write)
            for f, read, write in zip(own, reads, writes, strict=True)
        ]
    there = cache_bytes is not None
    return DeviceTraffic(
        flows=tuple(flows),
        l2_read_bytes=there * ledger.hbm_read_bytes,
        l2_write_bytes=there * ledger.hbm_write_bytes,
        l2_add_bytes=there * ledger.hbm_add_bytes,
    )


def distinct_tiles(grid: Sequence[tuple[str, int]], named: frozenset[str], blocks: int) -> int:
    """How many tiles the first `blocks` blocks in launch order use of a view that names the axes `named`."""
    if blocks == 0:
        return 0
    if not grid:
        return 1
    (axis, _), inner = grid[0], grid[1:]
    slices, rest = divmod(blocks, prod(n for _, n in inner))
    whole = prod(n for name, n in inner if name in named)
    if axis in named:
        return slices * whole + distinct_tiles(inner, named, rest)
    return whole if slices else distinct_tiles(inner, named, rest)


def _behind_cache(
    kernel: Kernel, flows: Sequence[Flow], cache_bytes: int, resident: int
) -> tuple[list[int], list[int]]:
    """(read, written) DRAM bytes of each flow, for those that read and those that write."""
    tensors = {f.tensor for f in flows}
    touched = sum(union_bytes(f for f in flows if f.tensor == tensor) for tensor in tensors)
    once_written = _once(flows, besides="read")
    if touched <= cache_bytes:
        return _once(flows, besides="write"), once_written
    wave = max(1, min(resident, kernel.blocks))
    distinct = [distinct_tiles(kernel.grid, f.node.view.indices, wave) for f in flows]
    tiles = list(zip(flows, distinct, strict=True))
    shared = [f.hbm_bytes for f in flows]
    if 2 * sum(d * _tile_bytes(f) for f, d in tiles if f.direction != "write") <= cache_bytes:
        shared = [max(f.unique_bytes, -(-f.hbm_bytes * d // wave)) for f, d in tiles]
    writes = [s if f.direction == "add" else w for f, s, w in zip(flows, shared, once_written, strict=True)]
    return shared, writes


def _once(flows: Sequence[Flow], besides: Direction) -> list[int]:
    """Bytes of its tensor that each flow, those in direction `besides` left out, is the first to touch."""
    out: list[int] = []
    seen: dict[str, list[Flow]] = {}
    for flow in flows:
        before = seen.get(flow.tensor, [])
        after = before if flow.direction == besides else [*before, flow]
        out.append(union_bytes(after) - union_bytes(before))
        seen[flow.tensor] = after
    return out


def _tile_bytes(flow: Flow) -> int:
    """Bytes of one tile as it stands in device memory, cut at the tensor's size."""
    tensor, tile = flow.node.view.tensor, flow.node.tile
    return min(tensor.bytes, tile.shape[0] * tile.shape[1] * tensor.bytes // prod(tensor.shape))
