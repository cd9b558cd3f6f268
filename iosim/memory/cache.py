"""The last cache as a level: what of a program's device traffic is left behind a cache that all processors share.

The cache is empty when the program begins, and what a kernel leaves in it is there for the next.  Requests come in the
order of the launch (launch.py), go to units of memory (units.py) and hit or miss in a set-associative cache in
partitions, least recently used out first (lru.py); simulation.py puts these together.  A store makes a unit dirty
without fetching it; a reduction fetches what it adds to.  Dirty units are written when they make room, or at the end.

Above a budget of work a closed form takes the place of the simulation (closed_form.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from iosim.interpreters.ledger import Flow, Ledger
from iosim.memory.closed_form import closed_form

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from iosim.hardware import Hardware
    from iosim.program import Program

Method: TypeAlias = Literal["none", "simulated", "closed form"]

# The share of a cache that a program's data gets.  Fitted to the DRAM reads of an H200's kernels, its only fitted
# number: 1 leaves the softmax of 4096 scores a row 23 % low, 0.9 puts the product that follows 18 % too high.
USABLE = 0.95


@dataclass(frozen=True, slots=True)
class DramFlow:
    """The bytes that one flow of the ledger reads from and writes to DRAM, over all blocks.

    What is written counts for the flow that made it dirty.
    """

    flow: Flow
    dram_read_bytes: int
    dram_write_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """Device traffic of a program in bytes: `flows` in the ledger's order, and their sums.

    `l2_*_bytes` are the requests that reach the L2, 0 where there is none.  `method` says how the DRAM bytes were had:
    "none" where there is no cache.
    """

    flows: tuple[DramFlow, ...]
    l2_read_bytes: int
    l2_write_bytes: int
    l2_add_bytes: int
    method: Method

    @property
    def dram_read_bytes(self) -> int:
        """Bytes read from DRAM."""
        return sum(f.dram_read_bytes for f in self.flows)

    @property
    def dram_write_bytes(self) -> int:
        """Bytes written to DRAM."""
        return sum(f.dram_write_bytes for f in self.flows)

    def of_kernel(self, name: str) -> tuple[int, int]:
        """(read, written) DRAM bytes of one kernel."""
        own = [f for f in self.flows if f.flow.kernel == name]
        return sum(f.dram_read_bytes for f in own), sum(f.dram_write_bytes for f in own)


def behind_caches(
    program: Program,
    ledger: Ledger,
    hardware: Hardware,
    resident: Mapping[str, int],
    descending: Collection[str] = (),
    clusters: Mapping[str, int] | None = None,
) -> DeviceTraffic:
    """`dram_flows` behind the last cache of a machine: what caches before it hold changes little of what it misses.

    Without a known capacity there is no cache; without a known number of partitions there is one.
    """
    last = hardware.caches[0] if hardware.caches else None
    capacity, partitions = (last.capacity_bytes, last.partitions or 1) if last is not None else (None, 1)
    return dram_flows(
        program, ledger, capacity, resident, partitions=partitions, descending=descending, clusters=clusters
    )


def dram_flows(
    program: Program,
    ledger: Ledger,
    cache_bytes: int | None,
    resident: Mapping[str, int],
    *,
    partitions: int = 1,
    descending: Collection[str] = (),
    clusters: Mapping[str, int] | None = None,
    method: Method | None = None,
) -> DeviceTraffic:
    """What each flow of `ledger` moves to and from DRAM behind a cache of `cache_bytes` (None: there is none).

    `resident` gives, by kernel, how many blocks the machine runs at one time; they start in launch order, the last grid
    axis fastest.  `cache_bytes` is all `partitions` together; the blocks of a cluster, as many as `clusters` says by
    kernel (else 1), are in one partition.  The loops named in `descending` run from their last iteration to the first,
    as FlashAttention-2 walks the keys; with a causal mask that decides how much is read again.
    `method` asks for one where the budget of work would take the other.
    """
    moved: Sequence[tuple[int, int]] | None
    if cache_bytes is None:
        moved, method = [_without_cache(f) for f in ledger.flows], "none"
    else:
        moved, usable = None, int(USABLE * cache_bytes)
        if method != "closed form":
            from iosim.memory.simulation import simulated

            bounded = method is None
            moved = simulated(
                program, ledger, usable, partitions, resident, descending, clusters=clusters, bounded=bounded
            )
        method = "closed form" if moved is None else "simulated"
        moved = moved or closed_form(program, ledger, usable, partitions, resident, descending)
    there = cache_bytes is not None
    return DeviceTraffic(
        flows=tuple(DramFlow(f, read, write) for f, (read, write) in zip(ledger.flows, moved, strict=True)),
        l2_read_bytes=there * ledger.hbm_read_bytes,
        l2_write_bytes=there * ledger.hbm_write_bytes,
        l2_add_bytes=there * ledger.hbm_add_bytes,
        method=method,
    )


def _without_cache(flow: Flow) -> tuple[int, int]:
    """(read, written): a reduction reads and writes what it adds to."""
    return (0 if flow.direction == "write" else flow.hbm_bytes, 0 if flow.direction == "read" else flow.hbm_bytes)
