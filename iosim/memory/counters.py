"""What a GPU's own counter shows as bytes written to DRAM, from what kernels write.

A cache holds back dirty lines.  A kernel's counter shows what the kernel wrote, more where the dirty lines of others
had to leave, less where its own stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iosim.hardware import Hardware
    from iosim.memory.cache import DeviceTraffic


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
