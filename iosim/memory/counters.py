"""What a GPU's own counters show: bytes written to DRAM, from what kernels write, and bytes of the L2.

A cache holds back dirty lines.  A kernel's counter shows what the kernel wrote, more where the dirty lines of others
had to leave, less where its own stay.

The L2's counter (Nsight's lts__t_bytes) has every byte between processors and L2, and once more those that cross from
one partition to another: as addresses are spread over all partitions, all but one in so many.  Requests of several
processors for one line that are under way together reach the L2 as one.  How many do is taken from rates: as much as
reads in step are faster than reads that nobody shares.  What a multicast has made one already, is not merged again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, prod
from typing import TYPE_CHECKING

from iosim.index import at, indices
from iosim.program import walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from iosim.hardware import Cache, Hardware
    from iosim.memory.cache import DeviceTraffic
    from iosim.memory.onchip import Footprint
    from iosim.program import Kernel, Program
    from iosim.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DirtyLines:
    """How many dirty lines a cache of `cache_bytes` holds when a kernel has run for long.

    `most_bytes` where it only writes; what it reads for each byte that it writes makes them fewer, with the weight
    `read_weight`.
    """

    cache_bytes: int
    most_bytes: float
    read_weight: float

    def of(self, cache_bytes: int) -> DirtyLines:
        """The same share of another cache."""
        return replace(self, cache_bytes=cache_bytes, most_bytes=self.most_bytes * cache_bytes / self.cache_bytes)

    def counted(self, kernels: Iterable[tuple[float, float]], before: float | None = None) -> list[float]:
        """The bytes counted as written for kernels that read and write so many bytes, one after another.

        `before` is how much of the cache is dirty at the beginning: all it can hold, unless said otherwise, as after a
        fill that flushes it.
        """
        dirty = self.most_bytes if before is None else before
        out = []
        for read, written in kernels:
            settled = self.most_bytes * written / (written + self.read_weight * read) if written else 0.0
            after = dirty + (settled - dirty) * (1 - exp(-(read + written) / self.cache_bytes))
            out.append(written + dirty - after)
            dirty = after
        return out


def dirty_lines(hardware: Hardware) -> DirtyLines:
    """Those of a machine's last cache: as on an H200, in proportion to its capacity."""
    capacity = hardware.caches[0].capacity_bytes if hardware.caches else None
    return H200_DIRTY.of(capacity or 1)


H200_DIRTY = DirtyLines(62_914_560, 29.6e6, 0.69)  # both fitted to 73 kernels that write more than 20 MB


def with_dirty_lines(traffic: DeviceTraffic, lines: DirtyLines, before: float | None = None) -> DeviceTraffic:
    """The traffic with each kernel's writes as its counter shows them.

    What a kernel has written for others goes with its flow that reads most, what it leaves behind is taken from the one
    that writes most.
    """
    names = list(dict.fromkeys(f.flow.kernel for f in traffic.flows))
    moved = [traffic.of_kernel(name) for name in names]
    flows = list(traffic.flows)
    for name, (_, written), counted in zip(names, moved, lines.counted(moved, before), strict=True):
        own = [n for n, f in enumerate(flows) if f.flow.kernel == name]
        more = round(counted) - written
        n = max(own, key=lambda n: flows[n].dram_read_bytes if more > 0 else flows[n].dram_write_bytes)
        flows[n] = replace(flows[n], dram_write_bytes=max(0, flows[n].dram_write_bytes + more))
    return replace(traffic, flows=tuple(flows))


def l2_counted(
    program: Program,
    schedule: Schedule,
    hardware: Hardware,
    prints: Mapping[str, Footprint],
    traffic: DeviceTraffic,
) -> dict[str, int]:
    """Bytes of the L2 by kernel, as its counter shows them; 0 without one."""
    l2 = hardware.l2
    out = dict.fromkeys((kernel.name for kernel in program.kernels), 0)
    if l2 is None:
        return out
    partitions = l2.partitions or 1
    for kernel in program.kernels:
        own = schedule.of(kernel.name)
        running = min(kernel.blocks, prints[kernel.name].resident * (hardware.processors or 1))
        in_step = (own.persistent or kernel.blocks <= running) and alike(kernel)
        asked = 0.0
        for f in (f for f in traffic.flows if f.flow.kernel == kernel.name):
            merged = 1.0
            if f.flow.direction == "read":
                node = f.flow.node
                readers = prod(n for axis, n in kernel.grid if axis not in node.view.indices)
                merged = min(running, readers, _merged(l2, in_step)) / own.multicast.get(node.tile.name, 1)
            asked += f.l2_bytes / max(1.0, merged)
        out[kernel.name] = round(asked * (2 * partitions - 1) / partitions)
    return out


def _merged(l2: Cache, in_step: bool) -> float:
    """How many requests for one line reach the L2 as one: in step on all processors, or where these drift apart."""
    rate = l2.step_bandwidth if in_step else l2.shared_bandwidth
    return rate / l2.bandwidth if rate and l2.bandwidth else 1.0


def alike(kernel: Kernel) -> bool:
    """Whether the loops of all blocks of a kernel have as many iterations."""
    import numpy as np

    extents = dict(kernel.grid)
    for loop in dict.fromkeys(loop for _, around in walk(kernel.body) for loop in around):
        named = indices(loop.lo) | indices(loop.hi)
        axes = [axis for axis in extents if axis in named]
        if not axes:
            continue
        if named - extents.keys():  # of a loop around it too
            return False
        cells = np.meshgrid(*(np.arange(extents[axis]) for axis in axes), sparse=True)
        env = dict(zip(axes, cells, strict=True))
        trips = np.maximum(0, np.asarray(at(loop.hi, env)) - np.asarray(at(loop.lo, env)))
        if (trips != trips.flat[0]).any():
            return False
    return True
