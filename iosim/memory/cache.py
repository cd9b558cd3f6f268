"""The last cache as a level: what of a program's device traffic is left behind a cache that all processors share.

The cache is empty when the program begins, and what a kernel leaves in it is there for the next.  Requests come in the
order of the launch (launch.py), go to units of memory (units.py) and hit or miss in a set-associative cache in
partitions, least recently used out first (lru.py); simulation.py puts these together.  A store makes a unit dirty
without fetching it; a reduction fetches what it adds to.  Dirty units are written when they make room, or at the end.

Above a budget of work a closed form takes the place of the simulation (closed_form.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal, TypeAlias

from iosim.interpreters.ledger import Direction, Flow, Ledger
from iosim.memory.closed_form import closed_form
from iosim.memory.rows import RowCost, row_costs

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

    What is written counts for the flow that made it dirty.  `l2_bytes` are what of its requests reaches the L2, 0 where
    there is none: a multicast read counts once for a cluster.  `rows` says what a layout whose rows do not follow each
    other adds to all three, which have it in them, and what it does to the time of DRAM.
    """

    flow: Flow
    dram_read_bytes: int
    dram_write_bytes: int
    l2_bytes: int
    rows: RowCost | None = None


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """Device traffic of a program in bytes: `flows` in the ledger's order, and their sums.

    `method` says how the DRAM bytes were had: "none" where there is no cache.
    """

    flows: tuple[DramFlow, ...]
    method: Method

    @property
    def dram_read_bytes(self) -> int:
        """Bytes read from DRAM."""
        return sum(f.dram_read_bytes for f in self.flows)

    @property
    def dram_write_bytes(self) -> int:
        """Bytes written to DRAM."""
        return sum(f.dram_write_bytes for f in self.flows)

    @property
    def l2_read_bytes(self) -> int:
        """Bytes that loads ask the L2 for."""
        return self._l2("read")

    @property
    def l2_write_bytes(self) -> int:
        """Bytes that stores send to the L2."""
        return self._l2("write")

    @property
    def l2_add_bytes(self) -> int:
        """Payload of the reductions in the L2."""
        return self._l2("add")

    def _l2(self, direction: Direction) -> int:
        return sum(f.l2_bytes for f in self.flows if f.flow.direction == direction)

    def of_kernel(self, name: str) -> tuple[int, int]:
        """(read, written) DRAM bytes of one kernel."""
        own = [f for f in self.flows if f.flow.kernel == name]
        return sum(f.dram_read_bytes for f in own), sum(f.dram_write_bytes for f in own)


def depends_on(hardware: Hardware) -> tuple[object, ...]:
    """All of a machine that `behind_caches` depends on, apart from how many blocks it runs at one time."""
    last = [(cache.capacity_bytes, cache.partitions) for cache in hardware.caches[:1]]
    return (*last, *hardware.grain.items())


def behind_caches(
    program: Program,
    ledger: Ledger,
    hardware: Hardware,
    resident: Mapping[str, int],
    descending: Collection[str] = (),
    multicast: Mapping[str, Mapping[str, int]] | None = None,
) -> DeviceTraffic:
    """`dram_flows` behind the last cache of a machine: what caches before it hold changes little of what it misses.

    Without a known capacity there is no cache; without a known number of partitions there is one.
    """
    last = hardware.caches[0] if hardware.caches else None
    capacity, partitions = (last.capacity_bytes, last.partitions or 1) if last is not None else (None, 1)
    found = dram_flows(
        program, ledger, capacity, resident, partitions=partitions, descending=descending, multicast=multicast
    )
    costs = row_costs(program, ledger.flows, hardware, resident)
    return replace(found, flows=tuple(map(_in_rows, found.flows, costs)))


def _in_rows(flow: DramFlow, rows: RowCost | None) -> DramFlow:
    """A flow with what its tensor's layout adds."""
    if rows is None:
        return flow
    read, written = (ceil(bytes_ * rows.cost.moved) for bytes_ in (flow.dram_read_bytes, flow.dram_write_bytes))
    return DramFlow(flow.flow, read, written, ceil(flow.l2_bytes * rows.cost.sectors), rows)


def dram_flows(
    program: Program,
    ledger: Ledger,
    cache_bytes: int | None,
    resident: Mapping[str, int],
    *,
    partitions: int = 1,
    descending: Collection[str] = (),
    multicast: Mapping[str, Mapping[str, int]] | None = None,
    method: Method | None = None,
) -> DeviceTraffic:
    """What each flow of `ledger` moves to and from DRAM behind a cache of `cache_bytes` (None: there is none).

    `resident` gives, by kernel, how many blocks the machine runs at one time; they start in launch order, the last grid
    axis fastest.  `cache_bytes` is all `partitions` together.  `multicast` says, by kernel and tile, for how many
    blocks of a cluster a load is made once; these blocks are in one partition.  The loops named in `descending` run
    from their last iteration to the first, as FlashAttention-2 walks the keys; with a causal mask that decides how much
    is read again.
    `method` asks for one where the budget of work would take the other.
    """
    moved: Sequence[tuple[int, int]] | None
    shared = multicast or {}
    clusters = {kernel: max(tiles.values(), default=1) for kernel, tiles in shared.items()}
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
    return DeviceTraffic(
        flows=tuple(
            DramFlow(f, read, write, 0 if cache_bytes is None else _asked(f, shared.get(f.kernel, {})))
            for f, (read, write) in zip(ledger.flows, moved, strict=True)
        ),
        method=method,
    )


def _asked(flow: Flow, multicast: Mapping[str, int]) -> int:
    """Bytes of a flow that reach the L2."""
    return -(-flow.hbm_bytes // (multicast.get(flow.node.tile.name, 1) if flow.direction == "read" else 1))


def _without_cache(flow: Flow) -> tuple[int, int]:
    """(read, written): a reduction reads and writes what it adds to."""
    return (0 if flow.direction == "write" else flow.hbm_bytes, 0 if flow.direction == "read" else flow.hbm_bytes)
